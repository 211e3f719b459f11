"""A monotonic clock that also advances while the machine is suspended, as the brokers' clocks do.

Owners get all of their times from it, and put them into TICKs. With another clock, a suspension would look like a jump
of the broker's clock, and messages with absolute times would be late by its length from then on.
"""

from __future__ import annotations

import time

# Linux stops CLOCK_MONOTONIC during a suspension. macOS does not, and has no CLOCK_BOOTTIME.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def uptime_s() -> float:
    """Return seconds since an arbitrary point."""
    return time.clock_gettime(_CLOCK)


def uptime_ms() -> int:
    """Return whole milliseconds since an arbitrary point."""
    return int(uptime_s() * 1000)
