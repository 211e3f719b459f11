"""One pass over the dead letters, which keeps the place and the group of each match.

A note comes after the dead letters that it settles, so only the end shows which ones are left. Until then each takes
about twenty bytes; :func:`dead_letters_at` reads the records themselves in a second pass.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from marq.core.deliveries.dead_letter_records import dead_lettered_at_ms, queue_of, text_of
from marq.core.storage.settled_dead_letters import Places
from marq.dead_letters.log import DeadLetterLog, Stored
from marq.wire.dead_letter_notes import decode, is_note
from marq.wire.markers import Source
from marq.wire.names import REASON_HEADER

#: Maximum number of different reasons; all others count as one.
MAX_GROUPS = 100_000
OTHER_REASONS = "other reasons"


class CountKey(NamedTuple):
    """The key by which dead letters are counted."""

    queue: str
    reason: str


class Spot(NamedTuple):
    """The place of a dead letter."""

    partition: int
    offset: int
    dead_lettered_at_ms: int
    group: int


class Span(NamedTuple):
    """The number of a group's dead letters, and the first and the last of them."""

    dead_letters: int
    oldest: Spot
    newest: Spot


class Survey:
    """The dead letters that ``fits`` accepts and that are not settled; ``counted_as`` returns their reason."""

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
        self._numbers: dict[CountKey, int] = {}
        #: Where to continue reading, by partition.
        self._next: dict[int, int] = {}
        self.ranges: dict[int, range] = {}

    async def make(self, log: DeadLetterLog) -> None:
        """Read all records that were not read before; same errors as :class:`DeadLetterLog`."""
        self.ranges = await log.ranges()
        for partition, span in self.ranges.items():
            self._forget_before(partition, span)
        async for records in log.records(self._unread(self.ranges)):
            for record in records:
                if is_note(record):
                    self._settle(record)
                else:
                    self._add(record)
                self._next[record.partition] = record.offset + 1

    def unread(self, ranges: Mapping[int, range]) -> int:
        """Return how many of these records :meth:`make` would read."""
        return sum(map(len, self._unread(ranges).values()))

    def _unread(self, ranges: Mapping[int, range]) -> dict[int, range]:
        return {
            partition: range(max(span.start, self._next.get(partition, 0)), span.stop)
            for partition, span in ranges.items()
        }

    def _forget_before(self, partition: int, span: range) -> None:
        """Forget dead letters removed by retention, or with a topic that was recreated."""
        if self._next.get(partition, 0) > span.stop:
            for by_partition in (self._next, self._offsets, self._died, self._groups, self._settled):
                by_partition.pop(partition, None)
        offsets = self._offsets.get(partition)
        if offsets and offsets[0] < span.start:
            gone = bisect_left(offsets, span.start)
            for column in (offsets, self._died[partition], self._groups[partition]):
                del column[:gone]

    def _settle(self, record: Stored) -> None:
        note = decode(Source(self._topic, record.partition), record.value)
        places = self._settled.setdefault(record.partition, Places())
        for offset in note.settled_before(record.offset) if note is not None else ():
            places.add(offset)

    def _add(self, record: Stored) -> None:
        queue = queue_of(record)
        if queue is None or not self._fits(queue, record):
            return
        partition = record.partition
        if partition not in self._offsets:
            self._offsets[partition], self._died[partition] = array("Q"), array("q")
            self._groups[partition] = array("L")
        self._offsets[partition].append(record.offset)
        self._died[partition].append(dead_lettered_at_ms(record))
        self._groups[partition].append(self._number(queue, self._counted_as(record)))

    def _number(self, queue: str, reason: str) -> int:
        group = CountKey(queue, reason)
        if group not in self._numbers and len(self._numbers) >= MAX_GROUPS:
            group = CountKey(queue, OTHER_REASONS)
        return self._numbers.setdefault(group, len(self._numbers))

    def spots(self, limit: int | None = None) -> Iterator[Spot]:
        """Return the places of the dead letters by partition and offset; with a limit the oldest ones."""
        if limit is None:
            return self._left()
        return iter(
            sorted(heapq.nsmallest(limit, self._left(), key=lambda spot: (spot.dead_lettered_at_ms, *spot[:2])))
        )

    def _left(self) -> Iterator[Spot]:
        for partition, offsets in sorted(self._offsets.items()):
            settled = self._settled.get(partition, _NO_PLACES)
            for offset, died_ms, group in zip(offsets, self._died[partition], self._groups[partition], strict=True):
                if offset not in settled:
                    yield Spot(partition, offset, died_ms, group)

    @property
    def groups(self) -> Sequence[CountKey]:
        """The groups, indexed by :attr:`Spot.group`."""
        return list(self._numbers)

    def counts(self) -> Counter[CountKey]:
        """Return how many dead letters of each group are left."""
        return Counter({group: span.dead_letters for group, span in self.spans().items()})

    def spans(self) -> dict[CountKey, Span]:
        """Return how many dead letters of each group are left, with the oldest and the newest of them."""
        spans: dict[int, Span] = {}
        for spot in self._left():
            letters, oldest, newest = spans.get(spot.group, (0, spot, spot))
            if spot.dead_lettered_at_ms < oldest.dead_lettered_at_ms:
                oldest = spot
            # If several have the same millisecond, the last place counts.
            if spot.dead_lettered_at_ms >= newest.dead_lettered_at_ms:
                newest = spot
            spans[spot.group] = Span(letters + 1, oldest, newest)
        groups = self.groups
        return {groups[number]: span for number, span in spans.items()}


_NO_PLACES = Places()


async def dead_letters_at(log: DeadLetterLog, spots: Iterator[Spot]) -> AsyncIterator[list[Stored]]:
    """Read the dead letters at these places, in the order of each partition; same errors as :class:`DeadLetterLog`."""
    wanted: dict[int, array[int]] = {}
    for spot in spots:
        wanted.setdefault(spot.partition, array("Q")).append(spot.offset)
    places = {partition: Places() for partition in wanted}
    for partition, offsets in wanted.items():
        for offset in offsets:
            places[partition].add(offset)
    ranges = {partition: range(offsets[0], offsets[-1] + 1) for partition, offsets in wanted.items()}
    async for records in log.records(ranges):
        if wanted_records := [record for record in records if record.offset in places[record.partition]]:
            yield wanted_records
