"""What a type checker sees of the public calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

LIMIT_SECONDS = 400
#: ``# R: type`` is the type that a line reveals, ``# E: code`` the error that it is.
_EXPECTED = re.compile(r"  # (?P<kind>[RE]): (?P<text>.+)$")
_FOUND = re.compile(
    r"^[^:]+:(?P<line>\d+): (?:note: Revealed type is \"(?P<type>.+)\"|error: .*\[(?P<code>[a-z-]+)\])$"
)

#: How mypy writes a NamedTuple.
_NAMED_TUPLE = re.compile(r"tuple\[[^\[\]]*, fallback=([\w.]+)\]")

SAMPLE = """
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

from pydantic import BaseModel

import marq
import marq.testing
from marq.metrics import HandlerMetrics


class Email(BaseModel):
    to: str


@dataclass
class Order:
    number: int


class Upper:
    def encode(self, value: str) -> bytes:
        return value.upper().encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


async def produce(name: str, names: list[str], some: tuple[str, ...]) -> None:
    async with marq.Producer(codec=marq.JSON, request_timeout=timedelta(seconds=5)) as producer:
        reveal_type(await producer.send("a", {"a": 1}))  # R: marq.client.receipt.Receipt
        reveal_type(await producer.send(name, b"x"))  # R: marq.client.receipt.Receipt
        await producer.send(name, b"x", headers={"a": b"1", "b": "text", "c": None})
        await producer.send(name, b"x", headers={"a": b"1", "b": "text"})
        await producer.send_many(name, [b"x"], headers={"a": b"1", "b": "text"})
        await producer.send(name, b"x", headers=[("a", b"1"), ("a", "text")])
        reveal_type(await producer.send(names, b"x"))  # R: list[marq.client.receipt.Receipt]
        reveal_type(await producer.send(some, b"x"))  # R: list[marq.client.receipt.Receipt]
        reveal_type(await producer.send(["a", "b"], b"x"))  # R: list[marq.client.receipt.Receipt]
        reveal_type(await producer.send_many("a", [1, 2]))  # R: list[marq.client.receipt.Receipt]
        await producer.send("a", b"x", headers={"a": 5})  # E: dict-item
        await producer.send(5, b"x")  # E: call-overload
        await producer.send("a", b"x", countdown=5)  # E: call-overload
        await producer.send_many(["a", "b"], [b"x"])  # E: call-overload
        await producer.send_many("a", [b"x"], countdown=5)  # E: call-overload


def produce_synchronously(names: list[str]) -> None:
    with marq.SyncProducer("127.0.0.1:9092", prefix="x", codec=marq.Model(Email)) as producer:
        reveal_type(producer.send("a", Email(to="x")))  # R: marq.client.receipt.Receipt
        reveal_type(producer.send(names, Email(to="x")))  # R: list[marq.client.receipt.Receipt]
        reveal_type(producer.send_many("a", []))  # R: list[marq.client.receipt.Receipt]
        producer.send("a", b"x", countdown=5)  # E: call-overload


class Sealed:
    def encode(self, value: Order) -> bytes:
        return b""

    def decode(self, data: bytes) -> Order:
        return Order(1)


async def typed_by_codec(any_producer: marq.Producer, any_consumer: marq.Consumer, codec: marq.Codec[Order]) -> None:
    consumer = marq.Consumer("orders", codec=marq.Model(Order), lease=30)
    reveal_type(consumer)  # R: marq.consumer.consumer.Consumer[sample.Order]
    async with consumer:
        async for message in consumer:
            reveal_type(message.value)  # R: sample.Order
        for message in await consumer.receive():
            reveal_type(message.value)  # R: sample.Order
    reveal_type(marq.Consumer("orders", codec=Sealed()))  # R: marq.consumer.consumer.Consumer[sample.Order]
    reveal_type(marq.Consumer("orders", codec=codec))  # R: marq.consumer.consumer.Consumer[sample.Order]
    reveal_type(marq.Consumer("orders", codec=marq.TEXT))  # R: marq.consumer.consumer.Consumer[str]
    reveal_type(marq.Consumer("orders", codec=marq.Model(set[int])))  # R: marq.consumer.consumer.Consumer[set[int]]
    plain = marq.Consumer("orders")
    reveal_type(plain)  # R: marq.consumer.consumer.Consumer[Any]
    either: marq.Consumer[Order | Email] = consumer
    wrong: marq.Consumer[Email] = consumer  # E: assignment
    any_consumer = consumer
    async with marq.Producer(codec=marq.Model(Order)) as producer:
        reveal_type(producer)  # R: marq.producer.producer.Producer[sample.Order]
        reveal_type(await producer.send("orders", Order(1)))  # R: marq.client.receipt.Receipt
        reveal_type(await producer.send(["orders", "audits"], Order(1)))  # R: list[marq.client.receipt.Receipt]
        await producer.send_many("orders", [Order(1)])
        await producer.send("orders", Email(to="x"))  # E: call-overload
        await producer.send(["orders"], Email(to="x"))  # E: call-overload
        await producer.send_many("orders", [b"x"])  # E: list-item
        await producer.send(count, Order(1))
    any_producer = producer
    with marq.SyncProducer(codec=marq.Model(Order)) as synchronous:
        reveal_type(synchronous)  # R: marq.producer.sync.SyncProducer[sample.Order]
        synchronous.send("orders", Order(1))
        synchronous.send("orders", b"x")  # E: call-overload
    async with marq.DeadLetters(codec=marq.Model(Order)) as letters:
        async for letter in letters.peek("orders"):
            reveal_type(letter.value)  # R: sample.Order


def code() -> None:
    reveal_type(marq.BYTES.decode(b""))  # R: bytes
    reveal_type(marq.JSON.decode(b""))  # R: Any
    reveal_type(marq.Model(Email).decode(b""))  # R: sample.Email
    marq.Model(Email).encode(5)  # E: arg-type
    reveal_type(marq.Model(list[Order]).decode(b""))  # R: list[sample.Order]
    reveal_type(marq.TEXT.decode(b""))  # R: str
    codec: marq.Codec
    for codec in (marq.BYTES, marq.JSON, marq.Model(Email), Upper()):
        marq.Producer(codec=codec)
    marq.Producer(codec=5)  # E: arg-type
    marq.Producer(no_such_option=5)  # E: call-arg


async def consume() -> None:
    async with marq.Consumer("a", codec=marq.JSON) as consumer:
        async for message in consumer:
            reveal_type(message)  # R: marq.leases.message.Message[Any]
            reveal_type(message.value)  # R: Any
            reveal_type(message.body)  # R: bytes
            reveal_type(message.key)  # R: bytes | None
            reveal_type(message.headers)  # R: dict[str, bytes | None]
            await message.release(countdown=5)  # E: arg-type
        reveal_type(await consumer.receive())  # R: list[marq.leases.message.Message[Any]]
        await consumer.run(handle)
        await consumer.run(handle_both)
        await consumer.run(handle_in_a_thread)


async def handle(message: marq.Message) -> None:
    raise marq.Retry(delay=5)


@marq.handler("a", concurrency=4)
@marq.handler("b", codec=marq.JSON)
async def handle_both(message: marq.Message) -> int:
    return 5


@marq.handler("a", max_attempts=3, backoff=[1, timedelta(seconds=5)], lease=timedelta(minutes=1))
async def with_settings(order: Order) -> None: ...


@marq.handler("a", max_retries=3)  # E: call-arg
async def misspelt(order: Order) -> None: ...


@marq.handler("a", lease="30s")  # E: arg-type
async def mistyped(order: Order) -> None: ...


@marq.handler("mail", type="welcome")
async def welcome(order: Order, message: marq.Message[Order]) -> None:
    reveal_type(message.type)  # R: str | None


async def send_types(producer: marq.Producer, synchronous: marq.SyncProducer) -> None:
    await producer.send("mail", b"x", type="welcome")
    await producer.send_many("mail", [b"x"], type="welcome")
    synchronous.send("mail", b"x", type="welcome")
    await welcome.send(Order(1), type="welcome")
    await welcome.send("x")  # E: arg-type
    await producer.send("mail", b"x", type=5)  # E: call-overload


def call(message: marq.Message) -> None:
    reveal_type(handle_both(message))  # R: Coroutine[Any, Any, int]


def handle_in_a_thread(message: marq.Message) -> None:
    raise marq.Reject("why")


@marq.lifespan
async def resources() -> AsyncIterator[dict[str, int]]:
    yield {"pool": 5}


@marq.lifespan  # E: type-var
async def no_generator() -> None: ...


@marq.middleware
async def timed(message: marq.Message, call_next: marq.CallNext) -> None:
    reveal_type(await call_next(message))  # R: Any
    reveal_type(message.state)  # R: Any
    await call_next(5)  # E: arg-type


@marq.middleware  # E: type-var
def plain(message: marq.Message, call_next: marq.CallNext) -> None: ...


reveal_type(resources)  # R: def () -> AsyncIterator[dict[str, int]]


async def surrounded(consumer: marq.Consumer, broker: marq.testing.Broker) -> None:
    await consumer.run(handle, middleware=[timed, HandlerMetrics()])
    await consumer.run(handle, middleware=[handle])  # E: list-item
    broker.override(resources, {"pool": 6})
    broker.override(timed, {})  # E: arg-type
@marq.handler("orders")
async def bill(order: Order, message: marq.Message[Order]) -> int:
    reveal_type(message.value)  # R: sample.Order
    return 5


@marq.handler("orders")
@marq.handler("refunds")
def pay(message: marq.Message, order: Order) -> None: ...


@marq.handler("orders")
async def audit(message: marq.Message[Order]) -> None: ...


@marq.handler("orders")
async def count(order: Order, many: bool = False) -> None: ...


@marq.handler("mixed")
async def mix(values: dict[str, marq.Message]) -> None: ...


class Accounts:
    @marq.handler("orders")
    async def bill(self, order: Order) -> int:
        return 5


async def send_to_handlers(
    producer: marq.Producer, synchronous: marq.SyncProducer, message: marq.Message[Order], accounts: Accounts
) -> None:
    reveal_type(await bill(Order(1), message))  # R: int
    reveal_type(await bill(order=Order(1), message=message))  # R: int
    reveal_type(await accounts.bill(Order(1)))  # R: int
    await bill(5, message)  # E: arg-type
    reveal_type(await bill.send(Order(1), delay=60))  # R: marq.client.receipt.Receipt
    await bill.send(Order(1), countdown=60)  # E: call-arg
    await bill.send("x")  # E: arg-type
    await pay.send("x")  # E: arg-type
    await audit.send("x")  # E: arg-type
    await count.send("x")  # E: arg-type
    await mix.send("x")  # E: arg-type
    await accounts.bill.send("x")  # E: arg-type
    await audit.send(Order(1))
    await count.send(Order(1))
    await pay.send(Order(1))
    await mix.send({})
    await accounts.bill.send(Order(1))
    await handle_both.send({"any": "value"})
    reveal_type(await producer.send(bill, Order(1), delay=60))  # R: marq.client.receipt.Receipt
    reveal_type(await producer.send_many(audit, [Order(1)]))  # R: list[marq.client.receipt.Receipt]
    await producer.send(bill, 3)  # E: arg-type
    await producer.send(count, 3)  # E: arg-type
    await producer.send(count, Order(1))
    await producer.send_many(bill, [3])  # E: arg-type
    await producer.send(handle, 3)  # E: call-overload
    reveal_type(synchronous.send(pay, Order(1)))  # R: marq.client.receipt.Receipt
    synchronous.send(bill, 3)  # E: arg-type
    synchronous.send_many(bill, [Order(1)])
    synchronous.send_many(bill, [3])  # E: arg-type


def wrong(order: Order, message: marq.Message, more: int) -> None: ...


async def run(consumer: marq.Consumer, accounts: Accounts) -> None:
    await consumer.run(bill)
    await consumer.run(accounts.bill)
    await consumer.run(lambda order: None)
    await consumer.run(wrong)  # E: arg-type


async def misspell(
    producer: marq.Producer,
    synchronous: marq.SyncProducer,
    consumer: marq.Consumer,
    message: marq.Message,
    queues: marq.Queues,
    schedules: marq.Schedules,
    letters: marq.DeadLetters,
) -> None:
    await producer.sned("a", b"x")  # E: attr-defined
    synchronous.sned("a", b"x")  # E: attr-defined
    await consumer.recieve()  # E: attr-defined
    await message.akc()  # E: attr-defined
    await queues.puase("a")  # E: attr-defined
    await schedules.defien("a")  # E: attr-defined
    await letters.redirve("a")  # E: attr-defined
    await message.nack()  # E: attr-defined


def undecodable(error: marq.DecodeError) -> None:
    reveal_type(error.reason)  # R: str
"""


def shown(text: str) -> str:
    return _NAMED_TUPLE.sub(r"\1", text).replace("builtins.", "").replace("typing.", "")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory from which mypy runs, with the cache that all its runs share."""
    path = tmp_path_factory.mktemp("typing")
    # As an installed package is seen: by what its signatures say, without the errors in it.
    (path / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nfollow_imports = silent\nmypy_path = {ROOT}\n"
        "[mypy-aiokafka.*]\nignore_missing_imports = true\n"
    )
    return path


def mypy(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", *arguments],
        cwd=directory, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip


def test_public_calls_have_the_types_that_they_say(directory: Path) -> None:
    (directory / "sample.py").write_text(SAMPLE, encoding="utf-8")

    done = mypy(directory, "sample.py")

    expected = {
        number: found["text"] for number, line in enumerate(SAMPLE.splitlines(), 1) if (found := _EXPECTED.search(line))
    }
    seen = {
        int(found["line"]): shown(found["type"] or found["code"])
        for line in done.stdout.splitlines()
        if (found := _FOUND.match(line))
    }
    assert seen == expected, done.stdout + done.stderr
    assert len(expected) > 25


def test_the_examples_are_typed_and_a_payload_of_another_type_is_found(directory: Path) -> None:
    # Celery is not installed in the environment of the tests.
    # Celery and the recipes use packages that are not installed here.
    examples = (ROOT / "examples").rglob("*.py")
    programs = [str(path) for path in examples if path.stem != "celery_tasks" and path.parent.name != "recipes"]
    (directory / "wrong.py").write_text(
        "from examples.handlers import Email, make_thumbnail, send_email\n"
        "async def main() -> None:\n"
        '    await send_email.send(Email("hello"))\n'
        '    await send_email.send({"subject": "hello"})\n'
        '    await make_thumbnail.send("text")\n'
    )

    done = mypy(directory, "wrong.py", *programs)

    errors = [line.partition(" error: ")[::2] for line in done.stdout.splitlines() if " error: " in line]
    assert [(place, text[-11:]) for place, text in errors] == [
        ("wrong.py:4:", " [arg-type]"),
        ("wrong.py:5:", " [arg-type]"),
    ], done.stdout + done.stderr
    assert len(programs) > 10
