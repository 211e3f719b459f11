"""Consumer groups in memory: assigned partitions and committed offsets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marq.kafka.committed_offsets import Committed, Offsets, StartPositionResolver, of_incarnations
from marq.kafka.group_consumer import replaced
from marq.kafka.group_reader import Assignee, NotCommitted
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks, MemberPositions, OffsetSnapshot, Positions
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.testing.topics import Topic
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq.wire.names import Names, incarnation_id

log = logging.getLogger("marq")

#: Members never time out here.
_KEEP_ALIVE_S = 3600.0


@dataclass
class Group:
    """One consumer group."""

    name: str
    #: The offset snapshots of all groups, by the id in their commits.
    snapshots: dict[str, OffsetSnapshot]
    committed: dict[Source, Committed] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    _turn: asyncio.Lock | None = None
    _rebalances: set[asyncio.Task[None]] = field(default_factory=set)

    def forget_members(self) -> None:
        """Drop members whose event loop is closed."""
        self.members.clear()
        self._rebalances.clear()
        self._turn = None

    def position(self, queue: str, source: Source, names: Names) -> int:
        """Return how far this group has read a queue in a partition."""
        committed = current([source], self.committed).get(source.log)
        if committed is None:
            return 0
        owner = names.owner_of_group(self.name)
        return Positions.decode(committed.offset, committed.metadata, owner, self.snapshots).by_queue.get(queue, 0)

    async def join(self, member: Member) -> None:
        """Add a member, which replaces the one with its instance id."""
        for former in [*self.members]:
            if former.instance_id is not None and former.instance_id == member.instance_id:
                self.members.remove(former)
                former.fail(replaced(self.name, member.instance_id))
        self.members.append(member)
        await self.rebalance()

    async def leave(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
            await self.rebalance()

    def rebalance_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.rebalance(), name="marq-memory-rebalance")
        self._rebalances.add(task)
        task.add_done_callback(self._rebalances.discard)

    async def rebalance(self) -> None:
        """Revoke and reassign all partitions, as an eager rebalance does."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            members = list(self.members)
            await asyncio.gather(*[member.revoke() for member in members])
            shares = _shares(members)
            for member in members:
                member.assign(shares[id(member)])


def _shares(members: Sequence[Member]) -> dict[int, list[Source]]:
    """Assign each partition to one of the members that read its topic."""
    shares: dict[int, list[Source]] = {id(member): [] for member in members}
    turn = 0
    for name in sorted({topic for member in members for topic in member.topics}):
        readers = [member for member in members if name in member.topics]
        for partition in range(readers[0].partitions_of(name)):
            shares[id(readers[turn % len(readers)])].append(Source(name, partition))
            turn += 1
    return shares


def current(sources: Iterable[Source], committed: Offsets, group: str | None = None) -> Offsets:
    """Return the commits for these sources, as :func:`of_incarnations`."""
    wanted = {source.log: source for source in sources}
    mine = {partition: commit for partition, commit in committed.items() if partition in wanted}
    return of_incarnations(wanted.values(), mine, group)


class Member:
    """A :class:`marq.kafka.group_reader.GroupMember` that reads topics in memory."""

    keep_alive_s = _KEEP_ALIVE_S

    def __init__(
        self,
        groups: Mapping[str, Group],
        group: Group,
        names: Names,
        topics: Mapping[str, Topic],
        serving: Serving,
        instance_id: str | None = None,
    ) -> None:
        self.instance_id = instance_id
        self._groups = groups
        self._group = group
        self._names = names
        self._topics = topics
        self._serving = serving
        self._assignee: Assignee
        self._read_to: dict[Source, int] = {}
        self._progress = MemberPositions()
        self._assignments = 0
        self._more = asyncio.Event()
        self._heard: set[str] = set()

    @property
    def topics(self) -> list[str]:
        return self._serving.topics

    def partitions_of(self, topic: str) -> int:
        return self._topics[topic].partitions if topic in self._topics else 0

    async def start(self, assignee: Assignee) -> None:
        self._assignee = assignee
        self._listen()
        await self._group.join(self)

    async def stop(self, limit_s: float) -> None:
        self._forget()
        for name in self._heard & self._topics.keys():
            self._topics[name].ignore(self._more.set)
        self._heard.clear()
        await self._group.leave(self)

    def fail(self, error: ConfigError) -> None:
        """Stop reading and committing for good."""
        self._forget()
        self._assignee.fail(error)
        # Ends a fetch.
        self._assignments += 1
        self._more.set()

    def serve(self, serving: Serving) -> None:
        self._serving = serving
        self._forget()
        self._listen()
        self._group.rebalance_soon()

    def _listen(self) -> None:
        for name in self.topics:
            if name not in self._topics:
                continue
            self._topics[name].listen(self._more.set)
            self._heard.add(name)

    # --- assignment ---------------------------------------------------------------------------------------------------

    async def revoke(self) -> None:
        await self._assignee.revoked()
        self._forget()

    def _forget(self) -> None:
        self._read_to.clear()
        self._progress.clear()

    def assign(self, sources: Iterable[Source]) -> None:
        """Begin to read partitions where the group's queues continue."""
        group, partitions = self._group, {source: source.of(self._topics[source.topic].id) for source in sources}

        committed = current(partitions.values(), group.committed, group.name)
        resolver = StartPositionResolver(self._names, group.name, self._serving, partitions, committed, group.snapshots)
        if resolver.needs_others:
            for name, other in sorted(self._groups.items()):
                if other is not group and self._names.is_group(name):
                    resolver.consider(name, current(partitions.values(), other.committed), group.snapshots)
        for partition, place in resolver.places().items():
            if place.snapshot is not None:
                group.snapshots[place.snapshot.id] = place.snapshot
            source = partitions[partition]
            self._read_to[source] = place.start
            self._progress.begin(source, place.positions, place.start)
        self._assignments += 1
        self._assignee.assigned()
        self._more.set()

    # --- calls of the receiver ----------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        assignment = self._assignments
        while not (fetched := self._take(max_records)):
            self._more.clear()
            await self._more.wait()
            if assignment != self._assignments:
                # The fetch began before the assignment, so its records would be ignored.
                return {}
        return self._progress.without_received(self._serving, fetched)

    def _take(self, left: int) -> dict[Source, Records]:
        taken: dict[Source, Records] = {}
        for source, start in list(self._read_to.items()):
            topic = self._topics.get(source.log.topic)
            if topic is None:
                continue
            if source not in topic.sources:
                # As marq.kafka.incarnations does.
                log.warning("topic %s was deleted and created again: reading it from its start", topic.name)
                self._forget()
                self._group.rebalance_soon()
                return {}
            records = topic.logs[source.partition][start : start + left]
            if records:
                taken[source] = Records.of(records)
                left -= len(records)
                # Moved to the end, so that the next fetch begins with another partition.
                del self._read_to[source]
                self._read_to[source] = records[-1].offset + 1
        return taken

    async def commit(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> None:
        after = self._progress.advanced_to(self._serving, offsets, behind)
        for topic, partition in offsets.keys() - after.keys():
            raise NotCommitted(f"{topic}/{partition} is no longer assigned")
        for source, offset in offsets.items():
            number = after[source].committed_offset(self._serving.queues_in(source.topic), offset)
            metadata = after[source].encode(
                number, changed_at=self._serving.changed_at, topic_id=incarnation_id(source.topic)
            )
            self._group.committed[source.log] = Committed(number, metadata)
        self._progress.take(offsets, after)

    async def verify(self, sources: Collection[Source]) -> None:
        # Members never time out here, and a cycle in progress keeps its partitions.
        if any(source not in self._read_to for source in sources):
            raise NotCommitted("a partition is no longer assigned")

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        for source, offset in offsets.items():
            if source in self._read_to:
                self._read_to[source] = offset
        self._more.set()

    async def keep_alive(self) -> None:
        return

    def assigned_of(self, topic: str) -> tuple[Collection[int], int]:
        assigned = [source.partition for source in self._read_to if source.log.topic == topic]
        return assigned, self.partitions_of(topic)
