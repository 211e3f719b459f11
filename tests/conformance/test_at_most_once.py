"""At-most-once queues: no handler sees a message twice, and abandoned messages are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import marq
from marq.wire.markers import Ack, Dispatch, Release
from tests.conformance.backend import LIMIT_S, Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one


async def new_queue(backend: Backend, **settings: Any) -> str:
    return await backend.new_queue(delivery="at-most-once", **settings)


async def dispatches_of(backend: Backend, queue: str, count: int) -> list[Dispatch]:
    """Return a queue's DISPATCH markers, at least ``count`` offsets; an open transaction hides them for a moment."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            dispatches = [batch for batch in await backend.markers(Dispatch) if batch.queue == queue]
            if sum(len(batch.offsets) for batch in dispatches) >= count:
                return dispatches
            await backend.advance(0.02)


async def test_a_message_is_dispatched_before_it_is_delivered(backend: Backend) -> None:
    queue = await new_queue(backend)
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        message = await take_one(consumer)

        dispatches = await dispatches_of(backend, queue, 1)
        assert [list(batch.offsets) for batch in dispatches] == [[message.offset]]
        assert not [batch for batch in await backend.markers(Ack) if batch.queue == queue]
        await message.ack()


async def test_messages_are_dispatched_only_when_their_handlers_begin(backend: Backend) -> None:
    """Found by a kill of a consumer whose 10 handlers hung: it had dispatched 20 messages, and all were abandoned."""
    queue, seen = await new_queue(backend), list[tuple[int, int]]()

    async def hang(message: marq.Message) -> None:
        seen.append((message.partition, message.offset))
        await asyncio.Event().wait()

    consumer = backend.consumer(queue, shutdown_timeout=0)
    async with running(consumer, lambda: consumer.run(hang, concurrency=3)):
        await backend.producer.send_many(queue, [b"%d" % number for number in range(20)])
        await backend.until(lambda: len(seen) == 3)

        batches = await dispatches_of(backend, queue, 3)
        dispatched = [(batch.source.partition, offset) for batch in batches for offset in batch.offsets]
        assert sorted(dispatched) == sorted(seen)


@pytest.mark.parametrize("delay", [None, 0.3], ids=["sent", "delayed"])
async def test_a_message_that_a_consumer_received_and_left_is_abandoned_and_never_delivered_again(
    backend: Backend, delay: float | None
) -> None:
    queue = await new_queue(backend, lease=4)
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"lost", delay=delay)
        assert (await take_one(consumer)).attempt == 1
        # Not released: the application has seen the message.
        await consumer.stop()
    async with backend.consumer(queue) as consumer:
        await backend.statistics(queue, acquired=1, abandoned=1, redelivered=0, acked=0, dead_lettered=0)
        await nothing_comes(backend, consumer)


async def test_undelivered_messages_are_released(backend: Backend) -> None:
    queue = await new_queue(backend)
    values = [b"%d" % number for number in range(50)]
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, values)
        first = await take(consumer, 5)
        await consumer.ack(first)
    async with backend.consumer(queue) as consumer:
        rest = await take(consumer, 45)
        assert sorted(message.value for message in [*first, *rest]) == sorted(values)
        # A prefetched message that no handler saw does not count as an attempt.
        assert {message.attempt for message in rest} == {1}
        await consumer.ack(rest)
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, acked=50, abandoned=0)


async def test_a_handler_that_fails_leaves_a_dead_letter(backend: Backend) -> None:
    queue, seen = await new_queue(backend), list[bytes]()

    async def handle(message: marq.Message) -> None:
        seen.append(message.value)
        if message.value == b"bad":
            raise ValueError("no good")
        if message.value == b"again":
            raise marq.Retry(delay=0)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle, concurrency=2)):
        await backend.producer.send_many(queue, [b"good", b"bad", b"again"])
        await backend.until(lambda: len(seen) == 3)
        letters = await backend.dead_letters(queue, 2)
    assert sorted(letter.value for letter in letters) == [b"again", b"bad"]
    assert {letter.reason.split(":")[0] for letter in letters} == {"ValueError", "Retry"}
    assert sorted(seen) == [b"again", b"bad", b"good"]
    await backend.statistics(queue, acked=1, rejected=2, dead_lettered=2, redelivered=0, abandoned=0)


async def test_a_handler_that_is_interrupted_leaves_a_dead_letter(backend: Backend) -> None:
    queue, begun = await new_queue(backend), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    consumer = backend.consumer(queue, shutdown_timeout=0.1)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"long")
        await backend.until(begun.is_set)
    [letter] = await backend.dead_letters(queue)
    assert letter.reason == "interrupted: it may have been processed in part"


async def test_a_delivered_message_cannot_be_released(backend: Backend) -> None:
    queue = await new_queue(backend)
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        message = await take_one(consumer)
        with pytest.raises(marq.MarqError, match="delivers at most once"):
            await message.release()
        await message.renew(60)
        await message.ack()
    assert not [batch for batch in await backend.markers(Release) if batch.queue == queue]
    await backend.statistics(queue, acquired=1, acked=1, abandoned=0, redelivered=0)


async def test_a_mode_that_there_is_not_is_refused(backend: Backend) -> None:
    with pytest.raises(marq.ConfigError, match="delivery: expected 'at-least-once' or 'at-most-once', not 'once'"):
        await backend.queues.change(backend.new_name(), delivery="once")
