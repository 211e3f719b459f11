"""Cycles in progress (steps 2 to 4 of :mod:`marq.consumer.receiver`), and the records fetched for the next ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from marq.consumer.acquisition import Acquisition
from marq.consumer.line_places import Reading
from marq.kafka.acquire_strategies import AcquireStrategy
from marq.kafka.group_reader import NotCommitted
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.wire.markers import Source

#: Maximum number of cycles: one writes its ACQUIREs while the previous one commits. More run only while
#: ``BUSY_RECORDS`` wait, because a small cycle costs as much as a large one.
MAX_CYCLES, MAX_CYCLES_BUSY, BUSY_RECORDS = 2, 4, 1_000
#: Without prefetching, cycles run one at a time and begin at least this many seconds apart: calls that arrive meanwhile
#: share the next cycle.
MAX_CYCLES_ON_DEMAND, ON_DEMAND_S = 1, 0.015
#: While this many records are kept back, further ones of their sources are dropped, and read again later.
MAX_HELD_RECORDS = 6_000


class BeforeFailed(NotCommitted):
    """The previous cycle failed, and reads again for both cycles."""


class Taking(NamedTuple):
    """What a cycle acquires and then commits; ``limit_s`` applies to each of these two steps."""

    strategy: AcquireStrategy
    acquisitions: Sequence[Acquisition]
    markers: Sequence[MarkerRecord]
    #: Empty for messages that are acquired again: nothing new was read.
    offsets: Mapping[Source, int]
    limit_s: float
    readings: Sequence[Reading] = ()

    def __str__(self) -> str:
        return " ".join(f"partition={source.partition} end={offset}" for source, offset in self.offsets.items())


class Cycle(NamedTuple):
    """Steps 2 to 4 for some records, of which at most ``pending`` will be delivered."""

    records: Mapping[Source, Records]
    assignment: int
    pending: int
    task: asyncio.Task[bool]


class Cycles(deque[Cycle]):
    """Cycles in progress, in the order in which their records were read; ``on_demand``: nothing is prefetched."""

    def __init__(self, *, on_demand: bool = False) -> None:
        super().__init__()
        self._on_demand = on_demand
        #: When the last one began.
        self._began_s = float("-inf")
        self.failed = RepeatedWarning("cycle failed, reading again: %s error=%s")

    def begin(self, cycle: Cycle, now_s: float) -> None:
        self._began_s = now_s
        self.append(cycle)

    def rest_s(self, now_s: float) -> float:
        """Return for how long no other cycle may begin."""
        return max(0.0, self._began_s + ON_DEMAND_S - now_s) if self._on_demand else 0.0

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        return [cycle.task for cycle in self]

    @property
    def pending(self) -> int:
        """The maximum number of messages that will be delivered."""
        return sum([cycle.pending for cycle in self])

    def starts(self, records: Mapping[Source, Records], assignment: int) -> dict[Source, int]:
        """Return where the cycles of an assignment began to read: the cycle with these records, and all later ones."""
        starts: dict[Source, int] = {}
        # If several have read a partition, the earliest counts.
        for cycle in reversed(self):
            if cycle.assignment == assignment:
                starts |= {source: read.offsets[0] for source, read in cycle.records.items()}
            if cycle.records is records:
                break
        return starts

    def have_to_end(self, waiting: int) -> bool:
        """Whether the first cycle has ended, or must end before the ``waiting`` records get a cycle."""
        if self._on_demand:
            # Nothing is fetched meanwhile, either: the next fetch returns more records at once.
            return len(self) >= MAX_CYCLES_ON_DEMAND
        most = MAX_CYCLES_BUSY if waiting >= BUSY_RECORDS else MAX_CYCLES
        return bool(self) and (self[0].task.done() or (waiting > 0 and len(self) >= most))


async def ended(before: asyncio.Task[bool] | None) -> None:
    """Wait for the previous cycle.

    Raises:
        BeforeFailed: its records will be read again.
    """
    if before is None:
        return
    await asyncio.wait([before])
    if before.cancelled() or before.exception() is not None or not before.result():
        raise BeforeFailed("the records before it were not committed")


class FetchedRecords:
    """Records that were fetched and not yet acquired, in order for each source partition.

    They are neither leased nor committed, so the receiver may fetch far more than it has room for. This matters if most
    records of a topic belong to other queues; ``serving`` tells which ones are ours.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._records: dict[Source, Records] = {}
        #: Records of sources from which nothing may be acquired yet.
        self._held: dict[Source, Records] = {}
        #: Held sources whose later records were dropped, with the offset of the first dropped one.
        self._dropped: dict[Source, int] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def count(self) -> int:
        """The number of records, including those of other queues."""
        return sum(map(len, self._records.values()))

    def put(self, records: Mapping[Source, Records]) -> None:
        """Add records that follow the present ones."""
        for source, read in records.items():
            if source in self._held or source in self._dropped:
                self._hold(source, read)
            else:
                before = self._records.get(source)
                self._records[source] = Records.joined([before, read]) if before is not None else read

    def hold(self, sources: Iterable[Source]) -> None:
        """Keep back the records of these sources."""
        for source in sources:
            self._hold(source, self._records.pop(source))

    def _hold(self, source: Source, read: Records) -> None:
        # A source that can't be resumed for hours must not stop the others.
        if source in self._dropped or sum(map(len, self._held.values())) >= MAX_HELD_RECORDS:
            self._dropped.setdefault(source, read.offsets[0])
        else:
            before = self._held.get(source)
            self._held[source] = Records.joined([before, read]) if before is not None else read

    def let_go(self, source: Source) -> int | None:
        """Stop keeping back the records of a source; return the offset from which to read again, if any."""
        if source in self._held:
            self._records[source] = self._held.pop(source)
        return self._dropped.pop(source, None)

    @property
    def held(self) -> bool:
        """Whether records are kept back."""
        return bool(self._held or self._dropped)

    @property
    def records(self) -> Mapping[Source, Records]:
        return self._records

    def clear(self) -> dict[Source, int]:
        """Forget all records; return where reading has to continue."""
        kept = {source: read.offsets[0] for source, read in (self._records | self._held).items()}
        starts = self._dropped | kept
        self._records, self._held, self._dropped = {}, {}, {}
        return starts

    def cut(self, room: int) -> dict[Source, Records]:
        """Take records with at most ``room`` messages of ours, and the other records between and after them."""
        taken: dict[Source, Records] = {}
        left: dict[Source, Records] = {}
        for source, read in self._records.items():
            count = len(read)
            end = count if count <= room else self._serving.end(source, read, room)
            if end:
                taken[source] = read if end == count else read[:end]
                room -= end if end == count <= room else self._serving.count(source, taken[source])
            if end < count:
                left[source] = read[end:]
        self._records = left
        return taken
