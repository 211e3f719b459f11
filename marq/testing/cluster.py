"""The seam between the clients and a broker in memory: what :class:`marq.cluster.KafkaCluster` is for Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from marq.core.errors import ConfigError
from marq.definition_log import Entry
from marq.flow import Flow
from marq.queues import Queues
from marq.reader import Assignee, GroupMember
from marq.serving import Serving
from marq.settings import ClientSettings
from marq.starts import MarkedStart
from marq.testing.group import Member
from marq.testing.installation import Installation
from marq.testing.memory import Memory, memory_at
from marq.testing.topics import Headers, Topic
from marq.topics import Topics
from marq.writer import MarkerRecord

T = TypeVar("T")


class Appended(NamedTuple):
    """Where the first record of a batch stands."""

    offset: int


class Batch:
    """Records for one partition; there is always room for one more."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes | None, bytes | None, Headers]] = []

    def append(self, *, timestamp: int | None, key: bytes | None, value: bytes | None, headers: Headers) -> int:
        """Add a record; ``timestamp`` is passed over, since virtual time counts here."""
        self.records.append((key, value, list(headers)))
        return len(self.records)


class MemorySender:
    """What the producer uses of AIOKafkaProducer."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def create_batch(self) -> Batch:
        return Batch()

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[Appended]:
        found = self._memory.topics[topic]
        first = len(found.logs[partition])
        for key, value, headers in batch.records:
            found.append(partition, self._memory.clock.wall_ms, key, value, headers)
        sent: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        sent.set_result(Appended(first))
        return sent


class MemoryWriter:
    """Writes markers, which are folded at once."""

    def __init__(self, memory: Memory, installation: Installation) -> None:
        self._memory = memory
        self._installation = installation

    async def start(self) -> None:
        return

    async def stop(self, limit_s: float) -> None:
        return

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        for partition, value in records:
            self._installation.owners[partition].append(value)
        self._memory.stir()


class MemoryMarkersReader:
    """Reads markers from where their logs end now."""

    def __init__(self, markers: Topic, partitions: Collection[int]) -> None:
        self._markers = markers
        self._positions = {each: len(markers.logs[each]) for each in partitions}
        self._more = asyncio.Event()
        markers.listen(self._more.set)

    async def read(self) -> Sequence[bytes | None]:
        while True:
            self._more.clear()
            found = []
            for partition, position in self._positions.items():
                found += [record.value for record in self._markers.logs[partition][position:]]
                self._positions[partition] = len(self._markers.logs[partition])
            if found:
                return found
            await self._more.wait()

    async def stop(self, limit_s: float) -> None:
        self._markers.ignore(self._more.set)


class MemoryMember(Member):
    """A member whose consumer the broker knows."""

    def __init__(self, memory: Memory, group: str, settings: ClientSettings, serving: Serving) -> None:
        super().__init__(memory.groups, memory.group(group), settings.names, memory.topics, serving)
        self._memory = memory
        self._description = f"a Consumer (Kafka group {group})"

    async def start(self, assignee: Assignee) -> None:
        self._memory.enter()
        await super().start(assignee)
        self._memory.started(self, self._description)
        if isinstance(assignee, Flow):
            self._memory.passage.add(self, assignee)

    async def stop(self, limit_s: float) -> None:
        self._memory.stopped(self)
        self._memory.passage.remove(self)
        await super().stop(limit_s)


class MemoryDefinitionLog:
    """The queues topic of an installation in memory."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._topic: Topic
        self._memory: Memory
        self._installation: Installation
        self._position = 0
        self._more = asyncio.Event()

    async def make(self) -> None:
        return

    async def start(self) -> int:
        self._memory = memory = memory_at(self._settings.bootstrap_servers)
        self._installation = memory.installation(self._settings)
        self._topic = self._installation.queues
        self._topic.listen(self._more.set)
        return len(self._topic.logs[0])

    async def stop(self) -> None:
        self._topic.ignore(self._more.set)

    async def read(self) -> tuple[Sequence[Entry], int]:
        log = self._topic.logs[0]
        while self._position >= len(log):
            self._more.clear()
            await self._more.wait()
        entries = [Entry(record.offset, record.key, record.value) for record in log[self._position :]]
        self._position = len(log)
        return entries, self._position

    async def end(self) -> int:
        return len(self._topic.logs[0])

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        offsets = {key: self._installation.define(key, value) for key, value in records.items()}
        # A schedule's first message waits now.
        self._memory.stir()
        return offsets


class MemoryCluster:
    """A broker in the memory of this process."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._memory = memory_at(settings.bootstrap_servers)

    def now_s(self) -> float:
        return self._memory.clock.now_s()

    def wall_s(self) -> float:
        return self._memory.clock.wall_ms / 1000

    async def sleep(self, seconds: float) -> None:
        await self._memory.clock.sleep(seconds)

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        if self._memory.is_elsewhere:
            # Nobody can make virtual time pass from here, but nobody has to: trackers answer at once.
            async with asyncio.timeout(seconds):
                return await waiting
        return await self._memory.passage.within(seconds, waiting)

    async def topics(self) -> Topics:
        return self._installation.facts

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        found = {}
        for name in sorted(names):
            if name not in self._memory.topics:
                raise ConfigError(
                    f"topic {name} does not exist, but a queue's settings name it as the queue's own: create it"
                    f" (Broker.create_topic({name!r})), or take `topic` out of the settings of that queue"
                )
            found[name] = self._memory.topics[name].partitions
        return found

    def queues(self) -> Queues:
        return Queues.of(self._settings)

    def writer(self, topics: Topics) -> MemoryWriter:
        return MemoryWriter(self._memory, self._installation)

    async def markers_reader(self, partitions: Collection[int]) -> MemoryMarkersReader:
        return MemoryMarkersReader(self._installation.markers, partitions)

    def member(self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False) -> MemoryMember:
        return MemoryMember(self._memory, group, self._settings, serving)

    def start(
        self, how: str, topics: Topics, member: GroupMember, group: str, instance_id: str | None
    ) -> tuple[MarkedStart, MemoryWriter]:
        # Nothing can fail here between the two, so each start is whole.
        writer = self.writer(topics)
        return MarkedStart(writer, member), writer

    async def sender(self, topics: Topics) -> MemorySender:
        sender = MemorySender(self._memory)
        self._memory.started(sender, "a Producer")
        return sender

    async def close(self, sender: object, limit_s: float) -> None:
        self._memory.stopped(sender)

    async def tracker_runs(self) -> bool | None:
        return True

    async def known_queues(self, wanted: str) -> set[str]:
        installation = self._installation
        groups = [installation.names.owner_of_group(group) for group in self._memory.groups]
        keys = [record.key for log in installation.messages.logs for record in log]
        leases = [lease for owner in installation.owners for _, _, lease, _ in owner.open_messages()]
        return {
            *installation.definitions.names(),
            *[queue for queue in groups if queue],
            *[key.decode("utf-8", "replace") for key in keys if key],
            *[lease.queue for lease in leases],
        }

    @property
    def _installation(self) -> Installation:
        return self._memory.installation(self._settings)


def memory_cluster(settings: ClientSettings) -> MemoryCluster:
    """Return the broker in memory at the settings' address."""
    return MemoryCluster(settings)


def memory_definition_log(settings: ClientSettings) -> MemoryDefinitionLog:
    """Return the queues topic at the settings' address."""
    return MemoryDefinitionLog(settings)
