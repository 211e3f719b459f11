"""The progress of owners of markers partitions: lag, whether it grows or falls, and how late messages are sent.

An owner that reads faster than others write catches up by itself; a slower one never does. So it is the difference of
the two rates, and not the lag, that tells whether an operator has to act.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from marq.core.storage.handling_times import buckets

#: Window over which rates are measured.
WINDOW_SECONDS = 30.0
#: A smaller lag does not count, because a fetch of these records is in progress.
LEVEL_RECORDS = 1_000
#: Most time between two samples that counts as stalled: a suspended process could not make progress.
MAX_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """The progress of one partition, in records of the markers topic; rates are per second over the last window.

    ``position`` is the next offset to read, ``end`` the end of the log; None if not known.
    """

    position: int | None = None
    end: int | None = None
    read_per_second: float = 0.0
    written_per_second: float = 0.0
    #: Seconds without a record read although records were available.
    stalled_seconds: float = 0.0

    @property
    def lag(self) -> int:
        return 0 if self.position is None or self.end is None else max(0, self.end - self.position)

    @property
    def lag_per_second(self) -> float:
        """How fast the lag grows (above 0) or falls (below 0)."""
        return self.written_per_second - self.read_per_second

    @property
    def falls_behind(self) -> bool:
        return self.lag > LEVEL_RECORDS and self.lag_per_second > 0

    @property
    def drain_seconds(self) -> float | None:
        """Time until the lag is gone at this pace; None if it does not fall."""
        if self.lag == 0:
            return 0.0
        return None if self.lag_per_second >= 0 else self.lag / -self.lag_per_second


@dataclass
class Paces:
    """Samples of positions and ends; ``end_of`` returns the end of a partition, None if not known."""

    end_of: Callable[[int], int | None] = lambda _: None
    _samples: dict[int, deque[tuple[float, int, int]]] = field(default_factory=dict)
    _stalled_s: dict[int, float] = field(default_factory=dict)

    def note(self, now_s: float, positions: dict[int, int | None]) -> None:
        """Sample the position of each partition that is owned now."""
        for gone in self._samples.keys() - positions.keys():
            del self._samples[gone]
            self._stalled_s.pop(gone, None)
        for partition, position in positions.items():
            end = self.end_of(partition)
            samples = self._samples.setdefault(partition, deque())
            if position is None or end is None:
                samples.clear()
                self._stalled_s[partition] = 0.0
                continue
            self._note_stall(partition, samples[-1] if samples else None, now_s, position)
            # A fetch on its way may know an end below the position.
            samples.append((now_s, position, max(position, end)))
            while now_s - samples[0][0] > WINDOW_SECONDS:
                samples.popleft()

    def _note_stall(self, partition: int, before: tuple[float, int, int] | None, now_s: float, position: int) -> None:
        # Records must have been available at the last sample already; newer ones could not be read yet.
        if before is None or position != before[1] or before[1] >= before[2]:
            self._stalled_s[partition] = 0.0
        else:
            self._stalled_s[partition] += min(now_s - before[0], MAX_STEP_SECONDS)

    def of(self, partition: int) -> PartitionProgress:
        samples = self._samples.get(partition)
        if not samples:
            return PartitionProgress()
        (start_s, first, first_end), (end_s, position, end) = samples[0], samples[-1]
        took_s, stalled_s = end_s - start_s, self._stalled_s[partition]
        if took_s <= 0:
            return PartitionProgress(position, end, stalled_seconds=stalled_s)
        return PartitionProgress(position, end, (position - first) / took_s, (end - first_end) / took_s, stalled_s)


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Progress of the reader of a partition, for the watchdog (marq_worker/watchdog/watchdog.py).

    ``progress`` changes whenever the reader makes progress.
    """

    progress: tuple[int, ...]
    #: The next offset to read; None if not known yet.
    position: int | None = None
    #: Work that is due although there is nothing to read; empty if none.
    owes: str = ""


#: Upper bounds of the buckets in ms; the last bucket has none.
BOUNDS_MS = (10, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000)
#: The age up to which a message counts as recent, so that an outage that is over does not seem to last.
RECENT_MS = 600_000
#: Messages to keep per partition, approximately.
RECENT = 10_000


@dataclass
class Lateness:
    """How late due messages were sent since the worker started, as a histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    sum_ms: int = 0

    def note(self, lateness_ms: Iterable[int]) -> None:
        for late_ms in lateness_ms:
            self.counts[bisect_left(BOUNDS_MS, late_ms)] += 1
            self.sum_ms += late_ms

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Return the upper bound of each bucket in seconds, as Prometheus writes it, and the cumulative count."""
        return buckets(BOUNDS_MS, self.counts)


class RecentLateness:
    """How late the last messages of a partition were, in lists as they were noted."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, Sequence[int]]] = deque()
        self._count = 0

    def note(self, now_ms: int, lateness_ms: Sequence[int]) -> None:
        """Add a list, and drop the oldest lists beyond :data:`RECENT` messages."""
        self._noted.append((now_ms, lateness_ms))
        self._count += len(lateness_ms)
        while self._count - len(self._noted[0][1]) >= RECENT:
            self._count -= len(self._noted.popleft()[1])

    def rising(self, now_ms: int) -> list[int]:
        """Return the values of the last :data:`RECENT_MS`, in ascending order."""
        return sorted(late_ms for at_ms, some in self._noted if now_ms - at_ms <= RECENT_MS for late_ms in some)
