"""A broker where nothing is allowed that no ACL allows, with a user whose rights each test begins without."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from broker import Certificates, EmbeddedBroker, Security

PASSWORD = "secret"
#: Each test is a user of its own, so that what one was granted does not help the next.
USERS = tuple(f"user{number}" for number in range(40))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secured(certificates: Certificates) -> Iterator[EmbeddedBroker]:
    """``listener(...)`` is for users, ``bootstrap_servers`` for the administrator."""
    users = dict.fromkeys(USERS, PASSWORD)
    protocols = ["SASL_PLAINTEXT", "SSL", "SASL_SSL"]
    with EmbeddedBroker(security=Security(protocols, users, certificates, acls=True)) as broker:
        yield broker


@pytest.fixture(scope="session")
def _fresh_users() -> Iterator[str]:
    return iter(USERS)


@pytest.fixture
def user(_fresh_users: Iterator[str]) -> str:
    """The name of a user without any right."""
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
            """Nobody reads it."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
