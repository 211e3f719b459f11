"""Looks through the dead letters once, and keeps of each that is meant where it stands and what it counts as.

A note stands behind what it settles, so which letters are left is known only at the end. Until then a letter takes some
twenty bytes, whatever its size; who wants the letters themselves reads them once more.
"""

from __future__ import annotations

import heapq
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from marq.core.dead_letters import died_at_ms, queue_of, text_of
from marq.core.errors import BrokerUnavailable
from marq.core.markers import Source
from marq.core.names import REASON_HEADER
from marq.core.notes import decode, is_note
from marq.core.settlements import Places
from marq.letter_log import LetterLog, Stored

#: Reasons that are told apart; the texts of all others count as one.
MAX_GROUPS = 100_000
OTHER_REASONS = "other reasons"


class Group(NamedTuple):
    """What letters are counted by."""

    queue: str
    reason: str


class Spot(NamedTuple):
    """Where a letter stands."""

    partition: int
    offset: int
    died_at_ms: int
    group: int


class Survey:
    """The letters of which ``fits`` is true, and that were not settled when it was last made.

    ``counted_as`` is what letters of one queue are told apart by.
    """

    def __init__(
        self,
        topic: str,
        fits: Callable[[str, Stored], bool],
        counted_as: Callable[[Stored], str] = lambda record: text_of(record.headers, REASON_HEADER),
    ) -> None:
        self._topic = topic
        self._fits = fits
        self._counted_as = counted_as
        self._offsets: dict[int, array[int]] = {}
        self._died: dict[int, array[int]] = {}
        self._groups: dict[int, array[int]] = {}
        self._settled: dict[int, Places] = {}
        self._numbers: dict[Group, int] = {}
        #: Where to read on, by partition.
        self._next: dict[int, int] = {}
        self.ranges: dict[int, range] = {}

    async def make(self, log: LetterLog, limit_s: float) -> None:
        """Read all that is there now, what was read before excepted; raises as :func:`until_the_end`."""
        self.ranges = await log.ranges()
        for partition, span in self.ranges.items():
            self._forget_before(partition, span)
        async for records in until_the_end(log, self._unread(self.ranges), limit_s):
            for record in records:
                if is_note(record.headers):
                    self._settle(record)
                else:
                    self._add(record)
                self._next[record.partition] = record.offset + 1

    def unread(self, ranges: Mapping[int, range]) -> int:
        """Return how many records of these :meth:`make` would read."""
        return sum(map(len, self._unread(ranges).values()))

    def _unread(self, ranges: Mapping[int, range]) -> dict[int, range]:
        return {
            partition: range(max(span.start, self._next.get(partition, 0)), span.stop)
            for partition, span in ranges.items()
        }

    def _forget_before(self, partition: int, span: range) -> None:
        """Forget letters that are there no more: removed by retention, or the topic was made anew."""
        if self._next.get(partition, 0) > span.stop:
            for each in (self._next, self._offsets, self._died, self._groups, self._settled):
                each.pop(partition, None)
        offsets = self._offsets.get(partition)
        if offsets and offsets[0] < span.start:
            gone = bisect_left(offsets, span.start)
            for column in (offsets, self._died[partition], self._groups[partition]):
                del column[:gone]

    def _settle(self, record: Stored) -> None:
        note = decode(Source(self._topic, record.partition), record.value)
        places = self._settled.setdefault(record.partition, Places())
        for offset in note.offsets if note is not None else ():
            places.add(offset)

    def _add(self, record: Stored) -> None:
        queue = queue_of(record)
        if queue is None or not self._fits(queue, record):
            return
        partition = record.partition
        if partition not in self._offsets:
            self._offsets[partition], self._died[partition], self._groups[partition] = (
                array("Q"),
                array("q"),
                array("L"),
            )
        self._offsets[partition].append(record.offset)
        self._died[partition].append(died_at_ms(record))
        self._groups[partition].append(self._number(queue, self._counted_as(record)))

    def _number(self, queue: str, reason: str) -> int:
        group = Group(queue, reason)
        if group not in self._numbers and len(self._numbers) >= MAX_GROUPS:
            group = Group(queue, OTHER_REASONS)
        return self._numbers.setdefault(group, len(self._numbers))

    def spots(self, limit: int | None = None) -> Iterator[Spot]:
        """Return where the letters stand, by partition and offset; with a limit those that died first."""
        if limit is None:
            return self._left()
        return iter(sorted(heapq.nsmallest(limit, self._left(), key=lambda spot: (spot.died_at_ms, *spot[:2]))))

    def _left(self) -> Iterator[Spot]:
        for partition, offsets in sorted(self._offsets.items()):
            settled = self._settled.get(partition, _NO_PLACES)
            for offset, died_ms, group in zip(offsets, self._died[partition], self._groups[partition], strict=True):
                if offset not in settled:
                    yield Spot(partition, offset, died_ms, group)

    @property
    def groups(self) -> Sequence[Group]:
        """By the numbers of :attr:`Spot.group`."""
        return list(self._numbers)

    def counts(self) -> Counter[Group]:
        """Return how many letters are left of each group."""
        numbers = Counter(spot.group for spot in self._left())
        groups = self.groups
        return Counter({groups[number]: count for number, count in numbers.items()})

    def spans(self) -> dict[Group, tuple[int, int, int]]:
        """Return of each group how many letters are left, and when the first and the last of them died."""
        found: dict[int, tuple[int, int, int]] = {}
        for spot in self._left():
            died_ms = spot.died_at_ms
            letters, first_ms, last_ms = found.get(spot.group, (0, died_ms, died_ms))
            found[spot.group] = (letters + 1, min(first_ms, died_ms), max(last_ms, died_ms))
        groups = self.groups
        return {groups[number]: span for number, span in found.items()}


_NO_PLACES = Places()


async def letters_at(log: LetterLog, spots: Iterator[Spot], limit_s: float) -> AsyncIterator[list[Stored]]:
    """Read the letters that stand there, in the order of each partition; raises as :func:`until_the_end`."""
    wanted: dict[int, array[int]] = {}
    for spot in spots:
        wanted.setdefault(spot.partition, array("Q")).append(spot.offset)
    places = {partition: Places() for partition in wanted}
    for partition, offsets in wanted.items():
        for offset in offsets:
            places[partition].add(offset)
    ranges = {partition: range(offsets[0], offsets[-1] + 1) for partition, offsets in wanted.items()}
    async for records in until_the_end(log, ranges, limit_s):
        found = [record for record in records if record.offset in places[record.partition]]
        if found:
            yield found


async def until_the_end(log: LetterLog, ranges: Mapping[int, range], limit_s: float) -> AsyncIterator[Sequence[Stored]]:
    """Read partitions from the start to the end of a range each.

    Raises:
        BrokerUnavailable: nothing more could be read for ``limit_s``.
    """
    left = {partition: offsets for partition, offsets in ranges.items() if offsets}
    if not left:
        return
    log.seek({partition: offsets.start for partition, offsets in left.items()})
    before: dict[int, int] = {}
    until_s = time.monotonic() + limit_s
    while left:
        records = await log.read()
        yield [record for record in records if record.offset < ranges[record.partition].stop]
        # Where only a transaction's own records are left, the position tells it, and no record.
        positions = await log.positions()
        if positions != before:
            before, until_s = positions, time.monotonic() + limit_s
        elif time.monotonic() > until_s:
            raise BrokerUnavailable(
                f"the dead letters could not be read to their end: nothing came for {limit_s:g} s of {positions}, and"
                f" they end at { ({partition: offsets.stop for partition, offsets in left.items()}) }"
            )
        done = [partition for partition, offsets in left.items() if positions.get(partition, 0) >= offsets.stop]
        for partition in done:
            del left[partition]
        if done and left:
            log.seek({partition: positions[partition] for partition in left})
