"""What passes to a page of the worker's web server, and what is answered instead."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from aiohttp import encode_basic_auth
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, HTTPFound, Request, Response
from yarl import URL

from marq.wire.errors import ConfigError
from marq_worker.config.settings import load_settings
from marq_worker.web.connection_limits import RateLimiter
from marq_worker.web.credentials import Credentials
from marq_worker.web.security import FAILURES, HEADERS, MAX_BODY_BYTES, VISITOR, Guard, check_exposure, options


def login(name: str, password: str) -> dict[str, str]:
    return {"Authorization": encode_basic_auth(name, password)}


OPERATOR, VIEWER = login("alice", "open sesame"), login("eve", "just looking")
TOKEN = {"Authorization": "Bearer prometheus-0123456789"}

Client = TestClient[Request, Application]
Start = Callable[[], Awaitable[Client]]


async def page(request: Request) -> Response:
    return Response(text=request[VISITOR].name if VISITOR in request else "open")


async def action(request: Request) -> Response:
    await request.read()
    return Response(text=f"done by {request[VISITOR].name}")


async def broken(request: Request) -> Response:
    raise RuntimeError("marker-of-a-secret")


async def elsewhere(request: Request) -> Response:
    raise HTTPFound("/")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_WEB_OPERATORS", "alice:open sesame")
    monkeypatch.setenv("MARQ_WEB_VIEWERS", "eve:just looking")
    monkeypatch.setenv("MARQ_WEB_VIEWER_TOKENS", TOKEN["Authorization"].removeprefix("Bearer "))


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    clients: list[Client] = []

    async def start() -> Client:
        app = Application(**options(load_settings()))  # type: ignore[arg-type]
        app.router.add_get("/", page)
        app.router.add_get("/healthz", page)
        app.router.add_post("/purge", action)
        app.router.add_get("/broken", broken)
        app.router.add_get("/elsewhere", elsewhere)
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.mark.usefixtures("guarded")
async def test_without_a_login_only_health_is_visible(start: Start) -> None:
    client = await start()

    refused, live = await client.get("/"), await client.get("/healthz")

    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"].startswith("Basic ")
    assert live.status == 200
    assert (await client.get("/", headers=login("alice", "wrong"))).status == 401


@pytest.mark.usefixtures("guarded")
async def test_a_viewer_looks_and_an_operator_acts(start: Start) -> None:
    client = await start()

    assert await (await client.get("/", headers=VIEWER)).text() == "eve"
    assert (await client.get("/", headers=TOKEN)).status == 200
    assert (await client.post("/purge", headers=VIEWER)).status == 403
    assert (await client.post("/purge", headers=TOKEN)).status == 403
    assert await (await client.post("/purge", headers=OPERATOR)).text() == "done by alice"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://HOST"}, 200),
        ({}, 200),
    ],
)
async def test_only_our_own_pages_change_something(start: Start, headers: dict[str, str], status: int) -> None:
    client = await start()
    own = f"{client.host}:{client.port}"

    answer = await client.post("/purge", headers={name: value.replace("HOST", own) for name, value in headers.items()})

    assert answer.status == status


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:80", "LOCALHOST:6066"])
async def test_a_server_without_login_answers_by_its_own_names(start: Start, host: str) -> None:
    client = await start()

    assert (await client.get("/", headers={"Host": host})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:6066", "[", ""])
async def test_a_page_whose_name_leads_here_gets_nothing(start: Start, host: str) -> None:
    client = await start()

    assert (await client.get("/", headers={"Host": host})).status in {400, 403}


@pytest.mark.parametrize("path", ["/", "/none", "/broken", "/elsewhere"])
async def test_every_answer_has_the_headers(start: Start, path: str, caplog: pytest.LogCaptureFixture) -> None:
    client = await start()

    answer = await client.get(path, allow_redirects=False)

    assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    # With "no-referrer", browsers would send "Origin: null" with our own forms.
    assert answer.headers["Referrer-Policy"] == "same-origin"
    assert "marker-of-a-secret" not in await answer.text()


async def test_a_request_that_is_too_large_is_refused(start: Start) -> None:
    client = await start()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65_536 + 2):
            yield bytes(65_536)

    assert (await client.post("/purge", data=io.BytesIO(bytes(MAX_BODY_BYTES + 1)))).status == 413
    # Without saying so beforehand.
    assert (await client.post("/purge", data=endless())).status == 413
    assert (await client.post("/purge", data=bytes(1_000))).status == 200


@pytest.mark.usefixtures("guarded")
async def test_guessing_is_slowed_down_but_known_logins_continue(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is: no guess becomes free during the test.
    monkeypatch.setattr("marq_worker.web.security.FAILURES", (FAILURES[0], 1e-6))
    client = await start()
    assert (await client.get("/", headers=OPERATOR)).status == 200

    statuses = [(await client.get("/", headers=login("alice", f"guess {number}"))).status for number in range(12)]

    assert statuses == [401] * 10 + [429] * 2
    assert (await client.get("/", headers=OPERATOR)).status == 200
    assert (await client.get("/", headers=TOKEN)).status == 200


@asynccontextmanager
async def limited(credentials: Credentials) -> AsyncIterator[Client]:
    """A client of a server that answers two requests of an address, and then one in 100 s."""
    guard = Guard(credentials, requests=RateLimiter(2, 0.01))
    app = Application()

    async def handle(request: Request) -> Response:
        return await guard.handle(request, page)  # type: ignore[return-value]

    app.router.add_get("/", handle)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_one_address_can_not_keep_the_server_busy() -> None:
    async with limited(Credentials([], [], "")) as client:
        answers = [await client.get("/") for _ in range(3)]

    assert [answer.status for answer in answers] == [200, 200, 429]
    assert int(answers[-1].headers["Retry-After"]) > 1


@pytest.mark.usefixtures("guarded")
async def test_other_workers_are_not_slowed_down_and_do_not_slow_down_visitors_of_their_address() -> None:
    credentials = Credentials.of(load_settings())

    async def statuses(authorization: str, count: int) -> list[int]:
        return [(await client.get("/", headers={"Authorization": authorization})).status for _ in range(count)]

    async with limited(credentials) as client:
        assert await statuses(f"Bearer {credentials.peer_token}", 5) == [200] * 5
        assert await statuses(TOKEN["Authorization"], 3) == [200, 200, 429]
        for wrong in (f"Bearer {credentials.peer_token}x", "Bearer ", "", "\N{LATIN SMALL LETTER O WITH DIAERESIS}"):
            assert await statuses(wrong, 1) == [429]
        assert await statuses(f"Bearer {credentials.peer_token}", 5) == [200] * 5


@pytest.mark.usefixtures("guarded")
async def test_the_log_names_user_and_action_and_no_secret(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    client = await start()

    with caplog.at_level(logging.INFO):
        await client.post("/purge?token=hidden", headers=OPERATOR, data=b"the body")
        await client.get("/", headers=login("alice", "wrong guess"))
        forged = URL("/a%0D%0Aall%20is%20well%20address=6.6.6.6%1B%5B2J%E2%80%AE", encoded=True)
        await client.post(forged, headers=OPERATOR)
        await client.get(forged, headers=login("alice", "wrong guess"))

    logged = "\n".join(record.getMessage() for record in caplog.records if record.name == "marq.web")
    assert "POST /purge: status=200 visitor=alice" in logged
    assert "wrong password or token" in logged
    for secret in ("sesame", "hidden", "the body", "wrong guess"):
        assert secret not in logged
    assert all(line.isprintable() for line in logged.split("\n"))
    assert " address=6.6.6.6" not in logged
    assert "\nall" not in logged


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_others_reach_no_server_that_lets_anybody_in(monkeypatch: pytest.MonkeyPatch, bind: str) -> None:

    with pytest.raises(ConfigError, match=r"MARQ_WEB_BIND=.*Set MARQ_WEB_OPERATORS"):
        check_exposure(load_settings(), bind)

    monkeypatch.setenv("MARQ_WEB_OPERATORS", "alice:open sesame")
    check_exposure(load_settings(), bind)


@pytest.mark.parametrize(
    ("bind", "roles"), [("127.0.0.1", "web"), ("::1", "web"), ("localhost", "web"), ("0.0.0.0", "tracker")]
)
def test_a_server_that_only_this_machine_reaches_needs_no_login(
    monkeypatch: pytest.MonkeyPatch, bind: str, roles: str
) -> None:
    monkeypatch.setenv("MARQ_ROLES", roles)

    check_exposure(load_settings(), bind)
