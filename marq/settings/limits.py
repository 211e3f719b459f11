"""Limits of a queue and of each of its keys: how many messages run at a time, and how many begin per second."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marq.wire.errors import ConfigError
from marq.wire.names import ORDERING_KEY_HEADER

#: A rate's units and their seconds.
_UNITS = {"s": 1, "min": 60, "h": 3_600}
MAX_RATE = 1_000_000
#: How much of a rate may begin at once, as seconds of it; at least one message.
_BURST_S = 0.1
#: The beginning of a ``key`` that names a header.
HEADER_KEY = "header:"


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` messages begin in ``unit``, evenly spaced."""

    count: int
    unit: str = "s"

    def __str__(self) -> str:
        return f"{self.count}/{self.unit}"

    @property
    def interval_s(self) -> float:
        """The time between two messages."""
        return _UNITS[self.unit] / self.count

    def burst(self, share: float = 1.0) -> int:
        """Return how many messages of a share of the rate may begin at once after a pause."""
        return max(1, int(_BURST_S * share / self.interval_s))

    @classmethod
    def parse(cls, value: object) -> Rate:
        """Parse a rate such as "10/min". Raises ConfigError."""
        match = re.fullmatch(r"([0-9]{1,7})/(s|min|h)", value) if isinstance(value, str) else None
        if match is None or not 1 <= int(match[1]) <= MAX_RATE:
            raise ConfigError(
                f'expected a number from 1 to {MAX_RATE} and a unit, such as "200/s", "10/min" or "5/h", not {value!r}'
            )
        return cls(int(match[1]), match[2])


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None for no limit."""

    concurrency: int | None = None
    rate: Rate | None = None


@dataclass(frozen=True, slots=True)
class Limits(KeyLimits):
    """The limits of a queue, and those of each of its keys."""

    per_key: KeyLimits = field(default_factory=KeyLimits)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Limits:
        """Return the limits of a checked document."""
        return cls(*_values(document), KeyLimits(*_values(document.get("per_key", {}))))

    def document(self) -> dict[str, Any]:
        """Return the document of these limits."""
        per_key = _document(self.per_key)
        return _document(self) | ({"per_key": per_key} if per_key else {})


def _values(document: Mapping[str, Any]) -> tuple[int | None, Rate | None]:
    rate = document.get("rate")
    return document.get("concurrency"), None if rate is None else Rate.parse(rate)


def _document(limits: KeyLimits) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if limits.concurrency is not None:
        found["concurrency"] = limits.concurrency
    if limits.rate is not None:
        found["rate"] = str(limits.rate)
    return found


def key_header(key: str) -> str:
    """Return the header that has the key of a message; ``key`` is the setting."""
    return key.removeprefix(HEADER_KEY) if key.startswith(HEADER_KEY) else ORDERING_KEY_HEADER


def check_key(value: object) -> None:
    """Raise ConfigError unless a value names what a message's key is."""
    header = value[len(HEADER_KEY) :] if isinstance(value, str) and value.startswith(HEADER_KEY) else ""
    if value != "ordering" and (not header or header != header.strip()):
        raise ConfigError(
            f'expected "ordering" for the ordering key, or "{HEADER_KEY}NAME" for the value of a header, not {value!r}'
        )
