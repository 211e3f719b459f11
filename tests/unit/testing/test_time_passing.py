"""When virtual time passes, and what is waited for in real time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

import marq
from marq.testing import Broker, Unfinished
from tests.unit.testing.handling import handling

#: A day of virtual time, in seconds.
DAY = 86_400


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(defaults={"backoff": {"base": 10, "jitter": False}}) as broker:
        yield broker


@pytest.fixture
async def producer(broker: Broker) -> AsyncIterator[marq.Producer]:
    async with broker.producer() as producer:
        yield producer


def passed(broker: Broker) -> Callable[[], float]:
    began = broker.now
    return lambda: (broker.now - began).total_seconds()


async def test_time_does_not_pass_by_itself(broker, producer) -> None:
    elapsed = passed(broker)
    async with broker.consumer("q", lease=30) as consumer:
        await producer.send("q", b"x")
        await (await consumer.receive())[0].release(5)
        await broker.settle()
        await broker.drain("q")

        assert elapsed() == 0
        assert len(broker.delayed("q")) == 1


async def test_waiting_for_messages_passes_time_up_to_the_next_one_or_to_the_end_of_the_wait(broker, producer) -> None:
    elapsed = passed(broker)
    async with broker.consumer("q") as consumer:
        assert await consumer.receive(wait=DAY) == []
        assert elapsed() == DAY

        await producer.send("q", b"x")
        [message] = await consumer.receive(wait=DAY)
        await message.release(7.5)
        [message] = await consumer.receive(wait=DAY)

        assert elapsed() == DAY + 7.5
        await message.release(5)
        # If both happen at the same time, the message wins.
        assert len(await consumer.receive(wait=5)) == 1


async def test_iterating_in_the_tests_own_task_passes_time_to_the_next_message(broker, producer) -> None:
    elapsed, attempts = passed(broker), []
    async with broker.consumer("q") as consumer:
        await producer.send("q", b"x")
        async for message in consumer:
            attempts.append(message.attempt)
            if message.attempt == 3:
                await message.ack()
                break
            async with message:
                raise marq.Retry(delay=100)

    assert attempts == [1, 2, 3]
    assert elapsed() == 200


async def test_iterating_in_the_background_passes_none(broker, producer) -> None:
    elapsed, attempts = passed(broker), []

    async def serve(consumer: marq.Consumer) -> None:
        async for message in consumer:
            async with message:
                attempts.append(message.attempt)
                raise marq.Retry(delay=100)

    async with broker.consumer("q") as consumer:
        serving = asyncio.create_task(serve(consumer))
        await producer.send("q", b"x")
        await broker.settle()
        await asyncio.sleep(0.02)
        assert (attempts, elapsed()) == ([1], 0)

        await broker.advance(100)
        assert attempts == [1, 2]
        await consumer.stop()
        await serving


async def test_advance_does_everything_in_its_order(broker, producer) -> None:
    elapsed, seen = passed(broker), []

    async def handle(message: marq.Message) -> None:
        seen.append((elapsed(), int(message.value), message.attempt))
        raise marq.Retry(delay=int(message.value))

    async with handling(broker.consumer("q"), handle):
        await producer.send_many("q", [b"2", b"3"])
        await broker.advance(6)

        assert sorted(seen) == [(0, 2, 1), (0, 3, 1), (2, 2, 2), (3, 3, 2), (4, 2, 3), (6, 2, 4), (6, 3, 3)]
        assert elapsed() == 6


async def test_a_held_message_is_renewed_for_hours_and_lost_at_its_max_lease(broker, producer) -> None:
    async with broker.consumer("q", lease=30, max_lease=7200) as consumer:
        await producer.send("q", b"x")
        [message] = await consumer.receive()

        await broker.advance(7199)
        assert len(broker.in_flight("q")) == 1
        assert (message.lease_expires_at - broker.now).total_seconds() == pytest.approx(1, abs=0.01)
        await broker.advance(1)

        assert [message.attempt for message in broker.messages("q")] == [2]
        with pytest.raises(marq.LeaseLost):
            await message.ack()


async def test_a_pause_ends_for_workers_after_hours(broker, producer) -> None:
    elapsed, seen = passed(broker), []

    @marq.handler("emails")
    async def handle(message: marq.Message) -> None:
        seen.append((message.value, elapsed()))

    async with broker.worker(handle):
        await broker.queues.pause("emails", 3 * 3600)
        await producer.send("emails", b"now")
        await producer.send("emails", b"later", delay=60)
        await broker.advance(3 * 3600 - 1)
        assert seen == []
        await broker.advance(2)

    assert sorted(value for value, _ in seen) == [b"later", b"now"]
    # The end is a whole second.
    assert {10_800 <= at_s <= 10_801 for _, at_s in seen} == {True}


async def test_a_handler_with_real_io_is_waited_for_in_real_time(broker, producer) -> None:
    elapsed, done = passed(broker), []

    async def read() -> bytes:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(b"done")
        writer.close()

    async def handle(message: marq.Message) -> None:
        done.append(await read())

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, handling(broker.consumer("q"), handle):
        await producer.send_many("q", [b"x"] * 3)
        await broker.settle()

        assert done == [b"done"] * 3
        assert len(broker.acked("q")) == 3
        assert elapsed() == 0


async def test_threads_and_loops_of_ones_own_are_waited_for_too(broker, producer) -> None:
    threads, iterated = [], []

    def handle(message: marq.Message) -> None:
        time.sleep(0.01)
        threads.append(threading.current_thread())

    async def iterate(consumer: marq.Consumer) -> None:
        async for message in consumer:
            async with message:
                await asyncio.sleep(0.01)
                iterated.append(message.value)

    async with broker.consumer("threads") as one, broker.consumer("loop") as other:
        tasks = [asyncio.create_task(one.run(handle)), asyncio.create_task(iterate(other))]
        await producer.send_many("threads", [b"x"] * 5)
        await producer.send_many("loop", [b"x"] * 5)
        await broker.settle()

        assert (len(threads), len(iterated)) == (5, 5)
        await asyncio.gather(one.stop(), other.stop())
        await asyncio.gather(*tasks)


async def test_a_handler_that_waits_for_messages_itself_does_not_hold_anybody_up(broker, producer) -> None:
    replies = []

    async def ask(message: marq.Message) -> None:
        await producer.send("questions", message.value)
        [reply] = await answers.receive(wait=60)
        replies.append(reply.value)
        await reply.ack()

    async def reply(message: marq.Message) -> None:
        if message.attempt == 1:
            raise marq.Retry(delay=10)
        await producer.send("answers", message.value)

    consumers = [broker.consumer(queue) for queue in ("q", "questions", "answers")]
    for consumer in consumers:
        await consumer.start()
    first, second, answers = consumers
    tasks = [asyncio.create_task(first.run(ask)), asyncio.create_task(second.run(reply))]
    await producer.send("q", b"x")
    await broker.drain(later=True)

    assert replies == [b"x"]
    await asyncio.gather(*[consumer.stop() for consumer in consumers])
    await asyncio.gather(*tasks)


async def test_a_handler_that_hangs_is_named_and_time_may_pass_over_it(broker, producer) -> None:
    begun = asyncio.Event()

    async def hang(message: marq.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with handling(broker.consumer("q", max_lease=60, shutdown_timeout=0), hang):
        await producer.send("q", b"x")
        await asyncio.wait_for(begun.wait(), 60)
        for waiting in (broker.settle(limit=0.05), broker.advance(1, limit=0.05), broker.drain("q", limit=0.05)):
            with pytest.raises(Unfinished, match=r"within 0\.05 real seconds.*at work: .*hang"):
                await waiting

        await broker.advance(61, settle=False)

        # Lost, delivered again, and it hangs again.
        assert [message.attempt for message in broker.in_flight("q")] == [2]


async def test_leases_are_renewed_while_a_stop_waits_for_handlers(broker, producer) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handle(message: marq.Message) -> None:
        begun.set()
        await gate.wait()

    async with broker.consumer("q", lease=10, shutdown_timeout=600) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await producer.send("q", b"x")
        await asyncio.wait_for(begun.wait(), 60)
        stopping = asyncio.create_task(consumer.stop())
        await broker.advance(100, settle=False)
        [in_flight] = broker.in_flight("q")
        gate.set()
        await asyncio.gather(stopping, running)

    assert in_flight.attempt == 1
    assert [message.value for message in broker.acked("q")] == [b"x"]


async def test_a_receiver_does_not_wait_forever_for_a_hanging_handler(broker, producer, monkeypatch, caplog) -> None:
    monkeypatch.setattr("marq.testing.time_passing._PATIENCE_S", 0.1)
    elapsed = passed(broker)

    async def hang(message: marq.Message) -> None:
        await asyncio.Event().wait()

    async with handling(broker.consumer("q", shutdown_timeout=0), hang), broker.consumer("other") as other:
        await producer.send("q", b"x")

        assert await other.receive(wait=100) == []
        assert await other.receive(wait=100) == []

        assert elapsed() == 200
        assert len([text for text in caplog.messages if "advances although handlers still run" in text]) == 1


async def test_the_limit_of_an_advance_is_that_of_each_step(broker, producer, monkeypatch) -> None:
    real_s = 0.0
    monkeypatch.setattr("marq.testing.time_passing.time", SimpleNamespace(monotonic=lambda: real_s))

    async def take_long(message: marq.Message) -> None:
        nonlocal real_s
        real_s += 40

    async with handling(broker.consumer("q"), take_long):
        for delay in (10, 20, 30):
            await producer.send("q", b"x", delay=delay)
        await broker.advance(60, limit=60)

        assert len(broker.acked("q")) == 3


async def test_drain_says_what_is_left(broker, producer) -> None:
    await producer.send_many("orphans", [b"x"] * 3)

    with pytest.raises(Unfinished, match="queue 'orphans': 3 waiting"):
        await broker.drain(limit=0.05)


async def test_drain_waits_for_a_consumer_that_is_about_to_come(broker, producer) -> None:
    async def serve() -> None:
        await asyncio.sleep(0.03)
        async with broker.consumer("q") as consumer:
            await consumer.run(lambda message: None)

    await producer.send("q", b"x")
    serving = asyncio.create_task(serve())
    await broker.drain("q")

    assert len(broker.acked("q")) == 1
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_drain_with_what_is_due_later_goes_through_all_attempts(broker, producer) -> None:
    elapsed = passed(broker)

    async def fail(message: marq.Message) -> None:
        raise LookupError("always")

    async with handling(broker.consumer("q"), fail):
        await producer.send("q", b"x")
        await broker.drain("q", later=True)

        [letter] = broker.dead_letters("q")
        assert (letter.attempt, letter.error) == (5, "LookupError: always")
        # No backoff after the last attempt.
        assert elapsed() == 10 + 20 + 40 + 80


async def test_a_loop_that_polls_in_the_background_leaves_the_processor_to_others(broker, producer) -> None:
    rounds, begun = 0, asyncio.Event()

    async def poll(consumer: marq.Consumer) -> None:
        nonlocal rounds
        while True:
            await consumer.receive(wait=1)
            rounds += 1
            begun.set()

    async with broker.consumer("q") as consumer:
        polling = asyncio.create_task(poll(consumer))
        await asyncio.wait_for(begun.wait(), 60)
        await asyncio.sleep(0.3)
        assert rounds < 400

        before = rounds
        await broker.settle()
        assert rounds <= before + 1
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


async def test_two_brokers_in_one_loop_have_times_of_their_own(broker) -> None:
    async with Broker() as other, other.consumer("q") as there, broker.consumer("q") as here:
        elapsed, elapsed_there = passed(broker), passed(other)

        await asyncio.gather(there.receive(wait=100), here.receive(wait=5), broker.settle(), other.settle())

        assert (elapsed(), elapsed_there()) == (5, 100)


@pytest.mark.parametrize(("max_lease", "renewed"), [(3_600, 2 * DAY), (30 * DAY, None)])
async def test_a_message_can_be_kept_for_days_by_its_own_renewals_or_by_a_long_max_lease(
    broker, producer, max_lease, renewed
) -> None:
    """Share groups end an acquisition lock after at most an hour, SQS a visibility timeout after 12."""
    async with broker.consumer("q", lease=3_600, max_lease=max_lease) as consumer:
        await producer.send("q", b"x")
        [message] = await consumer.receive()
        for _ in range(4):
            if renewed is not None:
                await message.renew(renewed)
            await broker.advance(DAY)

        assert broker.in_flight("q")
        await message.ack()

    assert [seen.attempt for seen in broker.acked("q")] == [1]


async def test_max_lease_can_be_changed_while_a_message_is_held(broker, producer) -> None:
    async with broker.consumer("q") as consumer:
        await producer.send("q", b"x")
        [message] = await consumer.receive()
        await broker.queues.change("q", max_lease=7200)
        await broker.advance(7199)
        assert message.lease_expires_at > broker.now

        await broker.queues.change("q", max_lease=None)
        await broker.advance(31)

        with pytest.raises(marq.LeaseLost):
            await message.ack()
