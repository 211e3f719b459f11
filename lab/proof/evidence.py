"""The evidence in a history, by subject: it is gathered event by event, and judged when all events are known.

Nothing is judged here, because events of different logs and processes may come in any order. Only the events of one
log, or of one process, are in order.
"""

from __future__ import annotations

import gc
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from sys import intern
from typing import Any, NamedTuple

from lab.proof.findings import Report, Why
from lab.proof.fold import FACTS, REDELIVERED, Fold, Key, Settings, Standing, acquires_of
from lab.proof.history import IN_RECORD, UNREADABLE, Event
from marq.wire.dead_letter_notes import Disposition
from marq.wire.markers import ANY_QUEUE, LAST
from marq.wire.names import is_synthetic

#: The target of faults that hit all processes.
EVERYBODY = "*"
#: Faults of a clock.
CLOCKS = {"clock", "step"}

#: Operations on a record, as bits.
ACK, RELEASE, REJECT, RENEW, ACQUIRE, RESCHEDULE, CANCEL, DELAY, DISPATCH = (1 << bit for bit in range(9))
BITS = {
    "ack": ACK, "release": RELEASE, "reject": REJECT, "renew": RENEW, "acquire": ACQUIRE,
    "reschedule": RESCHEDULE, "cancel": CANCEL, "delay": DELAY, "dispatch": DISPATCH,
}  # fmt: skip


class HandlerDelivery(NamedTuple):
    """A delivery to a handler: the event's number, and where the markers log of its source ended then, if known.

    ``time_ms`` is that log's time then, -1 if unknown.
    """

    number: int
    holder: str
    attempt: int = 1
    log_end: int | None = None
    time_ms: int = -1
    group: str = ""

    @property
    def until(self) -> float:
        """Where the log ended then; infinite if that is not known."""
        return inf if self.log_end is None else self.log_end

    def has(self, standing: Standing) -> bool:
        """Whether a standing is that of this delivery's holder and attempt."""
        return (standing.holder, standing.attempt) == (self.holder, self.attempt)


class TrackerFact(NamedTuple):
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
    offset: int = -1


@dataclass(slots=True, eq=False)
class SendCall:
    """One call of send; its outcome is unknown until its end is known."""

    process: str
    message: str
    #: The queue, or the topic that queues name.
    to: str
    content: str
    events: list[int]
    outcome: str = "unknown"
    record: str = ""

    def __str__(self) -> str:
        return self.message


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
    #: When it expires by a header, -1 for never.
    expires_at_ms: int | None = None
    #: Number of its ordering key; empty without one.
    line: str = ""
    committed: bool = False
    #: True for a redriven dead letter, False for a record.
    redriven: bool = False
    #: Numbers of all events about it.
    events: list[int] = field(default_factory=list)
    #: Contents in other events that differ or may differ, with the event's number.
    contents: tuple[tuple[int, str], ...] = ()
    #: Event, holder and operation of each request of a client to acquire, end or release it; and the deliveries.
    requests: tuple[tuple[int, str, str], ...] = ()
    deliveries: tuple[HandlerDelivery, ...] = ()
    #: Bits: requests of clients, confirmations to clients, and markers in the log.
    said: int = 0
    confirmed: int = 0
    written: int = 0
    #: Holders whose ack was reported as durable and in time.
    settled_by: tuple[str, ...] = ()
    #: The event that reports its DISPATCH as durable.
    spent_at: int | None = None
    #: Writes that failed, or whose outcome is unknown; and the time of the slowest.
    unconfirmed: int = 0
    slowest_ms: int = 0
    hung: bool = False
    #: Whether its deduplication id was accepted before.
    duplicate: bool = False
    #: Its markers log; from that log the lease, offset and standing (None: closed) at each change, first ACK, facts.
    log: str = ""
    lease_ms: int = 0
    changes: list[tuple[int, Standing | None]] = field(default_factory=list)
    acked_at: int | None = None
    facts: tuple[TrackerFact, ...] = ()
    #: Offset, event and holder of each ACQUIRE in the log.
    acquired: tuple[tuple[int, int, str], ...] = ()
    decisions: tuple[Decision, ...] = ()
    deaths: tuple[Event, ...] = ()
    #: Questions about it, the answers in the log, and the answers that callers received.
    questions: tuple[Question, ...] = ()
    answers: tuple[Told, ...] = ()
    told: tuple[Told, ...] = ()
    #: The offset of each RESUMED about it, and of the RESUME that it answers.
    resumed: tuple[tuple[int, int], ...] = ()
    #: Why its lease ran out, and why it was delivered more than once: known when it has been judged.
    why_expired: Why | None = None
    why_delivered_twice: Why | None = None

    def __str__(self) -> str:
        return f"{self.place} of {self.queue or 'any queue'}"

    @property
    def key(self) -> Key:
        return self.queue, self.place

    def requested(self, *operations: str, holder: str | None = None) -> list[int]:
        """Return the events by which clients, or one holder, asked for one of these operations."""
        return [number for number, one, op in self.requests if op in operations and holder in (None, one)]

    @property
    def began(self) -> bool:
        """Whether the message began with this record."""
        return self.id == self.place

    def say_content(self, number: int, content: str) -> None:
        """Note the content that an event gives it."""
        if content != IN_RECORD and (content != self.content or not self.id):
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
        if "expire_at_ms" in event:
            self.expires_at_ms = event["expire_at_ms"][index]

    @property
    def source(self) -> str:
        return self.place.rpartition("/")[0]

    @property
    def topic(self) -> str:
        return self.place.rsplit("/", 2)[0]

    @property
    def offset(self) -> int:
        return int(self.place.rpartition("/")[2])

    def standings(self, until: float = inf) -> list[Standing]:
        """Return its standings before an offset of its log, in order."""
        return [standing for offset, standing in self.changes if offset < until and standing is not None]

    def at(self, applied: int) -> Standing | None:
        """Return its standing after a record of its log."""
        for offset, standing in reversed(self.changes):
            if offset <= applied:
                return standing
        return None

    @property
    def redelivery(self) -> TrackerFact | None:
        """The fact of its redelivery, unless an ack that the tracker had not read yet ended it before."""
        for fact in self.facts[:1]:
            if fact.kind == REDELIVERED and (self.acked_at is None or self.acked_at > fact.offset):
                return fact
        return None

    @property
    def ended(self) -> bool:
        return self.acked_at is not None or bool(self.facts)


@dataclass(slots=True)
class Fault:
    """A fault: the numbers of its first and last event, and its kind."""

    first: int
    last: float
    op: str


@dataclass(slots=True, eq=False)
class MarkersClock:
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


class MarkersLog(Fold):
    """A fold that notes each change in the trail of its record."""

    def __init__(self, name: str, evidence: Evidence) -> None:
        super().__init__(evidence.settings_of)
        self.name = name
        self.clock = MarkersClock()
        #: Of each holder's TICKs, the offsets and the log's clock.
        self._ticks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.unreadable: dict[int, str] = {}
        self.halted = ""
        self._trail_of = evidence.trail

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
        self._ticks[event["holder"]].append((event["offset"], self.now_ms))

    def tick_before(self, holder: str, offset: int) -> tuple[int, int] | None:
        """Return offset and clock of a holder's last TICK before an offset."""
        ticks = self._ticks.get(holder, [])
        index = bisect_left(ticks, (offset,))
        return ticks[index - 1] if index else None

    def clock_of_tick(self, holder: str, offset: int | None) -> int | None:
        """Return the clock of a holder's TICK at an offset; None if there is none."""
        tick = None if offset is None else self.tick_before(holder, offset + 1)
        return tick[1] if tick is not None and tick[0] == offset else None


#: Requests that a trail keeps: by these, a consumer acquires a message, and ends or releases it.
_KEPT = ("acquire", "ack", "release", "reject")


class Evidence:
    """Takes events one by one; ``report`` has the malformed ones."""

    def __init__(self) -> None:
        self.report = Report()
        #: All calls, by the sender's name for the message; a message that is sent again has several.
        self.calls: dict[str, list[SendCall]] = {}
        self.trails: dict[Key, Trail] = {}
        #: The trails of each place, including that of requests that name no queue.
        self.places: dict[str, tuple[Trail, ...]] = {}
        self.logs: dict[str, MarkersLog] = {}
        #: The faults of each process, log, and queue's group.
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        #: The process behind each holder.
        self.process_of: dict[str, str] = {}
        #: Where the last purge of each queue and source ends.
        self.purges: dict[tuple[str, str], int] = {}
        #: Likewise of purges that have ended messages in flight.
        self.purges_in_flight: dict[tuple[str, str], int] = {}
        #: Published versions: settings by queue; and queues that changed their groups.
        self.versions: dict[int, dict[str, Settings]] = {}
        self.moved: set[str] = set()
        #: Queues with ordering; and the RESUMEs by queue and source: the offset of each, and where it resumes from.
        self.ordered: set[str] = set()
        #: Those of them that have limits or fairness, but no order.
        self.limited: set[str] = set()
        self.resumes: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        #: The markers log of each source.
        self.log_of: dict[str, str] = {}
        #: Where logs begin after retention, each with its event; and the records that consumers reported as skipped.
        self.truncations: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.skipped: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.limit: int | None = None
        self.quarantined: dict[str, list[str]] = defaultdict(list)
        #: Dead letters by record; what the notes that settle each say; and those reported to a caller as redriven.
        self.letters: dict[str, Event] = {}
        self.settled: dict[str, list[str]] = defaultdict(list)
        self.redriven: list[str] = []
        #: How often each markers log was taken over.
        self.owners: Counter[str] = Counter()
        self.number = 0
        #: Operations that clients record at all, as bits: a library may acquire and renew without an event.
        self.told = 0
        self._open_calls: dict[tuple[str, str], SendCall] = {}
        self._version_of: dict[str, int] = {}
        self._fenced_at: dict[tuple[str, str], int] = {}

    def take(self, event: Event) -> None:
        handle = getattr(self, f"_take_{_ALIASES.get(event['op'], event['op'])}", None)
        try:
            if handle is None:
                raise ValueError(f"unknown op {event['op']!r}")
            handle(event)
        except (KeyError, TypeError, ValueError) as error:
            self.report.find("malformed", f"event {self.number}", repr(error), events=[self.number])
        self.number += 1

    def is_purged_unread(self, trail: Trail) -> bool:
        """Return whether a purge ended a record that no consumer had acquired."""
        return not trail.changes and trail.offset < self.purges.get((trail.queue, trail.source), 0)

    def is_removed(self, trail: Trail, until: float = inf) -> bool:
        """Return whether retention removed a record before an event."""
        truncations = self.truncations.get(trail.source, ())
        return any(number < until and start > trail.offset for number, start in truncations)

    def befell(self, *names: str, since: int = 0, until: int | None = None) -> set[str]:
        """Return the faults that hit processes, logs, or queues' groups between two events, or ever.

        Those that began earlier and were not over count, too.
        """
        until = self.number if until is None else until
        faults = [fault for name in names for fault in self.faults.get(name, ())]
        return {fault.op for fault in faults if fault.first < until and fault.last >= since}

    # --- senders and consumers ----------------------------------------------------------------------------------------

    def _take_send(self, event: Event) -> None:
        process, message = event["process"], event["message"]
        if event["type"] == "invoke":
            call = SendCall(process, message, str(event.get("topic", event["queue"])), event["content"], [self.number])
            self.calls.setdefault(message, []).append(call)
            self._open_calls[process, message] = call
            return
        call = self._open_calls.pop((process, message))
        call.events.append(self.number)
        call.outcome, call.record = event["type"], event.get("record", "")

    def _named(self, event: Event) -> Sequence[Trail]:
        """Return the trails of the records that an event names."""
        return [self._named_at(event, f"{event['source']}/{offset}") for offset in event["offsets"]]

    def _named_at(self, event: Event, place: str) -> Trail:
        return self._noted((intern(event["queue"]), place))

    def _noted(self, key: Key) -> Trail:
        """Return a trail, and note that the current event is about it."""
        trail = self.trail(key)
        trail.events.append(self.number)
        return trail

    def trail(self, key: Key) -> Trail:
        trail = self.trails.get(key)
        if trail is None:
            trail = self.trails[key] = Trail(*key)
            self.places[trail.place] = (*self.places.get(trail.place, ()), trail)
        return trail

    def _take_write(self, event: Event) -> None:
        """Note that a client writes markers (ACQUIRE, an outcome, RENEW), or commits."""
        type_, op = event["type"], intern(event["op"])
        bit, holder, number = BITS.get(op, 0), intern(event["holder"]), self.number
        self.process_of.setdefault(holder, event["process"])
        self.told |= bit
        lost = set(event.get("lost", ()))
        took_ms = event.get("took_ms", 0)
        for offset, trail in zip(event["offsets"], self._named(event), strict=True):
            if took_ms > trail.slowest_ms:
                trail.slowest_ms = took_ms
            if type_ == "invoke":
                trail.unconfirmed += 1
                trail.said |= bit
                if op in _KEPT:
                    trail.requests += ((number, holder, op),)
            elif type_ == "ok":
                trail.unconfirmed -= 1
                trail.confirmed |= bit
                if bit == DISPATCH and trail.spent_at is None:
                    trail.spent_at = number
                if bit == ACK and offset not in lost:
                    trail.settled_by += (holder,)

    def _take_request(self, event: Event) -> None:
        """Note that a client cancels or reschedules messages."""
        kind, bit, holder = event["op"].upper(), BITS[event["op"]], event["holder"]
        outcomes = event.get("outcomes", ()) if event["type"] == "ok" else ()
        self.told |= bit
        for index, trail in enumerate(self._named(event)):
            trail.said |= bit
            if outcomes:
                trail.told += (Told(kind, holder, outcomes[index]),)

    def _take_deliver(self, event: Event) -> None:
        trail = self._named_at(event, event["record"])
        holder, place = intern(event["holder"]), (event.get("log_end"), event.get("time_ms", -1))
        delivery = HandlerDelivery(self.number, holder, event.get("attempt", 1), *place, intern(event["group"]))
        trail.deliveries += (delivery,)
        trail.say_content(self.number, event["content"])
        self.process_of.setdefault(event["holder"], event["process"])
        self.report.delivered += 1

    def _take_redrive(self, event: Event) -> None:
        if event["type"] == "ok":
            self.redriven += [f"{event['source']}/{offset}" for offset in event["offsets"]]

    def _take_hang(self, event: Event) -> None:
        self._named_at(event, event["record"]).hung = True

    def _take_skipped(self, event: Event) -> None:
        self.skipped[event["source"]].append((event["start"], event["end"]))

    def _take_fault(self, event: Event) -> None:
        type_, op, faults = event["type"], event["op"], self.faults[event["target"]]
        # Pauses can overlap, because a paused process also records its own stall.
        lasting = [fault for fault in faults if fault.op == op and fault.last == inf]
        if type_ == "ok" and lasting:
            lasting[-1].last = self.number
        else:
            faults.append(Fault(self.number, inf if type_ == "invoke" or op in ("kill", "stop") else self.number, op))

    # --- trackers -----------------------------------------------------------------------------------------------------

    def _take_own(self, event: Event) -> None:
        self.process_of.setdefault(event["holder"], event["process"])
        self._fenced_at[event["holder"], event["log"]] = event["fenced_at"]
        self.owners[event["log"]] += 1
        start = max((start for _, start in self.truncations.get(event["log"], ())), default=0)
        if event.get("position", start) < start:
            text = f"{event['process']} reads from {event['position']}, the log begins at {start}"
            self.report.find("position-lost", event["log"], text, events=[self.number])

    def _take_settings(self, event: Event) -> None:
        version = event["version"]
        if "queues" not in event:
            self._version_of[event["process"]] = version
            return
        before = self.versions.get(max(self.versions, default=-1), {})
        self.versions[version] = event["queues"]
        for queue, settings in event["queues"].items():
            if settings.get("ordering") == "key" or settings.get("by_key"):
                self.ordered.add(queue)
            if settings.get("by_key") and settings.get("ordering") != "key":
                self.limited.add(queue)
            if queue in before and before[queue].get("group") != settings.get("group"):
                self.moved.add(queue)

    def _take_fire(self, event: Event) -> None:
        if event["type"] != "invoke":
            return
        holder, log = event["holder"], event["log"]
        decision = Decision(
            event["kind"], event["attempt"], event["cause"], holder, log, event["applied"], event["tick"],
            self._fenced_at.get((holder, log), 0),
            self._version_of.get(event["process"]),
            self.number,
        )  # fmt: skip
        self._named_at(event, f"{event['source']}/{event['offset']}").decisions += (decision,)

    def _take_halt(self, event: Event) -> None:
        self.log(event["log"]).halted = event["reason"]

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _take_record(self, event: Event) -> None:
        place = f"{event['process']}/{event['offset']}"
        trail = self._named_at(event, place)
        trail.id = event.get("id", place)
        trail.content, trail.size = event["content"], event["size"]
        trail.attempt = event.get("attempt", 1)
        trail.error = event.get("error", "")
        trail.time_ms = event["time_ms"]
        trail.first_sent_ms = event.get("first_sent_ms")
        trail.deliver_at_ms = event.get("deliver_at_ms")
        trail.expires_at_ms = event.get("expires_at_ms")
        trail.line = event.get("line", "")
        trail.committed = event["type"] == "ok"

    def _take_dead(self, event: Event) -> None:
        if event["type"] != "ok":
            return
        self.letters[f"{event['process']}/{event['offset']}"] = event
        trail = self._named_at(event, event["origin"])
        trail.deaths += (event,)
        trail.say_content(self.number, event["content"])

    def _take_note(self, event: Event) -> None:
        if event["became"] in (Disposition.REDRIVEN, Disposition.DELETED):
            for offset in event["offsets"]:
                self.settled[f"{event['process']}/{offset}"].append(event["became"])

    def _take_quarantine(self, event: Event) -> None:
        if event["type"] == "ok":
            self.quarantined[event["origin"]].append(event["content"])

    def _take_truncate(self, event: Event) -> None:
        self.truncations[event["process"]].append((self.number, event["offset"]))

    def _take_limit(self, event: Event) -> None:
        self.limit = event["bytes"]

    def log(self, name: str) -> MarkersLog:
        log = self.logs.get(name)
        if log is None:
            log = self.logs[name] = MarkersLog(name, self)
        return log

    def settings_of(self, queue: str, version: int | None = None) -> list[Settings]:
        """Return a queue's settings: of a version that a tracker uses, or all that it may have had."""
        chosen = [self.versions[version]] if version in self.versions else self.versions.values()
        return [settings.get(queue) or settings.get(EVERYBODY) or {} for settings in chosen] or [{}]

    def may_be(self, queue: str, setting: str, default: Any = None, version: int | None = None) -> set[Any]:
        """Return the values that a setting of a queue may have had."""
        return {settings.get(setting, default) for settings in self.settings_of(queue, version)}

    def _take_marker(self, event: Event) -> None:
        log, kind = self.log(event["process"]), event["kind"]
        if event["offset"] <= log.applied:
            self.report.find("malformed", log.name, f"{event['offset']} after {log.applied}", events=[self.number])
            return
        if kind == UNREADABLE:
            log.unreadable[event["offset"]] = event["content"]
        elif kind != "TICK":
            for batch in acquires_of(event) if kind == "MIXED_ACQUIRE" else (event,):
                self._note_markers(log, batch)
        log.fold(event)

    def _note_markers(self, log: MarkersLog, event: Event) -> None:
        kind, source = event["kind"], event["source"]
        self.log_of[source] = log.name
        if kind == "RESUME":
            if event["onwards"]:
                self.resumes[event["queue"], source].append((event["offset"], event["offsets"][0]))
            return
        if kind == "PURGE":
            for ends in (self.purges, self.purges_in_flight) if event["in_flight"] else (self.purges,):
                ends[event["queue"], source] = max(event["offsets"][0], ends.get((event["queue"], source), 0))
            return
        if kind == "RESUMED":
            for offset in event["offsets"]:
                if (trail := self.trails.get((event["queue"], f"{source}/{offset}"))) is not None:
                    trail.resumed += ((event["offset"], event["asked_at"]),)
            return
        if event.get("in_order", False):
            self.ordered.add(event["queue"])
        for index, offset in enumerate(event["offsets"]):
            for trail in self._named_by(log, event, offset):
                self._note_marker(log, event, index, trail)

    def _named_by(self, log: MarkersLog, event: Event, offset: int) -> Sequence[Trail]:
        """Return the trails that a marker concerns; a request that names no queue has one of its own."""
        place = f"{event['source']}/{offset}"
        if event["queue"] != ANY_QUEUE or event["kind"] != "ACK":
            return [self._named_at(event, place)]
        # A late ACK concerns the messages that were once open at its place.
        keys = log.acknowledged(event, offset) or log.named(event, offset)
        return [self._noted(key) for key in keys] or [self._named_at(event, place)]

    def _note_marker(self, log: MarkersLog, event: Event, index: int, trail: Trail) -> None:
        kind, number = event["kind"], self.number
        bit = BITS.get(kind.lower(), 0)
        trail.written |= bit
        trail.log = log.name
        if bit == RELEASE and (not event["counted"] or event["delays_ms"][index] == LAST):
            # The library releases messages that no handler wants, that it holds when it is stopped, or whose last
            # lease in order has ended.
            trail.said |= bit
        elif bit == DELAY:
            trail.note_delay(event, index, number)
        elif bit == ACQUIRE:
            trail.acquired += ((event["offset"], number, intern(event["holder"])),)
            trail.say_content(number, event["contents"][index])
            trail.lease_ms = event["lease_ms"]
            # An ordered message is acquired again in its place, with the next attempt.
            attempt = event["attempts"][index]
            if not event.get("in_order", False) and (not trail.id or trail.attempt != attempt):
                # Compared at the end, when the record is known in any case.
                trail.contents += ((number, f"attempt {attempt}"),)
        elif bit == ACK and trail.acked_at is None:
            trail.acked_at = event["offset"]
        elif kind in FACTS:
            before = next(reversed(trail.standings()), None)
            made = event["attempts"][index], event["causes"][index], event["holder"]
            trail.facts += (TrackerFact(kind, *made, log.name, event["offset"], before, number),)
        elif kind == "ANSWERED":
            trail.answers += (Told(kind, event["holder"], event["outcomes"][index], event["offset"]),)


#: Operations that are taken like others.
_ALIASES = {
    **dict.fromkeys(("cancel", "reschedule"), "request"),
    **dict.fromkeys(("acquire", "commit", "ack", "release", "reject", "renew", "dispatch"), "write"),
    **dict.fromkeys(("kill", "pause", "cut", "stop", "revoke", "clock", "step", "offsets"), "fault"),
}


def gather(events: Iterable[Event]) -> Evidence:
    evidence = Evidence()
    # It is garbage only as a whole, and looking for it takes a third of the time.
    gc.disable()
    try:
        for event in events:
            evidence.take(event)
    finally:
        gc.enable()
    return evidence
