"""How many messages to hold: about as many as the recent pace finishes in a second.

A message that is prefetched is leased: no other consumer can have it. So a slow handler must not hoard, while a fast
one must never wait for the broker. The pace is counted over the time in which something was held; it follows a new
handler at once and a changed one within about a second. From one look to the next the window at most doubles.
"""

from __future__ import annotations

#: Messages to hold, in seconds of work.
HOLD_S = 1.0
#: How fast the past is forgotten.
MEMORY_S = 1.0


class Pace:
    """Counts finished messages over busy time. Times are seconds of a monotonic clock."""

    __slots__ = ("_busy_s", "_finished", "_seen_s", "_window")

    def __init__(self) -> None:
        self._finished = 0.0
        self._busy_s = 0.0
        self._seen_s: float | None = None
        self._window = 1

    def busy(self, now_s: float) -> None:
        """Messages were taken: from now on time counts."""
        if self._seen_s is None:
            self._seen_s = now_s

    def finished(self, count: int, now_s: float, *, idle: bool) -> None:
        """``count`` messages ended; ``idle`` when none is held any more."""
        self._pass(now_s)
        self._finished += count
        if idle:
            self._seen_s = None

    def window(self, floor: int, most: int, now_s: float) -> int:
        """Return how many messages to hold now: at least ``floor``, at most ``most``."""
        self._pass(now_s)
        wanted = self._finished / self._busy_s * HOLD_S if self._busy_s > 0 else 0.0
        grown = max(floor, 2 * self._window)
        self._window = max(1, min(int(max(floor, wanted)), grown, most))
        return self._window

    def _pass(self, now_s: float) -> None:
        if self._seen_s is None:
            return
        passed_s = now_s - self._seen_s
        self._seen_s = now_s
        self._busy_s += passed_s
        if self._busy_s > MEMORY_S:
            keep = MEMORY_S / self._busy_s
            self._busy_s *= keep
            self._finished *= keep
