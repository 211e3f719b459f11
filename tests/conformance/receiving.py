"""How tests send and receive messages, in the foreground and in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import marq
from tests.conformance.backend import Backend
from tests.worker.harness import take


async def take_one(consumer: marq.Consumer) -> marq.Message:
    [message] = await take(consumer)
    return message


async def nothing_comes(backend: Backend, *consumers: marq.Consumer) -> None:
    """Show that none of these receives anything for a while: long in memory, a moment on Kafka."""
    waiting = [consumer.receive(wait=backend.never_s) for consumer in consumers]
    assert await asyncio.gather(*waiting) == [[] for _ in consumers]


@asynccontextmanager
async def receiving_nothing(consumer: marq.Consumer) -> AsyncIterator[None]:
    """Let a call wait for messages, because a consumer reads only for such calls; show that it gets none."""
    waiting = asyncio.create_task(consumer.receive(wait=600))
    try:
        yield
        assert not waiting.done() or waiting.result() == []
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


class Served:
    """A consumer that acks every message in the background; ``seen`` has queue and value of each."""

    def __init__(self, consumer: marq.Consumer) -> None:
        self.consumer = consumer
        self.seen: list[tuple[str, bytes]] = []
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async for message in self.consumer:
            async with message:
                self.seen.append((message.queue, message.value))

    async def stop(self) -> None:
        await self.consumer.stop()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def served(consumer: marq.Consumer) -> AsyncIterator[Served]:
    """Start the consumer, and stop it at the end of the block."""
    await consumer.start()
    serving = Served(consumer)
    yield serving
    await serving.stop()


@asynccontextmanager
async def running(consumer: marq.Consumer, call: Callable[[], Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Start the consumer, run its handlers by ``call`` in the background, and stop it at the end of the block."""
    await consumer.start()
    task = asyncio.create_task(call())
    yield task
    await consumer.stop()
    await task


def numbered(queue: str, start: int, stop: int) -> list[tuple[str, bytes]]:
    """Return queue and value of numbered messages."""
    return [(queue, b"%d" % number) for number in range(start, stop)]


async def send(backend: Backend, queue: str, start: int, stop: int) -> None:
    """Send numbered messages."""
    await backend.producer.send_many(queue, [value for _, value in numbered(queue, start, stop)])
