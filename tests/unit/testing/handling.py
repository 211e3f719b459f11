"""Consumers that call handlers in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import marq


@asynccontextmanager
async def handling(consumer: marq.Consumer, handler: Callable[..., Any], **options: Any) -> AsyncIterator[None]:
    """Let the consumer call a handler until the end of the block."""
    async with consumer:
        running = asyncio.create_task(consumer.run(handler, **options))
        yield
        await consumer.stop()
        await running
