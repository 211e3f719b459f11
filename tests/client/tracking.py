"""A tracker for tests: the real state machine of marq.core in one asyncio loop, its state only in memory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from marq.core.copies import copy
from marq.core.fires import Destination
from marq.core.marker_codec import encode
from marq.core.names import Names
from marq.core.queue import QueueSettings
from marq.core.tracker import Tracker


def now_ms() -> int:
    return int(time.monotonic() * 1000)


class TestTracker:
    __test__ = False

    def __init__(self, servers: str, names: Names, partitions: int, settings: QueueSettings) -> None:
        self.names = names
        self.trackers = {p: Tracker(lambda queue: settings, secrets.randbits(64)) for p in range(partitions)}
        self.consumer = AIOKafkaConsumer(
            bootstrap_servers=servers, auto_offset_reset="earliest", enable_auto_commit=False
        )
        self.producer = AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, max_request_size=2**22)

    def counts(self, queue: str) -> dict[str, int]:
        """What has happened in a queue, over all partitions."""
        total: dict[str, int] = {}
        for tracker in self.trackers.values():
            counts = tracker.book.counts.get(queue)
            for name in counts.__slots__ if counts else ():
                total[name] = total.get(name, 0) + getattr(counts, name)
        return total

    @property
    def open(self) -> int:
        return sum(len(tracker.book) for tracker in self.trackers.values())

    async def run(self) -> None:
        while True:
            found = await self.consumer.getmany(timeout_ms=20)
            for source, records in found.items():
                for record in records:
                    self.trackers[source.partition].read(record.value, record.timestamp, record.offset)
            for partition, tracker in self.trackers.items():
                tracker.saw(now_ms())
                await self.step(partition, tracker)

    async def step(self, partition: int, tracker: Tracker) -> None:
        if tracker.tick_in_ms(now_ms()) == 0:
            await self.producer.send(self.names.markers, encode(tracker.tick(now_ms())), partition=partition)
        fires = tracker.due()
        topics = {Destination.QUEUE: self.names.messages, Destination.DEAD_LETTERS: self.names.dead_letters}
        for fire in fires:
            payload = tracker.book.fresh_payload(fire.source, fire.offset)
            assert payload is not None
            made = copy(fire, payload, tracker.book.clock.now_ms, None)
            await self.producer.send_and_wait(topics[fire.destination], made.value, made.key, headers=made.headers)
        for fact in tracker.facts(fires):
            await self.producer.send_and_wait(self.names.markers, encode(fact), partition=partition)


@contextlib.asynccontextmanager
async def tracking(servers: str, names: Names, partitions: int = 4, **settings: object) -> AsyncIterator[TestTracker]:
    """Run a tracker; the topics must be there."""
    tracker = TestTracker(servers, names, partitions, QueueSettings(**settings))  # type: ignore[arg-type]
    tracker.consumer.assign([TopicPartition(names.markers, partition) for partition in range(partitions)])
    await tracker.consumer.start()
    await tracker.producer.start()
    task = asyncio.create_task(tracker.run())
    try:
        yield tracker
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tracker.consumer.stop()
        await tracker.producer.stop()
