"""The brokers' clock, as the answers to writes show it.

Clocks of machines differ, so a process must not compare a record's timestamp with its own clock: if that is days ahead,
every record would seem old. The timestamp in the answer to a write is the time at which the broker appended the record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marq.client.uptime import uptime_s

#: ``timestamp_type`` of a record whose topic has ``message.timestamp.type=LogAppendTime``.
_LOG_APPEND_TIME = 1
#: A little more than the longest wait for an answer.
_MAX_LATE_MS = 20_000.0


class BrokerClock:
    """The brokers' time since the last write; late by the time that its answer took.

    Args:
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = uptime_s) -> None:
        self._clock = clock
        self._ahead_ms: float | None = None

    def note(self, written: Any) -> None:
        """Learn the time from the ``RecordMetadata`` of a write."""
        if written.timestamp_type == _LOG_APPEND_TIME:
            ahead_ms = written.timestamp - self._clock() * 1000
            late_ms = 0.0 if self._ahead_ms is None else self._ahead_ms - ahead_ms
            # A slow answer would set the clock back. A larger difference is a jump of the brokers' clock.
            if not 0 < late_ms <= _MAX_LATE_MS:
                self._ahead_ms = ahead_ms

    def now_ms(self) -> int | None:
        """Return the milliseconds since 1970; None before the first write."""
        return None if self._ahead_ms is None else round(self._clock() * 1000 + self._ahead_ms)
