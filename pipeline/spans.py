"""Durations, moments, and sizes as people write them: ``90s``, ``7d``, ``2026-11-21T08:00``, ``4KiB``."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from pipeline.errors import PipelineError

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
_UNITS_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_BYTES = {"": 1, "B": 1, "kB": 1000, "KiB": 1 << 10, "MB": 1000**2, "MiB": 1 << 20}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
#: A hundred years: longer ones are mistakes, and would pass what a timestamp can hold.
MAX_MS = 100 * 365 * DAY_MS


def duration_ms(name: str, text: str, *, least_ms: int = 1) -> int:
    """Return a duration in ms; ``name`` is the option's, for the error.

    Raises:
        PipelineError: it is none, or is too short or too long.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = _UNITS_MS.get(match[2]) if match else None
    if match is None or factor is None:
        raise PipelineError(f"{name} {text!r}: expected a number and a unit (ms, s, m, h, d), as in 30s or 7d")
    found = float(match[1]) * factor
    if not least_ms <= found <= MAX_MS:
        raise PipelineError(f"{name} {text!r}: expected at least {show_ms(least_ms)} and at most 100 years")
    return round(found)


def moment_ms(name: str, text: str) -> int:
    """Return a moment in ms since 1970; without a zone it is UTC.

    Raises:
        PipelineError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return math.floor(zoned.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise PipelineError(f"{name} {text!r}: expected a time such as 2026-11-21T08:00 (UTC)") from error


def size_bytes(name: str, text: str) -> int:
    """Return a size in bytes.

    Raises:
        PipelineError: it is none.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = _BYTES.get(match[2]) if match else None
    if match is None or factor is None:
        raise PipelineError(f"{name} {text!r}: expected bytes, as in 200 or 4KiB ({', '.join(filter(None, _BYTES))})")
    return round(float(match[1]) * factor)


def show_ms(ms: float) -> str:
    """Return a duration in the largest unit that leaves at least 1 of it: ``90 s`` is ``1.5 m``."""
    for unit in ("d", "h", "m", "s"):
        if ms >= _UNITS_MS[unit]:
            return f"{ms / _UNITS_MS[unit]:.3g}{unit}"
    return f"{ms:.3g}ms"


def show_moment(ms: int) -> str:
    """Return a moment in UTC, to the second."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
