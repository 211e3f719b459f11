"""How a test takes messages, and how it shows that none comes."""

from __future__ import annotations

import asyncio
from typing import Any

import marq
from tests.worker.harness import Worker, eventually

#: Limit of whatever is not what the test is about.
LIMIT_SECONDS = 90.0


async def receive(consumer: marq.Consumer, count: int, limit: float = LIMIT_SECONDS) -> list[marq.Message]:
    """Receive exactly so many messages."""
    messages: list[marq.Message] = []
    async with asyncio.timeout(limit):
        while len(messages) < count:
            messages += await consumer.receive(count - len(messages), wait=1)
    return messages


async def receive_one(consumer: marq.Consumer, limit: float = LIMIT_SECONDS) -> marq.Message:
    [message] = await receive(consumer, 1, limit)
    return message


async def finished(worker: Worker, queue: str, **expected: int) -> dict[str, Any]:
    """Wait until the tracker has seen all that is expected, and nothing of the queue is open any more."""
    wanted = {"in_flight": 0, "waiting_for_redelivery": 0, "waiting_for_dead_letters": 0, **expected}
    return await eventually(lambda: worker.queue(queue), lambda found: wanted.items() <= found.items())


async def nothing_comes(*consumers: marq.Consumer, seconds: float) -> None:
    """Show that none of these receives anything for so long."""
    assert await asyncio.gather(*[consumer.receive(wait=seconds) for consumer in consumers]) == [[] for _ in consumers]
