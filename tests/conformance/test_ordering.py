"""Ordering by key: which message is delivered when, across failures and consumers."""

from __future__ import annotations

from typing import Any

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one

ORDERED = {"ordering": "key", "backoff": [1, 1, 1]}


async def ordered(backend: Backend, *values: bytes, **settings: Any) -> str:
    """Return a queue with ordering, and send messages of one key to it."""
    queue = await backend.new_queue(**ORDERED, **settings)
    for value in values:
        await backend.producer.send(queue, value, ordering_key="a")
    return queue


async def values(consumer: marq.Consumer, count: int) -> list[bytes]:
    """Receive and acknowledge this many messages one after the other."""
    received = []
    for _ in range(count):
        message = await take_one(consumer)
        received.append(message.value)
        await message.ack()
    return received


async def test_messages_of_a_key_come_one_after_the_other(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2", b"3")
    await backend.producer.send(queue, b"other", ordering_key="b")
    await backend.producer.send(queue, b"none")
    async with backend.consumer(queue) as consumer:
        first = {message.value: message for message in await take(consumer, 3)}
        assert set(first) == {b"1", b"other", b"none"}
        await nothing_comes(backend, consumer)
        await consumer.ack(list(first.values()))

        assert await values(consumer, 2) == [b"2", b"3"]
    await backend.statistics(queue, acked=5)


async def test_a_released_message_keeps_its_place(backend: Backend) -> None:
    queue = await backend.new_queue(**ORDERED)
    for value in (b"1", b"2"):
        await backend.producer.send(queue, value, ordering_key="a", headers={"h": "x"})
    async with backend.consumer(queue) as consumer:
        first = await take_one(consumer)
        began_s = backend.now_s()
        await first.release(delay=2)

        again = await take_one(consumer)

        assert backend.now_s() - began_s >= 2
        assert (again.value, again.attempt, again.id, again.headers) == (b"1", 2, first.id, {"h": b"x"})
        await again.ack()
        assert await values(consumer, 1) == [b"2"]
    await backend.statistics(queue, acked=2, released=1, redelivered=1)


async def test_after_the_last_attempt_the_next_message_follows(backend: Backend) -> None:
    queue = await ordered(backend, b"poison", b"2", max_attempts=2)
    seen = []

    async def handle(message: marq.Message) -> None:
        seen.append((message.value, message.attempt, message.last_error))
        if message.value == b"poison":
            raise ValueError("no")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.until(lambda: len(seen) == 3)

    assert seen == [(b"poison", 1, None), (b"poison", 2, "ValueError: no"), (b"2", 1, None)]
    [dead] = await backend.dead_letters(queue)
    assert dead.value == b"poison"


async def test_the_next_consumer_continues_in_order(backend: Backend) -> None:
    queue = await ordered(backend, b"0", b"1", b"2", b"3", b"4")
    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 2) == [b"0", b"1"]
    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 3) == [b"2", b"3", b"4"]
    await backend.statistics(queue, acked=5)


async def test_a_message_whose_lease_ended_is_delivered_before_its_successor(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2")
    async with backend.consumer(queue, lease=4, max_lease=4) as consumer:
        first = await take_one(consumer)

        again = await take_one(consumer)

        assert (again.value, again.attempt, again.id) == (b"1", 2, first.id)
        await again.ack()
        assert await values(consumer, 1) == [b"2"]
    await backend.statistics(queue, acked=2, expired=1, redelivered=1)


async def test_a_message_that_another_process_acknowledged_is_not_delivered_again(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2")
    another = backend.consumer(await backend.new_queue())
    async with another, backend.consumer(queue, lease=4, max_lease=4) as consumer:
        first = await take_one(consumer)
        await another.ack(first.token)

        # Its consumer learns that when the lease ends.
        assert await values(consumer, 1) == [b"2"]
    await backend.statistics(queue, acked=2, expired=0)


async def test_another_consumer_waits_for_a_message_in_flight(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2")
    async with backend.consumer(queue) as first:
        message = await take_one(first)
        async with backend.consumer(queue) as second:
            # Whichever of them reads the partition now, the message in flight comes first.
            await nothing_comes(backend, first, second)
            await message.ack()
            received = []
            while not received:
                received += await first.receive(max_messages=5, wait=0.2)
                received += await second.receive(max_messages=5, wait=0.2)
            [next_one] = received
            assert next_one.value == b"2"
            await next_one.ack()
    await backend.statistics(queue, acked=2, redelivered=0)


async def test_messages_that_come_while_the_first_one_waits_come_after_it(backend: Backend) -> None:
    queue = await backend.new_queue(**ORDERED)
    seen: list[tuple[bytes, int]] = []

    async def handle(message: marq.Message) -> None:
        seen.append((message.value, message.attempt))
        if message.attempt == 1 and message.value == b"1":
            raise ValueError("no")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"1", ordering_key="a")
        await backend.until(lambda: len(seen) == 1)
        await backend.producer.send(queue, b"2", ordering_key="a")
        await backend.until(lambda: len(seen) == 3)

    assert seen == [(b"1", 1), (b"1", 2), (b"2", 1)]


async def test_a_message_that_would_become_a_dead_letter_can_block_its_line(backend: Backend) -> None:
    queue = await backend.new_queue(**ORDERED, max_attempts=1, on_dead_letter="block")
    first, _ = [await backend.producer.send(queue, value, ordering_key="a") for value in (b"1", b"2")]
    other, _ = [await backend.producer.send(queue, value, ordering_key="b") for value in (b"3", b"4")]
    seen: list[tuple[bytes, int, str | None]] = []

    async def handle(message: marq.Message) -> None:
        seen.append((message.value, message.attempt, message.last_error))
        if message.value in (b"1", b"3") and message.attempt == 1:
            raise ValueError("no")

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.until(lambda: len(seen) == 2)
        await backend.statistics_of_open(queue, released=2)
        await backend.advance(2)

        assert await backend.producer.reschedule(first, delay=0)
        assert await backend.producer.cancel(other)
        await backend.until(lambda: len(seen) == 5)

    assert sorted(seen[2:]) == [(b"1", 2, "ValueError: no"), (b"2", 1, None), (b"4", 1, None)]
    assert [value for value, *_ in seen].index(b"2") > 2
    await backend.statistics(queue, acked=3, cancelled=1, dead_lettered=0)


async def test_blocked_messages_become_dead_letters_when_they_no_longer_block(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2", on_dead_letter="block")
    async with backend.consumer(queue) as consumer:
        await (await take_one(consumer)).reject("bad")
        await nothing_comes(backend, consumer)

        await backend.queues.change(queue, on_dead_letter="continue")

        assert await values(consumer, 1) == [b"2"]
    [dead] = await backend.dead_letters(queue)
    assert dead.value == b"1"


async def test_a_lease_that_ends_can_block_its_line_too(backend: Backend) -> None:
    queue = await backend.new_queue(**ORDERED, max_attempts=1, on_dead_letter="block")
    receipt, _ = [await backend.producer.send(queue, value, ordering_key="a") for value in (b"1", b"2")]
    async with backend.consumer(queue, lease=4, max_lease=4) as consumer:
        first = await take_one(consumer)
        await backend.statistics_of_open(queue, released=1)
        await nothing_comes(backend, consumer)
        with pytest.raises(marq.LeaseLost):
            await first.renew()

        assert await backend.producer.reschedule(receipt, delay=0)
        again = await take_one(consumer)

        assert (again.value, again.attempt) == (b"1", 2)
        await again.ack()
        assert await values(consumer, 1) == [b"2"]
    await backend.statistics(queue, acked=2, dead_lettered=0)


async def test_the_next_message_follows_one_that_was_received_with_its_own_lease(backend: Backend) -> None:
    queue = await ordered(backend, b"1", b"2", b"3")
    async with backend.consumer(queue) as consumer:
        [first] = await consumer.receive(lease=60, wait=90)
        await first.ack()
        [second] = await consumer.receive(lease=60, wait=90)
        await second.release(delay=0)
        [again] = await consumer.receive(lease=60, wait=90)
        await again.ack()

        assert [each.value for each in (first, second, again)] == [b"1", b"2", b"2"]
        assert await values(consumer, 1) == [b"3"]
    await backend.statistics(queue, acked=3)
