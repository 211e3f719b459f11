"""The evidence in a history about one record, one process, or one markers log."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from lab.proof.fold import Fold, Key
from lab.proof.states import Standing
from marq.settings.backoff import Backoff
from marq.wire.names import is_synthetic

Event = dict[str, Any]

#: Operations on a record, as bits.
ACK, RELEASE, REJECT, RENEW, ACQUIRE, RESCHEDULE, CANCEL, DELAY, DISPATCH = (1 << bit for bit in range(9))
BITS = {
    "ack": ACK, "release": RELEASE, "reject": REJECT, "renew": RENEW, "acquire": ACQUIRE,
    "reschedule": RESCHEDULE, "cancel": CANCEL, "delay": DELAY, "dispatch": DISPATCH,
}  # fmt: skip


class Delivery(NamedTuple):
    """A delivery to a handler: the event's number, and where the markers log of its source ended then, if known.

    ``time_ms`` is that log's time then, -1 if unknown.
    """

    number: int
    holder: str
    attempt: int = 1
    log_end: int | None = None
    time_ms: int = -1


class Fact(NamedTuple):
    """What a tracker did with a record; ``before`` is its standing until then, ``number`` the event's number."""

    kind: str
    attempt: int
    cause: str
    holder: str
    log: str
    offset: int
    before: Standing | None
    number: int


class Decision(NamedTuple):
    """What a tracker is about to do, and how far it has read."""

    kind: str
    attempt: int
    cause: str
    holder: str
    log: str
    applied: int
    tick: int | None
    fenced_at: int
    version: int | None
    number: int


class Question(NamedTuple):
    """A RESCHEDULE or CANCEL in the log; ``in_time``: the message of ``queue`` was waiting."""

    queue: str
    kind: str
    holder: str
    offset: int
    in_time: bool


class Told(NamedTuple):
    """The answer to a question: in the log (``offset``), or from the library to its caller."""

    kind: str
    holder: str
    outcome: str
    offset: int
    number: int


@dataclass(slots=True, eq=False)
class Trail:
    """One record or delayed message of a queue: its content, its holders, and its markers.

    With ANY_QUEUE it has the requests that name no queue, and their answers. There may be millions of trails, so short
    sequences are tuples, and all empty ones are one object.
    """

    queue: str
    #: The name of the record.
    place: str
    #: The message's id; equal to the place for the record that began it. Empty until the record is known.
    id: str = ""
    content: str = ""
    error: str = ""
    attempt: int = 1
    time_ms: int = 0
    size: int = 0
    first_sent_ms: int | None = None
    #: Delivery time from a header of the record.
    deliver_at_ms: int | None = None
    #: Number of its ordering key; empty without one.
    line: str = ""
    committed: bool = False
    #: True for a redriven dead letter, False for a record.
    redriven: bool = False
    #: Numbers of all events about it.
    events: list[int] = field(default_factory=list)
    #: Contents in other events that differ or may differ, with the event's number.
    contents: tuple[tuple[int, str], ...] = ()
    #: Event and holder of each ACQUIRE that was sent; the deliveries; and their groups.
    acquires: tuple[tuple[int, str], ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    groups: tuple[str, ...] = ()
    #: The first event that asks to end or release it; and event and holder of each RELEASE and REJECT.
    finish_at: int | None = None
    gave_up: tuple[tuple[int, str], ...] = ()
    #: Bits: requests of clients, confirmations to clients, and markers in the log.
    said: int = 0
    confirmed: int = 0
    written: int = 0
    #: Holders whose ack was reported as durable and in time.
    settled_by: tuple[str, ...] = ()
    #: The event that reports its DISPATCH as durable.
    spent_at: int | None = None
    #: Writes that failed or have an unknown outcome; writes without an answer; and the time of the slowest.
    troubled: int = 0
    unanswered: int = 0
    slowest_ms: int = 0
    hung: bool = False
    #: Whether its deduplication id was accepted before.
    duplicate: bool = False
    #: Its markers log; from that log the lease, offset and standing (None: closed) at each change, first ACK, facts.
    log: str = ""
    lease_ms: int = 0
    changes: list[tuple[int, Standing | None]] = field(default_factory=list)
    acked_at: int | None = None
    facts: tuple[Fact, ...] = ()
    #: Offsets of its ACQUIREs; and whether one came after the tracker had decided.
    acquired_at: tuple[int, ...] = ()
    #: Event and holder of each ACQUIRE in the log.
    acquired_by: tuple[tuple[int, str], ...] = ()
    read_again: bool = False
    decisions: tuple[Decision, ...] = ()
    deaths: tuple[Event, ...] = ()
    #: Questions about it, the answers in the log, and the answers that callers received.
    questions: tuple[Question, ...] = ()
    answers: tuple[Told, ...] = ()
    told: tuple[Told, ...] = ()

    def __str__(self) -> str:
        return f"{self.place} of {self.queue or 'any queue'}"

    @property
    def key(self) -> Key:
        return self.queue, self.place

    @property
    def began(self) -> bool:
        """Whether the message began with this record."""
        return self.id == self.place

    def say_content(self, number: int, content: str) -> None:
        """Note the content that an event gives it."""
        if content != self.content or not self.id:
            self.contents += ((number, content),)

    def note_delay(self, event: Event, index: int, number: int) -> None:
        """Note a DELAY, which stands for the record until the message becomes one."""
        if self.id:
            self.say_content(number, event["contents"][index])
            return
        self.redriven = not is_synthetic(self.place)
        self.id, self.committed = event["ids"][index] if self.redriven else self.place, True
        self.content = event["contents"][index]
        self.attempt, self.time_ms = event["attempts"][index], event["timestamps_ms"][index]

    @property
    def source(self) -> str:
        return self.place.rpartition("/")[0]

    @property
    def offset(self) -> int:
        return int(self.place.rpartition("/")[2])

    def at(self, applied: int) -> Standing | None:
        """Return its standing after a record of its log."""
        for offset, standing in reversed(self.changes):
            if offset <= applied:
                return standing
        return None

    @property
    def ended(self) -> bool:
        return self.acked_at is not None or bool(self.facts)


class Process:
    """A process, and the faults that hit it: (first event, last event, kind)."""

    def __init__(self) -> None:
        self.faults: list[list[Any]] = []

    def suffer(self, number: int, type_: str, op: str) -> None:
        if type_ == "ok":
            for fault in reversed(self.faults):
                # Skip faults that have ended. Pauses can overlap, because a paused process also records its own stall.
                if fault[2] == op and fault[1] == float("inf"):
                    fault[1] = number
                    return
        lasting = type_ == "invoke" or op in ("kill", "stop")
        self.faults.append([number, float("inf") if lasting else number, op])

    def suffered(self, since: int, until: int) -> set[str]:
        """Return its faults between two events, including those that began earlier and were not over."""
        end = bisect_left(self.faults, [until])
        return {op for _, last, op in self.faults[:end] if last >= since}


@dataclass(slots=True, eq=False)
class Clock:
    """The clock of a log: its time after each record, the record's own time, and the skew subtracted from that."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    now_ms: array[int] = field(default_factory=lambda: array("q"))
    times_ms: array[int] = field(default_factory=lambda: array("q"))
    skews_ms: array[int] = field(default_factory=lambda: array("q"))
    #: For each record the earliest time of it and all later ones, once needed: a log's clock may be set back.
    _earliest_ms: array[int] | None = None

    def note(self, offset: int, now_ms: int, time_ms: int, skew_ms: int) -> None:
        self.offsets.append(offset)
        self.now_ms.append(now_ms)
        self.times_ms.append(time_ms)
        self.skews_ms.append(skew_ms)

    def end_at(self, time_ms: int) -> int:
        """Return the latest possible end of the log at a time; call it when all records are noted."""
        if self._earliest_ms is None:
            earliest = array("q", accumulate(reversed(self.times_ms), min))
            earliest.reverse()
            self._earliest_ms = earliest
        index = bisect_right(self._earliest_ms, time_ms)
        return self.offsets[index - 1] + 1 if index else 0

    def latest(self, since: int, until: int, time_ms: int) -> int:
        """Return the latest time that the clock showed between two offsets, or when the log's time was ``time_ms``."""
        start, end = bisect_left(self.offsets, since), bisect_left(self.offsets, until)
        last_ms = time_ms - self.skews_ms[end - 1] if end and time_ms >= 0 else 0
        return max(last_ms, *self.now_ms[max(start - 1, 0) : end], 0)


@dataclass(slots=True, eq=False)
class Ticks:
    """The TICKs of one holder in one log, in order."""

    offsets: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)

    def before(self, offset: int) -> tuple[int, int] | None:
        index = bisect_left(self.offsets, offset) - 1
        return None if index < 0 else (self.offsets[index], self.clocks[index])

    def at(self, offset: int) -> int | None:
        index = bisect_right(self.offsets, offset) - 1
        return self.clocks[index] if index >= 0 and self.offsets[index] == offset else None


class MarkersLog(Fold):
    """A fold that notes each change in the trail of its record."""

    def __init__(
        self,
        name: str,
        backoffs: Callable[[str], Sequence[Backoff]],
        limits: Callable[[str], Sequence[int]],
        window_ms: Callable[[str], int],
        trail_of: Callable[[Key], Trail],
    ) -> None:
        super().__init__(backoffs, limits, window_ms)
        self.name = name
        self.ticks: dict[str, Ticks] = {}
        self.clock = Clock()
        self.unreadable: dict[int, str] = {}
        self.halted = ""
        self._trail_of = trail_of

    def fold(self, event: Event) -> None:
        super().fold(event)
        self.clock.note(event["offset"], self.now_ms, event["time_ms"], self.skew_ms)

    def put(self, key: Key, standing: Standing) -> None:
        super().put(key, standing)
        self._trail_of(key).changes.append((self.applied, standing))

    def end(self, key: Key) -> bool:
        if not super().end(key):
            return False
        self._trail_of(key).changes.append((self.applied, None))
        return True

    def drop(self, key: Key) -> None:
        self._trail_of(key).duplicate = True

    def ask(self, key: Key, event: Event, *, in_time: bool) -> None:
        queue, place = key
        question = Question(queue, event["kind"], event["holder"], event["offset"], in_time)
        self._trail_of((event["queue"], place)).questions += (question,)

    def tick(self, event: Event) -> None:
        super().tick(event)
        ticks = self.ticks.setdefault(event["holder"], Ticks())
        ticks.offsets.append(event["offset"])
        ticks.clocks.append(self.now_ms)


def last_standing(trail: Trail) -> Standing | None:
    """Return the last standing of a closed record before it was closed."""
    return next((standing for _, standing in reversed(trail.changes) if standing is not None), None)


def events_of(trails: Iterable[Trail]) -> list[int]:
    """Return the numbers of the events about any of these trails."""
    return [number for trail in trails for number in trail.events]
