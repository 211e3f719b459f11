"""Durations, times and sizes as users write them: ``90s``, ``7d``, ``2026-11-21T08:00``, ``4KiB``; and lines of text.

Errors name the option (``name``) that a text came from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pipeline.errors import PipelineError

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
_UNITS_MS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_BYTES = {"": 1, "B": 1, "kB": 1000, "KiB": 1 << 10, "MB": 1000**2, "MiB": 1 << 20, "GB": 1000**3, "GiB": 1 << 30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
#: A hundred years: longer durations are mistakes and exceed what a timestamp can hold.
MAX_MS = 100 * 365 * DAY_MS


def duration_ms(name: str, text: str, *, least_ms: int = 1) -> int:
    ms = _number(name, text, _UNITS_MS, "a number and a unit (ms, s, m, h, d), as in 30s or 7d")
    if not least_ms <= ms <= MAX_MS:
        raise PipelineError(f"{name} {text!r}: expected at least {show_ms(least_ms)} and at most 100 years")
    return round(ms)


def size_bytes(name: str, text: str) -> int:
    return round(_number(name, text, _BYTES, "bytes, as in 200 or 4KiB (B, kB, KiB, MB, MiB, GB, GiB)"))


def _number(name: str, text: str, units: Mapping[str, int], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise PipelineError(f"{name} {text!r}: expected {expected}")
    return float(match[1]) * units[match[2]]


def moment_ms(name: str, text: str | None) -> int | None:
    """Return a time in ms since 1970, without a zone in UTC; None if the option is not set."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return math.floor(zoned.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise PipelineError(f"{name} {text!r}: expected a time such as 2026-11-21T08:00 (UTC)") from error


def show_ms(ms: float) -> str:
    """Return a duration in the largest unit that it reaches: ``90 s`` is ``1.5m``."""
    if ms < 0:
        return f"-{show_ms(-ms)}"
    for unit in ("d", "h", "m", "s"):
        if ms >= _UNITS_MS[unit]:
            return f"{ms / _UNITS_MS[unit]:.3g}{unit}"
    return f"{ms:.3g}ms"


def show_bytes(size: float) -> str:
    """Return a size in the largest unit that it reaches: 1,536 bytes are ``1.5 KiB``."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} bytes"


def show_moment(ms: int) -> str:
    """Return a time in UTC, to the second."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with columns of equal width, the first one aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([row[0].ljust(widths[0]), *line[1:]]) for row, line in zip(rows, lines, strict=True)]
