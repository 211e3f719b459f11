"""A record that is too large for a marker: it alone becomes a dead letter, and everything else goes on.

A topic limits the compressed size of a batch, so a producer that compresses can write such a record anywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

import marq
from marq.wire.names import TOO_LARGE_HEADER
from tests.conformance.backend import Backend
from tests.conformance.receiving import running, served, take

LARGE = b"0" * (3 << 20)


async def own(backend: Backend, **settings: Any) -> tuple[str, str]:
    """Return a new queue and its topic."""
    topic = await backend.create_topic(1)
    return await backend.new_queue("orders", topic=topic, **settings), topic


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"ordering": "key"}, {}),
        ({"delivery": "at-most-once"}, {}),
        ({"delay": 0.1}, {}),
        ({"dead_letter": False}, {}),
        ({}, {"transactional": True}),
    ],
    ids=["plain", "ordered", "at-most-once", "delayed", "without-dead-letters", "transactional"],
)
async def test_the_messages_around_it_are_delivered_and_it_becomes_a_dead_letter(
    backend: Backend, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    """Also in a queue that keeps no other dead letters: no handler gave it up."""
    queue, topic = await own(backend, **settings)
    await backend.produce(topic, b"before", b"customer")
    place = await backend.produce_compressed(topic, LARGE, b"customer")
    await backend.produce(topic, b"after", b"customer")

    async with backend.consumer(queue, **options) as consumer:
        seen = []
        while len(seen) < 2:
            for message in await take(consumer, 1):
                seen.append((message.value, message.key))
                await message.ack()

    # Delayed messages may be delivered in any order.
    assert sorted(seen, reverse=True) == [(b"before", b"customer"), (b"after", b"customer")]
    [letter] = await backend.dead_letters(queue)
    assert (letter.id, letter.origin, letter.key, letter.body) == (place, place, b"customer", b"")
    assert letter.attempt == 0
    assert f"{place} has {len(LARGE) + len(b'customer')} bytes" in letter.reason
    await backend.statistics(queue, too_large=1, acked=2, dead_lettered=1)


async def test_other_queues_of_its_consumer_go_on(backend: Backend) -> None:
    group = backend.new_name("group")
    topic = await backend.create_topic(1)
    large = await backend.new_queue("large", topic=topic, group=group)
    other = await backend.new_queue("other", group=group)
    await backend.produce_compressed(topic, LARGE)
    await backend.producer.send(other, b"small")

    async with served(backend.consumer(group=group)) as consumer:
        await backend.dead_letters(large)
        await backend.until(lambda: bool(consumer.seen))

    assert consumer.seen == [(other, b"small")]


async def test_a_record_of_the_shared_topic_is_set_aside_too(backend: Backend) -> None:
    queue = await backend.new_queue()
    place = await backend.produce_compressed(backend.names.messages, LARGE, queue.encode())
    await backend.produce(backend.names.messages, b"after", queue.encode())

    async with backend.consumer(queue) as consumer:
        [message] = await take(consumer)
        await message.ack()

    assert message.value == b"after"
    [letter] = await backend.dead_letters(queue)
    assert (letter.id, letter.body) == (place, b"")


async def test_a_batch_handler_and_a_handler_never_see_it(backend: Backend) -> None:
    queue, topic = await own(backend)
    for number in range(3):
        await backend.produce_compressed(topic, LARGE)
        await backend.produce(topic, b"%d" % number)
    seen: list[bytes] = []

    async def handle(messages: list[marq.Message]) -> None:
        seen.extend(message.value for message in messages)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run_batch(handle)):
        await backend.until(lambda: len(seen) >= 3)

    assert seen == [b"0", b"1", b"2"]
    assert len(await backend.dead_letters(queue, 3)) == 3


async def test_in_a_paused_queue_it_becomes_a_dead_letter_when_the_queue_is_resumed(backend: Backend) -> None:
    """A paused queue is read only together with others."""
    group = backend.new_name("group")
    queue, topic = await own(backend, paused=True, group=group)
    await backend.new_queue("other", group=group)
    await backend.produce_compressed(topic, LARGE)

    async with served(backend.consumer(group=group)) as consumer:
        await backend.statistics_of_open(queue, delayed=1)
        await backend.define(queue, paused=False)
        await backend.dead_letters(queue)

    assert consumer.seen == []


async def test_a_redrive_never_delivers_it_without_its_value(backend: Backend) -> None:
    """It becomes a dead letter again, which still names its record."""
    queue, topic = await own(backend)
    place = await backend.produce_compressed(topic, LARGE)
    async with served(backend.consumer(queue)) as consumer, marq.DeadLetters(**backend.client) as letters:
        await backend.dead_letters(queue)

        await letters.redrive(queue)

        first, again = await backend.dead_letters(queue, 2)
    assert (first.id, first.reason) == (again.id, again.reason) == (place, first.reason)
    assert consumer.seen == []


async def test_a_sender_can_write_the_header_and_its_message_is_delivered(backend: Backend) -> None:
    queue, topic = await own(backend)
    await backend.produce(topic, b"value", headers=[(TOO_LARGE_HEADER, b"not at all")])

    async with backend.consumer(queue) as consumer:
        [message] = await take(consumer)
        await message.release(0)
        [again] = await take(consumer)
        await again.ack()

    assert (again.value, again.attempt) == (b"value", 2)


async def test_a_key_as_large_as_the_topic_accepts_fails_with_its_message_alone(backend: Backend) -> None:
    """A dead letter of an ordered queue has the key twice, which is too large for its topic: it loses its value."""
    queue, topic = await own(backend, ordering="key", max_attempts=1)
    key = b"k" * 900_000
    place = await backend.produce(topic, b"fails", key)
    await backend.produce(topic, b"works", b"other")
    async with backend.consumer(queue) as consumer:
        messages = {message.value: message for message in await take(consumer, 2)}

        await messages[b"fails"].release(0)
        await messages[b"works"].ack()

        [letter] = await backend.dead_letters(queue)
    assert letter.id == place
