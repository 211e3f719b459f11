"""The words that other queues use, and ours: a foreign word as keyword or method gets an error with the right one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

#: The type of keywords that are caught only to be refused: a type checker then refuses each of them.
Unknown = Never

OURS = {
    "countdown": "delay (seconds or timedelta)",
    "max_retries": "max_attempts (it counts deliveries, the first one too)",
    "nack": "release (give back) or reject (to the dead letters)",
    "visibility_timeout": "lease (seconds or timedelta)",
}


class ForeignWord(TypeError, AttributeError):
    """A word of another queue was used; the message names ours."""


def refuse(function: str, unknown: Mapping[str, object]) -> None:
    """Raise for keywords that a function does not have.

    Raises:
        TypeError: there is one.
    """
    for name in unknown:
        if name in OURS:
            raise ForeignWord(f"{function}() has no keyword {name!r}: marq calls it {OURS[name]}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have."""
    if name in OURS:
        return ForeignWord(f"{owner} has no {name!r}: marq calls it {OURS[name]}")
    return AttributeError(f"{owner!r} object has no attribute {name!r}")
