"""The reader of a consumer's receiver: a member of a group on simulated Kafka.

It is a :class:`marq.kafka.group_reader.GroupMember`.

Marq's own code decides where to read a partition from, and how far each queue is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from lab.proof import history
from marq.kafka.committed_offsets import Committed, StartPositionResolver
from marq.kafka.group_reader import NotCommitted
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks, MemberPositions, Positions
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.wire.markers import Source
from tests.simulation.group import Commit

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer

POLL_MS = 40


class GroupCommit(NamedTuple):
    """What a member commits in its group."""

    offsets: Mapping[Source, Committed]
    after: Mapping[Source, Positions]
    generation: int
    #: The offsets of these positions.
    ends: Mapping[Source, int]


class Reader:
    """Reads the partitions of one member's assignment."""

    keep_alive_s = inf

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._world = consumer.world
        self._group = consumer.group
        #: Offsets to read next.
        self.positions: dict[Source, int] = {}
        self._unplaced: list[Source] = []
        self._generation = 0
        self._progress = MemberPositions()
        #: Number of changes of the assignment or of the served queues.
        self._changes = 0

    # --- assignment ---------------------------------------------------------------------------------------------------

    def serve(self, serving: Serving) -> None:
        """Read for other queues: a new subscription drops the assignment, and joins the group again."""
        self.revoked()
        self._world.stats["served_anew"] += 1
        self._consumer.serves(serving)

    def revoked(self) -> None:
        self._changes += 1
        self._progress.clear()
        self.positions.clear()
        self._unplaced = []

    def assigned(self, generation: int, sources: Iterable[Source]) -> None:
        self._changes += 1
        self._generation = generation
        self._unplaced = list(sources)

    async def _place(self) -> None:
        """Look up the group's position in each partition, and then those of other groups."""
        world, group, wait = self._world, self._group, self._consumer.loop.wait
        sources, changes = self._unplaced, self._changes
        if self._group.pending.of(sources):
            # A former owner's transaction may still move an offset.
            world.stats["waited_for_transactions"] += 1
            await wait(world.rng.randint(5, 30))
            return
        search = self._search(sources)
        await wait(world.rng.randint(0, 5))
        # A queue that came from another group continues at that group's position.
        if search.needs_others and any(each.pending.of(sources) for each in world.groups):
            await wait(world.rng.randint(5, 30))
            return
        if changes != self._changes:
            return
        if search.needs_others:
            for other in world.groups:
                if other is not group:
                    search.consider(other.kafka_name, other.committed, world.snapshots)
        for source, place in search.places().items():
            if place.snapshot is not None:
                world.snapshots[place.snapshot.id] = place.snapshot
                world.stats["snapshots"] += 1
            self.positions[source] = place.start
            self._progress.begin(source, place.positions, place.start)
        self._unplaced = []

    def _search(self, sources: Iterable[Source]) -> StartPositionResolver:
        world, group = self._world, self._group
        return StartPositionResolver(
            world.names,
            group.kafka_name,
            self._consumer.serving,
            sources,
            dict(group.committed),
            world.snapshots,
            plain_bytes=world.plain_metadata_bytes,
            room_bytes=world.metadata_room_bytes,
            new_id=lambda: f"snapshot-{next(world.snapshot_numbers)}",
        )

    def assigned_of(self, topic: str) -> tuple[Collection[int], int]:
        sources = [*self.positions, *self._unplaced]
        assigned = [source.partition for source in sources if source.log.topic == topic]
        return assigned, sum(1 for source in self._world.messages if source.log.topic == topic)

    # --- calls of the receiver ----------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        world, loop = self._world, self._consumer.loop
        if self._unplaced:
            await self._place()
            return {}
        await loop.wait(world.rng.randint(0, 5))
        fetched = {source: read for source in self.positions if (read := self._read(source))}
        if not fetched:
            await loop.wait(POLL_MS)
        return self._progress.without_received(self._consumer.serving, fetched)

    def _read(self, source: Source) -> Records | None:
        """Read some records of a partition, or none of them yet."""
        world, rng, start = self._world, self._world.rng, self.positions[source]
        partition, committed = world.messages[source], self._group.committed_reads
        if start < partition.start:
            # Retention was faster: report the gap, and continue at the start of the log.
            log_name, end = history.log_name(source), partition.start
            world.history.add(self._consumer.name, "ok", "skipped", source=log_name, start=start, end=end)
            world.stats["skipped"] += 1
            self.positions[source] = start = end
        end = partition.end(committed=committed)
        if start >= end:
            return None
        end = min(end, start + rng.randint(1, 8))
        if world.hit(world.faults.late_read):
            end = rng.randint(start, end)
        self.positions[source] = end
        # There may be only control records of transactions.
        records = partition.read(start, end, committed=committed)
        return Records.of(records) if records else None

    async def commit(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> None:
        await self._commit(self.commit_of(offsets, behind))

    async def verify(self, sources: Collection[Source]) -> None:
        offsets, current = self._progress.current(sources)
        await self._commit(self._commit_of(offsets, current, sources))

    async def _commit(self, commit: GroupCommit) -> None:
        world, wait = self._world, self._consumer.loop.wait
        assert commit.offsets, "aiokafka commits no empty offsets"
        if world.hit(world.faults.commit_failed):
            raise NotCommitted("failed")
        await wait(world.rng.randint(0, 2))
        for source, committed in commit.offsets.items():
            if self._group.commit(source, committed, commit.generation, self._consumer) is Commit.REFUSED:
                world.stats["commits_refused"] += 1
                raise NotCommitted("refused")
        if world.hit(world.faults.commit_unknown):
            raise NotCommitted("unknown")
        await wait(world.rng.randint(0, 2))
        self.note_committed(commit)

    def commit_of(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> GroupCommit:
        return self._commit_of(offsets, self._progress.advanced_to(self._consumer.serving, offsets, behind), offsets)

    def _commit_of(
        self, offsets: Mapping[Source, int], after: Mapping[Source, Positions], wanted: Collection[Source]
    ) -> GroupCommit:
        if set(wanted) - after.keys():
            raise NotCommitted("not assigned any more")
        queues_in = self._consumer.serving.queues_in
        numbers = {
            source: after[source].committed_offset(queues_in(source.topic), end) for source, end in offsets.items()
        }
        commits = {source: Committed(number, after[source].encode(number)) for source, number in numbers.items()}
        return GroupCommit(commits, after, self._generation, offsets)

    def note_committed(self, commit: GroupCommit) -> None:
        self._progress.take(commit.ends, commit.after)

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        self.positions.update({source: offset for source, offset in offsets.items() if source in self.positions})

    async def keep_alive(self) -> None:
        return
