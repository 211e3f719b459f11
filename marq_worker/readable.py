"""Text for people: durations, text from others that must not control the terminal, fatal errors."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import NoReturn

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def span(duration_s: float) -> str:
    """Return a duration in one or two units."""
    whole = round(abs(duration_s))
    sign = "-" if duration_s < 0 and whole else ""
    if whole < 60:
        return f"{sign}{whole} s"
    for unit, size, less, smaller in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller
            return f"{sign}{whole // size} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{sign}{whole} s"


def read_duration(text: str) -> float | None:
    """Return the seconds of a duration such as 90s, 15m, 2h, 7d or 90 (seconds); None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip(), re.ASCII)
    return None if match is None else float(match[1]) * _UNITS[match[2] or "s"]


def paused(until: str | None) -> str:
    """Return the state of a paused queue, with the end of the pause if it has one."""
    if until is None:
        return "paused"
    end = datetime.fromisoformat(until).astimezone(UTC)
    day = "" if end.date() == datetime.now(UTC).date() else f"{end:%Y-%m-%d} "
    return f"paused until {day}{end:%H:%M:%S} UTC"


def plain(text: str) -> str:
    """Return a text on one line, with a replacement for each unprintable character (controls, escapes, bidi).

    Senders and clients write such texts, which must not move the cursor, colour text or forge lines.
    """
    return "".join(character if character.isprintable() else "�" for character in text)


def end_with(error: Exception) -> NoReturn:
    """End the process with the error's notes (such as the traceback of a failed import) and its text."""
    sys.exit("\n".join([*getattr(error, "__notes__", ()), f"marq: {error}"]))
