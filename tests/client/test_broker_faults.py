"""What clients do when the broker vanishes, hangs, or was never there."""

from __future__ import annotations

import asyncio
import time

import pytest

import marq
from broker.embedded import EmbeddedBroker
from tests.client.waiting import read_all, until


@pytest.fixture
def own_broker():
    """A broker that the test may kill."""
    with EmbeddedBroker() as embedded:
        yield embedded


async def test_without_a_broker_start_says_so_in_time() -> None:
    begun = time.monotonic()
    for client in (
        marq.Producer("127.0.0.1:1", connect_timeout=1),
        marq.Consumer("q", "127.0.0.1:1", connect_timeout=1),
    ):
        with pytest.raises(marq.BrokerUnavailable, match=r"127\.0\.0\.1:1 .*MARQ_BOOTSTRAP_SERVERS"):
            await client.start()

    assert time.monotonic() - begun < 5


async def test_a_broker_that_restarts_loses_nothing(own_broker, prefix, names) -> None:
    servers = own_broker.bootstrap_servers
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

        await asyncio.to_thread(own_broker.kill)
        await asyncio.to_thread(own_broker.start)
        await producer.send_many("q", [b"%d" % number for number in range(3_000, 4_000)])
        await until(lambda: len(set(seen)) == 4_000, 180)
        await asyncio.wait_for(consumer.flush(), 60)
        await consumer.stop()
        await running


@pytest.mark.parametrize("fault", ["kill", "pause"])
async def test_a_stop_ends_within_ten_seconds_also_when_the_broker_is_gone(own_broker, prefix, fault) -> None:
    servers = own_broker.bootstrap_servers
    producer = marq.Producer(servers, prefix=prefix)
    consumer = marq.Consumer("q", servers, prefix=prefix)
    await producer.start()
    await consumer.start()
    await producer.send_many("q", [b"x"] * 100)
    (message, *_) = await consumer.receive(10)
    await asyncio.to_thread(getattr(own_broker, fault))
    await message.ack(wait=False)
    sending = asyncio.create_task(producer.send("q", b"late"))
    acking = asyncio.create_task(message.ack())
    await asyncio.sleep(0)

    for client in (consumer, producer):
        begun = time.monotonic()
        await client.stop()
        assert time.monotonic() - begun < 10

    # Nobody is left waiting. (A call that was under way may have reached the broker in its last moment.)
    outcomes = await asyncio.wait_for(asyncio.gather(sending, acking, return_exceptions=True), 1)
    assert all(isinstance(outcome, marq.BrokerUnavailable | marq.Receipt | None) for outcome in outcomes), outcomes
    await asyncio.to_thread(own_broker.resume)


async def test_a_send_to_a_broker_that_hangs_fails_in_time_and_the_producer_recovers(own_broker, prefix, names) -> None:
    async with marq.Producer(own_broker.bootstrap_servers, prefix=prefix, request_timeout=1) as producer:
        await producer.send("q", b"before")
        await asyncio.to_thread(own_broker.pause)
        with pytest.raises(marq.BrokerUnavailable, match="unknown whether"):
            await producer.send("q", b"during")
        await asyncio.to_thread(own_broker.resume)

        async with asyncio.timeout(90):
            while True:
                try:
                    await producer.send("q", b"after")
                    break
                except marq.BrokerUnavailable:
                    continue

    values = [record.value for record in await read_all(own_broker.bootstrap_servers, names.messages)]
    assert values.count(b"before") == 1
    assert b"after" in values
