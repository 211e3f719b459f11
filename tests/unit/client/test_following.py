"""How a consumer follows the definitions of its queues."""

from __future__ import annotations

import asyncio

import pytest

import marq.consumer.session
from marq.testing import Broker
from marq.testing.cluster import MemoryCluster
from marq.wire.errors import BrokerUnavailable
from tests.unit.client.fakes import LIMIT_S


async def test_what_can_not_be_served_yet_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    paused, resume = asyncio.Event(), asyncio.Event()

    async def sleep(self: MemoryCluster, seconds: float) -> None:
        if seconds == marq.consumer.session.RETRY_S:
            paused.set()
            await resume.wait()
        else:
            await asyncio.Event().wait()

    async def own_topics(self: MemoryCluster, *arguments: object) -> dict[str, int]:
        tries.append(self.now_s())
        if len(tries) == 2:
            raise BrokerUnavailable("not allowed yet")
        return {}

    monkeypatch.setattr(MemoryCluster, "sleep", sleep)
    monkeypatch.setattr(MemoryCluster, "own_topics", own_topics)
    async with (
        Broker(queues={"a": {"group": "g"}}) as broker,
        broker.consumer(group="g"),
        broker.producer() as producer,
    ):
        broker.define("b", group="g")
        async with asyncio.timeout(LIMIT_S):
            await paused.wait()
        assert len(tries) == 2

        resume.set()
        await producer.send("b", b"1")
        await broker.settle()

    assert len(tries) == 3
