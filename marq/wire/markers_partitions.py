"""Which partition of the markers topic, and so which tracker, a message belongs to."""

from __future__ import annotations

from hashlib import sha256
from zlib import crc32

from marq.wire.names import log_name


def markers_partition(topic: str, partition: int, count: int) -> int:
    """Return the markers partition of all messages of a source partition: (crc32(topic) + partition) mod count.

    All incarnations of a topic share it, so that its tracker sees when the topic is created again.
    """
    return (crc32(log_name(topic).encode()) + partition) % count


def source_partition(topic: str, wanted: int, count: int) -> int:
    """Return the first partition of a source whose messages are in the ``wanted`` markers partition."""
    return (wanted - crc32(topic.encode())) % count


def deduplicating_partition(queue: str, place: bytes, count: int) -> int:
    """Return the markers partition whose tracker checks deduplication ids.

    ``place`` is the ordering key of the message, or without one its id. One tracker must check all messages
    with the same id, and all with the same key, in their order.
    """
    return int.from_bytes(sha256(queue.encode() + b"\0" + place).digest()[:8]) % count
