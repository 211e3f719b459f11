"""How late due messages were sent, as the buckets of a histogram: of all partitions of a worker, since its start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from marq.core.histogram import buckets

#: Upper ends of the buckets, in ms; a last one has no end.
BOUNDS_MS = (10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000)


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
