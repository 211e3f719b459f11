"""How a consumer follows the definitions of its queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

import marq
import marq.consumer.session
from marq.kafka.topics import Topics
from marq.testing import Broker
from marq.testing.cluster import MemoryCluster
from marq.wire.errors import BrokerUnavailable
from tests.unit.client.fakes import LIMIT_S, spin


async def test_what_can_not_be_served_yet_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    paused, resume = asyncio.Event(), asyncio.Event()
    look_up = MemoryCluster.own_topics

    async def sleep(self: MemoryCluster, seconds: float) -> None:
        if seconds == marq.consumer.session.RETRY_S:
            paused.set()
            await resume.wait()
        else:
            await asyncio.Event().wait()

    async def own_topics(self: MemoryCluster, names: Iterable[str], topics: Topics) -> dict[str, int]:
        tries.append(self.now_s())
        if len(tries) == 1:
            raise BrokerUnavailable("not allowed yet")
        return await look_up(self, names, topics)

    monkeypatch.setattr(MemoryCluster, "sleep", sleep)
    monkeypatch.setattr(MemoryCluster, "own_topics", own_topics)
    async with Broker(queues={"a": {"group": "g"}}) as broker, broker.consumer(group="g") as group:
        broker.create_topic("topic-of-b")
        broker.define("b", group="g", topic="topic-of-b")
        async with asyncio.timeout(LIMIT_S):
            await paused.wait()
        assert len(tries) == 1

        resume.set()
        broker.produce("topic-of-b", b"1")
        async with asyncio.timeout(LIMIT_S):
            [message] = await group.receive()
        await message.ack()

        assert (message.queue, len(tries)) == ("b", 2)


class Lookups:
    """Holds up look-ups of own topics; notes which topics each one is for, and which queues are served meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[list[str]] = []
        self.begun = asyncio.Queue[None]()
        self.go_on = asyncio.Queue[None]()
        look_up = MemoryCluster.own_topics

        async def own_topics(cluster: MemoryCluster, names: Iterable[str], topics: Topics) -> dict[str, int]:
            self.names.append(sorted(names))
            self.begun.put_nowait(None)
            await self.go_on.get()
            return await look_up(cluster, self.names[-1], topics)

        monkeypatch.setattr(MemoryCluster, "own_topics", own_topics)

    async def next(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.begun.get()


async def until_served(consumer: marq.Consumer, *queues: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while consumer._started().receiver._serving.queues != queues:  # noqa: ASYNC110 - no signal says so
            await asyncio.sleep(0)


async def test_own_topics_are_looked_up_before_they_are_read_and_hold_up_no_other_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under steady changes, a queue that leaves the group would be read for as long, as by its next consumers."""
    lookups = Lookups(monkeypatch)
    async with Broker(queues={queue: {"group": "g"} for queue in "ab"}) as broker, broker.consumer(group="g") as group:
        for topic in ("topic-of-c", "topic-of-d"):
            broker.create_topic(topic)
        broker.define("c", group="g", topic="topic-of-c")
        await lookups.next()
        # The definitions change during the look-up.
        broker.define("a")
        broker.define("d", group="g", topic="topic-of-d")
        await group._started()._queues.sync(LIMIT_S)

        lookups.go_on.put_nowait(None)

        await lookups.next()
        await until_served(group, "b", "c")
        lookups.go_on.put_nowait(None)
        await until_served(group, "b", "c", "d")
    assert lookups.names == [["topic-of-c"], ["topic-of-d"]]


async def test_a_topic_that_is_named_while_a_consumer_starts_is_looked_up_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups = Lookups(monkeypatch)
    async with Broker(queues={"a": {"group": "g"}, "c": {"group": "g", "topic": "topic-of-c"}}) as broker:
        broker.create_topic("topic-of-c")
        group = broker.consumer(group="g")
        starting = asyncio.create_task(group.start())
        await lookups.next()
        broker.define("d", group="g", topic="no-such-topic")
        # The consumer has read the definition when this client has.
        await broker.queues.sync(LIMIT_S)
        await spin()

        lookups.go_on.put_nowait(None)
        await asyncio.wait_for(starting, LIMIT_S)
        await lookups.next()
        lookups.go_on.put_nowait(None)
        await broker.settle()

        assert group._started().receiver._serving.queues == ("a", "c")
        assert lookups.names[:2] == [["topic-of-c"], ["no-such-topic"]]
        await group.stop()
