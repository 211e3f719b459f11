"""A broker where nothing is allowed that no ACL allows, with a user whose permissions each test begins without."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marq_worker.broker import Certificates, EmbeddedBroker, Security
from marq_worker.check import examination
from tests.brokers import UNFENCED
from tests.check.checking import LIMIT_S, Check, NewWorker, make_topics
from tests.worker.conftest import workers

PASSWORD = "secret"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give checks in this process more time: a busy machine must not change what they find."""
    monkeypatch.setattr(examination, "LIMIT_S", 120.0)
    monkeypatch.setattr(examination, "REACH_LIMIT_S", 30.0)
    monkeypatch.setattr(examination, "QUESTION_LIMIT_S", 30.0)
    monkeypatch.setattr(examination, "PAGE_LIMIT_S", 5.0)
    monkeypatch.setattr(examination, "CONNECT_LIMIT_S", 4.0)
    monkeypatch.setattr(examination, "IMPORT_LIMIT_S", 30.0)


@pytest.fixture
def diagnosis_limit_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets a diagnosis take its time on a busy machine; a test in which it gets no answer sets another limit."""

    def set_limit(limit_s: float) -> None:
        for name in ("_LOOK_S", "_MAX_LOOK_S"):
            monkeypatch.setattr(f"marq.kafka.connection.{name}", limit_s)

    set_limit(LIMIT_S)
    return set_limit


@pytest.fixture(scope="session")
def _users(request: pytest.FixtureRequest) -> list[str]:
    """One for each test that wants one, so that what one was granted does not help the next."""
    return [f"user{number}" for number, item in enumerate(request.session.items) if "user" in item.fixturenames]


@pytest.fixture(scope="session")
def secured(certificates: Certificates, _users: list[str]) -> Iterator[EmbeddedBroker]:
    """``listener(...)`` is for users, ``bootstrap_servers`` for the administrator."""
    users = dict.fromkeys(_users, PASSWORD)
    protocols = ["SASL_PLAINTEXT", "SSL", "SASL_SSL"]
    security = Security(protocols, users, certificates, acls=True, tokens=True)
    # A client of ELSEWHERE is sent on to port 1, as a container without advertised.listeners does it.
    with EmbeddedBroker(security=security, proxied={"ELSEWHERE": 1}, properties=UNFENCED) as broker:
        yield broker


@pytest.fixture(scope="session")
def broker(secured: EmbeddedBroker) -> EmbeddedBroker:
    """The same broker serves the tests without users: its plain listener allows everything."""
    return secured


@pytest.fixture(scope="session")
def _fresh_users(_users: list[str]) -> Iterator[str]:
    return iter(_users)


@pytest.fixture
def user(_fresh_users: Iterator[str]) -> str:
    """The name of a user without any permission."""
    return next(_fresh_users)


@pytest.fixture
def login(secured: EmbeddedBroker, user: str) -> dict[str, str]:
    """The environment of a process of this user."""
    return {
        "MARQ_BOOTSTRAP_SERVERS": secured.listener("SASL_PLAINTEXT"),
        "MARQ_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "MARQ_SASL_MECHANISM": "SCRAM-SHA-256",
        "MARQ_SASL_USERNAME": user,
        "MARQ_SASL_PASSWORD": PASSWORD,
    }


@pytest.fixture
def http_server() -> Iterator[str]:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keep the output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def check(servers: str, prefix: str, tmp_path: Path) -> Check:
    """The check in a namespace without topics."""
    return Check(tmp_path, {"MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_PREFIX": prefix, "MARQ_PARTITIONS": "2"})


@pytest.fixture
async def guarded(secured: EmbeddedBroker, tmp_path: Path, login: dict[str, str], prefix: str) -> Check:
    """The check for a user without permissions; the topics exist."""
    await make_topics(secured.bootstrap_servers, prefix)
    return Check(tmp_path, {**login, "MARQ_PREFIX": prefix})


@pytest.fixture
def new_worker(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[NewWorker]:
    yield from workers(broker, tmp_path)
