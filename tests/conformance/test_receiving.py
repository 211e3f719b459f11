"""How messages are received: by calls and by iteration, how many at a time, and what becomes of them at a stop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import marq
from tests.conformance.backend import LIMIT_S, Backend
from tests.conformance.receiving import nothing_comes, running, send, take, take_one
from tests.conformance.test_leases import RENEWED_S


async def test_an_empty_queue_gives_an_empty_list_when_the_wait_is_over(backend: Backend) -> None:
    async with backend.consumer(backend.new_name()) as consumer:
        began_s = backend.now_s()

        assert await consumer.receive(wait=0.5) == []

        assert backend.now_s() - began_s > 0.45
        assert await consumer.receive(wait=0) == []


async def test_receive_returns_what_there_is_and_no_more_than_was_asked_for(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 5)
        messages = await take(consumer, 5)
        await consumer.ack(messages)
        await backend.producer.send_many(queue, [b"y"] * 20)

        while len(messages) < 25:
            more = await consumer.receive(max_messages=7, wait=20)
            assert 1 <= len(more) <= 7
            await consumer.ack(more)
            messages += more

        assert len({message.id for message in messages}) == 25


async def test_a_clean_exit_of_the_block_acks_and_an_exception_releases_with_backoff(backend: Backend) -> None:
    queue, attempts = backend.new_name(), []
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"good", b"bad"])

        async for message in consumer:
            attempts.append((message.value, message.attempt))
            if attempts[-1] == (b"bad", 1):
                with pytest.raises(LookupError, match="out of the block"):
                    async with message:
                        raise LookupError("out of the block")
            else:
                async with message:
                    pass
            if len(attempts) == 3:
                break
        await consumer.flush()

    assert sorted(attempts) == [(b"bad", 1), (b"bad", 2), (b"good", 1)]
    await backend.statistics(queue, acked=2, released=1, redelivered=1)


async def test_retry_and_reject_end_at_the_block(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")

        async for message in consumer:
            async with message:
                if message.attempt == 1:
                    raise marq.Retry(delay=0.3)
                raise marq.Reject("no good")
            if message.attempt == 2:
                break

    [letter] = await backend.dead_letters(queue)
    assert (letter.reason, letter.attempt) == ("no good", 2)


async def test_iteration_ends_with_the_consumer(backend: Backend) -> None:
    queue, seen = backend.new_name(), []
    consumer = backend.consumer(queue)
    await consumer.start()

    async def iterate() -> None:
        async for message in consumer:
            async with message:
                seen.append(message.value)

    iterating = asyncio.create_task(iterate())
    await backend.producer.send(queue, b"x")
    await backend.until(lambda: bool(seen))
    await consumer.stop()

    async with asyncio.timeout(60):
        await iterating
    assert seen == [b"x"]


async def test_what_is_held_is_bounded_and_goes_on_when_something_is_finished(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, max_in_flight=5) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 12)
        held = await take(consumer, 5)
        await nothing_comes(backend, consumer)

        await consumer.ack(held[:2])
        more = await take(consumer, 2)
        await nothing_comes(backend, consumer)
        await consumer.ack(held[2:] + more)

        await consumer.ack(await take(consumer, 5))
    await backend.statistics(queue, acked=12)


@pytest.mark.parametrize("where", [None, "consumer", "settings"])
async def test_both_ways_to_start_messages_look_alike(backend: Backend, where: str | None) -> None:
    queue, transactional = backend.new_name(), where == "consumer"
    if where == "settings":
        await backend.define(queue, transactional=True)
    await backend.producer.send_many(queue, [b"%d" % number for number in range(20)])

    async with backend.consumer(queue, transactional=transactional) as consumer:
        messages = await take(consumer, 20)
        await consumer.ack(messages[1:])
        await messages[0].release()
        again = await take_one(consumer)
        await again.ack()

    assert sorted(int(message.value) for message in messages) == list(range(20))
    assert (again.value, again.attempt) == (messages[0].value, 2)
    async with backend.consumer(queue, transactional=transactional) as consumer:
        assert await consumer.receive(wait=1) == []
    await backend.statistics(queue, acked=20, released=1, redelivered=1)


async def test_consumers_share_a_queue_and_each_message_is_handled_once(backend: Backend) -> None:
    queue, first = backend.new_name(), 0
    seen = [Counter[bytes](), Counter[bytes]()]

    async def serve(consumer: marq.Consumer, mine: Counter[bytes]) -> None:
        async def handle(message: marq.Message) -> None:
            mine[message.value] += 1

        await consumer.run(handle)

    async with backend.consumer(queue) as one, backend.consumer(queue) as other:
        serving = [asyncio.create_task(serve(*each)) for each in zip((one, other), seen, strict=True)]
        while not all(seen):
            await backend.producer.send_many(queue, [b"first"] * 2)
            first += 2
            await backend.advance(0.1)
        # Now each of them has a partition.
        before = [mine.total() for mine in seen]
        values = [b"%d" % number for number in range(100)]
        await backend.producer.send_many(queue, values)
        await backend.statistics(queue, acked=100 + first, redelivered=0)
        await asyncio.gather(one.stop(), other.stop())
        await asyncio.gather(*serving)

    assert seen[0] + seen[1] == Counter({**dict.fromkeys(values, 1), b"first": first})
    assert all(mine.total() > earlier for mine, earlier in zip(seen, before, strict=True))


async def test_a_receive_that_is_cancelled_loses_no_message(backend: Backend) -> None:
    queue, received = backend.new_name(), list[marq.Message]()
    async with backend.consumer(queue) as consumer:
        for number in range(20):
            receiving = asyncio.create_task(consumer.receive(wait=LIMIT_S))
            # Cancelled while it waits, or just as the message comes.
            await backend.producer.send(queue, b"%d" % number)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            if not receiving.cancelled():
                received += receiving.result()
        received += await take(consumer, 20 - len(received))
        await consumer.ack(received)

    assert sorted(int(message.value) for message in received) == list(range(20))
    await backend.statistics(queue, acked=20, redelivered=0)


async def test_a_consumer_that_joins_takes_over_partitions_and_nothing_comes_twice(backend: Backend) -> None:
    queue, seen = backend.new_name(), []
    async with backend.consumer(queue) as first:
        await backend.producer.send_many(queue, [b"%d" % number for number in range(20)])
        held = await take(first, 20)
        async with backend.consumer(queue) as second:
            await backend.producer.send_many(queue, [b"%d" % number for number in range(20, 40)])
            while len(seen) < 20:
                for messages in await asyncio.gather(first.receive(wait=0.5), second.receive(wait=0.5)):
                    seen += messages
            await asyncio.gather(*[message.ack() for message in seen])
        # Messages received before the rebalance are still in flight.
        await first.ack(held)

    assert sorted(int(message.value) for message in [*held, *seen]) == list(range(40))
    await backend.statistics(queue, acked=40, redelivered=0)


async def test_a_stop_releases_prefetched_messages_without_counting_the_attempt(backend: Backend) -> None:
    queue, started = backend.new_name(), asyncio.Event()

    async def hang(message: marq.Message) -> None:
        started.set()
        await asyncio.Event().wait()

    consumer = backend.consumer(queue, shutdown_timeout=0)
    async with running(consumer, lambda: consumer.run(hang, concurrency=2)):
        await backend.producer.send_many(queue, [b"x"] * 4)
        await backend.until(started.is_set)

    async with backend.consumer(queue) as other:
        messages = await take(other, 4)
        assert [message.attempt for message in messages] == [1] * 4
        await other.ack(messages)


async def test_a_stop_without_release_leaves_what_was_prefetched_until_its_lease_ends(backend: Backend) -> None:
    queue, started = backend.new_name(), asyncio.Event()

    async def hang(message: marq.Message) -> None:
        started.set()
        await asyncio.Event().wait()

    await backend.producer.send_many(queue, [b"x"] * 2)
    consumer = backend.consumer(queue, lease=RENEWED_S, shutdown_timeout=0)
    async with running(consumer, lambda: consumer.run(hang, concurrency=1)):
        await backend.until(lambda: started.is_set() and consumer.in_flight == 2)
        await consumer.stop(release=False)

    async with backend.consumer(queue) as other:
        # The cancelled one was released without counting its attempt; the other one comes when its lease expires.
        messages = await take(other, 2)
        assert [message.attempt for message in messages] == [1, 1]
        await other.ack(messages)


async def test_what_was_taken_and_not_finished_stays_leased_after_a_stop(backend: Backend) -> None:
    queue, began_s = backend.new_name(), backend.now_s()
    async with backend.consumer(queue, lease=4) as consumer:
        await backend.producer.send(queue, b"x")
        taken = await take_one(consumer)
    async with backend.consumer(queue) as other:
        again = await take_one(other)

        assert (again.id, again.attempt) == (taken.id, 2)
        assert backend.now_s() - began_s > 3.9
        await again.ack()


async def test_a_consumer_does_not_report_an_ack_that_its_stopped_session_cannot_write(backend: Backend) -> None:
    queue = await backend.new_queue()
    await send(backend, queue, 0, 2)
    consumer = backend.consumer(queue)
    async with consumer:
        first, second = await take(consumer, 2)
    async with consumer, backend.consumer(queue) as other:
        for caller, message in ((consumer, first), (other, second)):
            with pytest.raises(marq.BrokerUnavailable, match="the consumer is stopped"):
                await caller.ack([message])
            # A token names the lease, so any consumer can write its ack.
            await caller.ack(message.token)
    await backend.statistics(queue, acked=2)


async def test_a_consumer_may_be_started_and_stopped_twice_and_again(backend: Backend) -> None:
    queue = backend.new_name()
    consumer = backend.consumer(queue)
    for number in (b"1", b"2"):
        await consumer.start()
        await consumer.start()
        await backend.producer.send(queue, number)
        message = await take_one(consumer)
        assert message.value == number
        await message.ack()
        await consumer.stop()
        await consumer.stop()
        with pytest.raises(marq.MarqError, match=rf"consumer of queue '{queue}' is stopped: call start\(\)"):
            await consumer.receive()


async def test_flush_makes_queued_acks_durable(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send_many(queue, [b"x"] * 10)
        for message in await take(consumer, 10):
            await message.ack(wait=False)
        await consumer.flush()

        await backend.statistics(queue, acked=10)
    await consumer.flush()


async def test_receive_checks_what_it_is_given(backend: Backend) -> None:
    async with backend.consumer(backend.new_name()) as consumer:
        with pytest.raises(marq.ConfigError, match="max_messages=0"):
            await consumer.receive(max_messages=0)
        with pytest.raises(marq.ConfigError, match="wait=-1"):
            await consumer.receive(wait=-1)
