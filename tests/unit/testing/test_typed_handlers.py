"""Several handlers of one queue, chosen by the type of each message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import marq
from marq.client.outcomes import NoHandler
from marq.handlers.typed import MAX_WARNED_TYPES
from marq.leases.message import MAX_NO_HANDLER_MS, MAX_UNCOUNTED
from marq.testing import Broker
from marq.wire.names import TYPE_HEADER


@dataclass
class Welcome:
    name: str


@dataclass
class Bill:
    amount: int


class Calls(list[Any]):
    """Decorated functions that note their values."""

    def handler(self, queue: str = "mail", **options: Any) -> Callable[..., Any]:
        kind = options.get("type")

        @marq.handler(queue, **options)
        async def handle(message: marq.Message) -> None:
            self.append((kind, message.type, message.value))

        return handle


@pytest.fixture
def calls() -> Calls:
    return Calls()


async def test_the_type_of_a_message_chooses_its_handler_and_what_its_value_is() -> None:
    seen: list[object] = []

    @marq.handler("mail", type="welcome")
    async def welcome(value: Welcome, message: marq.Message[Welcome]) -> None:
        seen.append((value, message.type, dict(message.headers)))

    @marq.handler("mail", type="bill")
    def bill(value: Bill) -> None:
        seen.append(value)

    @marq.handler("mail", type="note")
    async def note(message: marq.Message) -> None:
        seen.append(message.value)

    @marq.handler("mail")
    async def other(message: marq.Message) -> None:
        seen.append(("other", message.type, message.value))

    async with Broker() as broker, broker.producer() as producer:
        # when: the type is the function's own, or given with the name of the queue
        await producer.send(welcome, Welcome("Ann"), headers={"tenant": "a"})
        await producer.send("mail", b'{"amount": 5}', type="bill")
        await producer.send("mail", b"text", type="note")
        await producer.send("mail", b"plain")
        await producer.send("mail", b"new", type="unheard-of")
        await broker.run(welcome, bill, note, other)

    assert sorted(map(str, seen)) == sorted(
        map(
            str,
            [
                (Welcome("Ann"), "welcome", {"tenant": b"a"}),
                Bill(5),
                b"text",
                ("other", None, b"plain"),
                ("other", "unheard-of", b"new"),
            ],
        )
    )


async def test_every_way_to_send_carries_the_type(calls: Calls) -> None:
    welcome, fallback = calls.handler(type="welcome"), calls.handler()
    other = calls.handler("archive", type="welcome")
    queues = {"lines": {"ordering": "key"}}
    line = calls.handler("lines", type="welcome")
    async with Broker(queues=queues) as broker, broker.producer() as producer:
        await producer.send("mail", b"name", type="welcome")
        await producer.send(welcome, b"function")
        await welcome.send(b"its send")
        await producer.send("mail", b"delayed", type="welcome", delay=60)
        await producer.send("mail", b"once", type="welcome", deduplication_id="x")
        await producer.send("lines", b"line", type="welcome", ordering_key="k")
        await producer.send("lines", b"late line", type="welcome", ordering_key="k", delay=5)
        await producer.send(["mail", "archive"], b"both", type="welcome")
        await producer.send_many("mail", [b"many"], type="welcome")
        await producer.send_many(welcome, [b"many of function"], delay=5)
        await producer.send_many("mail", [b"many once"], type="welcome", deduplication_ids=["y"])
        await producer.send_many("lines", [b"many in line"], type="welcome", ordering_key="k")

        def send() -> None:
            with marq.SyncProducer(broker.address) as synchronous:
                synchronous.send("mail", b"sync", type="welcome")
                synchronous.send(welcome, b"sync function")
                synchronous.send_many(welcome, [b"sync many"])

        await asyncio.to_thread(send)
        broker.produce("marq.messages", b"plain producer", key=b"mail", headers=[(TYPE_HEADER, b"welcome")])
        await broker.run(welcome, fallback, other, line)

    assert {(kind, own) for kind, own, _ in calls} == {("welcome", "welcome")}
    assert len(calls) == 17


async def test_a_message_keeps_its_type_when_it_is_redelivered_dead_lettered_and_redriven() -> None:
    attempts: list[tuple[int, str | None]] = []

    @marq.handler("mail", type="welcome", max_attempts=2, backoff=[1])
    async def welcome(message: marq.Message) -> None:
        attempts.append((message.attempt, message.type))
        if len(attempts) < 3:
            raise ValueError("no")

    async with Broker() as broker, broker.producer() as producer:
        await producer.send("mail", b"x", type="welcome")
        await broker.run(welcome)
        assert [letter.type for letter in broker.dead_letters("mail")] == ["welcome"]
        assert [message.type for message in broker.sent("mail")] == ["welcome"]
        async with marq.DeadLetters(broker.address) as letters:
            assert [letter.type async for letter in letters.peek("mail")] == ["welcome"]
            await letters.redrive("mail")
        await broker.run(welcome)

    assert attempts == [(1, "welcome"), (2, "welcome"), (1, "welcome")]


# --- types without a handler ------------------------------------------------------------------------------------------


async def test_a_type_that_an_old_worker_does_not_know_waits_for_a_new_one_and_uses_up_no_attempt(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    old = calls.handler(type="welcome", max_attempts=1)
    attempts: list[tuple[int, str | None]] = []

    @marq.handler("mail", type="goodbye", max_attempts=1)
    async def goodbye(message: marq.Message) -> None:
        attempts.append((message.attempt, message.last_error))

    async with Broker() as broker, broker.producer() as producer:
        async with broker.worker(old):
            await producer.send("mail", b"x", type="goodbye")
            await producer.send("mail", b"y", type="welcome")
            await broker.advance(timedelta(minutes=20))
            # then: it is delayed, not in flight and not a dead letter; other messages are handled
            assert (len(broker.delayed("mail")), broker.dead_letters("mail")) == (1, [])
            assert calls == [("welcome", "welcome", b"y")]
        async with broker.worker(old, goodbye):
            await broker.advance(MAX_NO_HANDLER_MS / 1000)

    assert attempts == [(1, "no handler for messages of type 'goodbye'; there are handlers for 'welcome'")]
    warnings = [record.getMessage() for record in caplog.records if "no handler: queue=mail" in record.getMessage()]
    assert "type=goodbye" in warnings[0]


@pytest.mark.parametrize("kind", ["welcom", None])
async def test_a_message_for_which_no_worker_ever_has_a_handler_becomes_a_dead_letter_that_says_so(
    calls: Calls, kind: str | None
) -> None:
    async with Broker() as broker, broker.producer() as producer:
        await producer.send("mail", b"x", type=kind)
        async with broker.worker(calls.handler(type="welcome")):
            await broker.advance(timedelta(minutes=80))
            assert broker.dead_letters("mail") == []
            await broker.advance(timedelta(minutes=20))
        [letter] = broker.dead_letters("mail")

    what = "a message without a type" if kind is None else "messages of type 'welcom'"
    assert letter.reason == f"no handler for {what}; there are handlers for 'welcome'"
    assert (letter.attempt, calls) == (1, [])
    assert MAX_UNCOUNTED == 100


async def test_an_at_most_once_queue_dead_letters_a_type_without_a_handler_and_announces_no_wait(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """It can't release the message."""
    async with Broker() as broker, broker.producer() as producer:
        await producer.send("mail", b"x", type="goodbye")
        await broker.run(calls.handler(type="welcome", delivery="at-most-once"))
        [letter] = broker.dead_letters("mail")

    assert letter.reason.startswith("no handler for messages of type 'goodbye';")
    [line] = [record.getMessage() for record in caplog.records if "no handler" in record.getMessage()]
    assert line.startswith("queue mail: attempt 1 of 5 has no handler, now a dead letter: ")


@pytest.mark.parametrize("deployed", [True, False])
async def test_in_an_ordered_queue_a_type_without_a_handler_holds_up_only_its_key(calls: Calls, deployed: bool) -> None:
    welcome, goodbye = calls.handler(type="welcome"), calls.handler(type="goodbye")
    async with Broker(queues={"mail": {"ordering": "key"}}) as broker, broker.producer() as producer:
        await producer.send("mail", b"1", type="goodbye", ordering_key="a")
        await producer.send("mail", b"2", type="welcome", ordering_key="a")
        await producer.send("mail", b"3", type="welcome", ordering_key="b")
        async with broker.worker(welcome):
            await broker.advance(timedelta(minutes=30))
            assert [value for _, _, value in calls] == [b"3"]
        if deployed:
            await broker.run(welcome, goodbye)
        else:
            async with broker.worker(welcome):
                await broker.advance(timedelta(minutes=100))
        assert [letter.value for letter in broker.dead_letters("mail")] == ([] if deployed else [b"1"])

    assert [value for _, _, value in calls] == [b"3", *([b"1"] if deployed else []), b"2"]


async def test_middleware_sees_a_type_without_a_handler_as_an_outcome(calls: Calls) -> None:
    import types

    seen: list[BaseException] = []

    @marq.middleware
    async def note(message: marq.Message, call_next: marq.CallNext) -> None:
        try:
            await call_next(message)
        except marq.Retry as error:
            seen.append(error)
            raise

    module = types.ModuleType("tasks_of_the_test")
    module.note, module.welcome = note, calls.handler(type="welcome")  # type: ignore[attr-defined]
    async with Broker() as broker, broker.producer() as producer, broker.worker(module) as worker:
        await producer.send("mail", b"x", type="goodbye")
        await broker.settle()
        assert worker.errors == []

    assert [type(error) for error in seen] == [NoHandler]


async def test_each_type_without_a_handler_has_its_own_warning(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    async with Broker() as broker, broker.producer() as producer, broker.worker(calls.handler(type="welcome")):
        for number in range(MAX_WARNED_TYPES + 10):
            await producer.send("mail", b"x", type=f"t{number % (MAX_WARNED_TYPES + 5)}")
        await broker.settle()

    warnings = {record.getMessage().partition(" id=")[0] for record in caplog.records if record.levelname == "WARNING"}
    assert len(warnings) == MAX_WARNED_TYPES


# --- functions and coroutines of one queue ----------------------------------------------------------------------------


async def test_plain_functions_and_coroutines_of_one_queue_run_where_each_belongs() -> None:
    threads: dict[str, threading.Thread] = {}

    @marq.handler("mail", type="plain")
    def plain(message: marq.Message) -> None:
        threads["plain"] = threading.current_thread()

    @marq.handler("mail", type="coroutine")
    async def coroutine(message: marq.Message) -> None:
        threads["coroutine"] = threading.current_thread()

    async with Broker() as broker, broker.producer() as producer:
        await producer.send(plain, b"x")
        await producer.send(coroutine, b"x")
        await broker.run(plain, coroutine)

    assert threads["coroutine"] is threading.main_thread()
    assert threads["plain"] is not threading.main_thread()


async def test_a_lost_lease_cancels_a_coroutine_and_not_the_thread_of_the_same_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []
    release, entered = threading.Event(), threading.Event()

    @marq.handler("mail", type="plain", lease=10, max_lease=20, max_attempts=1)
    def plain(message: marq.Message) -> None:
        entered.set()
        release.wait(30)
        ended.append("plain")

    @marq.handler("mail", type="coroutine")
    async def coroutine(message: marq.Message) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @marq.handler("mail", type="quick")
    async def quick(message: marq.Message) -> None:
        ended.append("quick")

    async with Broker() as broker, broker.producer() as producer:
        async with broker.worker(plain, coroutine, quick):
            await producer.send(plain, b"x")
            await producer.send(coroutine, b"x")
            await broker.advance(0, settle=False)
            await asyncio.to_thread(entered.wait, 30)
            await broker.advance(30, settle=False)
            assert ended == ["cancelled"]
            release.set()
            # The tasks of both go on with other messages.
            await producer.send_many(quick, [b"x"] * 200)
            await broker.drain("mail")
        assert sorted(set(ended)) == ["cancelled", "plain", "quick"]

    lost = [record.getMessage() for record in caplog.records if record.getMessage().startswith("lease lost")]
    assert len(lost) == 2
    assert sum("runs in a thread" in text for text in lost) == 1


async def test_an_operator_cancels_a_coroutine_and_not_the_thread_of_the_same_queue() -> None:
    release, entered = threading.Event(), threading.Event()
    begun, done = asyncio.Event(), list[str]()

    @marq.handler("mail", type="plain")
    def plain(message: marq.Message) -> None:
        entered.set()
        release.wait(30)
        done.append("plain")

    @marq.handler("mail", type="coroutine", max_attempts=1)
    async def coroutine(message: marq.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Broker() as broker, broker.producer() as producer, broker.worker(plain, coroutine) as worker:
        await producer.send(plain, b"x")
        await producer.send(coroutine, b"x")
        await broker.advance(0, settle=False)
        await asyncio.wait_for(begun.wait(), 30)
        await asyncio.to_thread(entered.wait, 30)
        [pool] = worker._groups[0]._session.pools
        calls = {message.type: message for message, _ in pool.calls()}
        assert {kind: pool.cancellable(message) for kind, message in calls.items()} == {
            "plain": False,
            "coroutine": True,
        }
        for message in calls.values():
            pool.cancel(message.id, counted=True)
        release.set()
        await broker.drain("mail")
        assert [letter.type for letter in broker.dead_letters("mail")] == ["coroutine"]

    assert done == ["plain"]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    two = r"queue 'mail', type 'a' has two handlers, .*one and .*other, but a type has one"
    yield two, [{"type": "a"}, {"type": "a"}]
    yield r"queue 'mail' has two handlers, .* or one for each type \(@marq\.handler\(…, type=…\)\)", [{}, {}]
    settings = r"queue 'mail': max_attempts = 2 of @marq\.handler \(.*one\) and max_attempts = 3 of @marq\.handler"
    yield settings, [{"type": "a", "max_attempts": 2}, {"type": "b", "max_attempts": 3}]


@pytest.mark.parametrize(("said", "options"), list(refused()))
async def test_handlers_that_contradict_each_other_are_both_named(said: str, options: list[dict[str, Any]]) -> None:
    async def one(message: marq.Message) -> None: ...

    async def other(message: marq.Message) -> None: ...

    async with Broker() as broker:
        with pytest.raises(marq.ConfigError, match=said):
            await broker.run(marq.handler("mail", **options[0])(one), marq.handler("mail", **options[1])(other))


async def test_settings_of_a_queue_may_be_in_any_of_its_decorators(calls: Calls) -> None:
    one, other = calls.handler(type="a", max_attempts=2), calls.handler(type="b", lease=60, max_attempts=2)
    async with Broker() as broker, broker.worker(one, other):
        assert (broker.queues["mail"].max_attempts, broker.queues["mail"].lease) == (2, 60)


@pytest.mark.parametrize("wrong", ["", 5, "x" * 201, "tab\t"])
async def test_a_type_is_a_printable_name(wrong: Any) -> None:
    with pytest.raises(marq.ConfigError, match="type"):
        marq.handler("mail", type=wrong)
    async with Broker() as broker, broker.producer() as producer:
        with pytest.raises(marq.ConfigError, match="type"):
            await producer.send("mail", b"x", type=wrong)
        with pytest.raises(marq.ConfigError, match=r"'marq-type': names beginning with 'marq-' are reserved; .* type="):
            await producer.send("mail", b"x", headers={TYPE_HEADER: "x"})


class Opaque:
    """What pydantic can't decode."""


class OpaqueCodec:
    def encode(self, value: Opaque) -> bytes:
        return b""

    def decode(self, data: bytes) -> Opaque:
        return Opaque()


@pytest.mark.parametrize(
    "decorators",
    [
        [{"queue": "mail"}, {"queue": "news", "type": "a"}],
        [{"queue": "news", "type": "a"}, {"queue": "mail"}],
        [{"queue": "mail"}, {"queue": "mail", "type": "a"}],
        [{"queue": "mail", "type": "a"}, {"queue": "mail"}],
    ],
)
async def test_a_consumer_looks_only_at_the_decorator_that_is_for_all_messages_of_its_queue(
    decorators: list[dict[str, Any]],
) -> None:
    called = asyncio.Event()

    async def note(value: Opaque) -> None:
        called.set()

    for options in decorators:
        marq.handler(**options, codec=OpaqueCodec())(note)
    async with Broker() as broker, broker.producer() as producer, broker.consumer("mail") as consumer:
        await producer.send("mail", b"x")
        running = asyncio.create_task(consumer.run(note))
        waiting = asyncio.create_task(called.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert waiting.done(), running
        running.cancel()


async def test_a_function_with_several_types_needs_to_be_told_which(calls: Calls) -> None:
    @marq.handler("mail", type="a")
    @marq.handler("mail", type="b")
    async def both(message: marq.Message) -> None:
        calls.append(message.type)

    async with Broker() as broker, broker.producer() as producer:
        with pytest.raises(marq.ConfigError, match=r"handles several types, .* \(its types: 'b', 'a'\)"):
            await producer.send(both, b"x")
        with pytest.raises(marq.ConfigError, match=r"does not handle type 'c' \(its types: 'b', 'a'\)"):
            await producer.send(both, b"x", type="c")
        await producer.send(both, b"x", type="a")
        await both.send(b"x", type="b")  # type: ignore[attr-defined]
        await broker.run(both)

    assert sorted(calls) == ["a", "b"]


async def test_a_consumer_refuses_a_function_that_is_for_one_type(calls: Calls) -> None:
    async with Broker() as broker, broker.consumer("mail") as consumer:
        with pytest.raises(marq.ConfigError, match=r"handles only messages of type 'a' of queue 'mail'.*message.type"):
            await consumer.run(calls.handler(type="a"))


handle_by_name = Calls().handler("named", type="a")


async def test_a_handler_for_one_type_is_not_the_handler_of_a_whole_queue() -> None:
    async with Broker(queues={"named": {"handler": f"{__name__}:handle_by_name"}}) as broker:
        with pytest.raises(marq.ConfigError, match=r"is decorated for messages of type 'a' only: .* MARQ_HANDLERS"):
            await broker.run()


async def test_the_handler_in_the_settings_gets_what_no_typed_one_is_for(calls: Calls) -> None:
    name = f"{__name__}:handle_others"
    OTHERS.clear()
    async with Broker(queues={"mail": {"handler": name}}) as broker, broker.producer() as producer:
        await producer.send("mail", b"1", type="welcome")
        await producer.send("mail", b"2")
        await broker.run(calls.handler(type="welcome"))

    assert (calls, OTHERS) == ([("welcome", "welcome", b"1")], [b"2"])


OTHERS: list[bytes] = []


async def handle_others(message: marq.Message) -> None:
    OTHERS.append(message.value)
