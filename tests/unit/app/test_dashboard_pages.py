"""Answers of the pages over HTTP, with invented statistics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote, urlencode

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from yarl import URL

from marq.admin import purge as purging
from marq.admin.purge import Purged
from marq.core.storage.rows import HELD, State
from marq.dead_letters.dead_letters import Deleted
from marq.kafka.assignor import encoded
from marq.kafka.group_members import _member
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import BLOCKED_MS, Source
from marq_worker.web.credentials import Access, Visitor
from marq_worker.web.dashboard import pages
from marq_worker.web.dashboard.actor import Actor
from marq_worker.web.dashboard.descriptions import consumer_names, consumer_of, names_of_holders
from marq_worker.web.dashboard.forms import read_places, write_places
from marq_worker.web.dashboard.tasks import Task
from marq_worker.web.dashboard.views import Dashboard, twin
from marq_worker.web.dashboard.waiting_search import WaitingSearch
from marq_worker.web.message_listing import MAX_PLACES
from marq_worker.web.peers import path_segment
from marq_worker.web.security import MAX_BODY_BYTES, VISITOR
from tests.browser.pretend import DEAD_LETTERED, PAGES, PROCESS, SHARED_ID, URLS, PretendActor, PretendNamespace, site

Client = TestClient[web.Request, web.Application]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Field = tuple[str, str]
FORM = "application/x-www-form-urlencoded"


class Filtered(PretendNamespace):
    """Notes by what dead letters were filtered."""

    async def dead_letters(self, queue, limit, filters):  # type: ignore[no-untyped-def]
        self.filters = filters
        return await super().dead_letters(queue, limit, filters)


@pytest.fixture
def namespace() -> Filtered:
    return Filtered()


@pytest.fixture
def actor(namespace: Filtered) -> PretendActor:
    return PretendActor(namespace)


@pytest_asyncio.fixture
async def client(namespace: Filtered, actor: PretendActor) -> AsyncIterator[Client]:
    async with TestClient(TestServer(site(namespace, actor))) as client:
        yield client


async def test_each_page_has_a_json_equivalent(client: Client) -> None:
    for address in PAGES.values():
        path, _, query = address.partition("?")
        assert (await client.get(address)).status == 200, address
        told = await client.get(f"{twin(path)}?{query}")

        assert told.status == 200, address
        assert isinstance(await told.json(), dict), address


@pytest.mark.parametrize(
    ("method", "address", "status", "said"),
    [
        ("GET", "/queues/emails/messages?state=lost", 400, "expected one of"),
        ("GET", "/message?id=nonsense", 400, "expected the id of a message"),
        ("GET", "/queues/emails?scope=worker", 400, "this parameter is for programs, at /api/queues/emails"),
        ("GET", "/queues/emails/messages?state=delayed&only=places", 400, "this parameter is for programs"),
        ("GET", "/dead-letters?queue=invoises", 404, "Did you mean"),
        ("GET", "/tasks/99", 404, "knows task 99"),
        ("POST", "/tasks/99/stop", 404, "knows task 99"),
        ("POST", "/actions/drop", 404, "unknown action"),
    ],
)
async def test_what_can_t_be_answered_says_why(
    client: Client, method: str, address: str, status: int, said: str
) -> None:
    answer = await client.request(method, address)

    text = await answer.text()
    assert answer.status == status
    assert said in text
    assert ("The action failed" in text) is (method == "POST")


@pytest.mark.parametrize(
    ("method", "address", "status", "allowed"),
    [
        ("HEAD", "/", 200, None),
        ("HEAD", "/api/overview", 200, None),
        ("POST", "/", 405, "GET,HEAD"),
        ("GET", "/actions/pause", 405, "POST"),
        ("HEAD", "/actions/pause", 405, "POST"),
        ("HEAD", "/tasks/99/stop", 405, "POST"),
        ("GET", "/static/dashboard.css", 200, None),
        ("GET", "/static/../rendering.py", 404, None),
    ],
)
async def test_each_address_answers_its_methods_only(
    client: Client, method: str, address: str, status: int, allowed: str | None
) -> None:
    answer = await client.request(method, address)

    assert (answer.status, answer.headers.get("Allow")) == (status, allowed)


@pytest.mark.parametrize("queue", ["{{7*7}}", "a{b", "a/b", "50%", "ü😀", "messages?state=dead"])
async def test_each_name_of_a_queue_has_pages_and_their_json(client: Client, namespace: Filtered, queue: str) -> None:
    namespace.undefined.add(queue)

    for page in (path_segment(queue), f"{path_segment(queue)}/messages?state=in_flight"):
        for address in (f"/queues/{page}", f"/api/queues/{page}"):
            assert (await client.get(URL(address, encoded=True))).status == 200, address


async def test_a_page_says_that_a_worker_did_not_answer_and_which_partition_is_stopped(
    client: Client, namespace: Filtered
) -> None:
    namespace.complete, namespace.alarm = False, "its retention has removed markers"

    overview, health = [await (await client.get(address)).text() for address in ("/", "/health")]

    assert "Markers partition 1: stalled: its retention has removed markers" in overview
    assert "no response from http://10.0.0.8:6066" in overview
    assert health.count('class="state wrong"') == 2


async def test_the_overview_leaves_out_unknown_queues_without_messages(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first one has no messages.
    namespace.queues = ["typo", "emails"]
    monkeypatch.setattr(namespace, "defined", list)
    listed = []

    for known in (None, {"emails"}):
        monkeypatch.setattr(namespace, "known", AsyncMock(return_value=known))
        overview = await (await client.get("/api/overview")).json()
        listed.append([row["queue"] for row in overview["rows"]])

    assert listed == [["emails", "invoices", "typo"], ["emails", "invoices"]]


async def test_the_page_of_a_queue_says_that_its_handler_may_have_been_removed(
    client: Client, namespace: Filtered
) -> None:
    namespace.removed_handlers = {"emails": {"handler": "mail:send", "seconds": 400.0}}

    for address in ("/", "/queues/emails"):
        assert "no worker has run its handler mail:send" in await (await client.get(address)).text()
    health = await (await client.get("/health")).text()
    assert "published handlers run in a worker" in health
    assert "Start a worker with the module mail in MARQ_HANDLERS" in health


async def test_the_page_of_a_queue_with_ordering_lists_its_blocked_keys(client: Client) -> None:
    ordered, other = [await (await client.get(f"/queues/{name}")).text() for name in ("invoices", "emails")]

    assert "Blocked keys" not in other
    assert re.findall(r'<tr><th scope="row">(.*?)</th><td><a href="/message', ordered) == [
        "customer-42",
        "&lt;b&gt;customer&lt;/b&gt;",
        "none",
    ]
    assert ordered.count('action="/actions/deliver-now"') == ordered.count('action="/actions/cancel"') == 3
    assert ordered.count("<td>by an operator</td>") == 1
    told = await (await client.get("/api/queues/invoices")).json()
    assert [row["key"] for row in told["blocked_keys"]] == ["customer-42", "<b>customer</b>", None]


async def test_the_page_of_a_queue_with_limits_lists_its_busiest_keys(client: Client) -> None:
    limited, other = [await (await client.get(f"/queues/{name}")).text() for name in ("emails", "invoices")]

    assert "<h2>Keys</h2>" not in other
    assert "12 keys have messages that wait for their turns in the handlers of trackers and of this worker" in limited
    assert "and 1 of them is at a limit" in limited
    assert '<th scope="row">&lt;b&gt;acme&lt;/b&gt;</th><td>1,200</td><td>2</td><td>yes</td>' in limited
    told = await (await client.get("/api/queues/emails")).json()
    assert [key["key"] for key in told["keys"]["busiest"]] == ["<b>acme</b>", "initech"]


@pytest.mark.parametrize("state", ["leased_in_order", "dispatched"])
async def test_no_action_is_offered_for_a_message_that_no_operator_can_release(
    client: Client, namespace: Filtered, state: str
) -> None:
    place = next(iter(namespace.open))
    namespace.open[place]["state"] = state

    listed = await (await client.get("/queues/emails/messages?state=in_flight")).text()
    page = await (await client.get(f"/message?id={quote(place, safe='')}")).text()

    assert (f'name="id" value="{place}"' in listed, 'name="id" value="marq.messages/0/3"' in listed) == (False, True)
    assert "<strong>in flight</strong>" in page
    assert "/actions/" not in page
    assert "<dt>Ordering key</dt><dd>customer-42</dd>" in page


async def test_who_may_only_look_finds_no_buttons(client: Client, namespace: Filtered, actor: PretendActor) -> None:
    @web.middleware
    async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[VISITOR] = Visitor("bob", Access.VIEWER)
        return await handler(request)

    async with TestClient(TestServer(site(namespace, actor, middlewares=[identify]))) as viewer:
        for name in ("in flight", "dead", "kinds", "message"):
            seen, possible = [await (await visitor.get(PAGES[name])).text() for visitor in (viewer, client)]

            assert ("/actions/" in seen, "/actions/" in possible) == (False, True), name


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"--x\r\nfoo", {"Content-Type": "multipart/form-data; boundary=x"}),
        (b'{"queue": "emails"}', {"Content-Type": "application/json"}),
        (b"queue=emails", {"Content-Type": FORM, "Content-Encoding": "gzip"}),
        (b"queue=emails", {"Content-Type": f"{FORM}; charset=none"}),
        (b"queue=\xff", {"Content-Type": FORM}),
        (b"queue=emails!", {"Content-Type": f"{FORM}; charset=utf-16"}),
    ],
)
async def test_what_is_no_form_is_refused_with_what_is_one(
    client: Client, body: bytes, headers: dict[str, str]
) -> None:
    answer = await client.post("/actions/pause", data=body, headers=headers)

    assert answer.status == 400
    assert "the form can&#39;t be read" in await answer.text()


async def test_dead_letters_that_say_nothing_are_a_kind_of_their_own(client: Client, namespace: Filtered) -> None:
    answer = await client.get("/queues/invoices/messages?state=dead&kind=")

    assert namespace.filters == {"kind": ""}
    # All that match, too, are those alone.
    assert (await answer.text()).count('<input type="hidden" name="kind" value="">') == 2

    await client.get("/queues/invoices/messages?state=dead&error=")

    assert namespace.filters == {}


@pytest.mark.parametrize(
    ("queue", "state", "found"), [("emails", "in_flight", 1), ("emails", "delayed", 0), ("reports", "in_flight", 0)]
)
async def test_a_message_is_found_by_its_id_behind_those_that_are_listed(
    client: Client, namespace: Filtered, queue: str, state: str, found: int
) -> None:
    wanted = "marq.messages/0/3"

    async def first_ones(queue: str, query: object) -> dict[str, object]:
        return {"complete": True, "messages": [namespace.open["marq.messages/0/0"]]}

    namespace.messages = first_ones  # type: ignore[method-assign]

    answer = await client.get(f"/api/queues/{queue}/messages?{urlencode({'state': state, 'id': wanted})}")

    assert [message["id"] for message in (await answer.json())["messages"]] == [wanted] * found


async def test_waiting_messages_are_searched_and_the_page_says_what_was_searched(
    client: Client, namespace: Filtered
) -> None:
    asked = {"state": "waiting", "text": "ann", "header": "tenant=acme", "sort": "bytes", "order": "desc"}
    address = f"/queues/emails/messages?{urlencode(asked)}"

    page = await (await client.get(address)).text()
    told = await (await client.get(f"/api{address}")).json()
    nothing = await (await client.get("/queues/emails/messages?state=waiting&text=nothing")).text()
    plain = await (await client.get("/queues/emails/messages?state=waiting")).text()

    assert namespace.searches[0] == WaitingSearch("ann", "tenant=acme", sort="bytes", descending=True)
    assert "3 of 3 waiting messages match. 4,000 records were read, which are all." in page
    assert 'aria-sort="descending"><a href="?text=ann&amp;header=tenant%3Dacme&amp;sort=bytes&amp;state=waiting' in page
    assert told["search"] == {"text": "ann", "header": "tenant=acme", "sort": "bytes", "order": "desc"}
    assert told["searched"] == {"records": 4_000, "waiting": 3, "matching": 3}
    assert "No waiting message matches." in nothing
    assert "waiting messages match" not in plain
    wrong = await client.get("/queues/emails/messages?state=waiting&attempts=x")
    assert (wrong.status, "attempts=x" in await wrong.text()) == (400, True)


async def test_what_runs_on_another_worker_is_not_stopped_in_silence(client: Client, namespace: Filtered) -> None:
    task = Task("4f", "purge", "emails", "what waits in queue emails", 0.0, Deleted(9)).told()
    namespace.tasks_of_others = [{**task, "worker": "http://10.0.0.8:6066", "here": False}]

    page = await (await client.get("/tasks/4f")).text()
    answer = await client.post("/tasks/4f/stop")

    assert '<a href="http://10.0.0.8:6066/tasks/4f">' in page
    assert "/tasks/4f/stop" not in page
    assert answer.status == 400
    assert "it runs on another worker; stop it there: http://10.0.0.8:6066/tasks/4f" in await answer.text()


async def test_the_page_of_a_purge_tells_how_many_messages_it_ended(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    purged = AsyncMock(return_value=Purged(waiting=9))
    monkeypatch.setattr(purging, "purge", purged)
    actor = Actor(None, None, Mock(), AsyncMock(), Mock(), Mock())  # type: ignore[arg-type]
    reached = await actor.purge("emails", delayed=False, extent=None)
    task = Task("4f", "purge", "emails", "waiting messages of queue emails", 0.0, reached, "done").told()
    namespace.tasks_of_others = [{**task, "worker": "http://10.0.0.8:6066", "here": False}]

    page = await (await client.get("/tasks/4f")).text()

    assert "9 of 9 purged" in page


async def test_whether_a_message_is_open_is_not_known_where_a_worker_did_not_answer(
    client: Client, namespace: Filtered
) -> None:
    namespace.complete = False
    dashboard = Dashboard.__new__(Dashboard)
    dashboard._namespace = namespace  # type: ignore[assignment]

    page = await (await client.get("/message?id=marq.messages/0/77")).text()
    listed = await (await client.get("/api/queues/emails/messages?state=in_flight&id=marq.messages/0/77")).json()

    assert "The status is unknown: a worker did not respond" in page
    assert listed["complete"] is False
    # Not "too late", which would say that it is done.
    with pytest.raises(MarqError, match="a worker did not respond"):
        await dashboard._look("emails", "marq.messages/0/77")


async def test_what_is_known_of_the_rows_of_one_page_alone_sorts_none(client: Client) -> None:
    page = await (await client.get("/")).text()

    assert "sort=waiting" in page
    assert "sort=consumers" not in page
    assert (await (await client.get("/api/overview?sort=consumers")).json())["shown"] == {}


@pytest.mark.parametrize("address", ["/", "/queues/emails"])
async def test_a_worker_that_does_not_answer_is_waited_for_once(
    client: Client, namespace: Filtered, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    statistics, queue, history = namespace.statistics, namespace.queue, namespace.history

    async def waiting(*query: object) -> object:
        await asyncio.wait_for(asked.wait(), 60)
        return await (statistics() if address == "/" else queue(*query))  # type: ignore[arg-type]

    async def noted(*query: object) -> object:
        asked.set()
        return await history(*query)  # type: ignore[arg-type]

    monkeypatch.setattr(namespace, "statistics" if address == "/" else "queue", waiting)
    monkeypatch.setattr(namespace, "history", noted)

    assert (await client.get(address)).status == 200


async def test_a_question_says_that_a_worker_may_have_more_messages_that_match(
    client: Client, namespace: Filtered
) -> None:
    form = {"match": "yes", "queue": "emails", "state": "in_flight"}
    questions = []

    for namespace.complete in (True, False):
        questions.append(await (await client.post("/actions/release", data=form)).text())

    assert ["may have more" in question for question in questions] == [False, True]


# --- questions and their answers --------------------------------------------------------------------------------------


class Form(HTMLParser):
    """The hidden fields of a question."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "input" and found.get("type") == "hidden":
            self.fields.append((found["name"] or "", found["value"] or ""))


async def question(client: Client, action: str, *fields: tuple[str, str]) -> tuple[str, list[tuple[str, str]]]:
    """Press a button; return the page that asks, and the fields that its form sends."""
    answer = await client.post(f"/actions/{action}", data=urlencode(fields), headers={"Content-Type": FORM})
    page = await answer.text()
    assert answer.status == 200, page
    return page, Form(page).fields


async def confirm(client: Client, action: str, fields: Sequence[tuple[str, str]]) -> str:
    """Answer a question with yes, and return the address of the task that does it."""
    answer = await client.post(
        f"/actions/{action}", data=urlencode(fields), headers={"Content-Type": FORM}, allow_redirects=False
    )
    assert answer.status == 303, await answer.text()
    return answer.headers["Location"]


@pytest.mark.parametrize(
    ("action", "pressed", "asked", "typed", "done"),
    [
        ("release", ("id", "marq.messages/0/1"), "Release this message?", (), ("", ["marq.messages/0/1"])),
        ("pause", ("queue", "webhooks"), "Pause queue webhooks?", (), "webhooks"),
        ("pause", ("queue", "webhooks"), "For how long", (("for", "10m"),), ("webhooks", 600)),
        ("resume", ("queue", "webhooks"), "Resume queue webhooks?", (), "webhooks"),
        ("purge", ("queue", "webhooks"), "queue webhooks", (("typed", "webhooks"),), ("webhooks", False)),
        (
            "cancel-handler",
            [("worker", URLS[1]), ("queue", "emails"), ("id", "t/0/1")],
            "Cancel the handler of message t/0/1 of queue emails?",
            (("counted", "yes"),),
            (URLS[1], {"queue": "emails", "id": "t/0/1", "counted": "yes"}),
        ),
        ("quiet", ("worker", URLS[0]), f"Let worker {URLS[0]} take no more messages?", (), (URLS[0], {})),
        ("purge", ("queue", "a/b&c"), "queue a/b&amp;c", (("typed", "a/b&c"), ("delayed", "yes")), ("a/b&c", True)),
    ],
)
async def test_nothing_is_done_before_the_answer_to_a_question(
    client: Client, actor: PretendActor, action: str, pressed: Field | list[Field], asked: str, typed: Sequence[Field],
    done: object,
) -> None:  # fmt: skip
    page, fields = await question(client, action, *(pressed if isinstance(pressed, list) else [pressed]))
    assert asked in page
    assert actor.asked == []

    await confirm(client, action, [*fields, *typed])

    assert actor.asked == [(action, done)]


@pytest.mark.parametrize(
    ("address", "action", "place"),
    [
        ("/queues/emails/messages?state=in_flight", "release", "marq.messages/0/1"),
        ("/message?id=marq.messages/0/1", "release", "marq.messages/0/1"),
        ("/queues/invoices", "cancel", "marq.messages/1/0"),
    ],
)
async def test_an_action_on_a_page_of_a_queue_concerns_its_messages_alone(
    client: Client, actor: PretendActor, address: str, action: str, place: str
) -> None:
    queue = "invoices" if address == "/queues/invoices" else "emails"
    offered = Form(await (await client.get(address)).text()).fields
    assert ("queue", queue) in offered

    page, fields = await question(client, action, ("queue", queue), ("id", place))
    assert f"{action.capitalize()} this message of queue {queue}?" in page
    await confirm(client, action, fields)

    assert actor.asked == [(action, (queue, [place]))]


async def test_the_page_of_workers_says_what_runs_and_offers_to_cancel_what_can_be(
    client: Client, namespace: Filtered
) -> None:
    namespace.silent = [{"group": "mail", "worker": URLS[1]}]

    page = await (await client.get("/workers")).text()
    told = await (await client.get("/api/running")).json()

    durations = re.findall(r'marq.messages/0/\d</a></th><td class="nowrap">(.*?)</td>', page)
    assert durations == ["5 min 40 s", "38 s", "4.2 s"]
    assert (page.count("/actions/cancel-handler"), page.count("a thread: can't be cancelled")) == (2, 1)
    assert f"The handler process of group mail of {URLS[1]} did not answer" in page
    assert len(told["calls"]) == 3


async def test_a_dead_letter_is_edited_and_sent_and_its_payload_stays_out_of_the_audit_log(
    client: Client, namespace: Filtered, actor: PretendActor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "marq.audit")
    namespace.story = (*namespace.story, DEAD_LETTERED)
    identity = "marq.messages/1/3"
    offered = await (await client.get(f"/message?{urlencode({'id': identity, 'queue': 'invoices'})}")).text()
    page, fields = await question(client, "resend", ("queue", "invoices"), ("id", identity))

    location = await confirm(client, "resend", [*fields, ("value", "secret"), ("to", "emails")])

    assert "/actions/resend" in offered
    assert '<textarea name="value" rows="12" spellcheck="false">\n{&#34;card&#34;: &#34;4111-1111&#34;' in page
    assert actor.asked == [
        ("resend", ("invoices", identity, {"queue": "invoices", "id": identity, "value": "secret", "to": "emails"}))
    ]
    assert location == "/message?id=marq.messages%2F2%2F9&queue=emails&did=resend&done=1&late=0"
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "marq.audit"]
    assert line["audit"] == "resend"
    assert (line["id"], line["sent"], line["deleted"]) == (identity, "marq.messages/2/9", 1)
    assert "value" not in line


async def test_schedules_are_run_paused_and_resumed_from_their_page(client: Client, actor: PretendActor) -> None:
    page = await (await client.get("/schedules")).text()
    last = f"/message?id={quote('~schedule/nightly/5f0c2a4b6d8e/3/1795240800', safe='')}&amp;queue=reports"

    locations = []
    for action, schedule in (("run-schedule", "nightly"), ("pause-schedule", "nightly"), ("resume-schedule", "hourly")):
        assert f'action="/actions/{action}"' in page
        _, fields = await question(client, action, ("schedule", schedule), ("back", "/schedules"))
        locations.append(await confirm(client, action, fields))

    assert f'<a href="{last}"><time' in page
    # Those before it are one click away.
    earlier = f"/message?id={quote('~schedule/nightly/5f0c2a4b6d8e/3/1795154400', safe='')}&amp;queue=reports"
    assert re.search(rf'<details><summary>9 before</summary><a href="{re.escape(earlier)}"><time', page)
    assert actor.asked == [
        ("run-schedule", "nightly"),
        ("switch-schedule", ("nightly", False)),
        ("switch-schedule", ("hourly", True)),
    ]
    assert [location.partition("?")[0] for location in locations] == ["/message", "/schedules", "/schedules"]


async def test_a_setting_is_changed_with_a_reason_that_the_audit_log_keeps(
    client: Client, actor: PretendActor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "marq.audit")
    offered = await (await client.get("/queues/emails")).text()
    page, fields = await question(client, "set", ("queue", "emails"), ("key", "max_attempts"))

    form = [*fields, ("confirmed", "yes"), ("value", "9")]
    without = await client.post("/actions/set", data=dict(form))
    await confirm(client, "set", [*form, ("reason", "incident 12")])

    assert "<option>max_attempts</option>" in offered
    assert "Change max_attempts of queue emails?" in page
    assert 'name="value" value="5"' in page
    assert (without.status, "Reason, for the audit log: it is empty" in await without.text()) == (400, True)
    assert actor.asked == [("set", ("emails", "max_attempts", "9"))]
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "marq.audit"]
    assert (line["audit"], line["key"], line["value"], line["reason"]) == ("set", "max_attempts", "9", "incident 12")


async def test_the_page_of_a_queue_has_its_times_and_its_own_settings_before_tables_of_the_protocol(
    client: Client,
) -> None:
    page = await (await client.get("/queues/emails")).text()
    told = await (await client.get("/api/queues/reports")).json()

    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Last 15 minutes", "Settings", "Keys", "Consumers", "Partitions", "Trackers",
    ]  # fmt: skip
    assert re.findall(r"<span>(p\d\d) <strong>(.*?)</strong>", page)[:3] == [
        ("p50", "39 ms"), ("p95", "83 ms"), ("p99", "97 ms"),
    ]  # fmt: skip
    assert told["times"]["wait"] == {"p50_seconds": None, "p95_seconds": None, "p99_seconds": None}
    assert told["times"]["run"]["p99_seconds"] == pytest.approx(0.0967, abs=0.001)


async def test_the_pages_show_until_when_a_queue_is_paused(client: Client, actor: PretendActor) -> None:
    await actor.pause("webhooks", 3_600)
    for address in ("/", "/queues/webhooks"):
        assert "until <time datetime=" in await (await client.get(address)).text()

    await actor.resume("webhooks")
    assert "until <time datetime=" not in await (await client.get("/")).text()


async def test_a_purge_of_old_messages_says_how_old_and_keeps_to_what_it_asked_about(
    client: Client, actor: PretendActor
) -> None:
    page, fields = await question(client, "purge", ("queue", "webhooks"), ("minutes", "30"))
    assert "Purge all waiting messages from queue webhooks that are at least 30 minutes old?" in page
    assert actor.before_ms is not None
    assert abs(time.time() * 1000 - 30 * 60_000 - actor.before_ms) < 60_000

    await confirm(client, "purge", [*fields, ("typed", "webhooks")])
    # A program need not ask first.
    form = {"queue": "webhooks", "minutes": "30", "confirmed": "yes", "typed": "webhooks"}
    assert (await client.post("/actions/purge", data=form)).status == 200

    assert [extent and [*extent.ends.values()] for extent in actor.extents] == [[3], [3]]


@pytest.mark.parametrize(
    ("filters", "offered"),
    [("", "Purge all<"), ("&minutes=30", "Purge all that match<"), ("&minutes=30&text=a", None), ("&attempts=2", None)],
)
async def test_waiting_messages_can_be_purged_by_their_age_alone(
    client: Client, filters: str, offered: str | None
) -> None:
    page = await (await client.get(f"/queues/emails/messages?state=waiting{filters}")).text()

    assert ("Purge all" in page) is (offered is not None)
    assert offered is None or offered in page
    # Otherwise it says why there is no button.
    assert ("without asking a tracker" in page) is (offered is None)


KIND, IDS = ("kind", "ValueError: no customer N"), [("id", f"marq.messages/1/{number}") for number in (1, 2)]


@pytest.mark.parametrize(
    ("action", "pressed", "asked", "to", "filters"),
    [
        ("redrive", [KIND], "5 dead letters of queue invoices", "emails", {"kind": KIND[1]}),
        ("delete", [KIND], "5 dead letters of queue invoices", None, {"kind": KIND[1]}),
        (
            "redrive",
            IDS,
            "2 dead letters of queue invoices, that were selected",
            None,
            {"id": [message_id for _, message_id in IDS]},
        ),
        (
            "redrive",
            [("error", "no customer"), ("minutes", "5")],
            "5 dead letters of queue invoices, at least 300 s old",
            None,
            {"error": "no customer", "older_than": 300},
        ),
    ],
)
async def test_dead_letters_that_are_meant_are_settled_with_progress(
    client: Client,
    actor: PretendActor,
    action: str,
    pressed: Sequence[Field],
    asked: str,
    to: str | None,
    filters: dict[str, object],
) -> None:
    page, fields = await question(client, action, ("queue", "invoices"), *pressed)
    assert asked in page
    assert actor.asked == []

    told = await (await client.get(f"/api{await confirm(client, action, [*fields, ('to', to or '')])}")).json()

    chosen = int(asked.partition(" ")[0])
    assert (told["task"]["state"], told["task"]["chosen"], told["task"]["done"]) == ("done", chosen, chosen)
    [(did, selection)] = actor.asked
    assert selection.filters.pop("as_of").ends == {0: 5}
    assert (did, selection.queue, selection.filters, selection.to) == (action, "invoices", filters, to)


async def test_dead_letters_that_came_after_the_question_are_not_deleted(
    client: Client, namespace: Filtered, actor: PretendActor
) -> None:
    page, fields = await question(client, "delete", ("queue", "invoices"))
    assert "Delete 5 dead letters of queue invoices?" in page
    namespace.dead += [namespace.dead_letter(number) for number in range(5, 9)]

    told = await (await client.get(f"/api{await confirm(client, 'delete', fields)}")).json()

    assert (told["task"]["chosen"], len(namespace.dead)) == (5, 4)


@pytest.mark.parametrize("action", ["redrive", "delete"])
async def test_a_selection_without_a_ticked_dead_letter_is_refused(
    client: Client, actor: PretendActor, action: str
) -> None:
    page = await (await client.get("/queues/invoices/messages?state=dead&error=no+customer")).text()
    selection = re.search('<form method="post" id="selection">.*?</form>', page, re.DOTALL)
    assert selection is not None

    answer = await client.post(f"/actions/{action}", data=Form(selection[0]).fields)

    assert (answer.status, actor.asked) == (400, [])
    assert "no message is selected" in await answer.text()
    # A ticked one is all that is meant.
    page, _ = await question(client, action, *Form(selection[0]).fields, IDS[0])
    assert "1 dead letters of queue invoices, that were selected" in page


async def test_open_messages_that_came_after_the_question_are_left_alone(
    client: Client, namespace: Filtered, actor: PretendActor
) -> None:
    page, fields = await question(client, "cancel", ("queue", "emails"), ("state", "delayed"), ("match", "yes"))
    assert "all 3 messages of queue emails that match" in page
    before = list(namespace.delayed)
    namespace.delayed["marq.messages/0/99"] = namespace._delayed(99)

    await confirm(client, "cancel", fields)

    assert actor.asked == [("cancel", ("emails", before))]


@pytest.mark.parametrize(("state", "clocks"), [("owner", [0, 1, 2]), ("recovering", [0, 2])])
async def test_a_purge_is_given_what_existed_when_it_was_asked_about(
    client: Client, namespace: Filtered, actor: PretendActor, state: str, clocks: list[int]
) -> None:
    statistics = await namespace.statistics()
    statistics["workers"][0]["partitions"][0]["state"] = state
    namespace.statistics = AsyncMock(return_value=statistics)  # type: ignore[method-assign]
    _, fields = await question(client, "purge", ("queue", "emails"))

    await confirm(client, "purge", [*fields, ("typed", "emails")])

    [extent] = actor.extents
    assert extent is not None
    assert extent.ends == {Source("marq.messages", 0): 7}
    # Those of a tracker that is still reading would be too old.
    assert sorted(extent.clocks) == clocks


async def test_a_redrive_to_an_unknown_queue_is_asked_about_once_more(client: Client, actor: PretendActor) -> None:
    _, fields = await question(client, "redrive", ("queue", "invoices"))

    page, again = await question(client, "redrive", *fields, ("to", "invoises"))
    assert "is unknown" in page
    assert "Did you mean &#39;invoices&#39;?" in page
    assert 'name="unknown" value="invoises"' in page
    assert actor.asked == []
    # An answer counts only for its own name.
    page, _ = await question(client, "redrive", *again, ("to", "invoces"), ("unknown", "invoises"))
    assert 'name="unknown" value="invoces"' in page
    assert actor.asked == []

    await confirm(client, "redrive", [*again, ("to", "invoises"), ("unknown", "invoises")])

    [(_, selection)] = actor.asked
    assert selection.to == "invoises"


@pytest.mark.parametrize(
    ("action", "fields", "status", "said"),
    [
        ("quiet", {}, 400, "which worker?"),
        ("pause", {"queue": "webhooks", "for": "a while"}, 400, "for=a while: expected a duration such as 90s"),
        ("purge", {"queue": "webhooks", "typed": "webhook"}, 400, "the typed name differs"),
        ("resend", {"queue": "invoices", "id": "t/1/3", "value": "x", "to": "invoises"}, 404, "Did you mean"),
        # Filters that the action does not have: it would affect more messages than were meant.
        ("delete", {"queue": "invoices", "reson": "no"}, 400, "unknown field"),
        ("redrive", {"queue": "invoices", "attempts": "3"}, 400, "unknown field"),
        ("release", {"queue": "emails", "match": "yes", "reason": "no"}, 400, "unknown field"),
        ("pause", {"queue": "emails", "error": "no"}, 400, "unknown field"),
    ],
)
async def test_an_action_that_is_refused_says_why_and_does_nothing(
    client: Client, actor: PretendActor, action: str, fields: dict[str, str], status: int, said: str
) -> None:
    answer = await client.post(f"/actions/{action}", data={**fields, "confirmed": "yes"})

    assert (answer.status, actor.asked) == (status, [])
    assert said in await answer.text()


async def test_places_of_many_messages_are_one_field_in_which_each_source_stands_once() -> None:
    ids = [f"{'t' * 249}/3/{number}" for number in range(MAX_PLACES)]

    text = write_places(ids)

    assert read_places(text) == ids
    # A form has to fit into a request.
    assert len(quote(text)) < MAX_BODY_BYTES // 4
    with pytest.raises(ConfigError, match="select 1 to 10,000"):
        read_places(write_places([*ids, "t/0/1"]))
    with pytest.raises(ConfigError, match="expected the id of a message"):
        read_places("t/0/1,x")
    with pytest.raises(ConfigError, match="0 messages are selected"):
        read_places(" ")


# --- filters by reason ------------------------------------------------------------------------------------------------


async def test_each_filter_of_dead_letters_that_is_shown_holds_for_the_buttons_too(
    client: Client, namespace: Filtered, actor: PretendActor
) -> None:
    shown = {"reason": "attempts used", "error": "no customer", "minutes": "5"}

    kinds = Form(await (await client.get(f"/dead-letters?{urlencode(shown)}")).text()).fields
    listed = await (await client.get(f"/queues/invoices/messages?{urlencode({'state': 'dead', **shown})}")).text()

    # Two buttons of each of two kinds.
    assert [kinds.count(field) for field in shown.items()] == [4, 4, 4]
    assert namespace.filters == {"reason": "attempts used", "error": "no customer", "older_than": 300}
    assert set(shown.items()) <= set(Form(listed).fields)
    assert 'name="reason" value="attempts used" aria-label="Reason contains"' in listed
    page, _ = await question(client, "delete", ("queue", "invoices"), ("reason", "nothing like it"))
    assert "there is nothing to do" in page


# --- unknown queues ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["/queues/emals", "/queues/emals/messages?state=dead", "/message?id=marq.messages/0/1&queue=emals"]
)
async def test_an_unknown_queue_has_no_page_and_the_closest_name_is_suggested(client: Client, address: str) -> None:
    answer = await client.get(address)
    told = await client.get(f"/api{address}")

    page = await answer.text()
    assert (answer.status, told.status) == (404, 404)
    assert '<a href="/queues/emails">emails</a>' in page
    assert "Purge" not in page
    assert await told.json() == {
        "error": "queue 'emals' is unknown: it has no definition, no consumer and no messages. Did you mean 'emails'?",
        "suggestion": "emails",
    }


@pytest.mark.parametrize("action", ["pause", "resume", "purge", "redrive", "delete", "cancel", "release"])
@pytest.mark.parametrize("confirmed", ["", "yes"])
async def test_nothing_is_done_to_an_unknown_queue(
    client: Client, actor: PretendActor, action: str, confirmed: str
) -> None:
    form = {"queue": "zzz", "confirmed": confirmed} | ({"typed": "zzz"} if action == "purge" else {})
    if action in ("cancel", "release"):
        form["id"] = "orders/0/7"

    answer = await client.post(f"/actions/{action}", data=form)

    assert (answer.status, actor.asked) == (404, [])


# --- single messages --------------------------------------------------------------------------------------------------


async def test_a_message_that_several_queues_have_is_shown_for_each_of_them(client: Client) -> None:
    address = f"/message?id={quote(SHARED_ID, safe='')}"

    page = await (await client.get(address)).text()
    told = await (await client.get(f"/api{address}")).json()

    assert "Several queues have this message:" in page
    assert [f'<a href="{address}&amp;queue={name}">{name}</a>' in page for name in ("emails", "invoices")] == [True] * 2
    assert ("Timeline" in page, "/actions/" in page) == (False, False)
    assert (told["queue"], told["queues"], told["status"]) == ("", ["emails", "invoices"], "several queues")
    assert (told["events"], told["now"], told["dead_letter"], told["possible"]) == ([], None, None, [])

    page = await (await client.get(f"{address}&queue=emails")).text()

    assert '<dt>Queue</dt><dd><a href="/queues/emails">emails</a></dd>' in page
    assert "Timeline" in page
    assert f'<a href="{address}&amp;queue=invoices">invoices</a>' in page


@pytest.mark.parametrize(
    ("address", "queue"),
    [
        ("/queues/emails/messages?state=in_flight", "emails"),
        ("/queues/emails/messages?state=waiting", "emails"),
        ("/queues/invoices/messages?state=dead", "invoices"),
        ("/queues/invoices", "invoices"),
        ("/dead-letters", "invoices"),
        ("/message?id=marq.messages/0/1&since=1", "emails"),
    ],
)
async def test_links_to_messages_name_the_queue(client: Client, address: str, queue: str) -> None:
    links = re.findall('href="(/message[^"]*)"', await (await client.get(address)).text())

    assert links
    assert [link for link in links if f"&amp;queue={queue}" not in link] == []


async def test_a_dead_message_is_redriven_and_deleted_from_its_page(client: Client, namespace: Filtered) -> None:
    namespace.story = (*namespace.story, DEAD_LETTERED)

    page = await (await client.get("/message?id=marq.messages/1/3")).text()

    assert "<strong>dead letter</strong>, attempt 5" in page
    assert "given up after 5 attempts, last error: ValueError: no customer" in page
    assert namespace.filters == {"id": ["marq.messages/1/3"]}
    for action in ("redrive", "delete", "resend"):
        assert f'action="/actions/{action}"' in page
    fields = Form(page).fields
    assert (fields.count(("queue", "invoices")), fields.count(("id", "marq.messages/1/3"))) == (3, 3)


@pytest.mark.parametrize(
    "path", ["/message?id=marq.messages/1/3", "/queues/invoices/messages?state=dead", "/dead-letters"]
)
async def test_a_dead_letter_shows_the_traceback_of_its_last_attempt(
    client: Client, namespace: Filtered, path: str
) -> None:
    namespace.story = (*namespace.story, DEAD_LETTERED)

    page = await (await client.get(path)).text()

    assert "Traceback (most recent call last):" in page
    assert "in &lt;bill&gt;" in page


async def test_messages_in_flight_name_their_consumer_or_say_why_it_is_unknown(
    client: Client, namespace: Filtered
) -> None:
    why = "An unknown consumer has left its group"
    assert why not in await (await client.get("/queues/emails/messages?state=in_flight")).text()
    namespace.open["marq.messages/0/1"]["consumer"] = None

    page = await (await client.get("/queues/emails/messages?state=in_flight")).text()

    assert page.count('<td><span title="billing-1c4f">billing-1c4f</span></td>') == 3
    assert page.count("<td>unknown</td>") == 1
    assert why in page


async def test_the_list_of_dead_letters_does_not_say_that_a_failed_message_was_released(client: Client) -> None:
    page = await (await client.get("/queues/invoices/messages?state=dead")).text()

    assert '<td class="text wide">given up after 5 attempts</td>' in page
    assert "was released" not in page


async def test_settings_have_their_origin_in_the_words_of_the_command(client: Client) -> None:
    page = await (await client.get("/queues/invoices")).text()

    assert re.search(r"max_attempts</th><td[^>]*>5</td><td>marq\.toml</td>", page)


async def test_a_message_that_was_redriven_meanwhile_has_no_such_buttons(client: Client, namespace: Filtered) -> None:
    namespace.story = (*namespace.story, DEAD_LETTERED)
    namespace.dead = []

    assert "/actions/" not in await (await client.get("/message?id=marq.messages/1/3")).text()


async def test_that_dead_letters_can_not_be_read_is_said(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> list[dict[str, object]]:
        raise MarqError("away")

    namespace.story = (*namespace.story, DEAD_LETTERED)
    monkeypatch.setattr(namespace, "dead_letters", unavailable)

    page = await (await client.get("/message?id=marq.messages/1/3")).text()

    assert "The status is unknown: the dead letters could not be read" in page


async def test_a_page_without_events_says_why_some_may_be_missing(client: Client, namespace: Filtered) -> None:
    namespace.story, namespace.dead, namespace.missing = (), [], "retention has removed markers"

    page = await (await client.get("/message?id=marq.messages/1/3")).text()
    listed = await (await client.get("/api/queues/emails/messages?state=in_flight&id=marq.messages/1/3")).json()

    assert "The status is unknown: no event was found, and earlier ones may be missing" in page
    assert "because retention has removed markers." in page
    assert "No event in the part that was read." in page
    # A redelivery of it may be open.
    assert listed == {**listed, "complete": False, "messages": []}

    namespace.missing = ""
    page = await (await client.get("/message?id=marq.messages/1/3")).text()
    assert "<strong>waiting</strong>" in page
    assert "No consumer has received it yet." in page


def test_the_consumer_of_a_message_is_the_member_that_names_its_holder() -> None:
    holders = ConsumerProtocolMemberMetadata(0, ["t"], encoded({}, [7, 8])).encode()
    members = [
        _member(*facts).document()
        for facts in (
            ("older-1", None, "older", "/10.0.0.1", ConsumerProtocolMemberMetadata(0, ["t"], b"").encode(), b""),
            ("billing-2", None, "billing", "/10.0.0.2", holders, b""),
            ("broken-3", None, "broken", "/10.0.0.3", b"\x00", b"\x00"),
        )
    ]

    name = "billing on 10.0.0.2"
    assert consumer_of({"holder": 8}, members) == {
        "id": "billing-2", "client_id": "billing", "host": "10.0.0.2", "name": name,
    }  # fmt: skip
    assert names_of_holders(members) == {f"{holder:016x}": name for holder in (7, 8)}
    assert consumer_of({"holder": 9}, members) is None
    # From a worker of an older version.
    assert consumer_of({}, members) is None


def test_consumers_have_their_instance_id_or_what_tells_them_apart_as_their_name() -> None:
    shared = {"client_id": "marq", "host": "10.0.0.1", "instance_id": None}
    members = [
        {**shared, "id": "a", "pid": 1},
        {**shared, "id": "b", "pid": 2},
        {**shared, "id": "c", "pid": 3, "host": "10.0.0.2"},
        {**shared, "id": "d", "pid": 4, "instance_id": "worker-2"},
    ]

    assert list(consumer_names(members[1:]).values()) == [
        "marq on 10.0.0.1 (process 2)",
        "marq on 10.0.0.2",
        "worker-2",
    ]
    assert consumer_names(members)["a"] == "marq on 10.0.0.1 (process 1)"
    assert consumer_names(members[2:3]) == {"c": "marq on 10.0.0.2"}


async def test_what_is_overdue_is_due_now(client: Client, namespace: Filtered) -> None:
    for message in (*namespace.delayed.values(), *namespace.open.values()):
        message["due_in_seconds"] = -0.1

    delayed = await (await client.get("/queues/emails/messages?state=delayed")).text()
    message = await (await client.get("/message?id=marq.messages/0/1")).text()

    assert delayed.count("<td>due now</td>") == 3
    assert "-0.1" not in delayed + message
    assert "<dt>Lease ends</dt><dd>now</dd>" in message


async def test_answers_to_posts_have_no_link_to_a_json_equivalent(client: Client) -> None:
    for answer in (
        await client.post("/actions/pause", data={"queue": "emails"}),
        await client.post("/actions/nonsense"),
        await client.post("/tasks/99/stop"),
    ):
        page = await answer.text()
        assert "This page as JSON" not in page
        assert "hx-get" not in page
    for address in ("/", "/queues/emails/messages?state=lost"):
        assert "This page as JSON" in await (await client.get(address)).text()


@pytest.mark.parametrize("state", State)
def test_each_state_has_a_status_in_words_and_only_a_message_that_a_consumer_holds_can_be_released(
    state: State,
) -> None:
    now = {"state": state.name.lower()}

    possible = pages._possible(now, at_most_once=False)
    status = pages._status({"now": now}, None, dead_letters_read=True)

    assert (possible == ("release",)) == (state is State.LEASED)
    assert "release" not in pages._possible(now, at_most_once=True)
    assert (status == "in flight") == (state in HELD)
    assert "_" not in status
    assert status != state.name.lower() or state is State.DELAYED


def test_a_message_that_waits_in_its_line_is_said_to_do_so_and_can_be_delivered_or_cancelled() -> None:
    now = {"state": "waiting_in_order", "due_in_seconds": 3_600.0}
    blocking = {**now, "due_in_seconds": BLOCKED_MS / 1000 - 3_600}

    assert (
        pages._status({"now": now}, None, dead_letters_read=True)
        == "waits for its next attempt, ahead of later messages with its key"
    )
    blocks = "blocks its key until it is delivered now or cancelled"
    assert pages._status({"now": blocking}, None, dead_letters_read=True) == blocks
    assert pages._possible(now, at_most_once=False) == ("deliver-now", "cancel")
    assert pages._is_open_in({**now, "queue": "emails"}, "emails", "delayed")


@pytest.mark.parametrize("at_most_once", [False, True])
def test_actions_are_offered_if_they_can_affect_a_message_of_the_list(at_most_once: bool) -> None:
    def possible(state: str, *messages: Mapping[str, Any]) -> Sequence[str]:
        return pages._possible_in(state, messages, at_most_once=at_most_once)

    released = () if at_most_once else ("release",)
    assert possible("delayed", {"state": "waiting_in_order"}) == ("deliver-now", "cancel")
    assert possible("in_flight", {"state": "leased_in_order"}, {"state": "dispatched"}) == ()
    assert possible("in_flight", {"state": "dispatched"}, {"state": "leased"}) == released
    assert possible("in_flight") == released
    assert possible("dead", {"id": "marq.messages/0/1"}) == ("redrive", "delete")


async def test_a_message_that_is_not_known_is_said_to_be_so_with_what_to_try(client: Client) -> None:
    page = await (await client.get("/message?id=marq.messages/0/999")).text()
    told = await (await client.get("/api/message?id=marq.messages/0/999")).json()

    assert "No message with this id is known" in page
    assert "Timeline" not in page
    assert (told["known"], told["status"]) == (False, "unknown")


async def test_each_state_of_a_queue_is_a_tab_with_its_number_of_messages(client: Client) -> None:
    for address, now in (("/queues/invoices", "Overview"), ("/queues/invoices/messages?state=delayed", "Delayed")):
        page = await (await client.get(address)).text()
        told = await (await client.get(f"/api{address}")).json()

        tabs = page[page.index('<nav class="tabs"') : page.index("</nav>", page.index('<nav class="tabs"'))]
        assert re.findall(r"(?<=>)[A-Z][a-z ]+", tabs) == [
            "Overview",
            "Waiting",
            "In flight",
            "Delayed",
            "Dead letters",
        ]
        assert [int(count) for count in re.findall(r'class="count[ a-z]*">(\d+)<', tabs)] == [31, 12, 8, 5]
        assert told["counts"] == {"waiting": 31, "in_flight": 12, "delayed": 8, "dead": 5}
        assert tabs[tabs.index("aria-current") :].startswith(f'aria-current="page">{now}')


async def test_messages_that_no_worker_counts_have_a_dash_and_not_a_zero(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = await namespace.statistics()
    for row in statistics["queues"].values():
        for name in ("waiting", "oldest_waiting_seconds", "arrived", "arrived_per_second"):
            del row[name]
    statistics["backlog"] = {**statistics["backlog"], "counted": False, "complete": False}
    monkeypatch.setattr(namespace, "statistics", AsyncMock(return_value=statistics))

    for address in ("/", "/queues/emails/messages?state=delayed"):
        page = await (await client.get(address)).text()

        assert re.search(r"Waiting(</dt>)?\s*<(dd|span class=\"count\")>\N{EN DASH}<", page), address
        assert not re.search(r"\N{GREATER-THAN OR EQUAL TO} [\d\N{EN DASH}]", page)


# --- workers ----------------------------------------------------------------------------------------------------------


async def test_workers_show_version_uptime_load_and_memory(client: Client) -> None:
    page = await (await client.get("/workers")).text()
    told = await (await client.get("/api/workers")).json()

    for text in ("0.1.0", "1 d 2 h", "37%", "187 MiB", "210 ms", "52%", "96 MiB", "process 4711"):
        assert f"{text}<" in page, text
    assert told["workers"][0]["process"]["uptime_seconds"] == 93_784.0
    assert told["versions"] == ["0.1.0"]
    assert "different versions" not in page
    # A tracker owns them in no order.
    assert '<td class="text">0, 1</td>' in page


async def test_a_worker_of_another_version_is_shown_without_what_it_does_not_report(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [f"queue-{number}" for number in range(200)]
    namespace.old_handlers = [{"group": "old", "queues": queues, "pid": None, "starts": 3, "breakers": {}}]

    page = await (await client.get("/workers")).text()

    # Four of the worker, four of its handlers, and the instance id of a consumer.
    assert page.count("<td>\N{EN DASH}</td>") == 9
    assert "not running" in page
    assert "queue-9 and 190 more" in page
    assert "queue-10" not in page

    statistics = await namespace.statistics()
    statistics["workers"][1]["process"] = {**PROCESS, "version": "0.2.0", "loop_lag_seconds": 2.5}
    monkeypatch.setattr(namespace, "statistics", AsyncMock(return_value=statistics))
    page = await (await client.get("/workers")).text()
    assert "different versions: 0.1.0, 0.2.0" in page
    assert "event loop 2.5 s late" in page


async def test_a_blocked_handler_process_says_by_what_and_a_stopped_one_that_it_is_stopped(
    client: Client, namespace: Filtered
) -> None:
    blocked = {"group": "g", "queues": ["emails"], "pid": 7, "starts": 1, "breakers": {}, "blocked_seconds": 4.0}
    namespace.old_handlers = [
        blocked,
        blocked | {"blocked_by": "handler mail:send of queue emails"},
        blocked | {"stopped": True},
    ]

    page = await (await client.get("/workers")).text()

    # A worker of an older version does not report by what.
    assert page.count(">blocked for ") == 2
    assert page.count("by handler mail:send of queue emails") == 1
    assert page.count("stopped by a signal") == 1


async def test_a_worker_that_does_not_answer_and_one_without_handlers_are_said_to_be_so(
    client: Client, namespace: Filtered, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.complete = False
    statistics = await namespace.statistics()
    statistics["workers"][0]["handlers"] = []
    monkeypatch.setattr(namespace, "statistics", AsyncMock(return_value=statistics))

    page = await (await client.get("/workers")).text()

    assert page.count("no response") == 1
    assert "No worker runs handlers" in page


# --- kinds of dead letters --------------------------------------------------------------------------------------------


async def test_kinds_of_errors_have_a_sample_and_the_time_since_the_last(client: Client, namespace: Filtered) -> None:
    page = await (await client.get("/dead-letters")).text()
    told = await (await client.get("/api/dead-letters")).json()

    assert (told["dead_letters"], told["kinds_in_all"]) == (7, 2)
    assert [kind["sample"] and kind["sample"]["id"] for kind in told["kinds"]] == ["marq.messages/1/4", None]
    assert page.count("last: ") == 1
    assert '<a href="/message?id=marq.messages%2F1%2F4&amp;queue=invoices">marq.messages/1/4</a>' in page
    # The value is redacted and escaped as everywhere.
    assert "4111" not in page
    assert re.search(r'title="2026-11-22 06:00:00 UTC">\d+ \w+ ago<', page)
