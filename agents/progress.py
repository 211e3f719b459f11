"""Whether the owners of markers partitions keep up: how far behind each is, and whether that grows or falls.

An owner that is behind and reads faster than others write catches up by itself; one that is slower never does. So it
is the difference of both velocities that says whether somebody has to act, not how far behind it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Seconds over which velocities are taken.
WINDOW_SECONDS = 30.0
#: Below so many records nobody is behind: a fetch of them is on its way.
LEVEL_RECORDS = 1_000
#: Most time between two samples that counts as stalled: a suspended process could not make progress.
MAX_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one partition, in records of the markers topic, each a batch of markers; per second over the last window.

    ``position`` is the next one to read, ``end`` the one that is to be written next, as far as that is known.
    """

    position: int | None = None
    end: int | None = None
    read_per_second: float = 0.0
    written_per_second: float = 0.0
    #: For how long nothing was read although records were available.
    stalled_seconds: float = 0.0

    @property
    def lag(self) -> int:
        """How many records are not read yet."""
        return 0 if self.position is None or self.end is None else max(0, self.end - self.position)

    @property
    def lag_per_second(self) -> float:
        """By how much the lag grows (above 0) or falls (below 0)."""
        return self.written_per_second - self.read_per_second

    @property
    def falls_behind(self) -> bool:
        """Whether it has a lag worth the name, and that grows."""
        return self.lag > LEVEL_RECORDS and self.lag_per_second > 0

    @property
    def drain_seconds(self) -> float | None:
        """How long until nothing is left, at this pace; None when that never comes."""
        if self.lag == 0:
            return 0.0
        return None if self.lag_per_second >= 0 else self.lag / -self.lag_per_second


@dataclass
class Paces:
    """Samples of positions and ends; ``end_of`` says where a partition ends, None where that is not known."""

    end_of: Callable[[int], int | None] = lambda _: None
    _samples: dict[int, deque[tuple[float, int, int]]] = field(default_factory=dict)
    _stalled_s: dict[int, float] = field(default_factory=dict)

    def note(self, now_s: float, positions: dict[int, int | None]) -> None:
        """Note how far each partition that is owned now has been read."""
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
            # What was read was written, whatever a fetch that is on its way has said of the end.
            samples.append((now_s, position, max(position, end)))
            while now_s - samples[0][0] > WINDOW_SECONDS:
                samples.popleft()

    def _note_stall(self, partition: int, before: tuple[float, int, int] | None, now_s: float, position: int) -> None:
        # Records must have been available at the last sample already; newer ones could not be read yet.
        if before is None or position != before[1] or before[1] >= before[2]:
            self._stalled_s[partition] = 0.0
        else:
            self._stalled_s[partition] += min(now_s - before[0], MAX_STEP_SECONDS)

    def of(self, partition: int) -> Pace:
        """Return the pace of a partition."""
        samples = self._samples.get(partition)
        if not samples:
            return Pace()
        (start_s, first, first_end), (end_s, position, end) = samples[0], samples[-1]
        took_s, stalled_s = end_s - start_s, self._stalled_s[partition]
        if took_s <= 0:
            return Pace(position, end, stalled_seconds=stalled_s)
        return Pace(position, end, (position - first) / took_s, (end - first_end) / took_s, stalled_s)
