"""A client's periodic metadata refresh, while the topics that it tracks change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer

from marq.kafka.paced_clients import paced
from tests.unit.client.fakes import LIMIT_S


class Refreshed:
    """A client whose broker answers when the test lets it; its periodic refresh is under way."""

    def __init__(self) -> None:
        self.consumer = paced(AIOKafkaConsumer(metadata_max_age_ms=1))
        self.client: Any = self.consumer._client
        self.client._metadata_update = self._update
        self.client.set_topics(["a", "b"])
        # As after a forced update.
        self.client._md_update_fut, self.client._md_update_waiter = None, asyncio.get_running_loop().create_future()
        self.asked: asyncio.Queue[set[str]] = asyncio.Queue()
        self.answer = asyncio.Event()
        self.client._sync_task = asyncio.create_task(self.client._md_synchronizer())

    async def _update(self, _: object, topics: set[str]) -> bool:
        self.client._metadata_max_age_ms = 3_600_000
        self.asked.put_nowait(set(topics))
        await self.answer.wait()
        return True


@pytest.fixture
async def refreshed() -> AsyncIterator[Refreshed]:
    refreshed = Refreshed()
    yield refreshed
    await refreshed.consumer.stop()


@pytest.mark.parametrize("topics", [{"a", "b", "c"}, {"a"}], ids=["added", "removed"])
async def test_topics_that_change_during_a_refresh_are_asked_for_right_after_it(
    refreshed: Refreshed, topics: set[str]
) -> None:
    async with asyncio.timeout(LIMIT_S):
        assert await refreshed.asked.get() == {"a", "b"}

        refreshed.client.set_topics(topics)
        refreshed.answer.set()

        assert await refreshed.asked.get() == topics
        assert await refreshed.client.force_metadata_update()
