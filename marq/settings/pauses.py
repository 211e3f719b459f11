"""The end of a pause: text in ISO 8601, because a pause without an end is ``true`` in the same setting.

The clock of the client that pauses sets the end, and each reader compares it with its own clock. So consumers and
trackers resume at different moments if their clocks differ. That is safe: a message is either delivered or
waits.
"""

from __future__ import annotations

from datetime import UTC, datetime
from math import ceil

from marq.settings.durations import moment_of
from marq.wire.errors import ConfigError


def pause_end(wall_s: float) -> str:
    """Return the end of a pause, rounded up to a whole second."""
    return datetime.fromtimestamp(ceil(wall_s), UTC).isoformat().replace("+00:00", "Z")


def pause_end_ms(value: object) -> int:
    """Return the end of a pause in ms since 1970. Raises ConfigError if it is not a time with a time zone."""
    end = moment_of(value) if isinstance(value, str) else None
    if end is None:
        raise ConfigError(
            f'expected true, false, or a time with a time zone, like "2026-11-23T14:05:00Z", not {value!r}'
        )
    return round(end.timestamp() * 1000)
