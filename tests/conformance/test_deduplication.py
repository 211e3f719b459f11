"""Deduplication ids: of messages with the same id, only the first one is delivered."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import marq
from marq.client.send_options import MAX_ID_BYTES
from marq.wire.markers import Delay
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one


async def received(backend: Backend, queue: str, count: int) -> list[bytes]:
    """Receive and ack this many messages, and show that no other message comes."""
    async with backend.consumer(queue) as consumer:
        messages = await take(consumer, count) if count else []
        await consumer.ack(messages)
        await nothing_comes(backend, consumer)
    return [message.value for message in messages]


async def test_only_the_first_message_of_an_id_is_delivered(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer

    first = await producer.send(queue, b"first", headers={"tenant": "acme"}, deduplication_id="a")
    second = await producer.send(queue, b"second", deduplication_id="a")
    await producer.send(queue, b"third", deduplication_id="b")

    async with backend.consumer(queue) as consumer:
        messages = {message.value: message for message in await take(consumer, 2)}
        assert messages.keys() == {b"first", b"third"}
        assert (messages[b"first"].id, messages[b"first"].headers) == (first.id, {"tenant": b"acme"})
        assert messages[b"first"].deduplication_id == "a"
        assert await producer.cancel(second) is False
        await consumer.ack(list(messages.values()))
        # Also after the first one has ended.
        await producer.send(queue, b"fourth", deduplication_id="a")
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, delayed=2, deduplicated=2, delivered=2, acked=2)


async def test_all_senders_share_the_ids_of_a_queue(backend: Backend) -> None:
    queue, other = backend.new_name(), backend.new_name()

    def work() -> None:
        with marq.SyncProducer(**backend.client) as producer:
            producer.send(queue, b"x", deduplication_id="a")
            producer.send([queue, other], b"x", deduplication_id="a")

    async with backend.new_producer() as producer:
        await asyncio.gather(
            *[each.send(queue, b"x", deduplication_id="a") for each in (producer, backend.producer) for _ in range(5)]
        )
    await asyncio.to_thread(work)

    assert await received(backend, queue, 1) == [b"x"]
    assert await received(backend, other, 1) == [b"x"]
    await backend.statistics(queue, delayed=1, deduplicated=11)


async def test_ids_are_remembered_after_a_restart_of_the_tracker(backend: Backend) -> None:
    queue = backend.new_name()
    ids = [f"id-{number}" for number in range(20)]
    await backend.producer.send_many(queue, [b"%d" % number for number in range(20)], deduplication_ids=ids)
    await backend.statistics_of_open(queue, delayed=20)
    await backend.restart()

    await backend.producer.send_many(queue, [b"again"] * 20, deduplication_ids=ids)

    assert sorted(await received(backend, queue, 20), key=int) == [b"%d" % number for number in range(20)]
    await backend.statistics(queue, delayed=20, deduplicated=20, acked=20)


async def test_a_cancelled_message_keeps_its_id(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    receipt = await producer.send(queue, b"x", deduplication_id="a", delay=3600)
    assert await producer.cancel(receipt) is True

    again = await producer.send(queue, b"x", deduplication_id="a", delay=3600)

    assert await producer.cancel(again) is False
    assert await received(backend, queue, 0) == []
    await backend.statistics(queue, delayed=1, cancelled=1, deduplicated=1)


async def test_an_id_may_come_again_when_the_window_has_passed(backend: Backend) -> None:
    queue = await backend.new_queue(deduplication_window=timedelta(seconds=1.5))
    assert backend.queues[queue].deduplication_window == 1.5
    assert backend.queues[backend.new_name()].deduplication_window == 300
    await backend.producer.send_many(queue, [b"first", b"second"], deduplication_ids=["a", "a"])

    await backend.advance(1.6)
    await backend.producer.send(queue, b"third", deduplication_id="a")

    assert sorted(await received(backend, queue, 2)) == [b"first", b"third"]
    await backend.statistics(queue, delayed=2, deduplicated=1)


async def test_each_of_many_messages_has_an_id(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer

    receipts = await producer.send_many(queue, [b"a", b"b", b"c"], deduplication_ids=["x", "y", "x"])
    more = await producer.send_many(queue, [b"d", b"e"], deduplication_ids=["z", "y"], headers={"n": "1"})

    assert sorted(await received(backend, queue, 3)) == [b"a", b"b", b"d"]
    assert len({receipt.id for receipt in [*receipts, *more]}) == 5
    assert await producer.send_many(queue, [], deduplication_ids=[]) == []
    await backend.statistics(queue, delayed=3, deduplicated=2)


async def test_a_message_with_an_id_may_be_delayed_and_rescheduled(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        first = await producer.send(queue, b"first", deduplication_id="a", delay=600)
        await producer.send(queue, b"second", deduplication_id="a")
        receipts = await producer.send_many(queue, [b"b", b"c"], deduplication_ids=["b", "c"], delay=[0.7, 600])
        assert await producer.reschedule([first, receipts[1]], delay=1) == [True, True]

        messages = await take(consumer, 3)

        assert {message.value for message in messages} == {b"first", b"b", b"c"}
        assert backend.now_s() - began_s >= 1 - 0.005
        await consumer.ack(messages)
    await backend.statistics(queue, delayed=3, deduplicated=1, delivered=3)


async def test_a_redelivered_or_redriven_message_is_no_duplicate(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts=2, backoff=[0.1])
    await backend.producer.send(queue, b"x", deduplication_id="a")
    async with backend.consumer(queue) as consumer:
        for attempt in (1, 2):
            message = await take_one(consumer)
            assert message.attempt == attempt
            await message.release()
        await backend.dead_letters(queue)

        async with marq.DeadLetters(**backend.client) as letters:
            assert (await letters.redrive(queue)).redriven == 1

        message = await take_one(consumer)
        assert (message.value, message.attempt) == (b"x", 1)
        await message.ack()
    await backend.statistics(queue, deduplicated=0, redriven=1, acked=1)


async def test_ids_of_an_ordering_key_are_its_own_and_its_messages_keep_the_order_of_the_calls(
    backend: Backend,
) -> None:
    queue, producer = await backend.new_queue(ordering="key"), backend.producer
    async with backend.consumer(queue) as consumer:
        sends = [
            producer.send(queue, b"%d" % number, ordering_key=f"k{number % 3}", deduplication_id=f"id-{number // 6}")
            for number in range(60)
        ]
        await asyncio.gather(*sends)
        await producer.send_many(queue, [b"60", b"63", b"66"], ordering_key="k0", deduplication_ids=["a", "id-3", "b"])

        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(32):
            # One after the other: the next message of a key comes when this one is acknowledged.
            message = await take_one(consumer)
            number = int(message.value)
            seen[number % 3].append(number)
            await message.ack()
        await nothing_comes(backend, consumer)

    # The first of two messages with the same key and id.
    assert seen == {key: [*range(key, 60, 6), *([60, 66] if key == 0 else [])] for key in range(3)}
    await backend.statistics(queue, delayed=32, deduplicated=31, acked=32)


async def test_receipts_tell_the_order_in_which_messages_of_a_key_are_accepted(backend: Backend) -> None:
    queue, producer = await backend.new_queue(ordering="key"), backend.producer
    first = await producer.send(queue, b"0", ordering_key="k", deduplication_id="0")
    many = await producer.send_many(queue, [b"1", b"2"], ordering_key="k", deduplication_ids=["1", "2"])
    async with backend.new_producer() as other:
        last = await other.send(queue, b"3", ordering_key="k", deduplication_id="3")
    delayed = await producer.send(queue, b"4", delay=1)

    sequences = [receipt.sequence for receipt in (first, *many, last) if receipt.sequence is not None]
    assert len(set(sequences)) == 4
    assert sequences == sorted(sequences)
    assert delayed.sequence is None
    async with backend.consumer(queue) as consumer:
        values, numbers = [], []
        for _ in range(5):
            message = await take_one(consumer)
            values.append(message.value)
            numbers += [value for name, value in message._record.headers if name == "marq-sequence"]
            await message.ack()
    # The receivers know it, too.
    assert [int(number or b"") for number in numbers] == sequences
    assert [value for value in values if value != b"4"] == [b"0", b"1", b"2", b"3"]


async def test_a_queue_with_its_own_topic_gets_such_messages_through_the_messages_topic(backend: Backend) -> None:
    topic = await backend.create_topic()
    queue = await backend.new_queue(topic=topic)
    await backend.producer.send(queue, b"first", deduplication_id="a")
    await backend.producer.send(queue, b"second", deduplication_id="a")

    assert await received(backend, queue, 1) == [b"first"]
    assert await backend.records(topic) == []

    ordered = await backend.new_queue(topic=await backend.create_topic(), ordering="key")
    with pytest.raises(marq.ConfigError, match="ordering_key cannot be combined with delay or deduplication_id"):
        await backend.producer.send(ordered, b"x", ordering_key="k", deduplication_id="a")
    with pytest.raises(marq.ConfigError, match="ordering_key cannot be combined with delay or deduplication_id"):
        await backend.producer.send_many(ordered, [b"x"], ordering_key="k", deduplication_ids=["a"])


async def test_the_marker_has_the_id_and_the_partition_follows_from_it(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.new_producer() as producer:
        for _ in range(2):
            await producer.send_many(queue, [b"x"] * 8, deduplication_ids=[f"id-{number}" for number in range(8)])
    await backend.statistics_of_open(queue, delayed=8, deduplicated=8)

    sources: dict[bytes | None, set[int]] = {}
    for batch in await backend.markers(Delay):
        for payload in batch.payloads if batch.queue == queue else ():
            [own_id] = [value for name, value in payload.headers if name == "marq-deduplication-id"]
            sources.setdefault(own_id, set()).add(batch.source.partition)

    assert sources.keys() == {b"id-%d" % number for number in range(8)}
    assert all(len(each) == 1 for each in sources.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "deduplication_id: the id is empty"),
        ("é" * (MAX_ID_BYTES // 2 + 1), f"deduplication_id: the id has {MAX_ID_BYTES + 2} bytes, at most"),
        (17, "deduplication_id: expected an id of type str, not int"),
        (b"x", "deduplication_id: expected an id of type str, not bytes"),
        ("\ud800", "deduplication_id: the id can't be encoded as UTF-8"),
    ],
)
async def test_a_bad_id_is_refused(backend: Backend, given: Any, said: str) -> None:
    queue = backend.new_name()
    with pytest.raises(marq.ConfigError, match=said):
        await backend.producer.send(queue, b"x", deduplication_id=given)
    with pytest.raises(marq.ConfigError, match=said.replace("_id:", r"_ids\[1\]:")):
        await backend.producer.send_many(queue, [b"x", b"y"], deduplication_ids=["a", given])


async def test_a_list_of_ids_must_fit_and_other_words_are_answered_with_marqs(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    with pytest.raises(marq.ConfigError, match="deduplication_ids has 1 ids for 2 messages"):
        await producer.send_many(queue, [b"x", b"y"], deduplication_ids=["a"])
    with pytest.raises(marq.ConfigError, match="deduplication_ids: expected a list"):
        await producer.send_many(queue, [b"x"], deduplication_ids="a")
    options: Any = {"deduplication_id": "a"}
    with pytest.raises(TypeError, match="marq calls it deduplication_ids"):
        await producer.send_many(queue, [b"x"], **options)
    for word in ("idempotency_key", "MessageDeduplicationId", "deduplication_ids"):
        options = {word: "a"}
        with pytest.raises(TypeError, match="marq calls it deduplication_id"):
            await producer.send(queue, b"x", **options)
