"""The rows of the lease table, as bytes.

Eight kinds of rows share one table, so that a single batch of writes keeps them consistent. The first byte of the key
is the kind:

========  =========================  ==================================================================
``i``                                which changelog this is: random bytes, the first record of its partition
``a``                                the offset of the last marker record that the other rows contain, and the clock
``m``     queue, source              the offsets that the queue has acquired before
                                     (:mod:`marq.core.storage.acquired_ranges`); without a queue: those that were
                                     delayed before
``k``     source, number             dead letters of that partition that are settled, as bits: offsets from number times
                                     4,096 on, the lowest first (:mod:`marq.core.storage.settled_dead_letters`)
``c``     queue                      what has happened in the queue so far (:class:`EventCounts`)
``d``     queue, log offset          the deduplication ids that the DELAY at this offset of the markers partition has
                                     accepted, and when they expire (:mod:`marq.core.storage.deduplication`)
``r``     queue, source, offset      an open message: its lease and its payload, or only the timestamp of its record
                                     as long as the payload was not copied from there
``s``     queue, source, offset      the lease of an open message, where it has changed since its ``r`` row was written
========  =========================  ==================================================================

The payload is written once: a renewal of a large message writes only its small ``s`` row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from struct import Struct, calcsize, pack, unpack, unpack_from

from marq.core.storage.log_clock import LogClock
from marq.wire.error_texts import cut_text
from marq.wire.marker_codec import decode_headers, encode_headers
from marq.wire.markers import BLOCKED_MS, Payload, Source
from marq.wire.names import is_synthetic

VERSION = 1
#: Version of the table's layout. In version 1, the keys of `r` and `s` rows had no queue.
LAYOUT = 2

IDENTITY_KEY = b"i"
APPLIED_KEY = b"a"
#: A header of the ``a`` record in the changelog: the name of the writer, for people.
OWNER_HEADER = "marq-owner"
_LEASE = Struct(">BBBIQqqBH")
#: Where the due time begins and ends in it.
BEFORE_DUE, AFTER_DUE = calcsize(">BBBIQ"), calcsize(">BBBIQq")
_APPLIED = Struct(">BqqqQqQ")
_PAYLOAD = Struct(">qiii")
_TIMESTAMP = Struct(">q")
#: Bytes of an ``r`` row after its lease if the payload is only in the message's record.
LEFT_BYTES = _TIMESTAMP.size


class State(IntEnum):
    """The state of an open message; :mod:`marq.core.transitions` has what each marker does to it."""

    #: A consumer holds it.
    LEASED = 1
    #: Waits for its redelivery.
    RELEASED = 2
    #: Becomes a dead letter.
    REJECTED = 3
    #: Waits for its first delivery.
    DELAYED = 4
    #: Ends with a fact, without a delivery.
    CANCELLED = 5
    #: A consumer holds it, and it is never redelivered.
    DISPATCHED = 6
    #: A consumer of a queue with ordering holds it. Consumers, not the tracker, deliver it again.
    LEASED_IN_ORDER = 7
    #: Waits in its place for that delivery; it keeps its last holder.
    WAITING_IN_ORDER = 8
    #: Becomes a dead letter after its last attempt.
    EXHAUSTED = 9


_STATES = {int(state): state for state in State}

#: The states of messages in flight.
HELD = (State.LEASED, State.DISPATCHED, State.LEASED_IN_ORDER)

#: The states of messages that wait for a time, which a RESCHEDULE may change.
WAITING = (State.RELEASED, State.DELAYED, State.WAITING_IN_ORDER)

#: The states of messages that keep their place: the tracker does nothing when their leases or delays end.
IN_ORDER = (State.LEASED_IN_ORDER, State.WAITING_IN_ORDER)


#: The ``text`` of a LEASED message that a RESUME has removed from its line.
OUT_OF_LINE = "its record is gone"


@dataclass(slots=True, eq=False)
class LeaseRow:
    """The lease of one open message, or of many that were acquired alike: compared by identity, and never changed.

    (Not frozen: that takes four times as long to create, and a delayed message has its own.)

    ``since_ms`` is the clock at its ACQUIRE or DELAY, ``text`` the error of a RELEASE or the reason of a REJECT, after
    the last attempt with its traceback (:mod:`marq.wire.error_texts`).
    ``counted`` says whether the attempt counts: of a message in flight, if its lease expires now. The ``holder`` of a
    DELAYED message is the place in the log of its ACQUIRE or DELAY: messages that are due together are
    delivered in that order.
    """

    queue: str
    holder: int
    attempt: int
    due_ms: int
    since_ms: int
    state: State = State.LEASED
    counted: bool = True
    text: str = ""

    def blocks(self, now_ms: int) -> bool:
        """Return whether this message blocks its line until an operator acts; no backoff is as long."""
        return self.state is State.WAITING_IN_ORDER and self.due_ms - now_ms >= BLOCKED_MS // 2

    def is_delayed(self, source: Source, now_ms: int) -> bool:
        """Return whether a DELAYED message is still delayed by its sender, or was until its queue was paused.

        A message of a paused queue that was left with the tracker is due since it was read. Without a record, it was
        not delayed if it was due from the beginning.
        """
        return self.due_ms > (self.since_ms if is_synthetic(source.topic) else now_ms)


@dataclass(slots=True)
class EventCounts:
    """Events in one queue, counted in messages."""

    acquired: int = 0
    acked: int = 0
    renewed: int = 0
    released: int = 0
    rejected: int = 0
    expired: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    late: int = 0
    reacquired: int = 0
    delayed: int = 0
    delivered: int = 0
    cancelled: int = 0
    redriven: int = 0
    deleted: int = 0
    abandoned: int = 0
    invalid_deliver_at: int = 0
    deduplicated: int = 0
    too_large: int = 0
    gone: int = 0
    messages_expired: int = 0

    def copy(self) -> EventCounts:
        # Called once a second for each of thousands of queues; replace() takes four times as long.
        return EventCounts(*_values_of(self))


_COUNT_FIELDS = tuple(field.name for field in fields(EventCounts))
_values_of = attrgetter(*_COUNT_FIELDS)


def _source_bytes(source: Source) -> bytes:
    topic = source.topic.encode()
    return pack(f">B{len(topic)}sI", len(topic), topic, source.partition)


def _queue_bytes(queue: str, source: Source) -> bytes:
    name = queue.encode()
    return pack(f">B{len(name)}s", len(name), name) + _source_bytes(source)


def row_key(queue: str, source: Source, offset: int) -> bytes:
    return b"r" + _queue_bytes(queue, source) + pack(">Q", offset)


def row_keys(queue: str, source: Source, offsets: Sequence[int], kind: bytes) -> list[bytes]:
    """Return the keys of many rows (``b"r"`` or ``b"s"``) of a queue in one source."""
    prefix = kind + _queue_bytes(queue, source)
    return [prefix + packed for packed in map(Struct(">Q").pack, offsets)]


def places_key(source: Source, number: int) -> bytes:
    return b"k" + _source_bytes(source) + pack(">Q", number)


def parse_places_key(key: bytes) -> tuple[Source, int]:
    return _parse_source(key[1:-8]), unpack(">Q", key[-8:])[0]


def parse_row_key(key: bytes) -> tuple[str, Source, int]:
    return *parse_queue(key[1:-8]), unpack(">Q", key[-8:])[0]


def parse_queue(encoded: bytes) -> tuple[str, Source]:
    """Return the queue and the source that the key of an ``r``, ``s`` or ``m`` row names."""
    end = 1 + encoded[0]
    return encoded[1:end].decode(), _parse_source(encoded[end:])


def _parse_source(encoded: bytes) -> Source:
    length = encoded[0]
    return Source(encoded[1 : 1 + length].decode(), unpack_from(">I", encoded, 1 + length)[0])


def mark_key(queue: str, source: Source) -> bytes:
    return b"m" + _queue_bytes(queue, source)


def parse_mark_key(key: bytes) -> tuple[str, Source]:
    return parse_queue(key[1:])


def counts_key(queue: str) -> bytes:
    return b"c" + queue.encode()


def deduplication_key(queue: str, offset: int) -> bytes:
    name = queue.encode()
    return pack(f">cB{len(name)}sQ", b"d", len(name), name, offset)


def parse_deduplication_key(key: bytes) -> tuple[str, int]:
    return key[2:-8].decode(), unpack(">Q", key[-8:])[0]


def encode_lease(lease: LeaseRow) -> bytes:
    queue, text = lease.queue.encode(), cut_text(lease.text) if lease.text else b""
    head = _LEASE.pack(
        VERSION,
        lease.state,
        lease.counted,
        lease.attempt,
        lease.holder,
        lease.due_ms,
        lease.since_ms,
        len(queue),
        len(text),
    )
    return head + queue + text


def encode_row(lease: bytes, payload: Payload) -> bytes:
    """Return an ``r`` row from an encoded lease, which many messages may share."""
    if payload.left:
        return lease + _TIMESTAMP.pack(payload.timestamp_ms)
    headers = encode_headers(payload.headers) if payload.headers else b""
    key, value = payload.key, payload.value
    sizes = _PAYLOAD.pack(
        payload.timestamp_ms,
        -1 if key is None else len(key),
        len(headers),
        -1 if value is None else len(value),
    )
    return b"".join((lease, sizes, key or b"", headers, value or b""))


def decode_lease(row: bytes) -> tuple[LeaseRow, int]:
    """Return the lease at the start of an ``r`` or ``s`` row and where it ends. Raises ValueError."""
    version, state, counted, attempt, holder, due, since, queue_length, text_length = _LEASE.unpack_from(row)
    if version != VERSION:
        raise ValueError(f"lease row of version {version}; this marq knows version {VERSION}")
    start = _LEASE.size
    end = start + queue_length + text_length
    queue = row[start : start + queue_length].decode()
    text = row[start + queue_length : end].decode()
    return LeaseRow(queue, holder, attempt, due, since, _STATES.get(state) or State(state), bool(counted), text), end


def with_due_of(row: bytes, like: LeaseRow) -> LeaseRow:
    """Return the lease at the start of an ``r`` or ``s`` row that differs from another only in its due time."""
    (due_ms,) = unpack_from(">q", row, BEFORE_DUE)
    return LeaseRow(
        like.queue, like.holder, like.attempt, due_ms, like.since_ms, like.state, like.counted, like.text
    )  # fmt: skip


def encoded_lease(row: bytes) -> bytes:
    """Return the bytes of the lease at the start of an ``r`` or ``s`` row, which :func:`encode_lease` made."""
    *_, queue_length, text_length = _LEASE.unpack_from(row)
    return row[: _LEASE.size + queue_length + text_length]


def decode_payload(row: bytes) -> Payload:
    """Return the payload of an ``r`` row, with the attempt at its ACQUIRE."""
    lease, position = decode_lease(row)
    if len(row) == position + LEFT_BYTES:
        return Payload(_TIMESTAMP.unpack_from(row, position)[0], lease.attempt, None, (), None, left=True)
    timestamp, key_length, headers_length, value_length = _PAYLOAD.unpack_from(row, position)
    position += _PAYLOAD.size
    key = None if key_length < 0 else row[position : position + key_length]
    position += max(key_length, 0)
    headers = decode_headers(row[position : position + headers_length]) if headers_length else ()
    position += headers_length
    value = None if value_length < 0 else row[position : position + value_length]
    return Payload(timestamp, lease.attempt, key, headers, value)


def encode_applied(offset: int, clock: LogClock) -> bytes:
    return _APPLIED.pack(
        LAYOUT,
        offset,
        clock.now_ms,
        clock.skew_ms,
        clock.anchor_holder,
        clock.anchor_now_ms,
        clock.anchor_monotonic_ms,
    )


def decode_applied(row: bytes) -> tuple[int, LogClock]:
    version, offset, *clock = _APPLIED.unpack(row)
    if version != LAYOUT:
        raise ValueError(f"lease table: its layout has version {version}, and this marq knows version {LAYOUT}")
    return offset, LogClock(*clock)


def encode_marks(intervals: Sequence[tuple[int, int]]) -> bytes:
    numbers = [number for pair in intervals for number in pair]
    return pack(f">{len(numbers)}Q", *numbers)


def decode_marks(row: bytes) -> list[tuple[int, int]]:
    numbers = unpack(f">{len(row) // 8}Q", row)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def encode_counts(counts: EventCounts) -> bytes:
    return pack(f">{len(_COUNT_FIELDS)}Q", *_values_of(counts))


def decode_counts(row: bytes) -> EventCounts:
    """Return the counts; fields that the writer did not know yet are 0."""
    known = min(len(row), calcsize(f">{len(_COUNT_FIELDS)}Q")) // 8
    return EventCounts(*unpack_from(f">{known}Q", row))
