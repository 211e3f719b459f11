"""Markers: what is said about messages, in batches.

One record of the markers topic is one *batch*: one kind of marker, by one holder, for messages of one queue that came
from one source. Batches are where the speed comes from: what is equal for all messages of a batch is written once, and
what differs is written in columns. Their bytes are made and read by :mod:`marq.core.marker_codec`.

A message is known by its source and a number. The source of a record is the partition where it stands, and the number
its offset. A message that was delayed by its sender is no record yet: its source is one that the sender has drawn for
itself (:func:`marq.core.names.drawn_topic`), and it numbers its messages there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

#: The release delay that stands for "the backoff of the queue".
BACKOFF = -1
#: The due time of a message that may be delivered at once.
NOW = -1
#: The queue of an ACK whose messages are of several queues.
SEVERAL = ""
#: Markers in one batch; a longer one is split by the encoder's caller.
MAX_BATCH_MARKERS = 65_536

Headers = Sequence[tuple[str, bytes | None]]


class Record(Protocol):
    """One record; aiokafka's are such, too."""

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
    """What is asked is imperative, what the tracker did is a participle, TICK is the tracker's clock."""

    ACQUIRE = 1
    RENEW = 2
    ACK = 3
    RELEASE = 4
    REJECT = 5
    DELAY = 6
    RESCHEDULE = 7
    CANCEL = 8
    DISCARD = 9
    SPEND = 10
    REDELIVERED = 33
    DEAD_LETTERED = 34
    DELIVERED = 35
    CANCELLED = 36
    ANSWERED = 37
    ABANDONED = 38
    TICK = 64


#: What a tracker did to end messages.
FACTS = (Kind.REDELIVERED, Kind.DEAD_LETTERED, Kind.DELIVERED, Kind.CANCELLED, Kind.ABANDONED)


class Cause(IntEnum):
    """Why a tracker ended a message."""

    EXPIRED = 1
    RELEASED = 2
    REJECTED = 3
    TOO_LARGE = 4
    DUE = 5
    CANCELLED = 6
    #: Of a schedule's messages: its definition does not hold any more, and what is known of it is forgotten.
    WITHDRAWN = 7


class Outcome(IntEnum):
    """What a tracker answers to a RESCHEDULE or CANCEL."""

    DONE = 1
    #: It is not waiting: delivered or cancelled before, held by somebody, or not known at all.
    TOO_LATE = 2


class Source(NamedTuple):
    """The partition that messages were read from, or what stands for it of messages that are no records yet."""

    topic: str
    partition: int


class Payload(NamedTuple):
    """All that must survive redelivery: the record as its sender made it."""

    timestamp_ms: int
    attempt: int
    key: bytes | None
    headers: Headers
    value: bytes | None


class Payloads(Sequence[Payload]):
    """Payloads that are kept as columns; ``attempts`` is None when all are 1."""

    __slots__ = ()
    attempts: Sequence[int] | None

    def may_have(self, header: str) -> bool:
        """Return False if no message has a header of this name; True if one may, because not all were read."""
        return True


class Columns(Payloads):
    """The payloads of an ACQUIRE as columns, for a writer that has thousands of them: no object for each.

    None stands for a column of which nothing is written: attempts that are all 1, keys that are all the queue's name,
    no headers at all.
    """

    __slots__ = ("attempts", "headers", "keys", "queue_key", "timestamps", "values")

    def __init__(
        self,
        queue_key: bytes,
        timestamps: Sequence[int],
        values: Sequence[bytes | None],
        *,
        attempts: Sequence[int] | None = None,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> None:
        self.queue_key = queue_key
        self.timestamps = timestamps
        self.values = values
        self.attempts = attempts
        self.keys = keys
        self.headers = headers

    def __len__(self) -> int:
        return len(self.timestamps)

    def __getitem__(self, index: int) -> Payload:  # type: ignore[override]
        attempt = 1 if self.attempts is None else self.attempts[index]
        key = self.queue_key if self.keys is None else self.keys[index]
        headers: Headers = () if self.headers is None else self.headers[index]
        return Payload(self.timestamps[index], attempt, key, headers, self.values[index])


@dataclass(frozen=True, slots=True)
class Acquire:
    """Messages taken by a holder for ``lease_ms``; ``from_offset`` is where the read that found them began.

    Each message of the queue from ``from_offset`` to the batch's last offset is in this batch: so the tracker can tell
    a record that it has seen before from one whose marker was lost. ``dues_ms``: for each message the time before which
    it must not be delivered, which nobody holds then, or :data:`NOW`; None when all are held.
    """

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    lease_ms: int
    from_offset: int
    payloads: Sequence[Payload]
    dues_ms: Sequence[int] | None = None

    @property
    def attempts(self) -> Sequence[int] | None:
        """The attempt of each message, or None when all are 1."""
        return attempts_of(self.payloads)


@dataclass(frozen=True, slots=True)
class Delay:
    """Messages that are not out yet: to be delivered at their ``times_ms``, unless they are cancelled before.

    Times are milliseconds from the batch's place in the log on when ``relative``, else since the epoch. ``from_offset``
    says as in an ACQUIRE from where on all is known, so that a batch which is written twice counts once; None where its
    writer never repeats itself. Where the source is a topic's partition the messages are dead letters that are
    redriven: then it is the first offset, and exactly the batch's own offsets are known, once and for ever.
    """

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    times_ms: Sequence[int]
    relative: bool
    from_offset: int | None
    payloads: Sequence[Payload]

    @property
    def attempts(self) -> Sequence[int] | None:
        """The attempt of each message, or None when all are 1."""
        return attempts_of(self.payloads)


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Messages that wait are to be delivered at other times, which are as those of a DELAY."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    times_ms: Sequence[int]
    relative: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Messages that wait are not to be delivered at all."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Discard:
    """Records that are dead letters are done with: they are never to be redriven."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Renew:
    """The holder keeps these messages for ``lease_ms`` from now on."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Spend:
    """The holder hands these messages out for the only time that there is, and keeps them for ``lease_ms``.

    Whatever becomes of them then, they are not delivered again.
    """

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Ack:
    """These messages are done; ``queue`` may be :data:`SEVERAL`, for whoever counts knows whose each is."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Release:
    """The holder gives these messages back, each after its delay (or :data:`BACKOFF`).

    ``counted`` is False at a shutdown: the attempt was none. ``errors`` says, for each, why ("" when nothing failed).
    """

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    delays_ms: Sequence[int]
    counted: bool
    errors: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reject:
    """The holder gives these messages up, each for its reason: they become dead letters."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fact:
    """What a tracker did: copies with these attempts went to the queue or to the dead letters, for these causes.

    CANCELLED, ABANDONED: no copies were sent, and none ever will be.
    """

    kind: Kind
    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    attempts: Sequence[int]
    causes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a RESCHEDULE or CANCEL, whose ``holder`` this is."""

    queue: str
    holder: int
    source: Source
    offsets: Sequence[int]
    outcomes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """A tracker's clock: its own monotonic time when it wrote this."""

    holder: int
    monotonic_ms: int


Batch = Acquire | Renew | Ack | Release | Reject | Delay | Reschedule | Cancel | Discard | Spend | Fact | Answer | Tick


def attempts_of(payloads: Sequence[Payload]) -> Sequence[int] | None:
    """Return the attempt of each payload, or None when all are 1."""
    if isinstance(payloads, Payloads):
        return payloads.attempts
    attempts = [payload.attempt for payload in payloads]
    return attempts if attempts.count(1) != len(attempts) else None


# --- taking apart -----------------------------------------------------------------------------------------------------


def alike(batch: Acquire, offsets: Sequence[int]) -> Iterable[tuple[int, int, Sequence[int]]]:
    """Group offsets of a batch by their attempts and times, which are nearly always 1 and :data:`NOW`."""
    attempts, times = batch.attempts, batch.dues_ms
    if not offsets:
        return ()
    if attempts is None and times is None:
        return ((1, NOW, offsets),)
    groups: dict[tuple[int, int], list[int]] = {}
    for offset in offsets:
        index = bisect_left(batch.offsets, offset)
        alike = (1 if attempts is None else attempts[index], NOW if times is None else times[index])
        groups.setdefault(alike, []).append(offset)
    return [(attempt, time_ms, group) for (attempt, time_ms), group in groups.items()]


def payload_of(batch: Acquire | Delay, offset: int) -> Payload:
    """Return the payload of one message of a batch."""
    return batch.payloads[bisect_left(batch.offsets, offset)]


# --- splitting --------------------------------------------------------------------------------------------------------


def payload_bytes(payload: Payload) -> int:
    """Return how many bytes a payload takes in an ACQUIRE or DELAY, at the most."""
    headers = sum([6 + 4 * len(name) + len(value or b"") for name, value in payload.headers])
    return 40 + len(payload.key or b"") + len(payload.value or b"") + headers


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
