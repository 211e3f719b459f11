"""How commands say durations, sizes and values."""

from __future__ import annotations

import re

from marq.core.errors import ConfigError

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
#: Bytes of a value that are shown.
SHOWN_BYTES = 1_024


def seconds(option: str, text: str) -> float:
    """Return a duration that somebody typed: 90s, 15m, 2h, 7d; without a unit seconds.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip(), re.ASCII)
    if not found:
        raise ConfigError(f"{option} {text}: expected a duration such as 90s, 15m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def span(duration_s: float) -> str:
    """Return a duration in one or two units, for people."""
    whole = round(abs(duration_s))
    sign = "-" if duration_s < 0 and whole else ""
    if whole < 60:
        return f"{sign}{whole} s"
    for unit, size, less, smaller in (("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller
            return f"{sign}{whole // size} {unit}" + (f" {rest} {less}" if rest else "")
    return f"{sign}{whole} s"


def text(value: bytes | None) -> str | None:
    """Return the beginning of a value, as far as it is text."""
    return None if value is None else value[:SHOWN_BYTES].decode("utf-8", "replace")
