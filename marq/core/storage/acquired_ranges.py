"""The records of a partition that a queue has acquired before, as a few intervals of offsets.

A consumer reads a partition in order, so there is nearly always a single interval. A second one appears if the marker
of a batch was lost and a later batch was written. The records in between must then be acquired again and not be
mistaken for finished ones; a single high-water mark would lose them.

Beyond :data:`MAX_INTERVALS`, the lowest interval is forgotten: if one of its records is read again, it is mistaken for
a new one and delivered twice. Closing the gap instead could lose the records in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping

from marq.wire.markers import Source

MAX_INTERVALS = 64


class AcquiredRanges:
    """Offsets acquired so far: sorted, disjoint, half-open intervals."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        pairs = list(intervals)
        self._starts = [start for start, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._ends[index]

    @property
    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def end(self) -> int:
        """The offset after the last one acquired; 0 before the first."""
        return self._ends[-1] if self._ends else 0

    def first_free(self, offset: int) -> int:
        """Return the first offset from this one on that a consumer may still acquire.

        No consumer acquires records before the first interval, because the group started after them.
        """
        index = bisect_right(self._starts, offset) - 1
        return max(offset, self._ends[max(0, index)]) if self._ends else offset

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the intervals that overlap the offsets from ``start`` to before ``end``."""
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        return list(zip(self._starts[low:high], self._ends[low:high], strict=True))

    def add(self, start: int, end: int) -> None:
        """Mark the offsets from ``start`` to before ``end``."""
        if self._ends and start == self._ends[-1]:
            self._ends[-1] = end
            return
        starts, ends = self._starts, self._ends
        low = bisect_right(ends, start - 1)
        high = bisect_right(starts, end)
        if low < high:
            start, end = min(start, starts[low]), max(end, ends[high - 1])
        starts[low:high] = [start]
        ends[low:high] = [end]
        if len(starts) > MAX_INTERVALS:
            del starts[0], ends[0]


def acquired_in(acquired: Mapping[tuple[str, Source], AcquiredRanges], queue: str) -> dict[Source, AcquiredRanges]:
    """Return what a queue has acquired in each source; ``acquired`` is that of a lease book."""
    return {source: ranges for (name, source), ranges in acquired.items() if name == queue}
