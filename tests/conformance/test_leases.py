"""Leases: renewed while a message is in flight, lost when they are over, and what may still be done then."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

import marq
from marq.wire.markers import Ack, Acquire, Payload, Renew, Source
from tests.conformance.backend import LIMIT_S, Backend
from tests.conformance.receiving import nothing_comes, running, take, take_one

#: Lease that outlasts short pauses of a busy machine.
SHORT_S = 4
#: A consumer whose messages are lost after that, since they may not be renewed for longer.
SHORT = {"lease": SHORT_S, "max_lease": SHORT_S}
#: A lease that must not expire. It is renewed every third of its length, so a longer lease survives longer stalls.
RENEWED_S = 8


async def renewed_past_its_lease(backend: Backend, message: marq.Message, lease_s: float) -> None:
    """Wait until a lease has been renewed past the time at which it would have ended otherwise."""
    first_end = message.lease_expires_at
    await backend.until(lambda: message.lease_expires_at > first_end + timedelta(seconds=lease_s))


async def test_a_lease_renews_itself_while_a_message_is_held(backend: Backend) -> None:
    async with backend.consumer("renewed-lease") as consumer:
        await backend.producer.send("renewed-lease", b"x")
        message = await take_one(consumer)

        await renewed_past_its_lease(backend, message, RENEWED_S)

        assert await consumer.receive(wait=0) == []
        await message.ack()
    await backend.statistics("renewed-lease", acked=1, expired=0)


async def test_a_message_whose_lease_is_over_is_delivered_again(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, **SHORT) as consumer:
        await backend.producer.send(queue, b"x", headers={"a": b"1"})
        message = await take_one(consumer)

        again = await take_one(consumer)

        assert (again.id, again.attempt, again.headers) == (message.id, 2, {"a": b"1"})
        await again.ack()
    await backend.statistics(queue, expired=1, redelivered=1, acked=1)


async def test_after_the_lease_only_an_ack_is_still_written(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, **SHORT) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 5)
        lost = await take(consumer, 5)
        again = []
        for _ in lost:
            again.append(await take_one(consumer))
            await again[-1].renew(60)

        for call in (lost[0].release(0), lost[1].reject(), lost[2].renew(), lost[0].release(0, wait=False)):
            with pytest.raises(marq.LeaseLost, match=f"queue '{queue}'.* attempt 1"):
                await call
        with pytest.raises(marq.LeaseLost, match="ack"):
            await lost[3].ack()
        with pytest.raises(marq.LeaseLost, match="1 of 1 messages"):
            await consumer.ack(lost[4])

        assert {message.id for message in again} == {message.id for message in lost}
        assert {message.attempt for message in again} == {2}
        await consumer.ack(again)
    acked = {(ack.source, offset) for ack in await backend.markers(Ack) if ack.queue == queue for offset in ack.offsets}
    written = {message.id for message in lost if ((backend.names.messages, message.partition), message.offset) in acked}
    assert written == {lost[3].id, lost[4].id}
    await backend.statistics(queue, acked=5, released=0, rejected=0, expired=5, late=2)


async def test_a_renewal_of_ones_own_keeps_a_message_longer(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, **SHORT) as consumer:
        await backend.producer.send_many(queue, [b"1", b"2"])
        kept, lost = await take(consumer, 2)
        before = kept.lease_expires_at

        await kept.renew(2_000)
        # A lease never gets shorter.
        await kept.renew(0.5)

        assert kept.lease_expires_at > before + timedelta(seconds=1_900)
        again = await take_one(consumer)
        assert again.id == lost.id
        await again.ack()
        await nothing_comes(backend, consumer)
        await kept.ack()
    await backend.statistics(queue, acked=2, redelivered=1)


async def test_a_handler_is_cancelled_when_its_message_is_lost_and_another_delivery_comes(backend: Backend) -> None:
    queue, begun, cancelled = backend.new_name(), [], []

    async def handle(message: marq.Message) -> None:
        begun.append(message.attempt)
        try:
            if message.attempt == 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(message.attempt)
            raise

    consumer = backend.consumer(queue, **SHORT)
    async with running(consumer, lambda: consumer.run(handle)):
        await backend.producer.send(queue, b"x")
        await backend.until(lambda: len(begun) == 2)

    assert (begun, cancelled) == ([1, 2], [1])
    await backend.statistics(queue, acked=1, expired=1)


async def test_the_last_attempt_may_end_by_its_lease(backend: Backend) -> None:
    queue = "two-attempts-of-a-lease"
    async with backend.consumer(queue, max_lease=SHORT_S) as consumer:
        await backend.producer.send(queue, b"x")
        assert [(await take_one(consumer)).attempt for _ in range(2)] == [1, 2]

        [letter] = await backend.dead_letters(queue)

    assert letter.reason == (
        "2 of 2 attempts used: the last time its lease ran out, as the time before: the process of its handler died, or"
        " the handler did not return"
    )


async def test_the_lease_of_the_queue_holds_where_the_consumer_says_nothing(backend: Backend) -> None:
    async with backend.consumer("lease-of-a-minute") as consumer:
        await backend.producer.send("lease-of-a-minute", b"x")
        message = await take_one(consumer)

        assert message.lease_expires_at - message.sent_at > timedelta(seconds=55)
        await message.ack()


async def test_the_max_lease_of_the_queue_holds_where_the_consumer_says_nothing(backend: Backend) -> None:
    queue = await backend.new_queue(lease=SHORT_S, max_lease=SHORT_S)
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        assert (await take_one(consumer)).attempt == 1
        again = await take_one(consumer)
        assert again.attempt == 2
        await again.ack()
    async with backend.consumer(queue, lease=RENEWED_S, max_lease=600) as consumer:
        await backend.producer.send(queue, b"y")
        message = await take_one(consumer)
        await renewed_past_its_lease(backend, message, RENEWED_S)
        await message.ack()
    await backend.statistics(queue, acked=2, expired=1)


async def test_a_max_lease_shorter_than_the_lease_is_refused_wherever_it_comes_from(backend: Backend) -> None:
    queue = await backend.new_queue(lease=60)
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': max_lease = 30 .* is shorter than lease = 60"):
        await backend.queues.change(queue, max_lease=30)
    assert (await backend.queues.change(queue, max_lease=timedelta(minutes=1))).max_lease == 60
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': max_lease = 60 .* is shorter than lease = 61"):
        await backend.queues.change(queue, lease=61)
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': lease=61 is longer than max_lease=60"):
        await backend.consumer(queue, lease=61).start()
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': lease=60 is longer than max_lease=59"):
        await backend.consumer(queue, max_lease=59).start()
    async with backend.consumer(queue, lease=61, max_lease=61):
        pass


async def test_a_call_may_choose_the_lease_of_what_it_receives(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, lease=20) as consumer:
        await backend.producer.send_many(queue, [b"1", b"2"])
        [first] = await consumer.receive(1, lease=timedelta(seconds=RENEWED_S))
        [second] = await consumer.receive(1, lease=90)

        assert second.lease_expires_at - first.lease_expires_at > timedelta(seconds=50)
        await renewed_past_its_lease(backend, first, RENEWED_S)
        assert await consumer.receive(wait=0) == []
        # Both were renewed automatically, each by its own lease.
        assert second.lease_expires_at - first.lease_expires_at > timedelta(seconds=50)
        await consumer.ack([first, second])
        with pytest.raises(marq.ConfigError, match="lease=3601 is longer than max_lease"):
            await consumer.receive(lease=3_601)
    await backend.statistics(queue, acked=2, expired=0)


@pytest.mark.parametrize("threads", [False, True], ids=["coroutine", "thread"])
async def test_a_handler_that_takes_longer_than_the_lease_never_runs_twice(backend: Backend, threads: bool) -> None:
    """Celery's visibility_timeout: a task that takes longer is given to a second worker while the first one works."""
    queue, begun, gate, opened = backend.new_name(), list[marq.Message](), asyncio.Event(), threading.Event()

    async def handle(message: marq.Message) -> None:
        begun.append(message)
        await gate.wait()

    def handle_in_a_thread(message: marq.Message) -> None:
        begun.append(message)
        opened.wait(LIMIT_S)

    one, two = backend.consumer(queue, lease=RENEWED_S), backend.consumer(queue, lease=RENEWED_S)
    async with one, two:
        working = [asyncio.create_task(each.run(handle_in_a_thread if threads else handle)) for each in (one, two)]
        await backend.producer.send(queue, b"x")
        await backend.until(lambda: bool(begun))
        await renewed_past_its_lease(backend, begun[0], RENEWED_S)
        gate.set()
        opened.set()
        await backend.statistics(queue, acked=1, expired=0, redelivered=0, late=0)
        await asyncio.gather(one.stop(), two.stop())
        await asyncio.gather(*working)

    assert [message.attempt for message in begun] == [1]
    kinds = [type(batch) for batch in await backend.markers(Acquire | Renew | Ack) if batch.queue == queue]
    assert kinds == [Acquire, *[Renew] * (len(kinds) - 2), Ack], "renewals end with the ack"


async def test_a_handler_that_is_stuck_in_a_thread_loses_its_message_after_max_lease(backend: Backend) -> None:
    queue, begun, stuck = backend.new_name(), [], threading.Event()

    def handle(message: marq.Message) -> None:
        begun.append(message.attempt)
        if message.attempt == 1:
            stuck.wait(LIMIT_S)

    consumer = backend.consumer(queue, lease=SHORT_S, max_lease=SHORT_S + 1)
    async with running(consumer, lambda: consumer.run(handle, concurrency=2)):
        begun_s = backend.now_s()
        await backend.producer.send(queue, b"x")
        await backend.until(lambda: len(begun) == 2)
        held_s = backend.now_s() - begun_s
        stuck.set()

    assert held_s > SHORT_S + 0.9
    assert begun == [1, 2]
    await backend.statistics(queue, acked=1, expired=1)


async def test_an_open_message_holds_up_no_other_and_comes_back_alone(backend: Backend) -> None:
    queue, other = backend.new_name(), backend.new_name("other")
    await backend.producer.send_many(queue, [b"%d" % number for number in range(20)])
    async with backend.consumer(queue, lease=RENEWED_S) as consumer, backend.consumer(other) as of_other:
        messages = await take(consumer, 20)
        first = min(messages, key=lambda message: (message.partition, message.offset))
        for message in reversed(messages):
            if message is not first:
                await message.ack()
        # The first record of its partition stays open, and the position is past all records.
        await consumer.stop()
        async with backend.consumer(queue) as later:
            again = await take_one(later)
            assert (again.id, again.attempt) == (first.id, 2)
            await again.ack()
            await nothing_comes(backend, later, of_other)
    await backend.statistics(queue, acquired=21, reacquired=0, acked=20, redelivered=1)


@pytest.mark.parametrize("lease_s", [600, 0.1], ids=["open", "over"])
async def test_messages_of_a_consumer_that_crashed_before_its_commit_go_to_the_next_reader(
    backend: Backend, lease_s: float
) -> None:
    queue, topic, holder = backend.new_name(), backend.names.messages, 7
    sent = [await backend.produce(topic, b"%d" % number, queue.encode()) for number in range(3)]
    offsets = [int(identity.rpartition("/")[2]) for identity in sent]
    payloads = [Payload(0, 1, queue.encode(), (), b"%d" % number) for number in range(3)]
    await backend.mark(Acquire(queue, holder, Source(topic, 0), offsets, int(lease_s * 1000), offsets[0], payloads))
    if lease_s < 1:
        await backend.statistics(queue, redelivered=3)

    async with backend.consumer(queue) as consumer:
        # The next reader finds the records and, if the lease was over before, their redeliveries.
        messages = await take(consumer, 3 if lease_s > 1 else 6)
        await consumer.ack(messages)
        await nothing_comes(backend, consumer)

    assert {message.id for message in messages} == set(sent)
    if lease_s > 1:
        assert {message.attempt for message in messages} == {1}
        await backend.statistics(queue, acquired=3, reacquired=3, acked=3, redelivered=0)
    else:
        assert sorted(message.attempt for message in messages) == [1] * 3 + [2] * 3
