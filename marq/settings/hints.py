"""Errors for keywords and methods of other queue libraries; they name Marq's equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Never

#: The type of keywords that are accepted only to be refused, so that a type checker refuses them, too.
Unknown = Never

OURS = {
    "MessageDeduplicationId": "deduplication_id",
    "MessageGroupId": "ordering_key",
    "compression_type": "compression",
    "countdown": "delay (seconds or timedelta)",
    "deduplication_id": "deduplication_ids here (a list with an id for each message)",
    "deduplication_ids": "deduplication_id here (one id)",
    "expiration": "expires_in (seconds or timedelta), or the queue setting expires_after",
    "expires": "expires_in (seconds or timedelta), or the queue setting expires_after",
    "expires_after": "expires_in here (seconds or timedelta)",
    "expires_in": "expires_after here (a setting of the queue)",
    "idempotency_key": "deduplication_id",
    "max_retries": "max_attempts (it counts deliveries, including the first)",
    "nack": "release (back to the queue) or reject (to the dead letters)",
    "ttl": "expires_in (seconds or timedelta), or the queue setting expires_after",
    "visibility_timeout": "lease (seconds or timedelta)",
}


class UnknownOption(TypeError, AttributeError):
    """A keyword or method of another queue library was used; the text names Marq's equivalent."""


def refuse(function: str, unknown: Mapping[str, object]) -> None:
    """Raise TypeError if there are unknown keywords."""
    for name in unknown:
        if name in OURS:
            raise UnknownOption(f"{function}() has no keyword {name!r}: marq calls it {OURS[name]}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Hinted:
    """Raises :class:`UnknownOption` for attributes of other queue libraries."""

    __slots__ = ()

    # Hidden from type checkers, which would otherwise accept every misspelt attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            owner = type(self).__name__
            if name in OURS:
                raise UnknownOption(f"{owner} has no {name!r}: marq calls it {OURS[name]}")
            raise AttributeError(f"{owner!r} object has no attribute {name!r}")
