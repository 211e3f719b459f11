"""Receive an exact number of messages."""

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
