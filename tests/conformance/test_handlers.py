"""What consumers do with handlers: one message or a list at a time, as coroutines and in threads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import running


def outcome(value: bytes, attempt: int) -> None:
    """What all handlers here do with a message."""
    if value == b"reject":
        raise marq.Reject("no good")
    if value == b"retry" and attempt == 1:
        raise marq.Retry(delay=0.3)
    if value == b"fail" and attempt == 1:
        raise LookupError("once")


EXPECTED = [(b"ack", 1), (b"fail", 1), (b"fail", 2), (b"reject", 1), (b"retry", 1), (b"retry", 2)]
SENT = [b"ack", b"retry", b"reject", b"fail"]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
async def test_how_a_handler_ends_decides_on_its_message(backend: Backend, plain: bool) -> None:
    queue, seen, threads = backend.new_name(), [], set()

    def handle(message: marq.Message) -> None:
        threads.add(threading.current_thread())
        seen.append((message.value, message.attempt))
        outcome(message.value, message.attempt)

    async def handle_in_the_loop(message: marq.Message) -> None:
        await asyncio.sleep(0)
        handle(message)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle if plain else handle_in_the_loop, concurrency=2)):
        await backend.producer.send_many(queue, SENT)
        await backend.until(lambda: len(seen) == len(EXPECTED))

    assert sorted(seen) == EXPECTED
    assert (threading.main_thread() in threads) is not plain
    await backend.statistics(queue, acked=3, dead_lettered=1, released=2, redelivered=2)
    assert [letter.reason for letter in await backend.dead_letters(queue)] == ["no good"]


@pytest.mark.parametrize("where", ["call", "decorator"])
async def test_concurrency_limits_how_many_handlers_run_at_a_time(backend: Backend, where: str) -> None:
    queue, gate, now, most = backend.new_name(), asyncio.Event(), 0, 0

    async def handle(message: marq.Message) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await gate.wait()
        now -= 1

    consumer = backend.consumer(queue)
    run = {
        "call": lambda: consumer.run(handle, concurrency=3),
        "decorator": lambda: consumer.run(marq.handler(queue, concurrency=3)(handle)),
    }[where]
    async with running(consumer, run):
        await backend.producer.send_many(queue, [b"x"] * 10)
        await backend.until(lambda: now == 3)
        await backend.advance(0.2)
        gate.set()
        await backend.statistics(queue, acked=10)

    assert most == 3


async def test_a_handler_may_decide_itself(backend: Backend) -> None:
    queue, seen = backend.new_name(), []

    async def handle(message: marq.Message) -> None:
        seen.append(message.attempt)
        if message.attempt == 1:
            await message.release(0)
        else:
            await message.ack()
            raise LookupError("after the ack")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"x")
        await backend.statistics(queue, acked=1, released=1)

    assert seen == [1, 2]


async def test_a_decorated_handler_brings_its_codec_and_its_concurrency(backend: Backend) -> None:
    queue, seen = backend.new_name(), []

    @marq.handler(queue, codec=marq.JSON, concurrency=2)
    async def handle(message: marq.Message) -> None:
        seen.append(message.value)

    consumer, other = backend.consumer(queue), backend.consumer(backend.new_name("other"))
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b'{"a": 1}')
        await backend.producer.send(queue, b"{")
        await backend.statistics(queue, acked=1, dead_lettered=1)
    async with other:
        with pytest.raises(marq.ConfigError, match=queue):
            await other.run(handle)

    assert seen == [{"a": 1}]


async def test_cancelling_run_gives_messages_back_and_the_attempt_does_not_count(backend: Backend) -> None:
    queue, attempts = backend.new_name(), []

    async def handle(message: marq.Message) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            await asyncio.Event().wait()

    async with backend.consumer(queue) as consumer:
        task = asyncio.create_task(consumer.run(handle))
        await backend.producer.send(queue, b"x")
        await backend.until(lambda: len(attempts) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = asyncio.create_task(consumer.run(handle))
        await backend.until(lambda: len(attempts) == 2)
        await consumer.stop()
        await again

    assert attempts == [1, 1]
    await backend.statistics(queue, acked=1, released=1)


async def test_a_stop_lets_handlers_end_within_the_shutdown_timeout(backend: Backend) -> None:
    queue, begun, gate = backend.new_name(), asyncio.Event(), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        begun.set()
        await gate.wait()

    consumer = backend.consumer(queue, shutdown_timeout=20)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"x")
        await backend.until(begun.is_set)
        stopping = asyncio.create_task(consumer.stop())
        await asyncio.sleep(0)
        gate.set()
        await stopping

    await backend.statistics(queue, acked=1, released=0)


async def test_a_stop_releases_prefetched_messages_while_a_handler_runs(backend: Backend) -> None:
    queue, begun, gate = backend.new_name(), asyncio.Event(), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        begun.set()
        await gate.wait()

    # A long lease, because messages that were not received are released in any case after a lease.
    consumer = backend.consumer(queue, lease=600, shutdown_timeout=20)
    async with running(consumer, lambda: consumer.run(handle, concurrency=1)):
        await backend.producer.send_many(queue, [b"x", b"y"])
        await backend.until(lambda: begun.is_set() and consumer.in_flight == 2)
        assert consumer._running is not None
        prefetch = consumer._running.prefetch
        stopping = asyncio.create_task(consumer.stop())
        await backend.until(lambda: prefetch.in_flight == 1)
        assert not stopping.done()
        gate.set()
        await stopping

    await backend.statistics(queue, acked=1, released=1)


async def test_a_handler_of_batches_gets_lists_and_decides_on_all_or_on_some(backend: Backend) -> None:
    queue, sizes, seen = backend.new_name(), [], []

    async def handle(messages: list[marq.Message]) -> None:
        sizes.append(len(messages))
        for message in messages:
            seen.append((message.value, message.attempt))
            if message.value == b"reject":
                await message.reject("no good", wait=False)
        if any((message.value, message.attempt) == (b"fail", 1) for message in messages):
            raise LookupError("all that have no outcome")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run_batch(handle, max_messages=4)):
        await backend.producer.send_many(queue, [b"ack"] * 8 + [b"reject", b"fail"])
        await backend.statistics(queue, acked=9, dead_lettered=1)

    assert max(sizes) <= 4
    assert sum(sizes) == len(seen)
    assert {(b"reject", 1), (b"fail", 1), (b"fail", 2), (b"ack", 1)} <= set(seen)
    assert [letter.reason for letter in await backend.dead_letters(queue)] == ["no good"]


async def test_a_plain_function_may_take_lists_too(backend: Backend) -> None:
    queue, seen = backend.new_name(), []

    def handle(messages: list[marq.Message]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.extend(message.value for message in messages)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run_batch(handle)):
        await backend.producer.send_many(queue, [b"1", b"2", b"3"])
        await backend.statistics(queue, acked=3)

    assert sorted(seen) == [b"1", b"2", b"3"]


async def test_other_objects_than_handlers_are_rejected(backend: Backend) -> None:
    async with backend.consumer(backend.new_name()) as consumer:
        with pytest.raises(marq.ConfigError, match="expected a function that takes a message"):
            await consumer.run("handler")  # type: ignore[arg-type]
        with pytest.raises(marq.ConfigError, match="expected a function that takes a list of messages"):
            await consumer.run_batch(lambda: None)  # type: ignore[arg-type, misc]
        with pytest.raises(marq.ConfigError, match="concurrency=0"):
            await consumer.run(print, concurrency=0)


# --- values by annotation ---------------------------------------------------------------------------------------------


@dataclass
class Item:
    name: str


@dataclass
class Order:
    number: int
    items: list[Item] = field(default_factory=list)


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain"])
@pytest.mark.parametrize("decorated", [False, True], ids=["function", "decorated"])
async def test_values_are_decoded_as_a_handler_is_annotated(backend: Backend, plain: bool, decorated: bool) -> None:
    queue, seen = backend.new_name(), []

    def handle(order: Order, message: marq.Message[Order]) -> None:
        seen.append((order, message.value is order, message.attempt))
        if message.attempt == 1:
            raise marq.Retry(delay=0.1)

    async def handle_in_the_loop(order: Order, message: marq.Message[Order]) -> None:
        handle(order, message)

    function = handle if plain else handle_in_the_loop
    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(marq.handler(queue)(function) if decorated else function)):
        await backend.producer.send(queue, b'{"number": 1, "items": [{"name": "a"}]}')
        await backend.producer.send(queue, b'{"number": "secret"}')
        await backend.until(lambda: len(seen) == 2)
        [letter] = await backend.dead_letters(queue)

    order = Order(1, [Item("a")])
    assert seen == [(order, True, 1), (order, True, 2)]
    assert letter.reason == "the value (20 bytes) is not a valid Order: number: int_parsing"
    await backend.statistics(queue, acked=1, dead_lettered=1, released=1, redelivered=1)


async def test_handlers_send_to_each_other(backend: Backend) -> None:
    orders, texts, seen = backend.new_name("orders"), backend.new_name("texts"), []

    @marq.handler(texts)
    async def write(text: str) -> None:
        seen.append(text)

    @marq.handler(orders)
    async def bill(order: Order) -> None:
        receipt = await backend.producer.send(write, f"order {order.number}", delay=0.1)
        assert receipt.queue == texts

    billing, writing = backend.consumer(orders), backend.consumer(texts)
    async with running(billing, lambda: billing.run(bill)), running(writing, lambda: writing.run(write)):
        await backend.producer.send_many(bill, [Order(1), Order(2)])
        await backend.statistics(texts, acked=2)

    assert sorted(seen) == ["order 1", "order 2"]
    with pytest.raises(TypeError, match=f"queue '{orders}'.*expected an instance of Order"):
        await backend.producer.send(bill, "x")  # type: ignore[arg-type]
