"""Programs of examples/recipes do what docs/recipes says, with PostgreSQL, S3, Django and FastAPI."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import boto3
import pytest

import marq
from lab.program import Program
from marq.testing.broker import Broker
from marq.wire.names import Names
from marq_worker.broker import ports
from tests.docs import recipes
from tests.docs.machine import Machine
from tests.docs.pages import ROOT
from tests.sqs import environments
from tests.worker.harness import Worker, eventually, take

pytestmark = pytest.mark.verify

QUEUES = """
[queues.invoices]
deduplication_window = 3600

[queues.payments]
lease = 2
"""


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """The directory of the recipes' packages. This process imports them, too, but prefers those of .venv."""
    site_packages = recipes.packages()
    sys.path.append(str(site_packages))
    yield site_packages
    sys.path.remove(str(site_packages))


@pytest.fixture(scope="module")
def server(packages: Path) -> Iterator[str]:
    """The host of a PostgreSQL server."""
    with recipes.postgres(packages) as host:
        yield host


@pytest.fixture
def database(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a database of the test's own; DATABASE_URL names it."""
    import psycopg

    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url(server, "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    monkeypatch.setenv("DATABASE_URL", url(server, name))
    return name


def url(host: str, database: str) -> str:
    return f"host={host} user={recipes.USER} dbname={database}"


def query(sql: str) -> list[Any]:
    """Return the rows of a query in the test's database."""
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        return connection.execute(sql).fetchall()  # type: ignore[arg-type]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a program of the recipes with the test's environment."""
    names: list[str] = []

    def load(name: str) -> ModuleType:
        names.append(name)
        return import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
async def machine(servers: str, names: Names, packages: Path, database: str) -> AsyncIterator[Machine]:
    async with Machine(servers, names, packages) as machine:
        yield machine


@pytest.fixture
async def worker(servers: str, names: Names, packages: Path, database: str, tmp_path: Path) -> AsyncIterator[Worker]:
    """A tracker that also runs the handler of payments, whose process is killed if a message asks for it."""
    modules = ["examples.recipes.idempotent", "tests.docs.killed_before_ack"]
    environment = {"MARQ_HANDLERS": ",".join(modules), "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    with Worker(servers, tmp_path, prefix=names.prefix, queues=QUEUES, environment=environment) as worker:
        yield await worker.ready(1)


# --- transactional outbox ---------------------------------------------------------------------------------------------


@pytest.fixture
async def shop(machine: Machine, program: Any) -> AsyncIterator[tuple[ModuleType, Any]]:
    """The program, and a connection to a database with its tables."""
    import psycopg

    await machine.run("recipes.outbox", "setup")
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        yield program("examples.recipes.outbox"), connection


async def test_an_order_and_its_message_are_written_together(shop: tuple[ModuleType, Any], machine: Machine) -> None:
    assert await machine.run("recipes.outbox", "order", "ann", "30") == "order 1\n"
    process = await machine.start("recipes.outbox", "order", "bob", "0")  # violates a constraint
    await process.communicate()

    assert process.returncode == 1
    assert query("SELECT customer FROM orders") == [("ann",)]
    assert [json.loads(value) for (value,) in query("SELECT value FROM outbox")] == [
        {"order_id": 1, "customer": "ann", "amount": 30}
    ]


async def test_rows_stay_while_the_broker_does_not_confirm_them(shop: tuple[ModuleType, Any]) -> None:
    class Unavailable:
        async def send_many(self, *_: Any, **__: Any) -> None:
            raise marq.BrokerUnavailable("no answer")

    outbox, connection = shop
    await outbox.place_order(connection, "ann", 30)

    with pytest.raises(marq.BrokerUnavailable):
        await outbox.relay_batch(connection, Unavailable())

    assert query("SELECT count(*) FROM outbox") == [(1,)]


async def test_a_relay_that_is_killed_between_send_and_delete_loses_and_repeats_nothing(
    shop: tuple[ModuleType, Any], machine: Machine, worker: Worker
) -> None:
    outbox, connection = shop
    for amount in range(1, 21):
        await outbox.place_order(connection, "ann", amount)

    killed = await machine.start("relay_killed", package="tests.docs")
    await killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert query("SELECT count(*) FROM outbox") == [(20,)]  # sent, and not deleted

    await machine.start("recipes.outbox", "relay")
    async with marq.Consumer("invoices", machine.servers, prefix=machine.names.prefix, codec=marq.JSON) as consumer:
        messages = await take(consumer, 20)
        await consumer.ack(messages)
    assert sorted(message.value["amount"] for message in messages) == list(range(1, 21))
    # The second relay has sent all of them again, and the tracker has dropped them.
    await eventually(lambda: worker.queue("invoices"), lambda found: found.get("deduplicated") == 20)
    assert (await worker.queue("invoices"))["acked"] == 20


async def test_relays_take_turns(shop: tuple[ModuleType, Any]) -> None:
    import psycopg

    class Recorded:
        """Notes what is sent, and lets the caller wait."""

        def __init__(self) -> None:
            self.values: list[bytes] = []
            self.called, self.confirmed = asyncio.Event(), asyncio.Event()

        async def send_many(self, _: str, values: list[bytes], **__: Any) -> None:
            self.values += values
            self.called.set()
            await self.confirmed.wait()

    outbox, connection = shop
    await outbox.place_order(connection, "ann", 30)
    first, second = Recorded(), Recorded()
    second.confirmed.set()
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as other:
        sending = asyncio.create_task(outbox.relay_batch(connection, first))
        await first.called.wait()
        waiting = asyncio.create_task(outbox.relay_batch(other, second))

        async def waits() -> bool:
            assert not waiting.done(), "the second relay did not wait"
            return query("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'") == [(1,)]

        await eventually(waits)
        first.confirmed.set()

        assert (await sending, await waiting) == (1, 0)
        assert (len(first.values), second.values) == (1, [])


# --- idempotent handlers ----------------------------------------------------------------------------------------------


async def test_a_payment_is_booked_once(machine: Machine, program: Any, worker: Worker) -> None:
    idempotent = program("examples.recipes.idempotent")
    await machine.run("recipes.idempotent")
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        connection.execute("INSERT INTO accounts VALUES ('ann', 0)")
    payment = idempotent.Payment("p-1", "ann", 30)
    async with marq.Producer(machine.servers, prefix=machine.names.prefix) as producer:
        await producer.send(idempotent.book, payment, headers={"kill": "yes"})  # booked, and redelivered
        await producer.send(idempotent.book, payment)  # a sender that tries again
        await producer.send(idempotent.book, idempotent.Payment("p-2", "nobody", 5))

        await eventually(lambda: worker.queue("payments"), lambda found: found.get("acked") == 2)
        await eventually(lambda: worker.queue("payments"), lambda found: found.get("dead_lettered") == 1)
        assert (await worker.queue("payments"))["redelivered"] >= 1
        assert query("SELECT * FROM accounts") == [("ann", 30)]
        assert query("SELECT key FROM handled") == [("p-1",)]

        # The rejected payment left no key, so a redrive books it.
        with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
            connection.execute("INSERT INTO accounts VALUES ('nobody', 0)")
    async with marq.DeadLetters(machine.servers, prefix=machine.names.prefix) as dead_letters:
        assert (await dead_letters.redrive("payments")).redriven == 1
    await eventually(lambda: worker.queue("payments"), lambda found: found.get("acked") == 3)
    assert query("SELECT balance FROM accounts ORDER BY name") == [(30,), (5,)]


# --- claim check ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A bucket of an S3 server; the environment names both."""
    port = ports.free_port("127.0.0.1")
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1", "S3_BUCKET": "pictures",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [str(environments.python("judges")), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with Program("S3", command, {}, tmp_path / "s3.log"):
        await eventually(lambda: asyncio.to_thread(post, environment["AWS_ENDPOINT_URL"]), lambda answer: answer[0])
        client = boto3.client("s3")
        client.create_bucket(Bucket="pictures")
        yield client


async def test_a_large_payload_takes_the_way_through_s3(bucket: Any, marq_broker: Broker, program: Any) -> None:
    claim_check = program("examples.recipes.claim_check")
    picture = os.urandom(3_000_000)
    async with marq.Producer() as producer:
        with pytest.raises(marq.MessageTooLarge):
            await producer.send("pictures", picture)
        await claim_check.send_picture(claim_check.Store("pictures"), picture)
    [message] = marq_broker.messages("pictures")
    assert len(message.value) < 200

    await marq_broker.run(claim_check)

    assert len(marq_broker.acked("pictures")) == 1


async def test_an_expired_or_changed_payload_makes_a_dead_letter(
    bucket: Any, marq_broker: Broker, program: Any
) -> None:
    claim_check = program("examples.recipes.claim_check")
    store = claim_check.Store("pictures")
    async with marq.Producer():
        expired, changed = await store.put(b"expired"), await store.put(b"changed")
        bucket.delete_object(Bucket="pictures", Key=expired.key)
        bucket.put_object(Bucket="pictures", Key=changed.key, Body=b"something else")
        for claim in (expired, changed):
            await claim_check.resize.send(claim)

    await marq_broker.run(claim_check)

    assert sorted(dead.reason.partition(" ")[2] for dead in marq_broker.dead_letters("pictures")) == [
        "is no longer in the bucket", "is not the payload that was sent"
    ]  # fmt: skip


# --- encryption -------------------------------------------------------------------------------------------------------


async def test_values_are_encrypted_and_keys_can_be_rotated(
    packages: Path, marq_broker: Broker, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    from cryptography.fernet import Fernet

    old, new = (Fernet.generate_key().decode() for _ in range(2))
    monkeypatch.setenv("MESSAGE_KEYS", old)
    encryption = program("examples.recipes.encryption")
    patient = encryption.Patient("Ann", "measles")
    rotated = encryption.Encrypted(marq.Model(encryption.Patient), [new, old])
    async with marq.Producer() as producer, marq.Producer(codec=rotated) as upgraded:
        await producer.send(encryption.admit, patient)
        await upgraded.send("patients", patient)
    for message in marq_broker.messages("patients"):
        assert b"Ann" not in message.value
        assert b"measles" not in message.value
        assert rotated.decode(message.value) == patient

    await marq_broker.run(encryption)  # it has only the old key

    [dead] = marq_broker.dead_letters("patients")
    assert "can't be decrypted with any key" in dead.reason
    assert len(marq_broker.acked("patients")) == 1
    monkeypatch.setattr(encryption.patients, "_keys", rotated._keys)
    async with marq.DeadLetters() as dead_letters:
        await dead_letters.redrive("patients")
    await marq_broker.run(encryption)
    assert len(marq_broker.acked("patients")) == 2


# --- Django -----------------------------------------------------------------------------------------------------------


def post(address: str, **fields: object) -> tuple[int, bytes]:
    """POST a form; return the status and the answer. Status 0 if there is no answer."""
    data = urllib.parse.urlencode(fields).encode()
    try:
        with urllib.request.urlopen(address, data, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError:
        return 0, b""


@pytest.fixture
def django(machine: Machine, server: str, database: str) -> Any:
    """Start the shop; return its process and the address of its orders."""

    async def start(servers: str) -> tuple[asyncio.subprocess.Process, str]:
        settings = {
            "DATABASE_HOST": server, "DATABASE_NAME": database, "DATABASE_USER": recipes.USER,
            "MARQ_BOOTSTRAP_SERVERS": servers,
        }  # fmt: skip
        machine.environment.update(settings)
        await machine.run("recipes.django_shop", "setup")
        port = ports.free_port("127.0.0.1")
        process = await machine.start("recipes.django_shop", "runserver", f"127.0.0.1:{port}", "--noreload")
        address = f"http://127.0.0.1:{port}"
        await eventually(lambda: asyncio.to_thread(post, address), lambda answer: answer[0] == 404)
        return process, f"{address}/orders"

    return start


async def test_django_sends_after_the_commit(machine: Machine, django: Any) -> None:
    _, orders = await django(machine.servers)

    assert await asyncio.to_thread(post, orders, customer="bob", amount=2_000) == (500, b"")
    assert await asyncio.to_thread(post, orders, customer="ann", amount=30) == (201, b'{"order_id": 2}')

    assert query("SELECT customer FROM shop_order") == [("ann",)]
    async with marq.Consumer("invoices", machine.servers, prefix=machine.names.prefix, codec=marq.JSON) as consumer:
        [message] = await take(consumer)
        assert message.value == {"order_id": 2}  # nothing for the order that was rolled back
        await message.ack()


async def test_django_keeps_an_order_whose_message_can_not_be_sent(machine: Machine, django: Any) -> None:
    process, orders = await django(f"127.0.0.1:{ports.free_port('127.0.0.1')}")

    assert (await asyncio.to_thread(post, orders, customer="ann", amount=30))[0] == 201

    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert query("SELECT customer FROM shop_order") == [("ann",)]
    assert b"BrokerUnavailable" in errors
