"""Commands to a worker from the pages of another one: who may give them, and what is answered."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
import pytest_asyncio
from aiohttp import ClientSession, encode_basic_auth
from aiohttp.test_utils import TestServer
from yarl import URL

from marq.wire.errors import ConfigError, MarqError
from marq_worker.config.settings import load_settings
from marq_worker.web.credentials import Credentials
from marq_worker.web.dashboard.actor import Actor
from marq_worker.web.dashboard.worker_commands import WorkerCommands
from marq_worker.web.peers import Members
from marq_worker.web.security import options
from tests.browser.pretend import PretendNamespace, site

#: The address of the worker on whose page the operator is.
HERE = "http://10.0.0.7:6066"


class Commanded:
    """A worker that notes whether it is quiet."""

    quiet: bool | None = None
    handlers = True

    def has_handlers(self) -> bool:
        return self.handlers

    def set_quiet(self, quiet: bool) -> None:
        self.quiet = quiet

    async def cancel_handler(self, queue: str, message_id: str, *, counted: bool) -> None:
        self.cancelled = (queue, message_id, counted)


class Peer:
    """Another worker, with its pages."""

    def __init__(self, session: ClientSession) -> None:
        self.worker = Commanded()
        self.address = "http://unset"
        commands = WorkerCommands(self.worker, lambda: self.address, Mock(), Mock(), Credentials.of(load_settings()))
        actor = Actor(None, None, Mock(), Mock(), commands, Mock())  # type: ignore[arg-type]
        application = site(PretendNamespace(), actor, **options(load_settings()))  # type: ignore[arg-type]
        self.server = TestServer(application)
        self.session = session

    def pages_of_another(self, credentials: Credentials | None = None) -> WorkerCommands:
        """Return the commands on the pages of another worker."""

        class Group:
            @staticmethod
            async def members() -> Members:
                return Members([URL(self.address)], settled=True)

        credentials = credentials or Credentials.of(load_settings())
        return WorkerCommands(Commanded(), lambda: HERE, Group(), lambda: self.session, credentials)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARQ_WEB_OPERATORS", "alice:open sesame")
    monkeypatch.setenv("MARQ_WEB_VIEWERS", "eve:just looking")


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    async with ClientSession() as session:
        peer = Peer(session)
        await peer.server.start_server()
        peer.address = str(peer.server.make_url("")).rstrip("/")
        yield peer
        await peer.server.close()


async def test_a_worker_is_made_quiet_from_the_pages_of_another_in_the_name_of_the_operator(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "marq.audit")

    await peer.pages_of_another().send(peer.address, "quiet", {}, "alice")

    assert peer.worker.quiet is True
    [line] = [json.loads(record.message) for record in caplog.records if record.name == "marq.audit"]
    assert line == {"audit": "quiet", "who": "alice", "from": "127.0.0.1", "worker": peer.address}
    await peer.pages_of_another().send(peer.address, "unquiet", {}, "alice")
    assert peer.worker.quiet is False


async def test_a_handler_of_another_worker_is_cancelled(peer: Peer) -> None:
    details = {"queue": "a/b&c", "id": "t/0/1", "counted": "yes"}

    await peer.pages_of_another().send(peer.address, "cancel-handler", details, "alice")

    assert peer.worker.cancelled == ("a/b&c", "t/0/1", True)


async def test_a_command_without_the_signature_of_an_operator_is_refused(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARQ_WEB_OPERATORS", "alice:another password")
    stranger = Credentials.of(load_settings())

    with pytest.raises(ConfigError, match=r"refused \(401\)"):
        await peer.pages_of_another(stranger).send(peer.address, "quiet", {}, "alice")
    token = {"Authorization": f"Bearer {stranger.peer_token}"}
    answer = await peer.session.post(f"{peer.address}/api/commands/quiet?worker={peer.address}", headers=token)

    assert (answer.status, peer.worker.quiet) == (401, None)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        # Its address may belong to a program that has joined the group to learn what operators send.
        (f"worker={HERE}", f"this command is for worker '{HERE}'"),
        # The audit log would show such a field.
        ("worker=PEER&from=10.0.0.9", "unknown field 'from'"),
    ],
    ids=["meant for another worker", "another field"],
)
async def test_a_signed_command_for_something_else_is_refused(peer: Peer, query: str, said: str) -> None:
    address = URL(f"/api/commands/quiet?{query.replace('PEER', peer.address)}").raw_path_qs
    headers = Credentials.of(load_settings()).sign_command("alice", address)

    answer = await peer.session.post(URL(peer.address + address, encoded=True), headers=headers)

    assert (answer.status, peer.worker.quiet) == (400, None)
    assert said in (await answer.json())["error"]


async def test_a_worker_says_why_it_refuses(peer: Peer) -> None:
    peer.worker.handlers = False
    here = peer.pages_of_another()

    with pytest.raises(ConfigError, match="runs no handlers"):
        await here.send(peer.address, "quiet", {}, "alice")
    with pytest.raises(ConfigError, match="unknown command 'explode'"):
        await here.send(peer.address, "explode", {}, "alice")
    with pytest.raises(ConfigError, match="has left, or does not exist"):
        await here.send("http://10.9.9.9:6066", "quiet", {}, "alice")
    await peer.server.close()
    with pytest.raises(MarqError, match="it is unknown whether it was done"):
        await here.send(peer.address, "quiet", {}, "alice")


async def test_a_command_to_the_worker_of_the_page_needs_no_request(peer: Peer) -> None:
    here = Commanded()
    commands = WorkerCommands(here, lambda: HERE, Mock(), Mock(), Credentials.of(load_settings()))

    await commands.send(HERE, "quiet", {}, "alice")

    assert here.quiet is True


async def test_an_operator_must_come_from_a_page_of_ours_and_a_viewer_may_command_nothing(peer: Peer) -> None:
    address = f"{peer.address}/api/commands/quiet?worker={peer.address}"
    alice, eve = (
        {"Authorization": encode_basic_auth(name, password)}
        for name, password in (("alice", "open sesame"), ("eve", "just looking"))
    )

    statuses = [
        (await peer.session.post(address, headers=headers)).status
        for headers in (eve, alice | {"Sec-Fetch-Site": "cross-site"}, alice)
    ]

    assert statuses == [403, 403, 200]
    assert peer.worker.quiet is True
