"""Handlers that lose their messages, on a real broker; a lease that ends soon stands for all reasons."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable

import pytest

import marq
from marq.core.names import Names
from tests.client.tracking import TestTracker, tracking
from tests.client.waiting import LIMIT_S, until


@pytest.fixture
async def producer(servers: str, prefix: str) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
async def tracker(producer: marq.Producer, servers: str, names: Names) -> AsyncIterator[TestTracker]:
    async with tracking(servers, names) as tracker:
        yield tracker


@pytest.fixture
async def make_consumer(servers: str, prefix: str) -> AsyncIterator[Callable[..., marq.Consumer]]:
    consumers: list[marq.Consumer] = []

    def make(**options) -> marq.Consumer:
        consumers.append(marq.Consumer("q", servers, prefix=prefix, grace=0, **options))
        return consumers[-1]

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in consumers])


class Hanging:
    """Hangs at the first delivery of a message, and returns at the second."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.finished = asyncio.Event()

    async def __call__(self, message: marq.Message) -> None:
        if message.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        self.finished.set()

    async def batch(self, messages: list[marq.Message]) -> None:
        await self(messages[0])


async def test_a_handler_that_hangs_is_cancelled_at_max_lease_and_the_next_delivery_is_handled(
    producer, tracker, make_consumer, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Hanging()
    consumer = make_consumer(lease=0.5, max_lease=1)
    await consumer.start()
    running = asyncio.create_task(consumer.run(handler, concurrency=1))

    await producer.send("q", b"x")
    async with asyncio.timeout(LIMIT_S):
        await handler.cancelled.wait()
        # The only worker is free again.
        await handler.finished.wait()
    await until(lambda: tracker.counts("q").get("acked") == 1)

    await consumer.stop()
    await running
    assert tracker.counts("q")["redelivered"] == 1
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert sum("its handler is cancelled" in each for each in lines) == 1
    assert not any("handler failed" in each for each in lines)


async def test_a_batch_handler_that_hangs_is_cancelled_too(producer, tracker, make_consumer) -> None:
    handler = Hanging()
    consumer = make_consumer(lease=0.5, max_lease=1)
    await consumer.start()
    running = asyncio.create_task(consumer.run_batch(handler.batch))

    await producer.send("q", b"x")
    async with asyncio.timeout(LIMIT_S):
        await handler.cancelled.wait()
        await handler.finished.wait()
    await until(lambda: tracker.counts("q").get("acked") == 1)

    await consumer.stop()
    await running
    assert tracker.counts("q")["redelivered"] == 1


async def test_a_function_in_a_thread_goes_on_and_its_late_ack_is_written(
    producer, tracker, make_consumer, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def handler(message: marq.Message) -> None:
        if message.attempt == 1:
            go_on.wait(LIMIT_S)

    consumer = make_consumer(lease=0.5, max_lease=0.5)
    await consumer.start()
    running = asyncio.create_task(consumer.run(handler, concurrency=1))

    await producer.send("q", b"x")
    await until(lambda: tracker.counts("q").get("redelivered") == 1)
    go_on.set()
    await until(lambda: tracker.open == 0)

    await consumer.stop()
    await running
    assert "runs in a thread and can't be cancelled" in caplog.text


async def test_a_message_in_a_loop_of_ones_own_is_not_cancelled(producer, tracker, make_consumer) -> None:
    async with make_consumer(lease=0.5, max_lease=0.5) as consumer:
        await producer.send("q", b"x")
        (message,) = await consumer.receive(1)

        async with message:
            await until(lambda: tracker.counts("q").get("redelivered") == 1)

        with pytest.raises(marq.LeaseLost):
            await message.release()
