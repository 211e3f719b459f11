"""Messages whose leases end while a call waits: another consumer may have them, so the call must not return them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq.testing.cluster import MemoryWriter
from marq.wire.marker_codec import decode
from marq.wire.markers import Renew
from marq.wire.record_headers import expired
from marq_worker.sqs.polling import PolledConsumer

LEASE_S = 2


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(queues={"q": {"lease": LEASE_S}}) as broker:
        yield broker


def block(broker: Broker, seconds: float = 1.5 * LEASE_S) -> None:
    """Let time pass as if code blocked the event loop: no timer runs meanwhile."""
    broker._memory.clock.now_ms += int(seconds * 1000)


async def test_a_message_whose_lease_ends_before_an_iteration_gets_to_it_is_not_returned(broker: Broker) -> None:
    async with broker.producer() as producer, broker.consumer("q") as consumer:
        await producer.send_many("q", [b"x"] * 3)
        # As if handlers were running: the consumer prefetches.
        consumer._started().buffer.handler_demand = 3
        consumer._started().receiver.demand()
        await broker.settle()
        assert (consumer.in_flight, consumer.processing) == (3, 0)

        # The iteration yields to other tasks first, and one of them blocks the loop.
        block(broker, 0.01)
        iterating = asyncio.create_task(anext(consumer))
        asyncio.get_running_loop().call_soon(block, broker)
        await broker.advance(LEASE_S)
        message = await iterating

        await message.ack()
        # A redelivery of one that no handler has seen.
        assert (message.attempt, expired(message._record.headers)) == (1, 1)


async def test_receive_with_a_lease_releases_messages_whose_renewal_came_too_late(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MemoryWriter.write

    async def slow(self: MemoryWriter, records: Any, limit_s: float) -> list[int]:
        if any(isinstance(decode(value), Renew) for _, value in records):
            block(broker)
        return await write(self, records, limit_s)

    async with broker.producer() as producer, broker.consumer("q") as consumer:
        await producer.send("q", b"x")
        monkeypatch.setattr(MemoryWriter, "write", slow)

        assert await consumer.receive(lease=60) == []
        monkeypatch.undo()
        (message,) = await consumer.receive(lease=60)
        await consumer.ack(message)
        # The tracker had renewed the lease, and an expiry would have counted an attempt that the program did not see.
        assert message.attempt == 1


async def test_a_poll_releases_messages_whose_renewal_came_too_late(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MemoryWriter.write

    async def slow(self: MemoryWriter, records: Any, limit_s: float) -> list[int]:
        written = await write(self, records, limit_s)
        if any(isinstance(decode(value), Renew) for _, value in records):
            # The tracker has renewed the lease, but the confirmation comes after the former lease has ended.
            block(broker, 0.9 * LEASE_S)
        return written

    consumer = PolledConsumer("q", ClientSettings.read(broker.address, {}, owner="test"))
    async with broker.producer() as producer, consumer:
        await producer.send("q", b"x")
        await consumer.wait(1, LEASE_S)
        block(broker, 0.2 * LEASE_S)
        monkeypatch.setattr(MemoryWriter, "write", slow)

        assert await consumer.poll(1) == []
        monkeypatch.undo()
        await consumer.flush()
        await consumer.wait(1, LEASE_S)
        (message,) = await consumer.poll(1)
        # An expiry would have counted an attempt that no program saw.
        assert message.attempt == 1


async def test_the_lease_of_a_polled_message_is_known_after_its_consumer_has_stopped(broker: Broker) -> None:
    consumer = PolledConsumer("q", ClientSettings.read(broker.address, {}, owner="test"))
    async with broker.producer() as producer, consumer:
        await producer.send("q", b"x")
        await consumer.wait(1, LEASE_S)
        (message,) = await consumer.poll(1)

    assert 0 < consumer.left_s(message) <= LEASE_S
