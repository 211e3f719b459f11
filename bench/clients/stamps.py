"""Messages that say when they were to be sent, by the monotonic clock that all processes of a machine share."""

from __future__ import annotations

import struct

_STAMP = struct.Struct(">Qd")


def stamped(number: int, intended_s: float, size: int) -> bytes:
    """Return a message of ``size`` bytes."""
    return _STAMP.pack(number, intended_s).ljust(size, b"x")


def read_stamp(value: bytes) -> tuple[int, float]:
    """Return the number of a message, and when it was to be sent."""
    number, intended_s = _STAMP.unpack_from(value)
    return number, intended_s


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    """Return p50, p99 and the most of a list that is not empty."""
    ordered = sorted(milliseconds)
    return {
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[len(ordered) * 99 // 100],
        "max_ms": ordered[-1],
    }
