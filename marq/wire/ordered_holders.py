"""Holders of ordered messages: which of two asked later, as their numbers show."""

from __future__ import annotations

#: The low bits of the holder of ordered messages, which are random; the place of a RESUME in the log is above them.
_HOLDER_BITS = 16


def ordered_holder(asked_at: int, random: int) -> int:
    """Return the holder for the ordered messages of a consumer whose RESUME is at this offset."""
    return asked_at << _HOLDER_BITS | random & (1 << _HOLDER_BITS) - 1 or 1


def follows(holder: int, other: int) -> bool:
    """Return whether the RESUME of one holder of ordered messages is not before that of another."""
    return holder >> _HOLDER_BITS >= other >> _HOLDER_BITS
