from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import marq


@pytest.fixture
async def producer(servers: str, prefix: str) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(servers, prefix=prefix) as producer:
        yield producer


@pytest.fixture
async def queues(servers: str, prefix: str) -> AsyncIterator[marq.Queues]:
    async with marq.Queues(servers, prefix=prefix) as queues:
        yield queues
