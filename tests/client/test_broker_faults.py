"""What clients do when the broker restarts, hangs, or is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from aiokafka import AIOKafkaProducer

import marq
from marq_worker.broker.embedded import EmbeddedBroker
from tests.client.forking import end_program, start_program
from tests.client.waiting import in_threads, producer_threads, read_all, until, values, wait_until

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def module_broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as embedded:
        yield embedded


@pytest.fixture
def broker(module_broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    """A broker that the test may pause, stop and kill."""
    module_broker.resume()
    module_broker.start()

    def is_usable() -> bool:
        # After a pause it takes a moment until the broker is a member of its cluster again.
        try:
            with marq.SyncProducer(module_broker.bootstrap_servers, prefix="usable") as producer:
                return bool(producer.send("q", b"x"))
        except marq.BrokerUnavailable:
            return False

    wait_until(is_usable)
    yield module_broker
    module_broker.resume()


# --- producers and consumers ------------------------------------------------------------------------------------------


async def test_a_broker_that_restarts_loses_nothing(broker, servers, prefix) -> None:
    seen: list[bytes] = []

    async def handler(message: marq.Message) -> None:
        seen.append(message.value)
        await asyncio.sleep(0.001)

    async with marq.Producer(servers, prefix=prefix) as producer:
        await producer.send_many("q", [b"%d" % number for number in range(3_000)])
        consumer = marq.Consumer("q", servers, prefix=prefix)
        await consumer.start()
        running = asyncio.create_task(consumer.run(handler, concurrency=4))
        await until(lambda: len(seen) > 500)

        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await producer.send_many("q", [b"%d" % number for number in range(3_000, 4_000)])
        await until(lambda: len(set(seen)) == 4_000, 180)
        await asyncio.wait_for(consumer.flush(), 60)
        await consumer.stop()
        await running


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_a_stop_ends_by_its_own_limits_also_when_the_broker_is_gone(broker, servers, prefix, fault) -> None:
    producer = marq.Producer(servers, prefix=prefix, request_timeout=300)
    consumer = marq.Consumer("q", servers, prefix=prefix, request_timeout=300)
    await producer.start()
    await consumer.start()
    await producer.send_many("q", [b"x"] * 100)
    (message, *_) = await consumer.receive(10)
    await asyncio.to_thread(getattr(broker, fault))
    await message.ack(wait=False)
    sending = asyncio.create_task(producer.send("q", b"late"))
    acking = asyncio.create_task(message.ack())
    await asyncio.sleep(0)

    for client in (consumer, producer):
        async with asyncio.timeout(60):
            await client.stop()

    # No caller is left waiting. (The broker may have received a call just before it stopped.)
    outcomes = await asyncio.wait_for(asyncio.gather(sending, acking, return_exceptions=True), 60)
    assert all(isinstance(outcome, marq.BrokerUnavailable | marq.Receipt | None) for outcome in outcomes), outcomes


async def test_a_send_to_a_broker_that_hangs_fails_in_time_and_the_producer_recovers(
    broker, servers, prefix, names
) -> None:
    async with marq.Producer(servers, prefix=prefix, request_timeout=5) as producer:
        await producer.send("q", b"before")
        await asyncio.to_thread(broker.pause)
        with pytest.raises(marq.BrokerUnavailable, match="unknown whether"):
            await producer.send("q", b"during")
        await asyncio.to_thread(broker.resume)

        async with asyncio.timeout(90):
            while True:
                try:
                    await producer.send("q", b"after")
                    break
                except marq.BrokerUnavailable:
                    continue

    values = [record.value for record in await read_all(servers, names.messages)]
    assert values.count(b"before") == 1
    assert b"after" in values


async def test_a_cancelled_stop_closes_a_producer_whose_broker_hangs(broker, servers, prefix) -> None:
    producer = marq.Producer(servers, prefix=prefix)
    await producer.start()
    await asyncio.to_thread(broker.pause)
    sending = asyncio.create_task(producer.send("q", b"x"))
    await until(lambda: producer._running.batches._sending)

    stopping = asyncio.create_task(producer.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    outcomes = await asyncio.gather(stopping, sending, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, marq.BrokerUnavailable]
    with pytest.raises(marq.MarqError, match="the producer is stopped"):
        await producer.send("q", b"x")


# --- settings of queues and dead letters ------------------------------------------------------------------------------


async def test_settings_that_were_read_stay_known_while_the_broker_is_away(broker, servers, prefix) -> None:
    async with marq.Queues(servers, prefix=prefix, request_timeout=5) as queues:
        await queues.change("emails", lease=5)

        await asyncio.to_thread(broker.kill)
        with pytest.raises(marq.BrokerUnavailable):
            await queues.change("emails", lease=6)
        assert queues["emails"].lease == 5

        await asyncio.to_thread(broker.start)
        async with marq.Queues(servers, prefix=prefix) as other:
            await other.change("emails", lease=7)
        await until(lambda: queues["emails"].lease == 7)
        assert (await queues.change("emails", lease=8)).lease == 8


async def test_reading_dead_letters_fails_when_the_broker_goes_away(broker, servers, prefix, names) -> None:
    async with marq.DeadLetters(servers, prefix=prefix, request_timeout=5) as letters:
        async with AIOKafkaProducer(bootstrap_servers=servers) as producer:
            for number in range(3_000):
                last = await producer.send(names.dead_letters, b"x" * 10_000, b"emails", partition=number % 4)
            await last
        seen = letters.peek("emails")
        await anext(seen)

        await asyncio.to_thread(broker.stop)

        async with asyncio.timeout(120):
            with pytest.raises(marq.BrokerUnavailable):
                async for _ in seen:
                    pass
            with pytest.raises(marq.BrokerUnavailable):
                await letters.count()


# --- the synchronous producer -----------------------------------------------------------------------------------------


def test_a_broker_that_goes_away_fails_sends_in_time_and_the_synchronous_producer_recovers(
    broker, servers, prefix
) -> None:
    with marq.SyncProducer(servers, prefix=prefix, request_timeout=5) as producer:
        producer.send("q", b"before")
        broker.kill()
        with pytest.raises(marq.BrokerUnavailable, match="unknown whether"):
            producer.send("q", b"during")
        broker.start()

        def sent() -> bool:
            try:
                return bool(producer.send("q", b"after"))
            except marq.BrokerUnavailable:
                return False

        wait_until(sent, 90)


def test_a_stop_ends_all_synchronous_sends_when_the_broker_hangs(broker, servers, prefix) -> None:
    producer = marq.SyncProducer(servers, prefix=prefix)
    producer.start()
    broker.pause()
    errors: list[marq.MarqError] = []

    def send() -> None:
        with pytest.raises(marq.BrokerUnavailable) as caught:
            producer.send("q", b"x")
        errors.append(caught.value)

    def stop() -> None:
        wait_until(lambda: len(producer._thread._open) == 4)
        producer.stop()

    in_threads(*[send] * 4, stop)

    assert len(errors) == 4
    assert producer_threads() == []


def test_ctrl_c_ends_the_wait_and_the_synchronous_producer_goes_on(broker, servers, prefix, names) -> None:
    with marq.SyncProducer(servers, prefix=prefix) as producer:
        broker.pause()

        def press() -> None:
            wait_until(lambda: producer._thread._open)
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            producer.send("q", b"interrupted")
        pressing.join()
        broker.resume()

        producer.send("q", b"after")
        assert not producer._thread._open

    assert values(servers, names.messages).count(b"after") == 1


@pytest.mark.parametrize("resumed", [True, False])
def test_a_program_that_ends_without_a_stop_sends_what_was_accepted_but_never_hangs(
    broker, servers, prefix, names, resumed
) -> None:
    program = start_program("end", servers, prefix)
    assert program.stdout.readline() == "started\n"
    broker.pause()
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "ending\n"
    if resumed:
        broker.resume()

    errors = end_program(program)

    if resumed:
        assert errors == ""
        assert values(servers, names.messages) == [b"accepted"]
    else:
        assert "Traceback" not in errors
