"""The in-memory counterpart of :class:`marq.backend.cluster.KafkaCluster`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from marq.client.backends import Backend, register
from marq.consumer.receiver import Receiver
from marq.dead_letters.log import Stored
from marq.kafka.group_reader import Assignee
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_records import Serving
from marq.kafka.records import Row
from marq.kafka.topics import Topics
from marq.queues.definition_log import UnfinishedMessages
from marq.queues.queues import Queues
from marq.settings.client import MEMORY_SCHEME, ClientSettings
from marq.settings.definitions import Definitions
from marq.testing.group import Member
from marq.testing.memory import Memory, memory_at
from marq.testing.namespace import Namespace
from marq.testing.topics import TopicReader, Unplaced
from marq.wire.errors import ConfigError
from marq.wire.markers import Headers, Source
from marq.wire.names import incarnation

T = TypeVar("T")


class Appended(NamedTuple):
    """The offset of a batch's first record."""

    offset: int


class Batch:
    """Records for one partition, without a size limit."""

    def __init__(self) -> None:
        self.records: list[Unplaced] = []

    def append(self, *, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        """Add a record; virtual time replaces ``timestamp``."""
        self.records.append((key, value, list(headers)))
        return len(self.records)


class MemorySender:
    """The part of AIOKafkaProducer that the producer uses."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def create_batch(self) -> Batch:
        return Batch()

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[Appended]:
        first = self._memory.topics[topic].extend(partition, self._memory.clock.wall_ms, batch.records)
        sent: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        sent.set_result(Appended(first))
        return sent


class MemoryWriter:
    """Writes markers, which are folded at once."""

    def __init__(self, memory: Memory, namespace: Namespace) -> None:
        self._memory = memory
        self._namespace = namespace

    async def start(self) -> None:
        return

    async def stop(self, limit_s: float) -> None:
        return

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> list[int]:
        offsets = [self._namespace.owners[partition].append(value) for partition, value in records]
        self._memory.stir()
        return offsets


class MemoryMarkersReader:
    """Reads markers that are appended from now on."""

    def __init__(self, reader: TopicReader) -> None:
        self._reader = reader

    async def read(self) -> Sequence[bytes | None]:
        return [record.value for _, record in await self._reader.read()]

    async def stop(self, limit_s: float) -> None:
        self._reader.close()


class MemoryMember(Member):
    """A group member that the broker knows as a running client."""

    def __init__(
        self, memory: Memory, group: str, settings: ClientSettings, serving: Serving, instance_id: str | None
    ) -> None:
        super().__init__(memory.groups, memory.group(group), settings.names, memory.topics, serving, instance_id)
        self._memory = memory
        self._description = f"a Consumer (Kafka group {group})"

    async def start(self, assignee: Assignee) -> None:
        self._memory.enter()
        await super().start(assignee)
        self._memory.started(self, self._description)
        if isinstance(assignee, Receiver):
            self._memory.passage.add(self, assignee)

    async def stop(self, limit_s: float) -> None:
        self._memory.stopped(self)
        self._memory.passage.remove(self)
        await super().stop(limit_s)


class MemoryDefinitionLog:
    """The queues topic in memory."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._memory: Memory
        self._reader: TopicReader

    async def make(self) -> None:
        return

    async def start(self) -> int:
        self._memory = memory_at(self._settings.bootstrap_servers)
        self._reader = TopicReader(self._memory.namespace(self._settings).queues, {0: 0})
        return await self.end()

    async def stop(self) -> None:
        self._reader.close()

    async def read(self) -> tuple[Sequence[Row], int]:
        return [record for _, record in await self._reader.read()], self._reader.positions[0]

    async def end(self) -> int:
        return len(self._reader.topic.logs[0])

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        namespace = self._memory.namespace(self._settings)
        offsets = {key: namespace.define(key, value) for key, value in records.items()}
        # The first message of a new schedule is waiting now.
        self._memory.stir()
        return offsets

    async def messages_of(self, queue: str, definitions: Definitions) -> UnfinishedMessages:
        return self._memory.namespace(self._settings).messages_of(queue)

    async def ends_of(self, topic: str) -> dict[Source, int]:
        return self._memory.topics[topic].ends if topic in self._memory.topics else {}

    def wall_s(self) -> float:
        return self._memory.clock.wall_ms / 1000

    async def sleep(self, seconds: float) -> None:
        if self._memory.is_elsewhere:
            # Another event loop can't advance virtual time; it has only producers, which pauses do not concern.
            await asyncio.Event().wait()
        await self._memory.clock.sleep(seconds)


class MemoryDeadLetterLog:
    """The dead-letter topic in memory."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._reader: TopicReader

    async def start(self) -> None:
        memory = memory_at(self._settings.bootstrap_servers)
        self._reader = TopicReader(memory.namespace(self._settings).dead_letters, {})

    async def stop(self) -> None:
        self._reader.close()

    async def ranges(self) -> dict[int, range]:
        return {partition: range(len(log)) for partition, log in enumerate(self._reader.topic.logs)}

    async def records(self, ranges: Mapping[int, range]) -> AsyncIterator[Sequence[Stored]]:
        for partition, span in ranges.items():
            yield _stored((partition, record) for record in self._reader.topic.logs[partition][span.start : span.stop])

    def seek(self, positions: Mapping[int, int]) -> None:
        self._reader.positions = dict(positions)

    async def read(self) -> Sequence[Stored]:
        return _stored(await self._reader.read())


def _stored(records: Iterable[tuple[int, Row]]) -> list[Stored]:
    return [Stored(partition, *record) for partition, record in records]


class MemoryCluster:
    """A broker in the memory of this process."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._memory = memory_at(settings.bootstrap_servers)

    def now_s(self) -> float:
        return self._memory.clock.now_s()

    def wall_s(self) -> float:
        return self._memory.clock.wall_ms / 1000

    def broker_ms(self) -> int:
        return self._memory.clock.wall_ms

    async def sleep(self, seconds: float) -> None:
        await self._memory.clock.sleep(seconds)

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        if self._memory.is_elsewhere:
            # Another event loop can't advance virtual time, but trackers answer at once.
            async with asyncio.timeout(seconds):
                return await waiting
        return await self._memory.passage.within(seconds, waiting)

    async def topics(self) -> Topics:
        return self._namespace.facts

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        partitions = {}
        for name in sorted(names):
            if name not in self._memory.topics:
                raise ConfigError(
                    f"topic {name} does not exist, but a queue's settings name it: create it"
                    f" (Broker.create_topic({name!r})), or remove `topic` from those settings"
                )
            partitions[name] = self._memory.topics[name].partitions
        return partitions

    async def incarnations(self, topics: Iterable[str]) -> dict[str, str]:
        known = self._memory.topics
        return {topic: incarnation(topic, known[topic].id if topic in known else "") for topic in topics}

    def queues(self) -> Queues:
        return Queues.of(self._settings)

    def writer(self, topics: Topics) -> MemoryWriter:
        return MemoryWriter(self._memory, self._namespace)

    async def markers_reader(self, partitions: Collection[int]) -> MemoryMarkersReader:
        markers = self._namespace.markers
        return MemoryMarkersReader(
            TopicReader(markers, {partition: len(markers.logs[partition]) for partition in partitions})
        )

    def member(
        self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False, url: str = ""
    ) -> MemoryMember:
        return MemoryMember(self._memory, group, self._settings, serving, instance_id)

    def acquirer(self, topics: Topics) -> MemoryWriter:
        return self.writer(topics)

    def transactions(self, topics: Topics, group: str, instance_id: str | None) -> None:
        """Return None: neither the write nor the commit can fail here."""

    async def sender(self, topics: Topics) -> MemorySender:
        sender = MemorySender(self._memory)
        self._memory.started(sender, "a Producer")
        return sender

    async def close(self, sender: object, limit_s: float) -> None:
        self._memory.stopped(sender)

    async def tracker_runs(self) -> bool | None:
        return True

    async def known_queues(self, wanted: str) -> set[str]:
        namespace = self._namespace
        owners = map(namespace.names.owner_of_group, self._memory.groups)
        return namespace.known_queues() | {queue for queue in owners if queue}

    @property
    def _namespace(self) -> Namespace:
        return self._memory.namespace(self._settings)


register(MEMORY_SCHEME, Backend(MemoryCluster, MemoryDefinitionLog, MemoryDeadLetterLog))
