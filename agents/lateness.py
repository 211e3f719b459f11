"""How late due messages were sent: of a worker since its start, as a histogram, and of a partition lately."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from marq.core.histogram import buckets

#: Upper ends of the buckets, in ms; a last one has no end.
BOUNDS_MS = (10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000)
#: What is of lately: an outage that is over should not be shown as one that lasts.
RECENT_MS = 600_000
#: About so many messages of a partition are kept.
RECENT = 10_000


@dataclass
class Lateness:
    """``counts``: one for each bucket; ``sum_ms``: of all that was noted."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    sum_ms: int = 0

    def note(self, lateness_ms: Iterable[int]) -> None:
        """Count some messages."""
        for late_ms in lateness_ms:
            self.counts[bisect_left(BOUNDS_MS, late_ms)] += 1
            self.sum_ms += late_ms

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Return each bucket's upper end in seconds, as Prometheus writes it, and how many were at most so late."""
        return buckets(BOUNDS_MS, self.counts)


class RecentLateness:
    """How late the last messages of a partition were, as lists that were noted at once."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Sequence[int]]] = deque()
        self._count = 0

    def note(self, now_ms: int, lateness_ms: Sequence[int]) -> None:
        """Keep them, and drop the oldest lists that are not needed for :data:`RECENT` messages."""
        self._noted.append((now_ms, lateness_ms))
        self._count += len(lateness_ms)
        while self._count - len(self._noted[0][1]) >= RECENT:
            self._count -= len(self._noted.popleft()[1])

    def rising(self, now_ms: int) -> list[int]:
        """Return those of the last :data:`RECENT_MS`, the least first; ``now_ms``: by the clock of the notes."""
        return sorted(late_ms for at_ms, some in self._noted if now_ms - at_ms <= RECENT_MS for late_ms in some)
