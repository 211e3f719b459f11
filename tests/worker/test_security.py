"""Workers with handlers on listeners that demand TLS, a client's certificate, or a user with a password."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import marq
from marq_worker.broker import Certificates, EmbeddedBroker, Security
from tests.worker.conftest import workers
from tests.worker.handling import Handlers
from tests.worker.harness import Namespace, Worker, eventually

pytestmark = pytest.mark.verify

NAME, PASSWORD = "worker", "secret"
QUEUES = '[queues.coroutine]\nhandler = "handlers_of_the_test:coroutine"\n'


@pytest.fixture(scope="module")
def broker(certificates: Certificates) -> Iterator[EmbeddedBroker]:
    """Listeners that only allow the worker: each of its clients must authenticate."""
    protocols = ["SASL_PLAINTEXT", "SSL", "SASL_SSL"]
    security = Security(protocols, {NAME: PASSWORD}, certificates, acls=True, super_users=[NAME], tokens=True)
    with EmbeddedBroker(security=security) as broker:
        yield broker


@pytest.fixture
def new_worker(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    yield from workers(broker, tmp_path)


def settings(protocol: str, mechanism: str, certificates: Certificates) -> dict[str, str]:
    """What a client needs, as variables."""
    found = {"MARQ_SECURITY_PROTOCOL": protocol}
    if "SSL" in protocol:
        found["MARQ_SSL_CAFILE"] = str(certificates.authority)
    if protocol == "SSL":
        found["MARQ_SSL_CERTFILE"] = str(certificates.client(NAME))
    if mechanism == "OAUTHBEARER":
        found |= {"MARQ_SASL_TOKEN_PROVIDER": "tests.tokens:from_environment", "TOKEN_USER": NAME}
    elif "SASL" in protocol:
        found |= {"MARQ_SASL_USERNAME": NAME, "MARQ_SASL_PASSWORD": PASSWORD}
    if "SASL" in protocol:
        found["MARQ_SASL_MECHANISM"] = mechanism
    return found


def options(variables: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix("MARQ_").lower(): value for name, value in variables.items() if name.startswith("MARQ_")}


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        ("SASL_PLAINTEXT", "PLAIN"),
        ("SASL_PLAINTEXT", "SCRAM-SHA-256"),
        ("SASL_SSL", "SCRAM-SHA-512"),
        ("SASL_SSL", "OAUTHBEARER"),
        ("SSL", ""),
    ],
)
async def test_a_worker_tracks_and_runs_handlers_over_a_secured_listener(
    new_worker: Callable[..., Worker],
    broker: EmbeddedBroker,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    handlers: Handlers,
    protocol: str,
    mechanism: str,
) -> None:
    security = settings(protocol, mechanism, certificates)
    # The provider of tokens reads it in this process, too.
    monkeypatch.setenv("TOKEN_USER", NAME)
    servers = broker.listener(protocol)
    worker = new_worker(
        queues=QUEUES, environment={**handlers.environment, **security, "MARQ_BOOTSTRAP_SERVERS": servers}
    )
    await worker.start().ready()

    async with (
        marq.Producer(servers, prefix=worker.names.prefix, **options(security)) as producer,
        # The administrator's door, for what a consumer that died has left behind.
        Namespace(broker.bootstrap_servers, worker.names) as namespace,
    ):
        await producer.send("coroutine", b"over a secured connection")
        orphan = await namespace.send("emails")
        await namespace.acquire(orphan, lease=0.5)
        await eventually(lambda: worker.queue("coroutine"), lambda found: found.get("acked") == 1)
        await eventually(lambda: namespace.copies_of(orphan))
        # The copy is visible before the tracker has read its fact back.
        statistics = await eventually(
            worker.published, lambda found: found["complete"] and found["queues"].get("emails", {}).get("redelivered")
        )

    assert [line["value"] for line in await handlers.noted("coroutine")] == ["over a secured connection"]
    assert statistics["queues"]["emails"]["redelivered"] == 1


async def test_a_worker_goes_on_when_the_sessions_of_its_clients_end(
    new_worker: Callable[..., Worker],
    broker: EmbeddedBroker,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handlers: Handlers,
) -> None:
    journal = tmp_path / "tokens"
    security = settings("SASL_SSL", "OAUTHBEARER", certificates)
    monkeypatch.setenv("TOKEN_USER", NAME)
    servers = broker.listener("SASL_SSL")
    short = {"TOKEN_SECONDS": "10", "TOKEN_JOURNAL": str(journal), "MARQ_BOOTSTRAP_SERVERS": servers}
    worker = new_worker(queues=QUEUES, environment={**handlers.environment, **security, **short})
    await worker.start().ready()

    async with marq.Producer(servers, prefix=worker.names.prefix, **options(security)) as producer:
        logins, sent = len(journal.read_text()), 0
        while len(journal.read_text()) < 3 * logins:
            await producer.send("coroutine", b"%d" % sent)
            sent += 1
            await handlers.has_noted("coroutine", sent)
        await eventually(lambda: worker.queue("coroutine"), lambda found: found.get("acked") == sent)

    assert sorted(int(line["value"]) for line in await handlers.noted("coroutine")) == list(range(sent))
    assert "Traceback" not in worker.log()


async def test_a_worker_with_a_wrong_password_ends_with_a_sentence(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, certificates: Certificates
) -> None:
    wrong = {
        **settings("SASL_PLAINTEXT", "PLAIN", certificates),
        "MARQ_SASL_PASSWORD": "wrong",
        "MARQ_BOOTSTRAP_SERVERS": broker.listener("SASL_PLAINTEXT"),
        "MARQ_CONNECT_TIMEOUT": "2",
    }
    worker = new_worker(environment=wrong).start()

    assert await worker.ended() != 0
    [sentence] = [line for line in worker.log().splitlines() if line.startswith("marq: ")]
    assert broker.listener("SASL_PLAINTEXT") in sentence
    assert "Traceback" not in worker.log()
