"""Messages that expire: they are not delivered afterwards, neither the first time nor again."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import marq
from marq.wire.markers import Acquire, Cause, Delay, Fact, Kind
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, receiving_nothing, running, take, take_one
from tests.conformance.test_delays import wall_s
from tests.conformance.test_leases import RENEWED_S

#: Longer than a test takes on a busy machine.
LONG_S = 600
#: Longer than a message takes to a consumer that runs on a busy machine.
SOON_S = 6


async def values(consumer: marq.Consumer, count: int) -> list[bytes]:
    """Receive messages and ack them."""
    taken: list[marq.Message] = []
    while len(taken) < count:
        taken += await take(consumer, count - len(taken))
    for message in taken:
        await message.ack()
    return sorted(message.value for message in taken)


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
async def test_an_expired_message_is_dropped_and_counted(backend: Backend, *, many: bool) -> None:
    queue, producer = backend.new_name(), backend.producer
    if many:
        await producer.send_many(queue, [b"stale"], expires_in=0.05)
        await producer.send_many(queue, [b"fresh"], expires_in=timedelta(hours=1))
    else:
        await producer.send(queue, b"stale", expires_in=0.05)
        await producer.send(queue, b"fresh", expires_in=timedelta(hours=1))
    await backend.advance(0.2)

    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 1) == [b"fresh"]
        await nothing_comes(backend, consumer)

    await backend.statistics(queue, messages_expired=1, acked=1, cancelled=0, dead_lettered=0, redelivered=0)
    [fact] = [fact for fact in await backend.markers(Fact) if fact.queue == queue and fact.kind is Kind.CANCELLED]
    assert [Cause(cause) for cause in fact.causes] == [Cause.MESSAGE_EXPIRED]


async def test_the_queues_setting_counts_from_the_time_of_sending(backend: Backend) -> None:
    queue = await backend.new_queue(expires_after=timedelta(hours=1))
    sent_ms = round(1000 * await wall_s(backend))
    topic = backend.names.messages
    headers = [("marq-expires-at", b"%d" % (sent_ms + 1_000 * LONG_S))]
    await backend.produce(topic, b"by another program", queue.encode(), headers)
    await backend.producer.send(queue, b"fresh")
    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 2) == [b"by another program", b"fresh"]

    await backend.define(queue, expires_after=0.05)
    await backend.producer.send_many(queue, [b"a", b"b"])
    await backend.advance(0.2)
    async with backend.consumer(queue) as consumer, receiving_nothing(consumer):
        await backend.statistics(queue, messages_expired=2, acked=2)


async def test_an_expired_message_becomes_a_dead_letter_that_a_redrive_delivers(backend: Backend) -> None:
    queue = await backend.new_queue(expires_after=0.1, expired="dead-letter")
    receipt = await backend.producer.send(queue, b"stale", headers={"tenant": b"acme"}, expires_in=0.05)
    await backend.advance(0.3)
    async with backend.consumer(queue) as consumer:
        async with receiving_nothing(consumer):
            [letter] = await backend.dead_letters(queue)

        assert (letter.id, letter.value, letter.headers) == (receipt.id, b"stale", {"tenant": b"acme"})
        assert letter.reason.startswith("expired ")
        assert letter.reason.endswith(" s before it could be delivered")
        await backend.statistics(queue, messages_expired=1, dead_lettered=1)

        async with marq.DeadLetters(**backend.client) as letters:
            assert [each.attempts async for each in letters.peek(queue)] == [0]
            assert (await letters.redrive(queue, reason="expired")).redriven == 1
        message = await take_one(consumer)
        assert (message.id, message.value, message.attempt) == (receipt.id, b"stale", 1)
        await message.release()
        message = await take_one(consumer)
        assert (message.value, message.attempt) == (b"stale", 2)
        await message.ack()
    await backend.statistics(queue, messages_expired=1, redriven=1, acked=1)


@pytest.mark.parametrize("ends", ["release", "lease"])
async def test_an_expired_message_is_not_redelivered(backend: Backend, ends: str) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, lease=SOON_S + 0.1) as consumer:
        # The consumer has its partitions now: the next message does not expire meanwhile.
        await backend.producer.send(queue, b"fresh")
        await (await take_one(consumer)).ack()
        await backend.producer.send(queue, b"once", expires_in=SOON_S)
        message = await take_one(consumer)
        if ends == "release":
            await message.release(delay=SOON_S + 0.1)
        else:
            await consumer.stop()
    await backend.advance(SOON_S + 0.2)
    async with backend.consumer(queue) as consumer, receiving_nothing(consumer):
        await backend.statistics(queue, messages_expired=1, acquired=2, redelivered=0)


async def test_a_delayed_message_expires_some_time_after_it_is_due(backend: Backend) -> None:
    queue = await backend.new_queue(expires_after=LONG_S)
    await backend.producer.send_many(queue, [b"a", b"b"], delay=[0.3, 0.2], expires_in=LONG_S)
    await backend.producer.send(queue, b"c", delay=0.2)
    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 3) == [b"a", b"b", b"c"]
    await backend.statistics(queue, messages_expired=0, delivered=3)

    await backend.define(queue, paused=True, expires_after=0.05)
    await backend.producer.send_many(queue, [b"a", b"b"], delay=0.1)
    await backend.producer.send(queue, b"c", delay=0.1, deduplication_id="c")
    await backend.advance(0.4)
    await backend.statistics_of_open(queue, delayed=6, messages_expired=0)
    await backend.define(queue, paused=False)
    async with backend.consumer(queue) as consumer, receiving_nothing(consumer):
        await backend.statistics(queue, messages_expired=3, delivered=3)


async def test_messages_of_a_paused_queue_expire_when_it_is_resumed(backend: Backend) -> None:
    queue, other = await backend.new_queue(group="both"), await backend.new_queue(group="both")
    await backend.define(queue, paused=True)
    async with backend.consumer(group="both") as consumer:
        await backend.producer.send(queue, b"stale", expires_in=0.1)
        await backend.producer.send(other, b"other")
        assert await values(consumer, 1) == [b"other"]
        await backend.advance(0.3)
        await backend.define(queue, paused=False)
        async with receiving_nothing(consumer):
            await backend.statistics(queue, messages_expired=1)


async def test_an_expired_message_of_a_queue_that_delivers_at_most_once_ends(backend: Backend) -> None:
    queue = await backend.new_queue(delivery="at-most-once", expires_after=0.05)
    await backend.producer.send(queue, b"stale")
    await backend.advance(0.2)
    async with backend.consumer(queue) as consumer, receiving_nothing(consumer):
        await backend.statistics(queue, messages_expired=1, abandoned=0)


async def test_the_first_messages_of_a_process_are_checked_too(backend: Backend) -> None:
    """A consumer learns the brokers' time when its first ACQUIRE is written; it releases the message then."""
    queue = backend.new_name()
    await backend.producer.send_many(queue, [b"stale"] * 3, expires_in=0.05)
    await backend.advance(0.2)
    async with backend.consumer(queue) as consumer:
        async with receiving_nothing(consumer):
            await backend.statistics(queue, messages_expired=3)
        for _ in range(3):
            await backend.produce(backend.names.messages, b"stale", queue.encode(), [("marq-expires-at", b"1")])
        async with receiving_nothing(consumer):
            await backend.statistics(queue, messages_expired=6)
    assert [batch for batch in await backend.markers(Acquire) if batch.queue == queue and batch.dues_ms is not None]


async def test_a_message_that_waits_behind_a_slow_handler_expires_in_the_prefetch_buffer(backend: Backend) -> None:
    queue, seen, began, end = backend.new_name(), list[bytes](), asyncio.Event(), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        seen.append(message.value)
        began.set()
        await end.wait()

    consumer = backend.consumer(queue, lease=RENEWED_S)
    async with running(consumer, lambda: consumer.run(handle, concurrency=1)):
        await backend.producer.send(queue, b"slow")
        await backend.until(began.is_set)
        await backend.producer.send(queue, b"stale", expires_in=1.5)
        # While the handler runs, the consumer renews the leases; then it releases what has expired.
        await backend.statistics_of_open(queue, messages_expired=1)
        end.set()
        await backend.statistics(queue, acked=1, messages_expired=1)
    assert seen == [b"slow"]


@pytest.mark.parametrize("settings", [{"limits": {}}, {"fair": True}, {"priority": 3}])
async def test_an_expiry_is_refused_where_keys_take_turns(backend: Backend, settings: dict[str, Any]) -> None:
    queue = await backend.new_queue(**settings)
    with pytest.raises(marq.ConfigError, match=rf"queue '{queue}': .* limits, fair and priority"):
        await backend.producer.send(queue, b"x", expires_in=5)


@pytest.mark.parametrize("options", [{}, {"ordering_key": "k"}], ids=["without a key", "with a key"])
async def test_messages_of_a_queue_with_ordering_cannot_expire(backend: Backend, options: dict[str, Any]) -> None:
    queue = await backend.new_queue(ordering="key")
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': expires_in cannot be combined"):
        await backend.producer.send(queue, b"x", expires_in=5, **options)
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': expires_in cannot be combined"):
        await backend.producer.send_many(queue, [b"x"], expires_in=5, **options)
    with pytest.raises(
        marq.ConfigError, match=f"queue '{queue}': expires_after = 5 .* cannot be combined with ordering"
    ):
        await backend.queues.change(queue, expires_after=5)

    # Another program may write the header; it does not count.
    await backend.produce(backend.names.messages, b"old", queue.encode(), [("marq-expires-at", b"1")])
    async with backend.consumer(queue) as consumer:
        assert await values(consumer, 1) == [b"old"]


@pytest.mark.parametrize("expires_in", [0, -1, "1h", True, float("inf")])
async def test_a_bad_expiry_is_refused(backend: Backend, expires_in: Any) -> None:
    with pytest.raises(marq.ConfigError, match="expires_in="):
        await backend.producer.send("q", b"x", expires_in=expires_in)
    with pytest.raises(marq.ConfigError, match="expires_in="):
        await backend.producer.send_many("q", [b"x"], expires_in=expires_in)


async def test_each_way_to_send_says_when_a_message_expires(backend: Backend) -> None:
    queue, other, producer = backend.new_name(), backend.new_name(), backend.producer
    began_ms = round(1000 * await wall_s(backend))

    def send() -> None:
        with marq.SyncProducer(**backend.client) as sync:
            sync.send(queue, b"sync", expires_in=10)
            sync.send_many(queue, [b"sync many"], expires_in=10)

    await asyncio.to_thread(send)
    await producer.send([queue, other], b"both", expires_in=10)
    await producer.send(queue, b"once", expires_in=10, deduplication_id="once")
    await producer.send_many(queue, [b"once of many"], expires_in=10, deduplication_ids=["many"])
    await producer.send(queue, b"soon", expires_in=9, delay=1)
    await producer.send_many(queue, [b"soon of many", b"now of many"], expires_in=9, delay=[1, 1])
    await producer.send(queue, b"moment", expires_in=10, at=datetime(2020, 1, 1, tzinfo=UTC))

    delayed = [payload for batch in await backend.markers(Delay) if batch.queue == queue for payload in batch.payloads]
    sent = [record for record in await backend.records(backend.names.messages) if record.key == queue.encode()]
    expiries = {
        record.value: int(dict(record.headers)["marq-expires-at"]) - began_ms - 10_000
        for record in [*delayed, *sent]
        if record.value is not None
    }
    assert expiries.keys() == {
        b"sync", b"sync many", b"both", b"once", b"once of many", b"soon", b"soon of many", b"now of many", b"moment",
    }  # fmt: skip
    assert all(0 <= late_ms < 60_000 for late_ms in expiries.values()), expiries
