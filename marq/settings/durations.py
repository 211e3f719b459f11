"""Durations as users give them: seconds or a timedelta, never milliseconds. Moments in ISO 8601.

The end of a pause is a moment, because a pause without an end is ``true`` in the same setting. The clock of the client
that pauses sets the end, and each reader compares it with its own clock. So consumers and trackers resume at different
moments if their clocks differ. That is safe: a message is either delivered or waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from marq.wire.errors import ConfigError

Duration = float | timedelta

#: The longest duration that a marker can hold as milliseconds in 32 bits: 49 days.
MAX_MS = 2**32 - 1


def duration_ms(name: str, value: object, *, least_ms: int = 0, most_ms: int = MAX_MS) -> int:
    """Return a duration in ms. Raises ConfigError if it is not a number or timedelta, or out of range."""
    seconds = _seconds(name, value)
    if not math.isfinite(seconds) or not least_ms <= round(seconds * 1000) <= most_ms:
        raise ConfigError(
            f"{name}={value!r}: expected seconds from {plain_seconds(least_ms)} to {plain_seconds(most_ms)},"
            " or a timedelta in that range"
        )
    return round(seconds * 1000)


def optional_ms(name: str, value: object) -> int | None:
    """Return a duration in ms, None for None."""
    return None if value is None else duration_ms(name, value)


def plain_seconds(ms: int) -> str:
    """Return seconds as a person writes them, without an exponent."""
    return f"{ms / 1000:.3f}".rstrip("0").rstrip(".")


def plain(value: object) -> Any:
    """Return the value of a setting in a document: durations in seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def moment_of(text: str) -> datetime | None:
    """Return a moment in ISO 8601 with a time zone, in UTC; None for any other text."""
    try:
        moment = datetime.fromisoformat(text)
        # In UTC it may be after the year 9999, which no datetime can be.
        return None if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def pause_end(wall_s: float) -> str:
    """Return the end of a pause, rounded up to a whole second."""
    return datetime.fromtimestamp(math.ceil(wall_s), UTC).isoformat().replace("+00:00", "Z")


def pause_end_ms(value: object) -> int:
    """Return the end of a pause in ms since 1970. Raises ConfigError if it is not a time with a time zone."""
    end = moment_of(value) if isinstance(value, str) else None
    if end is None:
        raise ConfigError(
            f'expected true, false, or a time with a time zone, like "2026-11-23T14:05:00Z", not {value!r}'
        )
    return round(end.timestamp() * 1000)


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r}: expected seconds (a number) or a timedelta, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
