"""Queues with a topic of their own: all of its records are theirs, and stay as they are."""

from __future__ import annotations

import asyncio

import pytest

import marq
from marq.client.receipt import Receipt
from tests.conformance.backend import LIMIT_S, Backend
from tests.conformance.receiving import take


async def own(backend: Backend) -> tuple[str, str]:
    """Return a new queue and its topic."""
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


async def test_key_and_headers_stay_through_redelivery(backend: Backend) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer:
        with_key = await backend.produce(topic, b"x", b"customer-7", [("a", b"1"), ("a", b"2")], partition=1)
        without = await backend.produce(topic, b"y", partition=0)
        like_queue = await backend.produce(topic, b"z", queue.encode(), partition=0)
        for message in await take(consumer, 3):
            await message.release(0)

        again = {message.id: message for message in await take(consumer, 3)}

        assert set(again) == {with_key, without, like_queue}
        keyed = again[with_key]
        assert (keyed.key, keyed.value, keyed.headers, keyed.attempt) == (b"customer-7", b"x", {"a": b"2"}, 2)
        assert (again[without].key, again[without].attempt) == (None, 2)
        assert again[like_queue].key == queue.encode()
        await keyed.reject("no good")
        await consumer.ack([again[without], again[like_queue]])
    [letter] = await backend.dead_letters(queue)
    assert (letter.key, letter.id, letter.body, letter.headers) == (b"customer-7", with_key, b"x", {"a": b"2"})


async def test_other_readers_of_the_topic_see_what_its_senders_wrote_and_nothing_of_marq(backend: Backend) -> None:
    queue, topic = await own(backend)
    await backend.queues.change(queue, max_attempts=2, backoff={"base": 0})
    async with backend.consumer(queue) as consumer, backend.new_producer() as producer:
        sent = [await backend.produce(topic, b"%d" % number, b"customer", partition=0) for number in range(2)]
        sent.append(await backend.produce(topic, b"2", headers=[("marq-deliver-at", b"1")], partition=1))
        await producer.send(queue, b"later", delay=0.001)
        first = {message.id: message for message in await take(consumer, 4)}
        for message in first.values():
            await message.release(0)
        again = {message.id: message for message in await take(consumer, 4)}
        await again.pop(sent[0]).reject("no good")
        await again.pop(sent[1]).release(0)
        await consumer.ack(list(again.values()))
        [rejected, exhausted] = sorted(await backend.dead_letters(queue, 2), key=lambda letter: letter.id)
        async with marq.DeadLetters(**backend.client) as letters:
            await letters.redrive(queue)
        redriven = {message.id: message for message in await take(consumer, 2)}
        await consumer.ack(list(redriven.values()))

    assert (rejected.key, exhausted.key) == (b"customer", b"customer")
    assert {id_: message.key for id_, message in redriven.items()} == dict.fromkeys(sent[:2], b"customer")
    records = sorted((record.partition, record.offset, record.value) for record in await backend.records(topic))
    assert records == [(0, 0, b"0"), (0, 1, b"1"), (1, 0, b"2")]


async def test_a_dead_letter_that_another_program_copies_back_is_a_new_message(backend: Backend) -> None:
    queue, topic = await own(backend)
    await backend.queues.change(queue, max_attempts=2, backoff={"base": 0})
    async with backend.consumer(queue) as consumer:
        first = await backend.produce(topic, b"x", b"customer", [("a", b"1")])
        for attempt in (1, 2):
            [message] = await take(consumer, 1)
            assert message.attempt == attempt
            await message.release(0)
        await backend.dead_letters(queue)
        [letter] = [each for each in await backend.records(backend.names.dead_letters) if each.key == queue.encode()]
        headers = [(name, value or b"") for name, value in letter.headers]
        assert dict(headers)["marq-id"] == first.encode()

        for destination in (topic, backend.names.messages):
            copy = await backend.produce(destination, letter.value, letter.key, headers, partition=1)
            for attempt in (1, 2):
                [message] = await take(consumer, 1)
                assert (message.id, message.attempt, message.last_error) == (copy, attempt, None)
                assert message.key == (queue.encode() if destination == topic else b"customer")
                assert message.headers == {"a": b"1"}
                await (message.release(0) if attempt == 1 else message.ack())
    await backend.statistics(queue, acked=2, dead_lettered=1)


async def test_a_topic_that_is_not_there_is_named(backend: Backend) -> None:
    queue = backend.new_name()
    await backend.queues.change(queue, topic="no-such-topic")
    try:
        async with backend.new_producer() as producer:
            with pytest.raises(marq.ConfigError, match="topic no-such-topic does not exist"):
                await producer.send(queue, b"x")
        with pytest.raises(marq.ConfigError, match="topic no-such-topic does not exist"):
            await backend.consumer(queue).start()
    finally:
        await backend.queues.reset(queue)


# --- a topic that is deleted and created again ------------------------------------------------------------------------


async def acked(backend: Backend, consumer: marq.Consumer, topic: str, count: int) -> None:
    for number in range(count):
        await backend.produce(topic, b"former %d" % number)
    await consumer.ack(await take(consumer, count))


@pytest.mark.parametrize(
    ("meanwhile", "count"), [("a consumer runs", 5), ("a consumer runs", 40), ("no consumer runs", 5)]
)
async def test_each_record_of_a_topic_that_is_created_again_is_delivered_and_retried(
    backend: Backend, meanwhile: str, count: int
) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer:
        await acked(backend, consumer, topic, 20)
        if meanwhile == "a consumer runs":
            await backend.recreate_topic(topic)
            await see_twice(backend, consumer, topic, count)
    if meanwhile == "no consumer runs":
        await backend.recreate_topic(topic)
        async with backend.consumer(queue) as consumer:
            await see_twice(backend, consumer, topic, count)
    await backend.statistics(queue, acked=20 + count, redelivered=count)


async def see_twice(backend: Backend, consumer: marq.Consumer, topic: str, count: int) -> None:
    """Release new records, at offsets that were acknowledged in the former topic, and receive them again."""
    sent = {await backend.produce(topic, b"%d" % number): b"%d" % number for number in range(count)}
    for attempt in (1, 2):
        messages = await take(consumer, count)
        assert {message.id: message.value for message in messages} == sent
        assert {message.attempt for message in messages} == {attempt}
        for message in messages:
            await (message.release(0) if attempt == 1 else message.ack())


async def test_a_late_ack_from_the_former_topic_does_not_end_the_record_at_the_same_place(backend: Backend) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer:
        same_id = await backend.produce(topic, b"former")
        [former] = await take(consumer, 1)
        await backend.recreate_topic(topic)
        assert await backend.produce(topic, b"new") == same_id
        [new] = await take(consumer, 1)

        await former.ack()
        await new.release(0)

        [again] = await take(consumer, 1)
        assert (again.value, again.attempt, again.id) == (b"new", 2, same_id)
        await again.ack()
    await backend.statistics(queue, acked=2)


async def test_an_unfinished_message_of_the_former_topic_is_redelivered(backend: Backend) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer:
        await backend.produce(topic, b"former")
        [former] = await take(consumer, 1)
        await backend.recreate_topic(topic)
        await backend.produce(topic, b"new")
        [new] = await take(consumer, 1)

        await former.release(0)

        [again] = await take(consumer, 1)
        assert (again.value, again.attempt) == (b"former", 2)
        await consumer.ack([again, new])
    await backend.statistics(queue, acked=2)


async def test_an_unfinished_message_in_order_is_redelivered_when_the_new_topic_is_read(backend: Backend) -> None:
    """Only consumers deliver it again, and its record is gone."""
    topic = await backend.create_topic(1)
    queue = await backend.new_queue("ordered", topic=topic, ordering="key", backoff=[0], lease=3)
    async with backend.consumer(queue) as consumer:
        await backend.produce(topic, b"former", b"a")
        await take(consumer, 1)
    await backend.recreate_topic(topic, 1)
    await backend.produce(topic, b"new", b"a")

    async with backend.consumer(queue) as consumer:
        messages = await take(consumer, 2)

        assert {message.value for message in messages} == {b"former", b"new"}
        await consumer.ack(messages)
    await backend.statistics(queue, acked=2)


async def test_a_delayed_record_of_a_topic_that_is_created_again_is_cancelled_by_its_receipt(backend: Backend) -> None:
    queue, topic = await own(backend)
    async with backend.consumer(queue) as consumer, backend.new_producer() as producer:
        await acked(backend, consumer, topic, 1)
        await backend.recreate_topic(topic)
        reading = asyncio.ensure_future(consumer.receive(wait=LIMIT_S))
        place = await backend.produce(topic, b"later", headers=[("marq-deliver-at", b"%d" % 10**15)])
        await backend.statistics_of_open(queue, delayed=1)

        assert await producer.cancel(Receipt.of(place, queue))

        reading.cancel()
    await backend.statistics(queue, cancelled=1)
