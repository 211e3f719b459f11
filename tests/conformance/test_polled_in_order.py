"""Messages of a queue with ordering that a process polls, and that any process settles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

import marq
from marq.client import message_token
from marq.client.message_token import Token
from marq.settings.client import ClientSettings
from marq.wire.markers import Acquire, Release, Renew
from marq_worker.sqs.polling import LeaseLookup, PolledInOrder
from tests.conformance.backend import LIMIT_S, Backend

LONG_MS, LONGER_MS = 36_000_000, 40_000_000


def of(message: marq.Message) -> Token:
    return message_token.decode(message.token)


@pytest_asyncio.fixture(loop_scope="session")
async def questions(settings: ClientSettings) -> AsyncIterator[LeaseLookup]:
    async with LeaseLookup(settings) as questions:
        yield questions


async def new_queue(backend: Backend, *sent: tuple[str, bytes]) -> str:
    """Return a queue with ordering that contains messages with these keys and values."""
    queue = await backend.new_queue(ordering="key", max_attempts="unlimited", lease=LONG_MS / 1000)
    for key, value in sent:
        await backend.producer.send(queue, value, ordering_key=key)
    return queue


async def poll(consumer: PolledInOrder, count: int) -> dict[bytes, marq.Message]:
    """Return this many messages by their values."""
    messages: dict[bytes, marq.Message] = {}
    while len(messages) < count:
        polled = await consumer.poll(10)
        messages |= {message.value: message for message in polled}
        if not polled:
            await consumer.wait(10, LIMIT_S)
    return messages


async def poll_one(consumer: PolledInOrder) -> marq.Message:
    [message] = (await poll(consumer, 1)).values()
    return message


async def nothing_comes(backend: Backend, consumer: PolledInOrder) -> None:
    await consumer.wait(10, backend.never_s)
    assert await consumer.poll(10) == []


async def test_the_next_message_of_a_key_follows_when_the_first_is_acked(backend, settings) -> None:
    queue = await new_queue(backend, ("a", b"1"), ("a", b"2"), ("b", b"other"))
    async with PolledInOrder(queue, settings) as consumer:
        first = await poll(consumer, 2)
        assert set(first) == {b"1", b"other"}
        await nothing_comes(backend, consumer)

        held = consumer.find(of(first[b"1"]), 1)
        assert held is first[b"1"]
        await consumer.ack_held(held)

        second = await poll_one(consumer)
        assert second.value == b"2"
        assert consumer.find(of(first[b"1"]), 1) is None
        await consumer.ack_held(second)
        await consumer.ack_held(first[b"other"])
    await backend.statistics(queue, acked=3)


async def test_a_message_whose_lease_ends_is_delivered_again_before_the_next(backend, settings) -> None:
    queue = await new_queue(backend, ("a", b"1"), ("a", b"2"))
    async with PolledInOrder(queue, settings) as consumer:
        first = await poll_one(consumer)
        assert await consumer.renew_held(first, 1_000)
        again = await poll_one(consumer)

        assert (again.value, again.attempt, again.id) == (b"1", 2, first.id)
        # Both deliveries have one token.
        assert consumer.find(of(first), 1) is None
        assert consumer.find(of(first), 2) is again
        await consumer.ack_held(again)
        await consumer.ack_held(await poll_one(consumer))
    await backend.statistics(queue, acked=2, redelivered=1)


async def test_the_lease_of_a_poll_is_not_renewed_and_can_be_moved(backend, settings) -> None:
    queue = await new_queue(backend, ("a", b"long"), ("b", b"short"))
    async with PolledInOrder(queue, settings) as consumer:
        messages = await poll(consumer, 2)
        assert await consumer.renew_held(messages[b"long"], LONGER_MS)
        assert await consumer.renew_held(messages[b"short"], 500)

        again = await poll_one(consumer)

        assert (again.value, again.attempt) == (b"short", 2)
        assert consumer.find(of(messages[b"long"]), 1) is messages[b"long"]
        await consumer.ack_held(again)
        await consumer.ack_held(messages[b"long"])
    of_queue = [batch for batch in await backend.markers(Renew) if batch.queue == queue]
    assert {LONGER_MS, 500} <= {batch.lease_ms for batch in of_queue}


async def test_a_release_keeps_the_place(backend, settings) -> None:
    queue = await new_queue(backend, ("a", b"1"), ("a", b"2"))
    async with PolledInOrder(queue, settings) as consumer:
        await consumer.release_held(await poll_one(consumer), counted=False)
        first = await poll_one(consumer)
        await consumer.release_held(first, counted=True)
        second = await poll_one(consumer)

        assert [(each.value, each.attempt) for each in (first, second)] == [(b"1", 1), (b"1", 2)]
        await consumer.ack_held(second)
        await consumer.ack_held(await poll_one(consumer))
    assert {batch.counted for batch in await backend.markers(Release) if batch.queue == queue} == {True, False}


async def test_a_message_is_settled_by_token_after_its_consumer_has_stopped(
    backend, settings, settler, questions
) -> None:
    queue = await new_queue(backend, ("a", b"1"), ("a", b"2"), ("b", b"x"))
    async with PolledInOrder(queue, settings) as consumer:
        polled = await poll(consumer, 2)
    acked, released = of(polled[b"1"]), of(polled[b"x"])
    lease = await questions.ask(acked)
    assert (lease.is_in_flight, lease.attempt) == (True, 1)
    assert 0 < lease.left_ms <= LONG_MS
    await settler.release([released])
    async with PolledInOrder(queue, settings) as successor:
        again = await poll_one(successor)
        assert (again.value, again.attempt) == (b"x", 2)
        await nothing_comes(backend, successor)
        await settler.ack([acked])

        second = await poll_one(successor)

        assert second.value == b"2"
        assert await questions.ask(acked) == (0, 0, 0)
        await successor.ack_held(second)
        await successor.ack_held(again)
    await backend.statistics(queue, acked=3)


async def test_questions_about_leases_are_asked_together(backend, settings, questions) -> None:
    queue = await new_queue(backend, ("a", b"1"), ("b", b"2"))
    async with PolledInOrder(queue, settings) as consumer:
        messages = await poll(consumer, 2)
        leases = await asyncio.gather(*[questions.ask(of(message)) for message in [*messages.values()] * 2])
        assert [lease.is_in_flight for lease in leases] == [True] * 4
        for message in messages.values():
            await consumer.ack_held(message)


async def test_a_poll_reads_past_blocked_keys_in_larger_and_larger_steps(backend, settings) -> None:
    queue = await new_queue(backend, ("a", b"first"))
    for key, count in (("a", 400), ("b", 1)):
        await backend.producer.send_many(queue, [b"x"] * count, ordering_key=key)
    async with PolledInOrder(queue, settings) as consumer:
        first = await poll_one(consumer)
        # Both keys may be in one partition, and the second message comes after all of the first key.
        other = await poll_one(consumer)

        assert (first.value, other.value) == (b"first", b"x")
        acquired = [len(batch.offsets) for batch in await backend.markers(Acquire) if batch.queue == queue]
        assert len(acquired) < 15
