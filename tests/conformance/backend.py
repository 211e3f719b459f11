"""What the suite runs on: a broker in memory, or a real Kafka with a real worker. One set of tests for both.

Where the two can't be equal:

* Waiting costs real time on Kafka and none in memory, so durations are compared with :meth:`Backend.now_s`, and only
  as "not before": a loaded machine may always be later.
* A consumer in memory is never thrown out of its group and its broker never fails, so nothing here is about that.
* The clients' clock and the log's clock agree exactly in memory, and differ by the network's delay on Kafka. So a test
  never acts at the very moment when a lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4
from weakref import WeakSet

from aiokafka import AIOKafkaProducer

import marq
from marq.owner.engine import Step
from marq.producer.producer import ProducerParts
from marq.testing import Broker, DeadLetter
from marq.testing.memory import memory_at
from marq.testing.owner import Owner
from marq.testing.views import dead_letter
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Batch
from marq.wire.names import Names, markers_partition
from tests.worker.harness import Namespace, Worker, delete_topic, eventually, make_topic

QUEUES = Path(__file__).with_name("queues.toml")
#: Time limit for anything that a test is not about: virtual seconds in memory.
LIMIT_S = 90.0


class Stored(NamedTuple):
    """A record of a topic."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


class Backend(ABC):
    """A broker with trackers; ``producer`` and ``queues`` are started and shared by the tests."""

    #: How long to wait for a message that must not come: a long time only where time costs nothing.
    never_s: float

    def __init__(self, address: str, names: Names) -> None:
        self.address = address
        self.names = names
        self.producer: marq.Producer
        self.queues: marq.Queues
        #: Consumers of the tests, as long as a test has them.
        self.consumers: WeakSet[marq.Consumer] = WeakSet()

    @property
    def client(self) -> dict[str, Any]:
        """Arguments of every client."""
        # On a busy machine, the rebalance after a second consumer joins may take long.
        return {"bootstrap_servers": self.address, "prefix": self.names.prefix, "connect_timeout": 60}

    def new_name(self, stem: str = "queue") -> str:
        return f"{stem}-{uuid4().hex[:8]}"

    def new_producer(self, **options: Any) -> marq.Producer:
        return marq.Producer(**{**self.client, **options})

    def consumer(self, queue: str | None = None, **options: Any) -> marq.Consumer:
        consumer = marq.Consumer(queue, **{**self.client, **options})
        self.consumers.add(consumer)
        return consumer

    async def define(self, queue: str, **settings: Any) -> str:
        """Change settings of a queue, and return its name when producer, consumers and trackers know of it."""
        await self.queues.change(queue, **settings)
        await self.seen_by_all()
        if "partitions" in settings:
            routes = self._sending.routes
            # A tracker chooses them later; until then, the producer uses all.
            await self.until(lambda: len(routes._definitions.placement(queue).sends or ()) == settings["partitions"])
        return queue

    @property
    def _sending(self) -> ProducerParts:
        assert self.producer._running is not None
        return self.producer._running

    async def new_queue(self, stem: str = "queue", **settings: Any) -> str:
        return await self.define(self.new_name(stem), **settings)

    @abstractmethod
    def now_s(self) -> float:
        """Seconds of the clock by which waiting is measured."""

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Let this much time pass."""

    @abstractmethod
    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until consumers that run in the background have made the condition true."""

    @abstractmethod
    async def statistics(self, queue: str, **expected: int) -> None:
        """Wait until the trackers count this many messages of a queue, and none of them is open any more."""

    @abstractmethod
    async def statistics_of_open(self, queue: str, **expected: int) -> None:
        """Wait like :meth:`statistics`, but some messages may be open."""

    @abstractmethod
    async def restart(self) -> None:
        """Let other trackers take over: they know what is in the log and in the lease table."""

    @abstractmethod
    async def records(self, topic: str) -> list[Stored]:
        """Return the records of a topic."""

    @abstractmethod
    async def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int = 0,
    ) -> str:
        """Write a record, as any other program may; return its id."""

    @abstractmethod
    async def produce_compressed(self, topic: str, value: bytes, key: bytes | None = None) -> str:
        """Write a record to partition 0 that the topic accepts only because it is compressed."""

    @abstractmethod
    async def mark(self, batch: Batch) -> None:
        """Write markers, as any client that speaks the protocol may."""

    @abstractmethod
    async def create_topic(self, partitions: int = 2) -> str:
        """Create a topic without a queue, and return its name."""

    @abstractmethod
    async def recreate_topic(self, topic: str, partitions: int = 2) -> None:
        """Delete a topic, and create it again without records."""

    @abstractmethod
    def handlers(self, queue: str) -> AbstractAsyncContextManager[Any]:
        """Run the handler that the settings of a queue name, as a worker does; stop its process at the end."""

    @abstractmethod
    async def seen_by_all(self) -> None:
        """Return when producer, consumers and trackers know all settings that were changed before."""

    async def dead_letters(self, queue: str, count: int = 1) -> list[DeadLetter]:
        """Return the dead letters of a queue when there are this many."""
        await self.statistics(queue, dead_lettered=count)
        found = [each for each in await self.records(self.names.dead_letters) if each.key == queue.encode()]
        assert len(found) == count
        return [dead_letter(self.names.dead_letters, each, None) for each in found]

    async def markers(self, kind: type[Any]) -> list[Any]:
        """Return the markers of a kind."""
        return [batch for batch in map(_decoded, await self.records(self.names.markers)) if isinstance(batch, kind)]


class MemoryBackend(Backend):
    """``marq.testing``."""

    never_s = 1_000.0

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.address, Names())
        self.broker = broker
        self.memory = memory_at(broker.address)
        self.queues = broker.queues

    def now_s(self) -> float:
        return self.memory.clock.now_s()

    async def advance(self, seconds: float) -> None:
        await self.broker.advance(seconds, settle=False)

    async def until(self, condition: Callable[[], bool]) -> None:
        end_s = self.now_s() + LIMIT_S
        while not condition():
            assert self.now_s() < end_s, "not within the limit"
            # Does not wait for handlers: some hang, and others run in threads, which need real time.
            await self.broker.advance(0.01, settle=False)
            await asyncio.sleep(0.001)

    async def statistics(self, queue: str, **expected: int) -> None:
        await self.until(
            lambda: self._counts(queue, expected) and not self.broker.in_flight(queue) + self.broker.delayed(queue)
        )

    async def statistics_of_open(self, queue: str, **expected: int) -> None:
        await self.until(lambda: self._counts(queue, expected))

    def _counts(self, queue: str, expected: dict[str, int]) -> bool:
        books = [owner.tracker.book for owner in self._owners]
        counts = [book.counts[queue] for book in books if queue in book.counts]
        return {name: sum(getattr(each, name) for each in counts) for name in expected} == expected

    @property
    def _owners(self) -> list[Owner]:
        return [owner for each in self.memory._namespaces.values() for owner in each.owners]

    async def restart(self) -> None:
        for owner in self._owners:
            _restart(owner)

    async def records(self, topic: str) -> list[Stored]:
        logs = self.memory.topics[topic].logs
        return [
            Stored(partition, each.offset, each.timestamp, each.key, each.value, tuple(each.headers))
            for partition, log in enumerate(logs)
            for each in log
        ]

    async def produce(self, topic, value, key=None, headers=(), partition=0):  # type: ignore[no-untyped-def]
        return self.broker.produce(topic, value, key=key, headers=headers, partition=partition)

    async def produce_compressed(self, topic: str, value: bytes, key: bytes | None = None) -> str:
        # The broker in memory has no limit for records of other programs.
        return await self.produce(topic, value, key)

    async def mark(self, batch: Batch) -> None:
        [namespace] = [each for each in self.memory._namespaces.values() if each.names == self.names]
        owners, source = namespace.owners, batch.source  # type: ignore[union-attr]
        owners[markers_partition(source.topic, source.partition, len(owners))].append(encode(batch))

    async def create_topic(self, partitions: int = 2) -> str:
        name = self.new_name("topic")
        self.broker.create_topic(name, partitions)
        return name

    async def recreate_topic(self, topic: str, partitions: int = 2) -> None:
        self.broker.delete_topic(topic)
        self.broker.create_topic(topic, partitions)

    def handlers(self, queue: str) -> AbstractAsyncContextManager[Any]:
        return self.broker.worker()

    async def seen_by_all(self) -> None:
        await self.broker.settle()


class KafkaBackend(Backend):
    """The embedded Kafka, and one worker for all tests."""

    never_s = 0.3
    _changes = itertools.count(1)

    def __init__(self, worker: Worker, servers: str, namespace: Namespace) -> None:
        super().__init__(servers, worker.names)
        self.worker = worker
        self._namespace = namespace

    def now_s(self) -> float:
        return time.monotonic()

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, condition: Callable[[], bool]) -> None:
        async def look() -> bool:
            return condition()

        await eventually(look, limit=LIMIT_S)

    async def statistics(self, queue: str, **expected: int) -> None:
        wanted = {"in_flight": 0, "waiting_for_redelivery": 0, "waiting_for_dead_letters": 0, **expected}
        await eventually(lambda: self.worker.queue(queue), lambda found: wanted.items() <= found.items())

    async def statistics_of_open(self, queue: str, **expected: int) -> None:
        await eventually(lambda: self.worker.queue(queue), lambda found: expected.items() <= found.items())

    async def restart(self) -> None:
        await self.worker.stop()
        self.worker = self.worker.again()
        await self.worker.start().ready(2)

    async def records(self, topic: str) -> list[Stored]:
        return [
            Stored(each.partition, each.offset, each.timestamp, each.key, each.value, tuple(each.headers))
            for each in await self._namespace.records(topic, wait=True)
        ]

    async def produce(self, topic, value, key=None, headers=(), partition=0):  # type: ignore[no-untyped-def]
        kept = await self._namespace.producer.send_and_wait(
            topic, value, key, partition=partition, headers=list(headers)
        )
        return f"{topic}/{partition}/{kept.offset}"

    async def produce_compressed(self, topic: str, value: bytes, key: bytes | None = None) -> str:
        options = {"compression_type": "gzip", "max_request_size": 2 * len(value)}
        async with AIOKafkaProducer(bootstrap_servers=self.address, **options) as producer:
            kept = await producer.send_and_wait(topic, value, key, partition=0)
        return f"{topic}/0/{kept.offset}"

    async def mark(self, batch: Batch) -> None:
        await self._namespace.mark(batch)

    async def create_topic(self, partitions: int = 2) -> str:
        name = self.new_name("topic")
        await make_topic(self.address, name, partitions)
        return name

    async def recreate_topic(self, topic: str, partitions: int = 2) -> None:
        await self._namespace.copied(topic)
        await delete_topic(self.address, topic)
        await make_topic(self.address, topic, partitions)

    @contextlib.asynccontextmanager
    async def handlers(self, queue: str) -> AsyncIterator[None]:
        # The worker follows the settings.
        yield
        await self.queues.reset(queue)

    async def seen_by_all(self) -> None:
        # All changes are in one log: a client that knows the last one knows all.
        queue, lease = "last-change", next(self._changes)
        await self.queues.change(queue, lease=lease)
        page = f"/api/queues/{quote(queue)}"

        async def shown() -> bool:
            status, text = await self.worker.page(page)
            return status == 200 and json.loads(text)["settings"]["lease"]["value"] == lease

        known = self._sending.routes._queues.sync(LIMIT_S)
        await asyncio.gather(eventually(shown), known, *map(self._heard, self.consumers))

    async def _heard(self, consumer: marq.Consumer) -> None:
        """Wait until a running consumer has applied the settings."""
        running = consumer._running
        if running is None:
            return
        await running._queues.sync(LIMIT_S)
        with contextlib.suppress(marq.ConfigError):  # its queue belongs to another group now, so it ends
            await self.until(
                lambda: (
                    not running.changed.is_set()
                    and list(running.receiver._serving.queues)
                    == [queue for queue in running.queues if queue not in running._refused]
                )
            )


def _restart(owner: Owner) -> None:
    """Let an owner in memory begin again with the rows of its table."""
    engine, now_ms = owner._engine, owner._clock.now_ms
    owner._perform(engine.rows())
    engine.forget()
    for step in engine.take_over():
        if step is Step.FENCE:
            engine.fenced((0, engine._epoch[1] + 1 if engine._epoch else 0), now_ms)
        elif step is Step.RECOVER:
            for _ in engine.restoring(sorted(engine._table._rows.items())):  # type: ignore[attr-defined]
                pass
        else:
            engine.begin(0, len(owner._markers.logs[owner._partition]), now_ms)
    owner.work()


def settings() -> dict[str, Any]:
    """Return the contents of queues.toml."""
    return tomllib.loads(QUEUES.read_text(encoding="utf-8"))


def _decoded(record: Stored) -> Batch | None:
    try:
        return decode(record.value)
    except CorruptMarker:
        return None
