"""The copy of a message that a tracker sends: the sender's record, with marq's headers brought up to date.

A message's id is where its first record stands, ``topic/partition/offset``. A first delivery does not carry it, so a
record of any plain Kafka producer is a valid message; every copy does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from marq.core.fires import Destination, Fire
from marq.core.marker_codec import cut_text
from marq.core.markers import NOW, Cause, Headers, Payload, Source
from marq.core.names import (
    ATTEMPT_HEADER,
    DELIVER_AT_HEADER,
    DIED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    HEADER_ROOM_BYTES,
    ID_HEADER,
    KEY_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
    UNCOUNTED_HEADER,
)
from marq.core.rows import State

#: A time that nobody can mean: the marker format has 63 bits for it.
_MAX_TIME_MS = 2**62


class Copy(NamedTuple):
    """A record to send: to the topic of ``destination``, which is never NOWHERE.

    ``own_topic``: back to the queue's own topic, into the partition that the message came from.
    """

    destination: Destination
    own_topic: bool
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class Origin(NamedTuple):
    """What a record's headers say of the message's past; for a first delivery, what the record itself says."""

    id: str
    attempt: int
    first_sent_ms: int


def record_id(source: Source, offset: int) -> str:
    return f"{source.topic}/{source.partition}/{offset}"


def origin(source: Source, offset: int, timestamp_ms: int, headers: Iterable[tuple[str, bytes | None]]) -> Origin:
    """Read marq's headers; one that can't be read counts as absent, for anybody may write a header."""
    found = {name: value for name, value in headers if name.startswith(RESERVED_HEADER) and value is not None}
    identity = found.get(ID_HEADER, b"").decode("utf-8", "replace") or record_id(source, offset)
    attempt = _number(found.get(ATTEMPT_HEADER), 1)
    return Origin(identity, attempt if 0 < attempt < 2**32 else 1, _number(found.get(FIRST_SENT_HEADER), timestamp_ms))


def deliver_at_ms(timestamp_ms: int, headers: Iterable[tuple[str, bytes | None]], delay_ms: int) -> int:
    """Return before when a record must not be delivered, NOW for one that may be; ``delay_ms`` is its queue's.

    A copy comes when it is due, whatever the record said that it is of.
    """
    found = {name: value for name, value in headers if name in (DELIVER_AT_HEADER, ATTEMPT_HEADER)}
    if ATTEMPT_HEADER in found:
        return NOW
    said_ms = _time_ms(found.get(DELIVER_AT_HEADER))
    if said_ms != NOW:
        return said_ms
    return max(0, timestamp_ms) + delay_ms if delay_ms else NOW


def has_invalid_deliver_at(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a message has a ``marq-deliver-at`` that can't be read, and so is delivered immediately."""
    found = [value for name, value in headers if name == DELIVER_AT_HEADER]
    return bool(found) and _time_ms(found[-1]) == NOW


def is_copy(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a record is a copy that a tracker has sent, which keeps the headers of the first one."""
    return any(name == ATTEMPT_HEADER for name, _ in headers)


def uncounted(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return how many releases of a message, one after the other, did not count."""
    found = [value for name, value in headers if name == UNCOUNTED_HEADER]
    return _number(found[-1], 0) if found else 0


def _time_ms(value: bytes | None) -> int:
    said_ms = _number(value, NOW)
    return said_ms if said_ms < _MAX_TIME_MS else NOW


def _number(value: bytes | None, default: int) -> int:
    if value is None or len(value) > 20 or not value.isdigit():
        return default
    return int(value)


def copy(fire: Fire, payload: Payload, now_ms: int, own_topic: str | None) -> Copy:
    """Return the record to send for a due message; ``now_ms`` is the log's clock, ``own_topic`` the queue's, if any.

    A message goes back to the topic that it came from, with its sender's key, as long as its queue is read there. Every
    other copy is known by its queue's name as key; the sender's key then travels in a header.
    """
    back = fire.destination is Destination.QUEUE and fire.source.topic == own_topic
    name = fire.lease.queue.encode()
    past = origin(fire.source, fire.offset, payload.timestamp_ms, payload.headers)
    own: list[tuple[str, bytes]] = [
        (ID_HEADER, past.id.encode()),
        (ATTEMPT_HEADER, b"%d" % fire.attempt),
        (FIRST_SENT_HEADER, b"%d" % past.first_sent_ms),
    ]
    if not back and payload.key is not None and payload.key != name:
        own.append((KEY_HEADER, payload.key))
    if fire.lease.text and fire.lease.state is State.RELEASED:
        own.append((ERROR_HEADER, cut_text(fire.lease.text)))
    if fire.destination is Destination.DEAD_LETTERS:
        own += [
            (REASON_HEADER, reason(fire).encode()),
            (ORIGIN_HEADER, record_id(fire.source, fire.offset).encode()),
            (DIED_AT_HEADER, b"%d" % now_ms),
        ]
    if fire.lease.state is State.RELEASED and not fire.lease.counted:
        own.append((UNCOUNTED_HEADER, b"%d" % (uncounted(payload.headers) + 1)))
    replaced = {UNCOUNTED_HEADER, *(name for name, _ in own)}
    kept: Headers = [header for header in payload.headers if header[0] not in replaced]
    key = payload.key if back else name
    # Kafka's clients refuse a record that has neither key nor value.
    value = b"" if key is None and payload.value is None else payload.value
    return Copy(fire.destination, back, key, value, [*kept, *own])  # type: ignore[list-item]


def fitting(fire: Fire, payload: Payload, limit_bytes: int) -> Fire:
    """Return the fire, as that of a dead letter if the messages topic, with this limit, would not accept its copy."""
    if fire.destination is not Destination.QUEUE or _size(payload) <= limit_bytes - HEADER_ROOM_BYTES // 2:
        return fire
    return too_large(fire)


def too_large(fire: Fire) -> Fire:
    """Return the fire of a message whose copy is refused for its size."""
    return Fire(fire.source, fire.offset, fire.lease, Destination.DEAD_LETTERS, fire.lease.attempt, Cause.TOO_LARGE)


def _size(payload: Payload) -> int:
    headers = sum(len(name) + len(value or b"") + 8 for name, value in payload.headers)
    return len(payload.key or b"") + len(payload.value or b"") + headers


def reason(fire: Fire) -> str:
    """Say in words why a message became a dead letter."""
    if fire.cause is Cause.TOO_LARGE:
        return "with the headers that redelivery adds it is larger than the messages topic accepts"
    if fire.lease.state is State.REJECTED:
        return cut_text(fire.lease.text or "rejected").decode()
    last = "its lease ran out" if fire.lease.state is State.LEASED else "it was released"
    return f"{fire.attempt} of {fire.attempt} attempts used: the last time {last}"
