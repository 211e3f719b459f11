"""Queues with a topic of their own: all of its records are theirs, and stay as they are."""

from __future__ import annotations

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import take


async def own(backend: Backend) -> tuple[str, str]:
    """A queue and its topic."""
    topic = await backend.create_topic(2)
    return await backend.new_queue("orders", topic=topic), topic


async def test_what_is_sent_goes_to_the_topic_and_records_of_the_shared_one_are_the_queues_too(
    backend: Backend,
) -> None:
    queue, topic = await own(backend)
    async with backend.new_producer() as producer, backend.consumer(queue) as consumer:
        receipts = [*await producer.send_many(queue, [b"1", b"2"]), await producer.send(queue, b"3")]
        shared = await backend.produce(backend.names.messages, b"4", queue.encode())

        messages = await take(consumer, 4)

        assert {receipt.topic for receipt in receipts} == {topic}
        assert {message.id for message in messages} == {shared, *(receipt.id for receipt in receipts)}
        assert {message.key for message in messages} == {None}
        assert {message.queue for message in messages} == {queue}
        assert [record.key for record in await backend.records(topic)] == [None] * 3
        await consumer.ack(messages)
    await backend.statistics(queue, acked=4)


async def test_key_headers_and_partition_stay_through_redelivery(backend: Backend) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer:
        with_key = await backend.produce(topic, b"x", b"customer-7", [("a", b"1"), ("a", b"2")], partition=1)
        without = await backend.produce(topic, b"y", partition=0)
        for message in await take(consumer, 2):
            await message.release(0)

        again = {message.id: message for message in await take(consumer, 2)}

        assert set(again) == {with_key, without}
        keyed = again[with_key]
        assert (keyed.key, keyed.value, keyed.headers, keyed.attempt, keyed.partition) == (
            b"customer-7", b"x", {"a": b"2"}, 2, 1,
        )  # fmt: skip
        assert (again[without].key, again[without].partition, again[without].attempt) == (None, 0, 2)
        await keyed.reject("no good")
        await again[without].ack()
    [letter] = await backend.dead_letters(queue)
    assert (letter.key, letter.id, letter.body, letter.headers) == (b"customer-7", with_key, b"x", {"a": b"2"})
    copies = [record for record in await backend.records(topic) if record.offset > 0]
    assert sorted((record.partition, record.key or b"") for record in copies) == [(0, b""), (1, b"customer-7")]


async def test_a_topic_that_is_not_there_is_named(backend: Backend) -> None:
    queue = backend.new_name()
    await backend.queues.change(queue, topic="no-such-topic")
    try:
        async with backend.new_producer() as producer:
            with pytest.raises(marq.ConfigError, match="topic no-such-topic does not exist"):
                await producer.send(queue, b"x")
        with pytest.raises(marq.ConfigError, match="topic no-such-topic does not exist"):
            await backend.consumer(queue).start()
        with pytest.raises(marq.ConfigError, match=r"no-such-topic.* belongs to"):
            await backend.queues.change(backend.new_name(), topic="no-such-topic")
    finally:
        await backend.queues.reset(queue)
