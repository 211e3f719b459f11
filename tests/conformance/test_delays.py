"""Delayed messages: delivered at their time and not before, moved and cancelled until then."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import marq
from marq.wire.markers import Ack, Acquire, Cause, Delay, Fact, Kind
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one

#: How early a message may seem by the clock of a test: the broker's clock counts whole milliseconds.
EARLY_S = 0.005


async def wall_s(backend: Backend) -> float:
    """Return the time of the broker's wall clock."""
    receipt = await backend.producer.send(backend.new_name(), b"what time is it")
    [record] = [
        each
        for each in await backend.records(backend.names.messages)
        if (each.partition, each.offset) == (receipt.partition, receipt.offset)
    ]
    return record.timestamp / 1000


async def taken_at(backend: Backend, consumer: marq.Consumer, count: int) -> dict[bytes, float]:
    """Receive and ack messages; return the time at which each value came."""
    came: dict[bytes, float] = {}
    while len(came) < count:
        message = await take_one(consumer)
        came[message.value] = backend.now_s()
        await message.ack()
    return came


async def test_a_delayed_message_comes_when_its_time_has_come(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        receipt = await backend.producer.send(queue, b"later", headers={"tenant": b"acme"}, delay=0.7)

        message = await take_one(consumer)

        assert backend.now_s() - began_s >= 0.7 - EARLY_S
        assert (message.value, message.headers, message.attempt) == (b"later", {"tenant": b"acme"}, 1)
        assert message.id == receipt.id
        assert receipt.queue == queue
        await message.ack()
    await backend.statistics(queue, delayed=1, delivered=1, acquired=1, acked=1, redelivered=0)


async def test_a_moment_may_be_given(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        at = datetime.fromtimestamp(await wall_s(backend) + 1, UTC)
        await backend.producer.send(queue, b"past", at=at - timedelta(days=1))
        await backend.producer.send(queue, b"future", at=at)

        came = await taken_at(backend, consumer, 2)

        assert came.keys() == {b"past", b"future"}
        assert came[b"future"] - began_s >= 1 - EARLY_S


async def test_many_messages_are_delayed_together_or_each_to_its_own_time(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        await backend.producer.send_many(queue, [b"a", b"b"], delay=0.2)
        await backend.producer.send_many(queue, [b"c", b"d", b"e"], delay=[0.9, 0, timedelta(seconds=0.5)])

        came = await taken_at(backend, consumer, 5)

        least_s = {b"a": 0.2, b"b": 0.2, b"c": 0.9, b"d": 0, b"e": 0.5}
        assert came.keys() == least_s.keys()
        assert all(came[value] - began_s >= least - EARLY_S for value, least in least_s.items())
    await backend.statistics(queue, delivered=5, acked=5)


async def test_a_delay_of_nothing_is_none(backend: Backend) -> None:
    queue = backend.new_name()
    receipt = await backend.producer.send(queue, b"now", delay=0)

    assert receipt.topic == backend.names.messages


async def test_a_message_to_several_queues_may_be_delayed(backend: Backend) -> None:
    queues = [backend.new_name(), backend.new_name()]
    receipts = await backend.producer.send(queues, b"both", delay=0.2)

    for queue, receipt in zip(queues, receipts, strict=True):
        async with backend.consumer(queue) as consumer:
            message = await take_one(consumer)
            assert (message.id, message.queue) == (receipt.id, queue)
            await message.ack()


async def test_a_cancelled_message_is_never_delivered(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    async with backend.consumer(queue) as consumer:
        first, second = await producer.send_many(queue, [b"first", b"second"], delay=600)

        assert await producer.cancel(first) is True
        assert await producer.cancel(first) is False
        assert await producer.reschedule([first, second], delay=0) == [False, True]

        message = await take_one(consumer)
        assert message.value == b"second"
        await message.ack()
        assert await producer.cancel([first, second]) == [False, False]
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, delayed=2, cancelled=1, delivered=1, acked=1)


async def test_a_message_is_delivered_at_the_time_to_which_it_was_moved(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        receipts = await backend.producer.send_many(queue, [b"sooner", b"later"], delay=600)

        assert await backend.producer.reschedule(receipts[0], delay=0) is True
        assert await backend.producer.reschedule(receipts[1], delay=timedelta(seconds=1)) is True

        came = await taken_at(backend, consumer, 2)
        assert came.keys() == {b"sooner", b"later"}
        assert came[b"later"] - began_s >= 1 - EARLY_S
        assert await backend.producer.reschedule(receipts, delay=1) == [False, False]
    await backend.statistics(queue, delivered=2, acked=2)


async def test_what_was_delivered_can_not_be_cancelled(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        receipt = await backend.producer.send(queue, b"now")
        assert await backend.producer.cancel(receipt) is False
        message = await take_one(consumer)
        assert await backend.producer.cancel(receipt) is False
        await message.ack()


async def test_many_ask_at_the_same_moment(backend: Backend) -> None:
    queue, producer = backend.new_name(), backend.producer
    receipts = await producer.send_many(queue, [b"%d" % number for number in range(200)], delay=3600)

    moved = asyncio.gather(*[producer.reschedule(receipt, delay=7200) for receipt in receipts[:100]])
    cancelled = asyncio.gather(*[producer.cancel(receipt) for receipt in receipts[100:]])

    assert set(await moved) == {True}
    assert set(await cancelled) == {True}
    assert set(await producer.cancel(receipts[:100])) == {True}
    await backend.statistics(queue, delayed=200, cancelled=200, delivered=0)


async def test_a_delay_takes_no_lease_and_no_attempt(backend: Backend) -> None:
    queue = await backend.new_queue(max_attempts=1, lease=4)
    async with backend.consumer(queue) as consumer:
        # Longer than the lease: if a delay were a consumer's lease, the message would come twice.
        await backend.producer.send(queue, b"later", delay=4.5)

        message = await take_one(consumer)

        assert message.attempt == 1
        await message.ack()
        await nothing_comes(backend, consumer)
    await backend.statistics(queue, delivered=1, redelivered=0, expired=0, dead_lettered=0, acked=1)


async def test_a_plain_record_may_say_when_it_is_to_be_delivered(backend: Backend) -> None:
    queue, began_s = backend.new_name(), backend.now_s()
    at_ms = round((await wall_s(backend) + 1) * 1000)
    async with backend.consumer(queue) as consumer:
        later = await backend.produce(
            backend.names.messages, b"later", queue.encode(), [("marq-deliver-at", b"%d" % at_ms), ("own", b"1")]
        )
        await backend.produce(backend.names.messages, b"now", queue.encode())
        for bad in (b"tomorrow", b"-5", b"9" * 20, b""):
            await backend.produce(backend.names.messages, b"bad", queue.encode(), [("marq-deliver-at", bad)])

        messages = await take(consumer, 6)

        assert sorted(message.value for message in messages) == [b"bad"] * 4 + [b"later", b"now"]
        [delayed] = [message for message in messages if message.value == b"later"]
        assert backend.now_s() - began_s >= 1 - EARLY_S
        assert (delayed.id, delayed.attempt, delayed.headers) == (later, 1, {"own": b"1"})
        await consumer.ack(messages)
    await backend.statistics(queue, acquired=6, delayed=1, delivered=1, acked=6, redelivered=0)


async def test_a_queue_may_delay_all_of_its_messages(backend: Backend) -> None:
    queue = await backend.new_queue(delay=0.7)
    async with backend.consumer(queue) as consumer:
        began_s = backend.now_s()
        await backend.producer.send(queue, b"queue's")
        await backend.produce(backend.names.messages, b"plain", queue.encode())

        messages = await take(consumer, 2)

        assert backend.now_s() - began_s >= 0.7 - EARLY_S
        assert {message.value for message in messages} == {b"queue's", b"plain"}
        await messages[0].release()
        await messages[1].ack()
        again = await take_one(consumer)
        assert again.attempt == 2
        await again.ack()
    await backend.statistics(queue, delayed=2, delivered=2, redelivered=1, acked=2)


async def test_a_handler_gets_what_was_delayed(backend: Backend) -> None:
    queue, seen = backend.new_name(), list[bytes]()

    async def handle(message: marq.Message) -> None:
        seen.append(message.value)

    consumer = backend.consumer(queue)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"later", delay=0.5)
        await backend.until(lambda: bool(seen))
    assert seen == [b"later"]


async def test_the_markers_tell_the_whole_story(backend: Backend) -> None:
    queue = backend.new_name()
    kept, cancelled = await backend.producer.send_many(queue, [b"kept", b"cancelled"], delay=[0.2, 600])
    await backend.producer.cancel(cancelled)
    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        await message.ack()
    await backend.statistics(queue, delivered=1, cancelled=1)

    async def of(kind: type[Any]) -> list[Any]:
        return [batch for batch in await backend.markers(kind) if batch.queue == queue]

    [delay] = await of(Delay)
    assert [payload.value for payload in delay.payloads] == [b"kept", b"cancelled"]
    assert {(fact.kind, *fact.offsets, *fact.causes) for fact in await of(Fact)} == {
        (Kind.DELIVERED, kept.offset, Cause.DUE),
        (Kind.CANCELLED, cancelled.offset, Cause.CANCELLED),
    }
    [acquired], [acked] = await of(Acquire), await of(Ack)
    assert acquired.source == acked.source == (backend.names.messages, message.partition)
    assert list(acquired.offsets) == list(acked.offsets) == [message.offset]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"delay": -1}, "delay=-1: expected seconds from 0"),
        ({"delay": "soon"}, "delay='soon': expected seconds"),
        ({"delay": float("nan")}, "delay=nan: expected seconds"),
        ({"at": datetime(2030, 1, 1)}, "has no time zone"),  # noqa: DTZ001
        ({"at": 5}, "at=5: expected a datetime with a time zone"),
        ({"delay": 1, "at": datetime.now(UTC)}, "pass one of them"),
    ],
)
async def test_a_time_that_is_none_is_refused(backend: Backend, times: dict[str, object], said: str) -> None:
    queue = backend.new_name()
    with pytest.raises(marq.ConfigError, match=said):
        await backend.producer.send(queue, b"x", **times)  # type: ignore[arg-type]
    with pytest.raises(marq.ConfigError, match=said):
        await backend.producer.send_many(queue, [b"x"], **times)  # type: ignore[arg-type]


async def test_lists_of_times_must_fit(backend: Backend) -> None:
    queue = backend.new_name()
    with pytest.raises(marq.ConfigError, match="delay has 1 times for 2 messages"):
        await backend.producer.send_many(queue, [b"x", b"y"], delay=[1])
    with pytest.raises(marq.ConfigError, match=r"delay\[1\]='soon'"):
        await backend.producer.send_many(queue, [b"x", b"y"], delay=[1, "soon"])  # type: ignore[list-item]
    with pytest.raises(marq.ConfigError, match="say when"):
        await backend.producer.reschedule(marq.Receipt(queue, "t", 0, 0))
    with pytest.raises(TypeError, match="takes the receipt that send"):
        await backend.producer.cancel([5])  # type: ignore[list-item]
    with pytest.raises(marq.ConfigError, match="expected the id of a message"):
        await backend.producer.cancel("nonsense")


async def test_a_message_is_known_by_its_id_alone(backend: Backend) -> None:
    queue = backend.new_name()
    one, other = await backend.producer.send_many(queue, [b"one", b"other"], delay=3600)

    assert await backend.producer.cancel(one.id) is True
    assert await backend.producer.reschedule([one.id, other.id], delay=0) == [False, True]

    async with backend.consumer(queue) as consumer:
        assert (await take_one(consumer)).id == other.id


async def test_code_without_an_event_loop_delays_cancels_and_moves(backend: Backend) -> None:
    queue = backend.new_name()

    def work() -> list[marq.Receipt]:
        with marq.SyncProducer(**backend.client) as producer:
            one = producer.send(queue, b"one", delay=3600)
            two, three = producer.send_many(queue, [b"two", b"three"], delay=[3600, timedelta(hours=1)])
            assert producer.cancel(one) is True
            assert producer.reschedule([one, two], delay=0) == [False, True]
            assert producer.cancel([three]) == [True]
            return [one, two, three]

    _, two, _ = await asyncio.to_thread(work)
    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        assert message.id == two.id
        await message.ack()
    await backend.statistics(queue, delayed=3, cancelled=2, delivered=1, acked=1)
