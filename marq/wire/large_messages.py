"""Messages without their values: too large for a record of Marq's topics, or removed before they were copied.

Their place is kept instead. A record that is too large stays where it is, so a person can read it there. Without its
value the message can be acquired and become a dead letter like any other, and does not hold up the messages behind it.
"""

from __future__ import annotations

from marq.wire.markers import Payload, headers_bytes
from marq.wire.names import GONE_HEADER, TOO_LARGE_HEADER
from marq.wire.record_headers import last_value

#: Maximum bytes of the key and the headers that are kept.
KEPT_BYTES = 4_096


def without_value(payload: Payload, place: str, limit: str) -> Payload:
    """Return a message without its value, with a note about the ``place`` and size of its record, and the ``limit``.

    The key and the headers are kept as far as there is room for them.
    """
    note = f"{place} has {size_bytes(payload)} bytes, and {limit}"
    room, kept = KEPT_BYTES, []
    key = payload.key if len(payload.key or b"") <= room else None
    room -= len(key or b"")
    for header in payload.headers:
        size = headers_bytes([header])
        if header[0] != TOO_LARGE_HEADER and size <= room:
            kept.append(header)
            room -= size
    return payload._replace(key=key, headers=(*kept, (TOO_LARGE_HEADER, note.encode())), value=None)


def size_bytes(payload: Payload) -> int:
    """Return about how large a message is as a record, without the headers that Marq adds."""
    headers = sum(len(name) + len(value or b"") + 8 for name, value in payload.headers)
    return len(payload.key or b"") + len(payload.value or b"") + headers


def left_out(payload: Payload) -> str:
    """Return the note about a value that was left out; empty for a message that is complete."""
    if payload.value is not None:
        return ""
    note = last_value(payload.headers, TOO_LARGE_HEADER) or last_value(payload.headers, GONE_HEADER) or b""
    return note.decode("utf-8", "replace")


def gone(place: str, timestamp_ms: int) -> Payload:
    """Return the payload of a message whose record at ``place`` was removed before it was copied."""
    note = f"{place} was removed before the tracker could copy it"
    return Payload(timestamp_ms, 1, None, ((GONE_HEADER, note.encode()),), None)


def is_gone(payload: Payload) -> bool:
    return payload.value is None and last_value(payload.headers, GONE_HEADER) is not None
