"""Text for people: durations, and text from others that must not control the terminal."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = "".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS)
#: What :func:`read_duration` understands, for errors.
DURATION_FORM = "a duration such as 90s, 15m, 1h30m or 7d"


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
    """Return the seconds of a duration such as 90s, 15m, 1h30m, 7d or 90 (seconds); None for any other text.

    Units are in descending order, each at most once.
    """
    text = text.strip()
    if re.fullmatch(_NUMBER, text, re.ASCII):
        return float(text)
    match = re.fullmatch(_DURATION, text, re.ASCII)
    if not text or match is None:
        return None
    return sum(
        float(number) * seconds for number, seconds in zip(match.groups(), _UNITS.values(), strict=True) if number
    )


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


#: The reason of a message that used up its attempts, if a release ended the last one.
_EXHAUSTED = re.compile(r"(\d+) of \1 attempts used: the last time it was released")


def given_up(reason: str) -> str:
    """Return a reason without the release that ended the last attempt: next to an error, it says nothing."""
    exhausted = _EXHAUSTED.fullmatch(reason)
    if exhausted is None:
        return reason
    attempts = int(exhausted[1])
    return f"given up after {attempts:,} attempt{'s' if attempts > 1 else ''}"


def why_dead(reason: str, error: str) -> str:
    """Return why a message became a dead letter: its last error, if it used up its attempts, else the reason.

    The error may be that of an earlier attempt: a Retry without a cause leaves none.
    """
    if not error or _EXHAUSTED.fullmatch(reason) is None:
        return reason
    return f"{given_up(reason)}, last error: {error}"
