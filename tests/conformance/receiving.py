"""How the suite receives messages."""

from __future__ import annotations

import asyncio

import marq
from tests.conformance.backend import LIMIT_S, Backend


async def take(consumer: marq.Consumer, count: int = 1) -> list[marq.Message]:
    """Receive exactly so many messages."""
    messages: list[marq.Message] = []
    while len(messages) < count:
        more = await consumer.receive(count - len(messages), wait=LIMIT_S)
        assert more, f"only {len(messages)} of {count} messages came"
        messages += more
    return messages


async def take_one(consumer: marq.Consumer) -> marq.Message:
    [message] = await take(consumer)
    return message


async def nothing_comes(backend: Backend, *consumers: marq.Consumer) -> None:
    """Show that none of these receives anything for a while: long in memory, a moment on Kafka."""
    waiting = [consumer.receive(wait=backend.never_s) for consumer in consumers]
    assert await asyncio.gather(*waiting) == [[] for _ in consumers]
