"""Feeds the five steps of :mod:`marq.consumer.receiver` from a Faust stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata, TopicPartition

from marq.kafka.committed_offsets import StartPosition
from marq.kafka.group_reader import GroupCommit, NotCommitted
from marq.kafka.incarnations import Incarnations, Recreated, TopicIds
from marq.kafka.protocol import Generation
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks, MemberPositions, Positions
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.wire.errors import MarqError
from marq.wire.markers import Source
from marq.wire.names import incarnation_id
from marq_worker.progress import ProgressReport
from marq_worker.transport.inbox import Fetched

log = logging.getLogger("marq.handlers")

#: Records that may wait for the receiver; beyond that the partitions are paused.
MAX_WAITING = 10_000
#: How long a fetch waits for the first record, and the pause before a retry.
FETCH_WAIT_SECONDS = 0.5
COMMIT_SECONDS = 10.0
#: Time limit for looking up start positions, enough for thousands of queues that had groups of their own.
PLACE_SECONDS = 60.0
#: A receiver that has not fetched for this long is assumed to have no room for records.
ASKING_SECONDS = 2.0
#: A batch that takes longer from Faust's consumer to the reader counts as lost.
DELIVERY_SECONDS = 1.0

Record = ConsumerRecord[bytes, bytes]

NO_MEMBER = Generation(-1, "", None)


async def no_ids(partitions: Collection[Source]) -> Collection[tuple[str, str]]:
    """Return no ids, as brokers before Kafka 2.8 do."""
    return ()


@dataclass(frozen=True)
class FaustConsumerPort:
    """Operations of Faust's consumer."""

    seek: Callable[[Source, int], Awaitable[None]]
    #: Returns when no rebalance is running.
    settled: Callable[[], Awaitable[None]]
    pause: Callable[[Iterable[Source]], None]
    resume: Callable[[Iterable[Source]], None]
    #: Commits {partition: (offset, metadata)} for a generation, but not after the limit (seconds). Raises KafkaError or
    #: TimeoutError if the commit was refused or its outcome is unknown.
    commit: Callable[[Mapping[Source, tuple[int, str]], Generation, float], Awaitable[None]]
    #: Start positions of assigned partitions; raises KafkaError.
    places: Callable[[Serving, Iterable[Source]], Awaitable[Mapping[Source, StartPosition]]]
    #: First and end offset of a partition.
    log_start: Callable[[Source], Awaitable[int]]
    log_end: Callable[[Source], Awaitable[int]]
    #: The offset after the last fetched record, delivered or not; None if not known.
    returned_to: Callable[[Source], int | None]
    #: The topics of partitions with their ids; raises KafkaError.
    topic_ids: TopicIds = no_ids
    #: Name of the committer, for the metadata of commits.
    committer: str = ""
    #: The consumer group, and the current generation of this member.
    group: str = ""
    generation: Callable[[], Generation] = lambda: NO_MEMBER


@dataclass
class _Lane:
    """One partition: its records that wait for the receiver, and the offset of the next record."""

    position: int
    records: deque[Record] = field(default_factory=deque)


class StreamReader:
    """A :class:`marq.kafka.group_reader.Reader` for the queues of one group, fed by an agent's stream."""

    #: Faust's consumer stays in the group by itself.
    keep_alive_s = 3600.0

    def __init__(self, serving: Serving, partitions: FaustConsumerPort) -> None:
        self._serving = serving
        self._partitions = partitions
        self._lanes: dict[Source, _Lane] = {}
        self._progress = MemberPositions()
        #: The sources by assigned partition. Offsets of the receiver and positions belong to sources, all other members
        #: to partitions.
        self._incarnations = Incarnations(partitions.topic_ids, self._go_back)
        #: The generation of the current assignment, read at its start: the member may already have a later one, in
        #: which others own the partitions, before we learn that they were revoked.
        self._generation = NO_MEMBER
        #: Assigned partitions whose start positions are not known yet.
        self._unplaced: set[Source] = set()
        #: Number of assignments and revocations.
        self._changes = 0
        self._rewound: dict[Source, int] = {}
        self._made_anew: MarqError | None = None
        self._arrived = asyncio.Event()
        self._paused = False
        #: Partitions for which a batch was on its way at the last check, with their positions then.
        self._awaited: dict[Source, int] = {}
        self._looked_s = 0.0
        self._asking = False
        self._asked_s = -ASKING_SECONDS

    def standings(self) -> dict[Source, ProgressReport]:
        """Return the progress of partitions that should deliver records; none while there is no room."""
        if not (self._asking or time.monotonic() - self._asked_s < ASKING_SECONDS):
            return {}
        return {
            source: ProgressReport((lane.position,), lane.position)
            for source, lane in self._lanes.items()
            if not lane.records
        }

    def assigned(self, sources: Iterable[Source]) -> None:
        """Begin with new partitions; take no records before their start positions are known."""
        self._changes += 1
        self._generation = self._partitions.generation()
        self._unplaced = set(sources)
        self._paused = False
        self._arrived.set()

    def revoked(self) -> None:
        """Forget records that were not fetched: the next owner reads them from the committed offset."""
        self._changes += 1
        self._lanes.clear()
        self._progress.clear()
        self._incarnations.clear()
        self._unplaced.clear()
        self._rewound.clear()

    async def deliver(self, source: Source, fetched: Fetched) -> None:
        # First: the lane may change meanwhile.
        await self._check_end(source, fetched.start)
        lane = self._lanes.get(source)
        if lane is None or source in self._rewound:
            return
        if fetched.start > lane.position:
            await self._close_gap(source, lane, fetched.start)
            return
        lane.records.extend(record for record in fetched.records if record.offset >= lane.position)
        lane.position = max(lane.position, fetched.end)
        self._arrived.set()
        self._hold()

    async def _check_end(self, source: Source, start: int) -> None:
        """Notice a log that was recreated or lost its end: its new records must not be mistaken for those read before.

        The consumer then returns records from before our position.
        """
        lane = self._lanes.get(source)
        if lane is None or start >= lane.position or source in self._rewound or self._made_anew is not None:
            return
        position = lane.position
        try:
            # All partitions wait for this.
            async with asyncio.timeout(DELIVERY_SECONDS):
                end = await self._partitions.log_end(source)
        except (KafkaError, TimeoutError) as error:
            # The next batches are also from before the position, so they are checked, too.
            log.warning("topic %s, partition %s: could not check where partitions end: %r", *source, error)
            return
        if end < position:
            self._made_anew = MarqError(
                f"topic {source.topic}, partition {source.partition}: the log ends at {end}, but it was read up to "
                f"{position}: the topic was recreated or has lost records; continuing from the committed offsets"
            )
            self._arrived.set()

    async def _close_gap(self, source: Source, lane: _Lane, start: int) -> None:
        log_start = await self._partitions.log_start(source)
        if log_start > lane.position:
            log.error(
                "topic %s, partition %s: retention has removed records %s to %s before they were read",
                source.topic, source.partition, lane.position, log_start - 1,
            )  # fmt: skip
            lane.position = log_start
        log.info("topic %s, partition %s: going back from %s to %s", *source, start, lane.position)
        await self._partitions.seek(source, lane.position)

    def _hold(self) -> None:
        waiting = sum(len(lane.records) for lane in self._lanes.values())
        if not self._paused and waiting >= MAX_WAITING:
            self._paused = True
            self._partitions.pause(self._lanes)
        elif self._paused and waiting < MAX_WAITING // 2:
            self._paused = False
            self._partitions.resume(self._lanes)

    # --- calls of the receiver ----------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        self._asking = True
        try:
            return await self._fetch(max_records)
        finally:
            self._asking, self._asked_s = False, time.monotonic()

    async def _fetch(self, max_records: int) -> Mapping[Source, Records]:
        if self._made_anew is not None:
            # This ends the process; the next one looks its start positions up again.
            raise self._made_anew
        await self._place()
        await self._seek_back()
        await self._look_for_lost()
        if not any(lane.records for lane in self._lanes.values()):
            self._arrived.clear()
            try:
                async with asyncio.timeout(FETCH_WAIT_SECONDS):
                    await self._arrived.wait()
            except TimeoutError:
                self._hold()
                return await self._checked({})
        taken = self._take(max_records)
        self._hold()
        return await self._checked(taken)

    async def _checked(self, taken: Mapping[Source, Records]) -> Mapping[Source, Records]:
        try:
            return self._progress.without_received(
                self._serving, await self._incarnations.checked(self._serving, taken)
            )
        except Recreated as error:
            # This ends the process; the next one looks its start positions up again.
            raise MarqError("a queue's own topic was deleted and created again: starting over") from error

    async def _place(self) -> None:
        wanted, changes = frozenset(self._unplaced), self._changes
        if not wanted:
            return
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                places = await self._partitions.places(self._serving, wanted)
                starts = {source: await self._partitions.log_start(source) for source in wanted}
        except (TimeoutError, KafkaError) as error:
            log.warning("position to continue from is still unknown, retrying: %r", error)
            await asyncio.sleep(FETCH_WAIT_SECONDS)
            return
        # Even if a rebalance assigned the same partitions: another member may have read on meanwhile.
        if changes != self._changes:
            return
        self._unplaced.clear()
        for source, place in places.items():
            start = max(place.start, starts[source])
            self._lanes[source] = _Lane(start)
            self._progress.begin(self._incarnations.begin(source, place.topic_id), place.positions, start)
            self._rewound[source] = start
        if lost := [source.of(place.topic_id) for source, place in places.items() if place.lost]:
            with suppress(NotCommitted):
                await self.verify(lost)

    async def _look_for_lost(self) -> None:
        """Seek back for fetched batches that do not arrive: at the end of a log no later one shows the gap."""
        now_s = time.monotonic()
        if now_s - self._looked_s < DELIVERY_SECONDS:
            return
        self._looked_s = now_s
        awaited = {
            source: lane.position
            for source, lane in self._lanes.items()
            if source not in self._rewound and (self._partitions.returned_to(source) or 0) > lane.position
        }
        for source in [source for source, position in awaited.items() if self._awaited.get(source) == position]:
            log.warning("topic %s, partition %s: reading again from %s: no record arrived", *source, awaited[source])
            self._rewound[source] = awaited.pop(source)
        self._awaited = awaited
        await self._seek_back()

    def _take(self, max_records: int) -> dict[Source, Records]:
        taken: dict[Source, Records] = {}
        for source, lane in list(self._lanes.items()):
            count = min(len(lane.records), max_records)
            if count:
                max_records -= count
                taken[source] = Records.of([lane.records.popleft() for _ in range(count)])
                # Last, so that the next fetch begins with another partition.
                self._lanes[source] = self._lanes.pop(source)
        return taken

    async def _seek_back(self) -> None:
        while self._rewound:
            # At the end of a rebalance Faust seeks to the committed offsets, so seek after that.
            await self._partitions.settled()
            if not self._rewound:
                return
            source, offset = next(iter(self._rewound.items()))
            try:
                await self._partitions.seek(source, offset)
            except KafkaError as error:
                log.warning("topic %s, partition %s: could not seek to %s: %r", *source, offset, error)
                await asyncio.sleep(FETCH_WAIT_SECONDS)
                continue
            if self._rewound.get(source) == offset:
                del self._rewound[source]

    async def commit(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> None:
        await self._commit(offsets, self._after(offsets, behind))

    async def verify(self, sources: Collection[Source]) -> None:
        offsets, current = self._progress.current(sources)
        _check_assigned(sources, current)
        await self._commit(offsets, current)

    async def _commit(self, offsets: Mapping[Source, int], after: Mapping[Source, Positions]) -> None:
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._partitions.commit(self._encoded(offsets, after), self._generation, COMMIT_SECONDS)
        except (KafkaError, TimeoutError) as error:
            raise NotCommitted(str(error) or type(error).__name__) from error
        self._progress.take(offsets, after)

    def commit_of(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> GroupCommit:
        """See :class:`marq.kafka.group_reader.TransactionalReader`."""
        after = self._after(offsets, behind)
        if self._generation.number < 0:
            # Without a generation, the group would accept it like an administrator's commit.
            raise NotCommitted("the group has removed this member")
        commits = {
            TopicPartition(*log): OffsetAndMetadata(*position)
            for log, position in self._encoded(offsets, after).items()
        }
        return GroupCommit(self._partitions.group, self._generation, commits, after, offsets)

    def committed(self, commit: GroupCommit) -> None:
        """Note that this commit has succeeded."""
        self._progress.take(commit.ends, commit.after)

    def _after(self, offsets: Mapping[Source, int], behind: LowWatermarks) -> Mapping[Source, Positions]:
        after = self._progress.advanced_to(self._serving, offsets, behind)
        _check_assigned(offsets, after)
        return after

    def _encoded(
        self, offsets: Mapping[Source, int], after: Mapping[Source, Positions]
    ) -> dict[Source, tuple[int, str]]:
        if self._made_anew is not None:
            # The next process would take these offsets for those of the present log, and skip its new records.
            raise NotCommitted(str(self._made_anew))
        by, changed_at = self._partitions.committer, self._serving.changed_at
        numbers = {
            source: after[source].committed_offset(self._serving.queues_in(source.topic), offset)
            for source, offset in offsets.items()
        }
        return {
            source.log: (number, after[source].encode(number, by, changed_at, incarnation_id(source.topic)))
            for source, number in numbers.items()
        }

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        self._incarnations.rewind(offsets)

    def _go_back(self, offsets: Mapping[Source, int]) -> None:
        for source, offset in offsets.items():
            lane = self._lanes.get(source)
            if lane is not None:
                lane.records.clear()
                lane.position = offset
                self._rewound[source] = offset
        # The dropped records may have been the reason for the pause.
        self._hold()
        self._arrived.set()

    async def keep_alive(self) -> None:
        return


def _check_assigned(wanted: Collection[Source], positions: Mapping[Source, Positions]) -> None:
    for topic, partition in set(wanted) - positions.keys():
        raise NotCommitted(f"{topic}/{partition} is no longer assigned")
