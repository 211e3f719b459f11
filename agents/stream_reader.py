"""Feeds the five steps of :mod:`marq.flow` from a Faust stream instead of a Kafka consumer of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from agents.fetched import Fetched
from agents.positions import Positions, keys
from marq.core.markers import Source
from marq.reader import NotCommitted

log = logging.getLogger("marq.handlers")

#: Records that wait for the flow; past that the partitions are paused, so that trackers go on reading beside them.
MAX_WAITING = 10_000
#: How long a fetch waits for a first record.
FETCH_WAIT_SECONDS = 0.5
COMMIT_SECONDS = 10.0

Record = ConsumerRecord[bytes, bytes]


@dataclass(frozen=True)
class Partitions:
    """What the reader asks of Faust's consumer, for partitions of the messages topic."""

    seek: Callable[[int, int], Awaitable[None]]
    #: Returns when no rebalance is under way.
    settled: Callable[[], Awaitable[None]]
    pause: Callable[[Iterable[int]], None]
    resume: Callable[[Iterable[int]], None]
    #: {partition: (offset, metadata)}; raises KafkaError when refused or unknown.
    commit: Callable[[Mapping[int, tuple[int, str]]], Awaitable[None]]
    #: partition -> (committed offset or None, its metadata, where the log begins).
    committed: Callable[[int], Awaitable[tuple[int | None, str, int]]]


@dataclass
class _Lane:
    """One partition: what has come of it and not been fetched, and where its next record begins."""

    position: int
    positions: Positions
    records: deque[Record] = field(default_factory=deque)


class StreamReader:
    """A :class:`marq.reader.Reader` for the queues of one worker."""

    #: Faust's consumer stays in the group by itself.
    keep_alive_s = 3600.0

    def __init__(self, topic: str, queues: Iterable[str], partitions: Partitions) -> None:
        self._topic = topic
        self._queues = keys(queues)
        self._partitions = partitions
        self._lanes: dict[int, _Lane] = {}
        self._rewound: dict[int, int] = {}
        self._arrived = asyncio.Event()
        self._paused = False

    async def assigned(self, partitions: Iterable[int]) -> None:
        """Begin to read partitions where the queue that is furthest behind has to go on."""
        for partition in partitions:
            offset, metadata, log_start = await self._partitions.committed(partition)
            positions = Positions.decode(offset, metadata)
            start = positions.start(self._queues.values(), log_start)
            if offset is not None and start < offset:
                log.info("partition %s: reading from %s for queues that have joined since", partition, start)
            self._lanes[partition] = _Lane(start, positions)
            self._rewound[partition] = start
        self._paused = False
        self._arrived.set()

    def revoked(self) -> None:
        """Forget what was read and not fetched: the next owner reads it from the committed offset."""
        self._lanes.clear()
        self._rewound.clear()

    async def deliver(self, partition: int, fetched: Fetched) -> None:
        """Take a batch from the stream."""
        lane = self._lanes.get(partition)
        if lane is None or partition in self._rewound:
            return
        if fetched.start > lane.position:
            await self._close_gap(partition, lane, fetched.start)
            return
        lane.records.extend(record for record in fetched.records if record.offset >= lane.position)
        lane.position = max(lane.position, fetched.end)
        self._arrived.set()
        self._hold()

    async def _close_gap(self, partition: int, lane: _Lane, start: int) -> None:
        _, _, log_start = await self._partitions.committed(partition)
        if log_start > lane.position:
            log.error(
                "topic %s, partition %s: retention has removed records %s to %s before they were read",
                self._topic, partition, lane.position, log_start - 1,
            )  # fmt: skip
            lane.position = log_start
        log.info("topic %s, partition %s: going back from %s to %s", self._topic, partition, start, lane.position)
        await self._partitions.seek(partition, lane.position)

    def _hold(self) -> None:
        waiting = sum(len(lane.records) for lane in self._lanes.values())
        if not self._paused and waiting >= MAX_WAITING:
            self._paused = True
            self._partitions.pause(self._lanes)
        elif self._paused and waiting < MAX_WAITING // 2:
            self._paused = False
            self._partitions.resume(self._lanes)

    # --- what the flow asks -------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Sequence[Record]]:
        await self._seek_back()
        if not any(lane.records for lane in self._lanes.values()):
            self._arrived.clear()
            try:
                async with asyncio.timeout(FETCH_WAIT_SECONDS):
                    await self._arrived.wait()
            except TimeoutError:
                self._hold()
                return {}
        taken = self._take(max_records)
        self._hold()
        return taken

    def _take(self, max_records: int) -> dict[Source, list[Record]]:
        taken: dict[Source, list[Record]] = {}
        for partition, lane in list(self._lanes.items()):
            count = min(len(lane.records), max_records)
            if count:
                max_records -= count
                records = [self._masked(lane.records.popleft(), lane) for _ in range(count)]
                taken[Source(self._topic, partition)] = records
                # To the end, so that the next fetch begins with another partition.
                self._lanes[partition] = self._lanes.pop(partition)
        return taken

    def _masked(self, record: Record, lane: _Lane) -> Record:
        queue = self._queues.get(record.key)
        # A record that its queue has had counts as another queue's: it is read past, and nobody gets it.
        return replace(record, key=None) if queue is not None and lane.positions.had(queue, record.offset) else record

    async def _seek_back(self) -> None:
        while self._rewound:
            # At the end of a rebalance Faust seeks to the committed offsets: only a seek after that one stays.
            await self._partitions.settled()
            if not self._rewound:
                return
            partition, offset = next(iter(self._rewound.items()))
            try:
                await self._partitions.seek(partition, offset)
            except KafkaError as error:
                log.warning("topic %s, partition %s: could not seek to %s: %r", self._topic, partition, offset, error)
                await asyncio.sleep(FETCH_WAIT_SECONDS)
                continue
            if self._rewound.get(partition) == offset:
                del self._rewound[partition]

    async def commit(self, offsets: Mapping[Source, int]) -> None:
        commits: dict[int, tuple[int, str]] = {}
        for source, offset in offsets.items():
            lane = self._lanes.get(source.partition)
            if lane is None:
                raise NotCommitted(f"partition {source.partition} is not assigned any more")
            after = Positions(dict(lane.positions.by_queue))
            after.advance(self._queues.values(), offset)
            commits[source.partition] = (offset, after.encode(offset))
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self._partitions.commit(commits)
        except (KafkaError, TimeoutError) as error:
            raise NotCommitted(str(error) or type(error).__name__) from error
        for source, offset in offsets.items():
            lane = self._lanes.get(source.partition)
            if lane is not None:
                lane.positions.advance(self._queues.values(), offset)

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        for source, offset in offsets.items():
            lane = self._lanes.get(source.partition)
            if lane is not None:
                lane.records.clear()
                lane.position = offset
                self._rewound[source.partition] = offset
        # What was dropped may have been why reading pauses.
        self._hold()
        self._arrived.set()

    async def keep_alive(self) -> None:
        return
