"""The evidence in a history, by subject: it is gathered event by event, and judged when all events are known.

Nothing is judged here, because events of different logs and processes may come in any order. Only the events of one
log, or of one process, are in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from sys import intern
from typing import Any

from lab.proof.causes import EVERYBODY
from lab.proof.evidence_types import (
    ACK,
    ACQUIRE,
    BITS,
    DELAY,
    DISPATCH,
    REJECT,
    RELEASE,
    Decision,
    Delivery,
    Event,
    Fact,
    MarkersLog,
    Process,
    Told,
    Trail,
    last_standing,
)
from lab.proof.findings import Report
from lab.proof.fold import DEFAULT_LIMIT, DEFAULT_WINDOW_MS, Key
from lab.proof.history import UNREADABLE
from lab.proof.sends import Sends
from lab.proof.states import FACTS
from marq.settings.backoff import Backoff
from marq.wire.dead_letter_notes import Disposition
from marq.wire.markers import ANY_QUEUE, LAST

#: Requests that may end a message.
_FINISHING = (ACK, RELEASE, REJECT)
_FAULTS = ("kill", "pause", "cut", "stop", "revoke", "clock", "step", "offsets")


class Evidence:
    """Takes events one by one; ``report`` has the malformed ones."""

    def __init__(self) -> None:
        self.report = Report()
        self.sends = Sends()
        self.trails: dict[Key, Trail] = {}
        #: The trails of each place, including that of requests that name no queue.
        self.places: dict[str, tuple[Trail, ...]] = {}
        self.logs: dict[str, MarkersLog] = {}
        self.processes: dict[str, Process] = defaultdict(Process)
        #: The process behind each holder.
        self.process_of: dict[str, str] = {}
        #: Where the last purge of each queue and source ends.
        self.purges: dict[tuple[str, str], int] = {}
        #: Likewise of purges that have ended messages in flight.
        self.purges_in_flight: dict[tuple[str, str], int] = {}
        #: Published versions: settings by queue; and queues that changed their groups.
        self.versions: dict[int, dict[str, dict[str, Any]]] = {}
        self.moved: set[str] = set()
        #: Queues with ordering; and the RESUMEs by queue and source: the offset of each, and where it resumes from.
        self.ordered: set[str] = set()
        self.resumes: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        #: The markers log of each source.
        self.log_of: dict[str, str] = {}
        #: Where logs begin after retention, and since which event; and the records that consumers reported as skipped.
        self.starts: dict[str, int] = {}
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
        self._version_of: dict[str, int] = {}
        self._fenced_at: dict[tuple[str, str], int] = {}
        self._backoffs: dict[str, list[Backoff]] = {}
        #: All values of max_attempts so far, by queue.
        self._limits: dict[str, list[int]] = {}

    def take(self, event: Event) -> None:
        handle = _HANDLERS.get(event["op"])
        try:
            if handle is None:
                raise ValueError(f"unknown op {event['op']!r}")
            handle(self, event)
        except (KeyError, TypeError, ValueError) as error:
            self.report.find("malformed", f"event {self.number}: {error!r}", [self.number])
        self.number += 1

    def is_purged_unread(self, trail: Trail) -> bool:
        """Return whether a purge ended a record that no consumer had acquired."""
        return not trail.changes and trail.offset < self.purges.get((trail.queue, trail.source), 0)

    def befell(self, name: str) -> set[str]:
        """Return all faults that ever hit a process, a log, or a queue's group."""
        return self.processes[name].suffered(0, self.number) if name in self.processes else set()

    # --- senders and consumers ----------------------------------------------------------------------------------------

    def _send(self, event: Event) -> None:
        self.sends.take(event, self.number)

    def _named(self, event: Event) -> Iterable[Trail]:
        queue, source = intern(event["queue"]), event["source"]
        return [self._trail((queue, f"{source}/{offset}")) for offset in event["offsets"]]

    def _trail(self, key: Key) -> Trail:
        trail = self.trails.get(key)
        if trail is None:
            trail = self.trails[key] = Trail(*key)
            self.places[trail.place] = (*self.places.get(trail.place, ()), trail)
        return trail

    def _trail_of(self, event: Event, place: str) -> Trail:
        return self._trail((intern(event["queue"]), place))

    def _write(self, event: Event) -> None:
        """Note that a client writes markers (ACQUIRE, an outcome, RENEW), or commits."""
        type_, bit = event["type"], BITS.get(event["op"], 0)
        holder, number = intern(event["holder"]), self.number
        self.process_of.setdefault(holder, event["process"])
        self.told |= bit
        lost = set(event.get("lost", ()))
        took_ms = event.get("took_ms", 0)
        for offset, trail in zip(event["offsets"], self._named(event), strict=True):
            trail.events.append(number)
            if took_ms > trail.slowest_ms:
                trail.slowest_ms = took_ms
            trail.unanswered += 1 if type_ == "invoke" else -1
            if type_ == "invoke":
                trail.said |= bit
                if bit == ACQUIRE:
                    trail.acquires += ((number, holder),)
                elif bit in _FINISHING:
                    trail.finish_at = number if trail.finish_at is None else trail.finish_at
                    trail.gave_up += ((number, holder),) if bit != ACK else ()
            elif type_ != "ok":
                trail.troubled += 1
            else:
                trail.confirmed |= bit
                if bit == DISPATCH and trail.spent_at is None:
                    trail.spent_at = number
                if bit == ACK and offset not in lost:
                    trail.settled_by += (holder,)

    def _ask(self, event: Event) -> None:
        """Note that a client cancels or reschedules messages."""
        kind, bit, holder = event["op"].upper(), BITS[event["op"]], event["holder"]
        outcomes = event.get("outcomes", ()) if event["type"] == "ok" else ()
        self.told |= bit
        for index, trail in enumerate(self._named(event)):
            trail.events.append(self.number)
            trail.said |= bit
            if outcomes:
                trail.told += (Told(kind, holder, outcomes[index], -1, self.number),)

    def _deliver(self, event: Event) -> None:
        trail = self._trail_of(event, event["record"])
        trail.events.append(self.number)
        place = event.get("log_end"), event.get("time_ms", -1)
        trail.deliveries += (Delivery(self.number, intern(event["holder"]), event.get("attempt", 1), *place),)
        if event["group"] not in trail.groups:
            trail.groups += (intern(event["group"]),)
        trail.say_content(self.number, event["content"])
        self.process_of.setdefault(event["holder"], event["process"])
        self.report.delivered += 1

    def _redrive(self, event: Event) -> None:
        if event["type"] == "ok":
            self.redriven += [f"{event['source']}/{offset}" for offset in event["offsets"]]

    def _hang(self, event: Event) -> None:
        trail = self._trail_of(event, event["record"])
        trail.events.append(self.number)
        trail.hung = True

    def _skip(self, event: Event) -> None:
        self.skipped[event["source"]].append((event["start"], event["end"]))

    def _fault(self, event: Event) -> None:
        self.processes[event["target"]].suffer(self.number, event["type"], event["op"])

    # --- trackers -----------------------------------------------------------------------------------------------------

    def _own(self, event: Event) -> None:
        self.process_of.setdefault(event["holder"], event["process"])
        self._fenced_at[event["holder"], event["log"]] = event["fenced_at"]
        self.owners[event["log"]] += 1
        start = self.starts.get(event["log"], 0)
        if event.get("position", start) < start:
            text = f"{event['log']}: {event['process']} reads from {event['position']}, the log begins at {start}"
            self.report.find("position-lost", text, [self.number])

    def _settings(self, event: Event) -> None:
        version = event["version"]
        if "queues" not in event:
            self._version_of[event["process"]] = version
            return
        before = self.versions.get(max(self.versions, default=-1), {})
        self.versions[version] = event["queues"]
        for queue, settings in event["queues"].items():
            backoff = Backoff(*settings["backoff"])
            known = self._backoffs.setdefault(queue, [])
            if backoff not in known:
                known.append(backoff)
            limits = self._limits.setdefault(queue, [])
            if (limit := settings.get("max_attempts", DEFAULT_LIMIT)) not in limits:
                limits.append(limit)
            if settings.get("ordering") == "key":
                self.ordered.add(queue)
            if queue in before and before[queue].get("group") != settings.get("group"):
                self.moved.add(queue)

    def _fire(self, event: Event) -> None:
        if event["type"] != "invoke":
            return
        holder, log = event["holder"], event["log"]
        decision = Decision(
            event["kind"], event["attempt"], event["cause"], holder, log, event["applied"], event["tick"],
            self._fenced_at.get((holder, log), 0),
            self._version_of.get(event["process"]),
            self.number,
        )  # fmt: skip
        trail = self._trail_of(event, f"{event['source']}/{event['offset']}")
        trail.events.append(self.number)
        trail.decisions += (decision,)

    def _halt(self, event: Event) -> None:
        self.log(event["log"]).halted = event["reason"]

    # --- logs ---------------------------------------------------------------------------------------------------------

    def _record(self, event: Event) -> None:
        place = f"{event['process']}/{event['offset']}"
        trail = self._trail_of(event, place)
        trail.events.append(self.number)
        trail.id = event.get("id", place)
        trail.content, trail.size = event["content"], event["size"]
        trail.attempt = event.get("attempt", 1)
        trail.error = event.get("error", "")
        trail.time_ms = event["time_ms"]
        trail.first_sent_ms = event.get("first_sent_ms")
        trail.deliver_at_ms = event.get("deliver_at_ms")
        trail.line = event.get("line", "")
        trail.committed = event["type"] == "ok"

    def _dead(self, event: Event) -> None:
        if event["type"] != "ok":
            return
        self.letters[f"{event['process']}/{event['offset']}"] = event
        trail = self._trail_of(event, event["origin"])
        trail.events.append(self.number)
        trail.deaths += (event,)
        trail.say_content(self.number, event["content"])

    def _note(self, event: Event) -> None:
        if event["became"] in (Disposition.REDRIVEN, Disposition.DELETED):
            for offset in event["offsets"]:
                self.settled[f"{event['process']}/{offset}"].append(event["became"])

    def _quarantine(self, event: Event) -> None:
        if event["type"] == "ok":
            self.quarantined[event["origin"]].append(event["content"])

    def _truncate(self, event: Event) -> None:
        self.starts[event["process"]] = event["offset"]
        self.truncations[event["process"]].append((self.number, event["offset"]))

    def _limit(self, event: Event) -> None:
        self.limit = event["bytes"]

    def log(self, name: str) -> MarkersLog:
        log = self.logs.get(name)
        if log is None:
            log = self.logs[name] = MarkersLog(
                name, self._backoffs_of, self._limits_of, self._window_of, self._trail
            )  # fmt: skip
        return log

    def _backoffs_of(self, queue: str) -> list[Backoff]:
        return self._backoffs.get(queue) or self._backoffs.get(EVERYBODY) or [Backoff()]

    def _limits_of(self, queue: str) -> list[int]:
        return self._limits.get(queue) or self._limits.get(EVERYBODY) or [DEFAULT_LIMIT]

    def _window_of(self, queue: str) -> int:
        newest = self.versions.get(max(self.versions, default=-1), {})
        settings = newest.get(queue) or newest.get(EVERYBODY) or {}
        return int(settings.get("deduplication_window_ms", DEFAULT_WINDOW_MS))

    def _marker(self, event: Event) -> None:
        log, kind = self.log(event["process"]), event["kind"]
        if event["offset"] <= log.applied:
            self.report.find("malformed", f"{log.name}: {event['offset']} after {log.applied}", [self.number])
            return
        if kind == UNREADABLE:
            log.unreadable[event["offset"]] = event["content"]
        elif kind != "TICK":
            self._note_markers(log, event)
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
        if kind in ("RESUMED", "PURGE"):
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
            return [self._trail_of(event, place)]
        # A late ACK concerns the messages that were once open at its place.
        keys = log.acknowledged(event, offset) or log.named(event, offset)
        return [self._trail(key) for key in keys] or [self._trail_of(event, place)]

    def _note_marker(self, log: MarkersLog, event: Event, index: int, trail: Trail) -> None:
        kind, number = event["kind"], self.number
        bit = BITS.get(kind.lower(), 0)
        trail.events.append(number)
        trail.written |= bit
        trail.log = log.name
        if bit == RELEASE and (not event["counted"] or event["delays_ms"][index] == LAST):
            # The library releases messages that no handler wants, that it holds when it is stopped, or whose last
            # lease in order has ended.
            trail.said |= bit
        elif bit == DELAY:
            trail.note_delay(event, index, number)
        elif bit == ACQUIRE:
            trail.acquired_at += (event["offset"],)
            trail.acquired_by += ((number, intern(event["holder"])),)
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
            self._note_fact(log, event, index, trail)
        elif kind == "ANSWERED":
            trail.answers += (Told(kind, event["holder"], event["outcomes"][index], event["offset"], number),)

    def _note_fact(self, log: MarkersLog, event: Event, index: int, trail: Trail) -> None:
        before = log.open.get(trail.key)
        trail.facts += (
            Fact(
                event["kind"], event["attempts"][index], event["causes"][index], event["holder"],
                log.name, event["offset"], before or last_standing(trail), self.number,
            ),
        )  # fmt: skip


_HANDLERS: dict[str, Callable[[Evidence, Event], None]] = {
    "send": Evidence._send,
    "deliver": Evidence._deliver,
    "hang": Evidence._hang,
    "skipped": Evidence._skip,
    "own": Evidence._own,
    "settings": Evidence._settings,
    "fire": Evidence._fire,
    "halt": Evidence._halt,
    "record": Evidence._record,
    "dead": Evidence._dead,
    "note": Evidence._note,
    "redrive": Evidence._redrive,
    "quarantine": Evidence._quarantine,
    "marker": Evidence._marker,
    "truncate": Evidence._truncate,
    "limit": Evidence._limit,
    **dict.fromkeys(("cancel", "reschedule"), Evidence._ask),
    **dict.fromkeys(("acquire", "commit", "ack", "release", "reject", "renew", "dispatch"), Evidence._write),
    **dict.fromkeys(_FAULTS, Evidence._fault),
}


def gather(events: Iterable[Event]) -> Evidence:
    """Return the evidence in a history."""
    evidence = Evidence()
    for event in events:
        evidence.take(event)
    return evidence
