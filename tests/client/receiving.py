"""Consumers in the background, and calls that receive exactly so many messages."""

from __future__ import annotations

import asyncio

import marq
from tests.client.waiting import LIMIT_S


async def receive(consumer: marq.Consumer, count: int) -> list[marq.Message]:
    messages: list[marq.Message] = []
    async with asyncio.timeout(LIMIT_S):
        while len(messages) < count:
            messages += await consumer.receive(count - len(messages), wait=1)
    return messages


class Served:
    """A started consumer that acks whatever comes, and the queues and values that came."""

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
