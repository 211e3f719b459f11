"""Markers: statements about messages, in batches.

One record of the markers topic is one *batch*: one kind of marker, by one holder, for messages of one queue that came
from one source. Batches make markers fast: a batch has each common field once, and columns for the fields that differ.
:mod:`marq.wire.marker_codec` writes and reads their bytes.

A source and a number identify a message. For a record these are its partition and offset. A message that its sender
delayed is not a record yet: its sender draws a source for itself (:func:`marq.wire.names.synthetic_topic`), and numbers
its messages there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from marq.wire.names import incarnation, log_name

#: The release delay that means the backoff of the queue.
BACKOFF = -1
#: The release delay of a message of a queue with ordering that its consumers will not deliver again.
LAST = -2
#: The delay of a release, a hundred years, that blocks a line: an operator moves or cancels the message.
BLOCKED_MS = 100 * 365 * 24 * 3_600_000
#: The wait in a RESUMED of a message that was released for half as long or longer.
BLOCKED_WAIT_MS = 2**32 - 1
#: The due time of a message that may be delivered immediately.
NOW = -1
#: The due time in an ACQUIRE of a message that the tracker delivers as soon as it may: when its queue is resumed.
DUE_AT_ONCE = 0
#: The latest due time; later ones count as this one. Times have 63 bits, and the sum of two may not fit.
MAX_TIME_MS = 2**62
#: The queue of a MIXED_ACQUIRE, and of an ACK, RESCHEDULE or CANCEL of messages of any queues.
ANY_QUEUE = ""
#: Maximum number of markers in one batch; the encoder's caller splits longer ones.
MAX_BATCH_MARKERS = 65_536

Headers = Sequence[tuple[str, bytes | None]]


class Record(Protocol):
    """One record, such as aiokafka's."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class Kind(IntEnum):
    """Requests are imperatives, facts by the tracker are participles, and TICK is the tracker's clock."""

    ACQUIRE = 1
    RENEW = 2
    ACK = 3
    RELEASE = 4
    REJECT = 5
    DELAY = 6
    RESCHEDULE = 7
    CANCEL = 8
    DISCARD = 9
    DISPATCH = 10
    RESUME = 11
    PURGE = 12
    MIXED_ACQUIRE = 13
    REDELIVERED = 33
    DEAD_LETTERED = 34
    DELIVERED = 35
    CANCELLED = 36
    ANSWERED = 37
    ABANDONED = 38
    RESUMED = 39
    TICK = 64


#: The markers by which a tracker ends messages.
FACTS = (Kind.REDELIVERED, Kind.DEAD_LETTERED, Kind.DELIVERED, Kind.CANCELLED, Kind.ABANDONED)


class Cause(IntEnum):
    """Why a tracker ended a message."""

    EXPIRED = 1
    RELEASED = 2
    REJECTED = 3
    TOO_LARGE = 4
    DUE = 5
    CANCELLED = 6
    #: A schedule's definition was changed or removed: the tracker withdraws its messages and forgets its source.
    WITHDRAWN = 7
    #: The message's record was removed before its payload was copied: it can't be delivered again.
    GONE = 8
    #: The message has expired: it is too old to be delivered.
    MESSAGE_EXPIRED = 9


class RequestOutcome(IntEnum):
    """The answer of a tracker to a RESCHEDULE or CANCEL."""

    DONE = 1
    #: The message is not waiting: it was delivered or cancelled before, is in flight, or is unknown.
    TOO_LATE = 2


class Source(NamedTuple):
    """The partition that messages were read from, or a generated source for messages that are not records yet.

    The topic of a queue's own topic has the id of its incarnation (:func:`marq.wire.names.incarnation`).
    """

    topic: str
    partition: int

    @property
    def log(self) -> Source:
        """The same partition as Kafka knows it, without the id of the topic's incarnation."""
        name = log_name(self.topic)
        return self if name == self.topic else Source(name, self.partition)

    def of(self, topic_id: str) -> Source:
        """Return the partition in the incarnation of its topic that has this id; itself if the id is empty."""
        return Source(incarnation(self.topic, topic_id), self.partition) if topic_id else self


class Payload(NamedTuple):
    """The record as its sender made it: everything that must survive redelivery.

    ``left``: key, headers and value are only in the message's own record, so they are None or empty here.
    """

    timestamp_ms: int
    attempt: int
    key: bytes | None
    headers: Headers
    value: bytes | None
    left: bool = False


class Payloads(Sequence[Payload]):
    """Payloads that are kept as columns; ``attempts`` is None when all are 1."""

    __slots__ = ()
    attempts: Sequence[int] | None

    def may_have(self, header: str) -> bool:
        """Return False if no message has a header of this name; True if one may, because not all were read."""
        return True


class LeftPayloads(Payloads):
    """Payloads of first attempts that are only in their records; the ACQUIRE has only their timestamps."""

    __slots__ = ("timestamps",)
    attempts = headers = None

    def __init__(self, timestamps: Sequence[int]) -> None:
        self.timestamps = timestamps

    def __len__(self) -> int:
        return len(self.timestamps)

    def __getitem__(self, index: int) -> Payload:  # type: ignore[override]
        return Payload(self.timestamps[index], 1, None, (), None, left=True)

    def may_have(self, header: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Markers:
    """Markers of one holder, for messages of one queue that came from one source."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Acquire(_Markers):
    """A holder takes messages for ``lease_ms``; ``from_offset`` is where its read began.

    Each message of the queue from ``from_offset`` to the batch's last offset is in this batch. So the tracker can tell
    a record that it has seen before from one whose marker was lost. ``dues_ms`` has the earliest delivery time of each
    message that is not leased yet, and :data:`NOW` for the others; None if all are leased.
    :data:`DUE_AT_ONCE` stands for the log's clock at this marker.
    With ``in_order`` the messages keep their places: consumers, not the tracker, deliver them again.
    Unless ``counted``, the attempt counts only after a RENEW that says that user code has the messages.
    """

    lease_ms: int
    from_offset: int
    payloads: Sequence[Payload]
    dues_ms: Sequence[int] | None = None
    in_order: bool = False
    counted: bool = True

    @property
    def attempts(self) -> Sequence[int] | None:
        """The attempt of each message, or None when all are 1."""
        return attempts_of(self.payloads)


@dataclass(frozen=True, slots=True)
class MixedAcquire(_Markers):
    """A holder takes messages of several ``queues`` from one source, as with an ACQUIRE for each message.

    ``queue`` is :data:`ANY_QUEUE`. The messages are first attempts, and their payloads are only in their records.
    """

    lease_ms: int
    queues: Sequence[str]
    from_offsets: Sequence[int]
    timestamps_ms: Sequence[int]
    counted: bool = True

    def acquires(self) -> list[Acquire]:
        """Return the ACQUIRE of each message."""
        holder, source, lease_ms, counted = self.holder, self.source, self.lease_ms, self.counted
        messages = zip(self.queues, self.offsets, self.from_offsets, self.timestamps_ms, strict=True)
        return [
            Acquire(queue, holder, source, (offset,), lease_ms, known, LeftPayloads((time_ms,)), None, False, counted)
            for queue, offset, known, time_ms in messages
        ]


@dataclass(frozen=True, slots=True)
class Delay(_Markers):
    """Messages to deliver at their ``times_ms``, unless they are cancelled before.

    Times are milliseconds after the batch's place in the log if ``relative``, else since the epoch. ``from_offset`` is
    as in an ACQUIRE, so that a batch which is written twice counts once; None if its writer never repeats itself.
    If the source is a topic's partition, the messages are dead letters to redrive. Then ``from_offset`` is the first
    offset, and exactly the batch's own offsets are settled, for good.
    """

    times_ms: Sequence[int]
    relative: bool
    from_offset: int | None
    payloads: Sequence[Payload]

    @property
    def attempts(self) -> Sequence[int] | None:
        """The attempt of each message, or None when all are 1."""
        return attempts_of(self.payloads)


@dataclass(frozen=True, slots=True)
class Reschedule(_Markers):
    """Deliver waiting messages at other times, given as in a DELAY."""

    times_ms: Sequence[int]
    relative: bool


@dataclass(frozen=True, slots=True)
class Cancel(_Markers):
    """Do not deliver these waiting messages."""


@dataclass(frozen=True, slots=True)
class Discard(_Markers):
    """Delete dead letters: they must never be redriven."""


@dataclass(frozen=True, slots=True)
class Purge(_Markers):
    """Discard the messages of this queue and source before the only offset, the ``end``.

    Unread ones count as acquired. Messages in flight stay unless ``in_flight``, and delayed ones unless ``delayed``.
    With the topic :data:`marq.wire.names.WITHOUT_RECORDS`, the end is a time of the log's clock. It concerns the
    queue's messages in this markers partition that a DELAY before then opened, except those of schedules.
    """

    in_flight: bool = False
    delayed: bool = False

    @property
    def end(self) -> int:
        return self.offsets[0]


@dataclass(frozen=True, slots=True)
class Renew(_Markers):
    """The holder keeps these messages for ``lease_ms`` from now on; if ``started``, user code has them.

    A lease that would last longer stays as it is, unless it is to end ``exactly`` then.
    """

    lease_ms: int
    started: bool = False
    exactly: bool = False


@dataclass(frozen=True, slots=True)
class Dispatch(_Markers):
    """The holder delivers these messages, which are never redelivered, and keeps them for at least ``lease_ms``."""

    lease_ms: int


@dataclass(frozen=True, slots=True)
class Ack(_Markers):
    """These messages are done; ``queue`` may be :data:`ANY_QUEUE`: the tracker knows the queue of each."""


@dataclass(frozen=True, slots=True)
class Release(_Markers):
    """The holder releases these messages, each after its delay (or :data:`BACKOFF`, :data:`LAST`).

    ``counted`` is False at a shutdown: the attempt does not count. ``errors`` has the error of each message, or "".
    """

    delays_ms: Sequence[int]
    counted: bool
    errors: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reject(_Markers):
    """The holder rejects these messages, each for its reason: they become dead letters."""

    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fact:
    """A tracker sent redeliveries or dead letters with these attempts, for these causes.

    CANCELLED, ABANDONED: it sent no records for these messages, and never will.
    """

    kind: Kind
    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    attempts: Sequence[int]
    causes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer(_Markers):
    """The outcome of a RESCHEDULE or CANCEL by ``holder``."""

    outcomes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Resume(_Markers):
    """A consumer of a queue with ordering asks which of these messages are open; ``holder`` is the question's own.

    With ``onwards`` there is one offset, from which the consumer will read the source. Then the question is about all
    messages from there on, and the tracker redelivers earlier ones: their records are gone from the source.
    """

    onwards: bool


@dataclass(frozen=True, slots=True)
class Resumed(_Markers):
    """The answer to the RESUME by ``holder``, whose record is ``asked_at`` in the markers partition.

    It has the messages that were asked about, or the first one and all open ones after it. ``states`` are those of
    open messages (:class:`marq.core.storage.rows.State`), 0 for others. ``attempts`` are the numbers of their last
    deliveries, or of the next ones if they were released; ``waits_ms`` tells how long their leases or delays last from
    the answer on; ``errors`` are those of their releases. ``left`` is the number of batches that follow for the same
    question. The first batch of an answer to a question ``onwards`` has the offsets that the queue has acquired before,
    as ``acquired``: intervals of a first offset and the one after the last.
    """

    asked_at: int
    left: int
    acquired: Sequence[tuple[int, int]]
    states: Sequence[int]
    attempts: Sequence[int]
    waits_ms: Sequence[int]
    errors: Sequence[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """A tracker's clock: its own monotonic time when it wrote this."""

    holder: int
    monotonic_ms: int


#: Batches of requests about messages of one queue.
Request = Acquire | Renew | Ack | Release | Reject | Delay | Reschedule | Cancel | Discard | Dispatch | Resume | Purge
PlainBatch = Request | Fact | Answer | Resumed | Tick
Batch = PlainBatch | MixedAcquire


def kind_of(batch: Batch) -> Kind:
    """Return the kind of a batch: most classes are named like their kinds."""
    if isinstance(batch, Fact):
        return batch.kind
    return _KINDS.get(type(batch)) or Kind[type(batch).__name__.upper()]


_KINDS = {Answer: Kind.ANSWERED, MixedAcquire: Kind.MIXED_ACQUIRE}


def split(batch: Batch) -> Sequence[PlainBatch]:
    """Return a batch, or the ACQUIREs of a mixed one."""
    return batch.acquires() if isinstance(batch, MixedAcquire) else (batch,)


def attempts_of(payloads: Sequence[Payload]) -> Sequence[int] | None:
    """Return the attempt of each payload, or None when all are 1."""
    if isinstance(payloads, Payloads):
        return payloads.attempts
    attempts = [payload.attempt for payload in payloads]
    return attempts if attempts.count(1) != len(attempts) else None


def may_have(payloads: Sequence[Payload], header: str) -> bool:
    """Return False if no payload has a header of this name; True if one may, because not all were read."""
    return not isinstance(payloads, Payloads) or payloads.may_have(header)


def payload_of(batch: Acquire | Delay, offset: int) -> Payload:
    """Return the payload of one message of a batch."""
    return batch.payloads[bisect_left(batch.offsets, offset)]


# --- splitting --------------------------------------------------------------------------------------------------------


def payload_bytes(payload: Payload) -> int:
    """Return an upper limit for the bytes of a payload in an ACQUIRE or DELAY."""
    return 40 + len(payload.key or b"") + len(payload.value or b"") + headers_bytes(payload.headers)


def headers_bytes(headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return an upper limit for the bytes of headers."""
    return sum([6 + 4 * len(name) + len(value or b"") for name, value in headers])


def offset_runs(offsets: Sequence[int], most: int = MAX_BATCH_MARKERS) -> Iterator[slice]:
    """Cut ascending offsets into runs that a batch can express: at most ``most`` offsets, less than 2^32 apart."""
    start = 0
    while start < len(offsets):
        stop = bisect_left(offsets, offsets[start] + 2**32, start, min(start + most, len(offsets)))
        yield slice(start, stop)
        start = stop


def spans(sizes: Iterable[int], limit_bytes: int) -> Iterator[slice]:
    """Cut a sequence of sizes into runs of at most ``limit_bytes``; a single larger one is a run of its own."""
    index, start, total = -1, 0, 0
    for index, size in enumerate(sizes):
        if index > start and (total + size > limit_bytes or index - start == MAX_BATCH_MARKERS):
            yield slice(start, index)
            start, total = index, 0
        total += size
    if index >= start:
        yield slice(start, index + 1)
