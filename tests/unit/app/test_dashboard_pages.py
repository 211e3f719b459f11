"""What pages answer, as whoever asks sees it: of an installation that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from app.dashboard.actions import Doing
from app.dashboard.pages import Pages
from app.dashboard.serving import Dashboard
from app.dashboard.tasks import Task, Tasks
from marq.core.errors import MarqError
from marq.dead_letters import Deleted
from tests.browser.pretend import PretendActor, PretendInstallation

Client = TestClient[web.Request, web.Application]
FORM = "application/x-www-form-urlencoded"


class Letters(PretendInstallation):
    """Notes by what dead letters were filtered."""

    async def letters(self, queue, limit, filters):  # type: ignore[no-untyped-def]
        self.filters = filters
        return await super().letters(queue, limit, filters)


@pytest.fixture
def installation() -> Letters:
    return Letters()


@pytest_asyncio.fixture
async def client(installation: Letters) -> AsyncIterator[Client]:
    application = web.Application()
    Pages(installation, Doing(PretendActor(installation), Tasks())).attach(application)
    async with TestClient(TestServer(application)) as client:
        yield client


@pytest.mark.parametrize(
    "address", ["/queues/emails?scope=worker", "/queues/emails/messages?state=delayed&only=places"]
)
async def test_what_only_programs_ask_for_is_no_page(client: Client, address: str) -> None:
    answer = await client.get(address)

    assert answer.status == 400
    assert "only programs are answered that, at /api/queues/emails" in await answer.text()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"--x\r\nfoo", {"Content-Type": "multipart/form-data; boundary=x"}),
        (b'{"queue": "emails"}', {"Content-Type": "application/json"}),
        (b"queue=emails", {"Content-Type": FORM, "Content-Encoding": "gzip"}),
        (b"queue=emails", {"Content-Type": f"{FORM}; charset=none"}),
        (b"queue=\xff", {"Content-Type": FORM}),
    ],
)
async def test_what_is_no_form_is_refused_with_what_is_one(
    client: Client, body: bytes, headers: dict[str, str]
) -> None:
    answer = await client.post("/actions/pause", data=body, headers=headers)

    assert answer.status == 400
    assert "the form can&#39;t be read" in await answer.text()


async def test_dead_letters_that_say_nothing_are_a_kind_of_their_own(client: Client, installation: Letters) -> None:
    answer = await client.get("/queues/invoices/messages?state=dead&kind=")

    assert installation.filters == {"kind": ""}
    # All that match, too, are those alone.
    assert (await answer.text()).count('<input type="hidden" name="kind" value="">') == 2

    await client.get("/queues/invoices/messages?state=dead&error=")

    assert installation.filters == {}


@pytest.mark.parametrize(
    ("queue", "state", "found"), [("emails", "in_flight", 1), ("emails", "delayed", 0), ("x", "in_flight", 0)]
)
async def test_a_message_is_found_by_its_id_behind_those_that_are_listed(
    client: Client, installation: Letters, queue: str, state: str, found: int
) -> None:
    wanted = "marq.messages/0/3"

    async def first_ones(queue: str, query: object) -> dict[str, object]:
        return {"complete": True, "messages": [installation.open["marq.messages/0/0"]]}

    installation.messages = first_ones  # type: ignore[method-assign]

    answer = await client.get(f"/api/queues/{queue}/messages?{urlencode({'state': state, 'id': wanted})}")

    assert [each["id"] for each in (await answer.json())["messages"]] == [wanted] * found


async def test_what_runs_on_another_worker_is_not_stopped_in_silence(client: Client, installation: Letters) -> None:
    task = Task("4f", "purge", "emails", "what waits in queue emails", 0.0, Deleted(9)).told()
    installation.tasks_of_others = [{**task, "worker": "http://10.0.0.8:6066", "here": False}]

    answer = await client.post("/tasks/4f/stop")

    assert answer.status == 400
    assert "it runs on another worker, whose page can do that: http://10.0.0.8:6066/tasks/4f" in await answer.text()


async def test_whether_a_message_is_open_is_not_known_where_a_worker_did_not_answer(
    client: Client, installation: Letters
) -> None:
    installation.complete = False
    dashboard = Dashboard.__new__(Dashboard)
    dashboard._installation = installation  # type: ignore[assignment]

    page = await (await client.get("/message?id=marq.messages/0/77")).text()
    listed = await (await client.get("/api/queues/emails/messages?state=in_flight&id=marq.messages/0/77")).json()

    assert "not known: a worker did not answer" in page
    assert listed["complete"] is False
    # Not "too late", which would say that it is done.
    with pytest.raises(MarqError, match="a worker did not answer"):
        await dashboard._look("marq.messages/0/77")


async def test_what_is_known_of_the_rows_of_one_page_alone_sorts_none(client: Client) -> None:
    page = await (await client.get("/")).text()

    assert "sort=waiting" in page
    assert "sort=consumers" not in page
    assert (await (await client.get("/api/overview?sort=consumers")).json())["shown"] == {}


@pytest.mark.parametrize("address", ["/", "/queues/emails"])
async def test_a_worker_that_does_not_answer_is_waited_for_once(
    client: Client, installation: Letters, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    figures, queue, history = installation.figures, installation.queue, installation.history

    async def waiting(*query: object) -> object:
        await asyncio.wait_for(asked.wait(), 10)
        return await (figures() if address == "/" else queue(*query))  # type: ignore[arg-type]

    async def noted(*query: object) -> object:
        asked.set()
        return await history(*query)  # type: ignore[arg-type]

    monkeypatch.setattr(installation, "figures" if address == "/" else "queue", waiting)
    monkeypatch.setattr(installation, "history", noted)

    assert (await client.get(address)).status == 200


async def test_a_question_says_that_a_worker_may_have_more_messages_that_match(
    client: Client, installation: Letters
) -> None:
    form = {"match": "yes", "queue": "emails", "state": "in_flight"}
    questions = []

    for installation.complete in (True, False):
        questions.append(await (await client.post("/actions/release", data=form)).text())

    assert ["which may have more" in question for question in questions] == [False, True]
