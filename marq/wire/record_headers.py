"""Marq's headers of a record, and what they say about its message.

A message's id is the place of its first record, ``topic/partition/offset``, as any client can tell it from the record:
without the id of the topic's incarnation. The first record does not carry it, so a record from any plain Kafka producer
is a valid message. Every redelivery carries it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from marq.wire.markers import MAX_TIME_MS, NOW, Headers, Payload, Source
from marq.wire.names import (
    ATTEMPT_HEADER,
    DEAD_LETTERED_AT_HEADER,
    DEDUPLICATION_ID_HEADER,
    DELIVER_AT_HEADER,
    EXPIRED_HEADER,
    EXPIRES_AT_HEADER,
    FIRST_RECEIVED_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    KEY_HEADER,
    ORDERING_KEY_HEADER,
    PREVIOUS_HEADER,
    RESERVED_HEADER,
    RUNS_HEADER,
    TYPE_HEADER,
    UNCOUNTED_HEADER,
)

#: Marq's headers that any sender may write.
SENDERS_HEADERS = frozenset(
    {DELIVER_AT_HEADER, EXPIRES_AT_HEADER, ORDERING_KEY_HEADER, DEDUPLICATION_ID_HEADER, TYPE_HEADER}
)
#: Those of them that the copy of a record keeps: an expired dead letter that was copied must be delivered.
_COPIED_HEADERS = SENDERS_HEADERS - {EXPIRES_AT_HEADER}
#: The value of ``marq-expires-at`` of a message that does not expire, such as a redriven dead letter.
NEVER = b"never"

_EXPIRY_HEADERS = frozenset({EXPIRES_AT_HEADER, DELIVER_AT_HEADER, FIRST_SENT_HEADER})


class Origin(NamedTuple):
    """A message's past by the headers of a record; for a first delivery, by the record itself."""

    id: str
    attempt: int
    first_sent_ms: int


def record_id(source: Source, offset: int) -> str:
    """Return the place of a record; the id of a message if the source has no incarnation (:attr:`Source.log`)."""
    return f"{source.topic}/{source.partition}/{offset}"


def origin(source: Source, offset: int, timestamp_ms: int, headers: Iterable[tuple[str, bytes | None]]) -> Origin:
    """Read Marq's headers; an unreadable one counts as absent, because any producer may write a header."""
    values = {name: value for name, value in headers if name.startswith(RESERVED_HEADER) and value is not None}
    identity = values.get(ID_HEADER, b"").decode("utf-8", "replace") or record_id(source.log, offset)
    attempt = _number(values.get(ATTEMPT_HEADER), 1)
    # A dead letter has the number of its attempts, and 0 if none counted.
    least = 0 if DEAD_LETTERED_AT_HEADER in values else 1
    # A record without a time has a negative one, which the header can't express: each redelivery would have another.
    first_sent_ms = _number(values.get(FIRST_SENT_HEADER), max(0, timestamp_ms))
    return Origin(identity, attempt if least <= attempt < 2**32 else 1, first_sent_ms)


def are_copied(names: Iterable[str], *, own_topic: bool) -> bool:
    """Return whether Marq's headers among these came with a copy of another record.

    Trackers write nothing to a queue's own topic, and no dead letters to the messages topic, so an operator or another
    program has copied such a record. It is a new message, which must not begin with the attempts of the old one.
    """
    if own_topic:
        return any(name.startswith(RESERVED_HEADER) and name not in SENDERS_HEADERS for name in names)
    return DEAD_LETTERED_AT_HEADER in names


def without_copied(headers: Headers, *, own_topic: bool) -> Headers:
    """Return the headers of a record without those of Marq that came with a copy (:func:`are_copied`)."""
    if not are_copied([name for name, _ in headers], own_topic=own_topic):
        return headers
    # In the messages topic, the record key is the queue's name, so only the header has the sender's key.
    kept = _COPIED_HEADERS if own_topic else _COPIED_HEADERS | {KEY_HEADER}
    return tuple([header for header in headers if header[0] in kept or not header[0].startswith(RESERVED_HEADER)])


def sequence(delay_offset: int, number: int) -> int:
    """Return the sequence of the message with this number in the DELAY at this offset of a markers partition.

    All messages of an ordering key are in DELAYs of one partition, and numbers ascend within a DELAY. They have at most
    19 digits.
    """
    return delay_offset * 10**19 + number


def sequence_text(number: int) -> str:
    """Return a sequence as text of one length, so that the order of texts is that of numbers, too."""
    return f"{number:038}"


def deliver_at_ms(timestamp_ms: int, headers: Iterable[tuple[str, bytes | None]], delay_ms: int) -> int:
    """Return the earliest delivery time of a record, or NOW; ``delay_ms`` is its queue's.

    A redelivery ignores the first record's delay.
    """
    values = {name: value for name, value in headers if name in (DELIVER_AT_HEADER, ATTEMPT_HEADER)}
    if ATTEMPT_HEADER in values:
        return NOW
    time_ms = _time_ms(values.get(DELIVER_AT_HEADER))
    if time_ms != NOW:
        return time_ms
    return min(max(0, timestamp_ms) + delay_ms, MAX_TIME_MS) if delay_ms else NOW


def expires_at_ms(
    timestamp_ms: int,
    headers: Iterable[tuple[str, bytes | None]],
    *,
    delay_ms: int,
    expires_after_ms: int | None,
    due_ms: int | None = None,
) -> int | None:
    """Return the time from which on a message is not delivered, or None.

    ``delay_ms`` and ``expires_after_ms`` are those of its queue; the latter counts from ``due_ms``, if that is known,
    else from the due time in the headers, or from the time of sending. The sender's own time counts if it is earlier.
    """
    values = {name: value for name, value in headers if name in _EXPIRY_HEADERS}
    by_sender = values.get(EXPIRES_AT_HEADER)
    if by_sender == NEVER:
        return None
    time_ms = _time_ms(by_sender)
    if expires_after_ms is None:
        return None if time_ms == NOW else time_ms
    if due_ms is None:
        sent_ms = _number(values.get(FIRST_SENT_HEADER), max(0, timestamp_ms))
        due_ms = _time_ms(values.get(DELIVER_AT_HEADER))
        due_ms = sent_ms + delay_ms if due_ms == NOW else max(sent_ms, due_ms)
    by_queue_ms = min(due_ms + expires_after_ms, MAX_TIME_MS)
    return by_queue_ms if time_ms == NOW else min(time_ms, by_queue_ms)


def not_expiring(headers: Headers) -> Headers:
    """Return headers that say that their message does not expire: an operator wants it to be delivered."""
    return (*[header for header in headers if header[0] != EXPIRES_AT_HEADER], (EXPIRES_AT_HEADER, NEVER))


def last_value(headers: Iterable[tuple[str, bytes | None]], wanted: str) -> bytes | None:
    """Return the value of a header, the last one of several; None if there is none."""
    last = None
    for name, value in headers:
        if name == wanted:
            last = value
    return last


def has_invalid_deliver_at(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a message has an unreadable ``marq-deliver-at``, which then counts as absent."""
    values = [value for name, value in headers if name == DELIVER_AT_HEADER]
    return bool(values) and _time_ms(values[-1]) == NOW


def is_redelivery(headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return whether a tracker has sent the record; it keeps the headers of the first one."""
    return any(name == ATTEMPT_HEADER for name, _ in headers)


def ordering_key(headers: Iterable[tuple[str, bytes | None]]) -> bytes | None:
    """Return the ordering key of a record of the messages topic, or None."""
    return last_value(headers, ORDERING_KEY_HEADER) or None


def deduplication_id(headers: Iterable[tuple[str, bytes | None]]) -> bytes | None:
    """Return the deduplication id of a message, or None."""
    return last_value(headers, DEDUPLICATION_ID_HEADER) or None


def message_type(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """Return the type of a message, or None."""
    return (last_value(headers, TYPE_HEADER) or b"").decode("utf-8", "replace") or None


def uncounted(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return how many consecutive releases of a message did not count."""
    return _number(last_value(headers, UNCOUNTED_HEADER), 0)


def expired(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return how many consecutive deliveries of a message ended with the end of their leases."""
    return _number(last_value(headers, EXPIRED_HEADER), 0)


def first_received_ms(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return when a redelivered message was first received, 0 if that is unknown."""
    return _number(last_value(headers, FIRST_RECEIVED_HEADER), 0)


def previous_time_s(payload: Payload | None) -> int | None:
    """Return the time of a schedule before that of its message, in seconds since the epoch; None if it is not known."""
    value = -1 if payload is None else _number(last_value(payload.headers, PREVIOUS_HEADER), -1)
    return None if value < 0 else value


def previous_runs_s(payload: Payload | None) -> list[int]:
    """Return the last times of a schedule, as it is defined now, that were delivered before its message, latest first.

    They are in seconds since the epoch.
    """
    value = None if payload is None else last_value(payload.headers, RUNS_HEADER)
    return [time_s for part in (value or b"").split(b",") if (time_s := _number(part, -1)) >= 0]


def _time_ms(value: bytes | None) -> int:
    time_ms = _number(value, NOW)
    return time_ms if time_ms < MAX_TIME_MS else NOW


def _number(value: bytes | None, default: int) -> int:
    if value is None or len(value) > 20 or not value.isdigit():
        return default
    return int(value)
