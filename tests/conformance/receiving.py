"""How the suite takes messages."""

from __future__ import annotations

import asyncio

import marq
from tests.conformance.backend import LIMIT_S


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


async def nothing_for(seconds: float, *consumers: marq.Consumer) -> None:
    """Show that none of these receives anything for so long."""
    assert await asyncio.gather(*[consumer.receive(wait=seconds) for consumer in consumers]) == [[] for _ in consumers]
