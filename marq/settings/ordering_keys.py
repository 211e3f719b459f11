"""Ordering by key: the settings that it excludes, the keys, and the partition of a key's messages.

All messages with a key must be in one partition, in the order in which they were sent, because a receiver sees only the
order within a partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from marq.settings.queue import AT_MOST_ONCE, BLOCK, ORDERED_BY_KEY, ORDERING_KEY, TURN_KEYS, QueueSettings
from marq.wire.errors import ConfigError
from marq.wire.names import utf8

#: Bytes of an ordering key as UTF-8.
MAX_ORDERING_KEY_BYTES = 1_024


class OrderingError(NamedTuple):
    """A setting that a queue's ordering excludes, and the rest of the sentence about it."""

    key: str
    value: str
    advice: str


def ordering_error(settings: QueueSettings) -> OrderingError | None:
    """Return the setting that contradicts ``ordering`` or another setting by which messages have turns, or None."""
    if settings.limited and not settings.ordered:
        name = next(key for key in TURN_KEYS if getattr(settings, key))
        if settings.delivery == AT_MOST_ONCE:
            advice = f"cannot be combined with {name}: use at-least-once delivery, or no {name}"
            return OrderingError("delivery", f'"{AT_MOST_ONCE}"', advice)
        if settings.expires_after_ms is not None:
            advice = (
                f"cannot be combined with {name}: set expires_after = false, or compare message.sent_at in the handler"
            )
            return OrderingError("expires_after", f"{settings.expires_after_ms / 1000:g}", advice)
    if settings.key != ORDERING_KEY and settings.ordered:
        advice = f'cannot be combined with ordering = "{ORDERED_BY_KEY}", which goes by the ordering key: leave key out'
        return OrderingError("key", f'"{settings.key}"', advice)
    if settings.key != ORDERING_KEY and not settings.by_key:
        advice = "has no effect without limits, fair or priority: set one of them, or leave key out"
        return OrderingError("key", f'"{settings.key}"', advice)
    most = None if settings.limits is None else settings.limits.per_key.concurrency
    if settings.ordered and most is not None and most > 1:
        advice = f'cannot be above 1 with ordering = "{ORDERED_BY_KEY}", which delivers the messages of a key in turn'
        return OrderingError("limits.per_key.concurrency", str(most), advice)
    if not settings.ordered:
        if settings.on_dead_letter != BLOCK:
            return None
        return OrderingError(
            "on_dead_letter", f'"{BLOCK}"', f'has no effect without ordering = "{ORDERED_BY_KEY}": set both or neither'
        )
    conflict = f'cannot be combined with ordering = "{ORDERED_BY_KEY}"'
    if settings.delivery == AT_MOST_ONCE:
        return OrderingError("delivery", f'"{AT_MOST_ONCE}"', f"{conflict}: use at-least-once delivery, or no ordering")
    if settings.delay_ms:
        reason = "messages would be ordered by their due times, which depend on the senders' clocks"
        return OrderingError("delay", f"{settings.delay_ms / 1000:g}", f"{conflict}, because {reason}: set delay = 0")
    if settings.expires_after_ms is not None:
        reason = "a message that expires while it waits for a retry would hold up the later messages of its key"
        value = f"{settings.expires_after_ms / 1000:g}"
        return OrderingError("expires_after", value, f"{conflict}, because {reason}: set expires_after = false")
    if settings.on_dead_letter == BLOCK and not settings.dead_letter:
        reason = f'with on_dead_letter = "{BLOCK}": a dropped message could never be redriven'
        return OrderingError("dead_letter", "false", f"cannot be combined {reason}; set dead_letter = true")
    return None


def check_ordering_key(key: object) -> bytes:
    """Return the bytes of an ordering key. Raises ConfigError."""
    if isinstance(key, str):
        data = utf8(key, "ordering_key: the key")
    elif isinstance(key, bytes):
        data = key
    else:
        raise ConfigError(f"ordering_key: expected a key of type str or bytes, not {type(key).__name__}")
    if not data:
        raise ConfigError("ordering_key: the key is empty; omit it for a message without a key")
    if len(data) > MAX_ORDERING_KEY_BYTES:
        raise ConfigError(f"ordering_key: the key has {len(data)} bytes, at most {MAX_ORDERING_KEY_BYTES} are allowed")
    return data


def line_of(key: bytes) -> int:
    """Return the line of an ordering key: the first 8 bytes of its SHA-256, big-endian."""
    return int.from_bytes(sha256(key).digest()[:8])


def partition_of(key: bytes, partitions: Sequence[int]) -> int:
    """Return the partition of the key's messages, of the queue's partitions in ascending order."""
    return partitions[line_of(key) % len(partitions)]
