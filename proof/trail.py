"""What a history says of one record of a messages topic, of one process, and of one log of markers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marq.core.backoff import Backoff
from proof.fold import Fold, Standing

Event = dict[str, Any]

#: What can be said of a record: bits.
ACK, RELEASE, REJECT, RENEW, ACQUIRE, RESCHEDULE, CANCEL, DELAY, SPEND = (1 << bit for bit in range(9))
BITS = {
    "ack": ACK, "release": RELEASE, "reject": REJECT, "renew": RENEW, "acquire": ACQUIRE,
    "reschedule": RESCHEDULE, "cancel": CANCEL, "delay": DELAY, "spend": SPEND,
}  # fmt: skip


class Fact(NamedTuple):
    """What a tracker did with a record; ``before`` is how it stood then, ``number`` the event's."""

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
    """A RESCHEDULE or CANCEL in the log; ``in_time``: the message was waiting."""

    kind: str
    holder: str
    offset: int
    in_time: bool


class Told(NamedTuple):
    """What somebody was told of its question: in the log (``offset``), or by the library that asked it."""

    kind: str
    holder: str
    outcome: str
    offset: int
    number: int


class Trail:
    """One record, or delayed message: what it is, who had it, and what the markers say of it.

    There may be millions, so what is mostly short is a tuple, and all empty ones are one.
    """

    __slots__ = (
        "acked_at",
        "acquired_at",
        "acquires",
        "answers",
        "attempt",
        "changes",
        "committed",
        "confirmed",
        "content",
        "contents",
        "deaths",
        "decisions",
        "deliver_at_ms",
        "deliveries",
        "error",
        "events",
        "facts",
        "first_sent_ms",
        "groups",
        "hung",
        "id",
        "key",
        "lease_ms",
        "log",
        "questions",
        "queue",
        "read_again",
        "redriven",
        "said",
        "settled_by",
        "size",
        "slowest_ms",
        "spent_at",
        "time_ms",
        "told",
        "troubled",
        "unanswered",
        "written",
    )

    def __init__(self, key: str) -> None:
        self.key = key
        #: The message's id; equal to the key for the record that began it. Empty until the record is known.
        self.id = ""
        self.queue = self.content = self.error = ""
        self.attempt = 1
        self.time_ms = self.size = 0
        self.first_sent_ms: int | None = None
        #: By a header of the record.
        self.deliver_at_ms: int | None = None
        self.committed = False
        #: It is no record, but a dead letter that was sent back.
        self.redriven = False
        #: The numbers of all events that speak of it.
        self.events: list[int] = []
        #: What was said of its content elsewhere, unless it is known to be the same, with the event's number.
        self.contents: tuple[tuple[int, str], ...] = ()
        #: Event and holder of each ACQUIRE that was sent, and of each time it was handed out; and by which groups.
        self.acquires: tuple[tuple[int, str], ...] = ()
        self.deliveries: tuple[tuple[int, str], ...] = ()
        self.groups: tuple[str, ...] = ()
        #: Bits: what a client asked for, was told to be durable, and what stands in the log.
        self.said = self.confirmed = self.written = 0
        #: Holders that were told that their ack is durable, and nothing of a lost lease.
        self.settled_by: tuple[str, ...] = ()
        #: The event by which somebody knew that it is spent.
        self.spent_at: int | None = None
        #: Writes that failed, or of which nobody knows; that were never answered; and how long the slowest took.
        self.troubled = self.unanswered = 0
        self.slowest_ms = 0
        self.hung = False
        #: Log of markers, and there: offset and standing (None: closed) at each change, first ACK, facts.
        self.log = ""
        self.lease_ms = 0
        self.changes: list[tuple[int, Standing | None]] = []
        self.acked_at: int | None = None
        self.facts: tuple[Fact, ...] = ()
        #: Where its ACQUIREs stand; and whether one came after the tracker had decided.
        self.acquired_at: tuple[int, ...] = ()
        self.read_again = False
        self.decisions: tuple[Decision, ...] = ()
        self.deaths: tuple[Event, ...] = ()
        #: What was asked about it, how the log answers, and what those were told who had asked.
        self.questions: tuple[Question, ...] = ()
        self.answers: tuple[Told, ...] = ()
        self.told: tuple[Told, ...] = ()

    def say_content(self, number: int, content: str) -> None:
        """Note what somebody says of its content."""
        if content != self.content or not self.id:
            self.contents += ((number, content),)

    @property
    def source(self) -> str:
        return self.key.rpartition("/")[0]

    @property
    def offset(self) -> int:
        return int(self.key.rpartition("/")[2])

    def at(self, applied: int) -> Standing | None:
        """How it stood after a record of its log."""
        for offset, standing in reversed(self.changes):
            if offset <= applied:
                return standing
        return None

    @property
    def ended(self) -> bool:
        return self.acked_at is not None or bool(self.facts)


class Process:
    """A process, and what befell it: (first event, last event, what)."""

    def __init__(self) -> None:
        self.faults: list[list[Any]] = []

    def suffer(self, number: int, type_: str, op: str) -> None:
        if type_ == "ok":
            for fault in reversed(self.faults):
                if fault[2] == op:
                    fault[1] = number
                    return
        lasting = type_ == "invoke" or op == "kill"
        self.faults.append([number, float("inf") if lasting else number, op])

    def suffered(self, since: int, until: int) -> set[str]:
        """What befell it between two events, or began before and was not over."""
        end = bisect_left(self.faults, [until])
        return {op for _, last, op in self.faults[:end] if last >= since}


class Ticks:
    """The TICKs of one holder in one log, in order."""

    __slots__ = ("clocks", "offsets")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.clocks: list[int] = []

    def before(self, offset: int) -> tuple[int, int] | None:
        """Return offset and clock of the last one before an offset."""
        index = bisect_left(self.offsets, offset) - 1
        return None if index < 0 else (self.offsets[index], self.clocks[index])

    def at(self, offset: int) -> int | None:
        """Return the clock of the one at an offset."""
        index = bisect_right(self.offsets, offset) - 1
        return self.clocks[index] if index >= 0 and self.offsets[index] == offset else None


class MarkersLog(Fold):
    """A fold that notes each change in the trail of its record."""

    def __init__(
        self,
        name: str,
        backoffs: Callable[[str], Sequence[Backoff]],
        limits: Callable[[str], Sequence[int]],
        trail_of: Callable[[str], Trail],
    ) -> None:
        super().__init__(backoffs, limits)
        self.name = name
        self.ticks: dict[str, Ticks] = {}
        self.unreadable: dict[int, str] = {}
        self.halted = ""
        self._trail_of = trail_of

    def put(self, key: str, standing: Standing) -> None:
        self.open[key] = standing
        self._trail_of(key).changes.append((self.applied, standing))

    def end(self, key: str) -> bool:
        if self.open.pop(key, None) is None:
            return False
        self._trail_of(key).changes.append((self.applied, None))
        return True

    def ask(self, key: str, event: Event, *, in_time: bool) -> None:
        self._trail_of(key).questions += (Question(event["kind"], event["holder"], event["offset"], in_time),)

    def tick(self, event: Event) -> None:
        super().tick(event)
        ticks = self.ticks.setdefault(event["holder"], Ticks())
        ticks.offsets.append(event["offset"])
        ticks.clocks.append(self.now_ms)


def last_standing(trail: Trail) -> Standing | None:
    """Return how a closed record stood when it was last open."""
    return next((standing for _, standing in reversed(trail.changes) if standing is not None), None)
