"""Whether a tracker was right to end a message or to send a copy: judged by what it had read, message by message.

With the tracker's own ``fire`` events the judgement is exact, because they say what it had read. Facts are judged by
the log alone: at some TICK of the same tracker, before the fact, the message must have been open and due.

Settings change at run time, so a message may have several expiries by the log's clock: it must end after the latest,
and must not end before the earliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from lab.proof.causes import why_expired
from lab.proof.evidence import CLOCKS, REJECT, RELEASE, Decision, Evidence, MarkersLog, TrackerFact, Trail
from lab.proof.findings import Why
from lab.proof.fold import (
    ABANDONED,
    CANCELLED,
    COPIED,
    DEAD_LETTERED,
    DEFAULT_LIMIT,
    DELAYED,
    DELIVERED,
    DISPATCHED,
    EXHAUSTED,
    HELD,
    IN_ORDER,
    LEASED,
    REDELIVERED,
    REJECTED,
    RELEASED,
    WAITING,
    Settings,
    Standing,
)
from lab.proof.key_order import LOST_VALUES, is_resumed
from marq.wire.names import is_synthetic

#: Room for marq's headers: a redelivery must be smaller than the topic's limit by this much.
_HEADER_ROOM_BYTES = 1_024
#: The expiry of a message that does not expire.
NEVER = -1
#: How long after its expiry a message may be delivered: a consumer checks it when it acquires it, and again while it
#: waits in its buffer, but its process may be suspended.
LATE_MS = 10_000
#: The cause of the end of a message that is too old to be delivered.
_MESSAGE_EXPIRED = "MESSAGE_EXPIRED"
#: How a due message ends by its state, and the cause; a redelivery only while attempts are left.
_ENDINGS = {
    LEASED: (REDELIVERED, "EXPIRED"), RELEASED: (REDELIVERED, "RELEASED"), REJECTED: (DEAD_LETTERED, "REJECTED"),
    DELAYED: (DELIVERED, "DUE"), CANCELLED: (CANCELLED, "CANCELLED"), DISPATCHED: (ABANDONED, "EXPIRED"),
    EXHAUSTED: (DEAD_LETTERED, "RELEASED"),
}  # fmt: skip


#: A message's standing whenever a tracker may have found it due, and the offset before which that was.
_Moments = list[tuple[Standing, int]]


class DueEnding(NamedTuple):
    """The end of a due message: kind of the fact, attempt, cause."""

    kind: str
    attempt: int
    cause: str


def ending(standing: Standing, max_attempts: int) -> DueEnding:
    """Return what happens to a message that is due."""
    kind, cause = _ENDINGS[standing.state]
    if kind != REDELIVERED or not standing.counted:
        return DueEnding(kind, standing.attempt, cause)
    if standing.attempt < max_attempts:
        return DueEnding(REDELIVERED, standing.attempt + 1, cause)
    return DueEnding(DEAD_LETTERED, standing.attempt, cause)


def judge_tracker(evidence: Evidence, trail: Trail) -> None:
    """Judge what trackers decided about a record, and what they wrote about it."""
    for decision in trail.decisions:
        _judge_decision(evidence, trail, decision)
    for fact in trail.facts[:1]:
        _judge_fact(evidence, trail, fact)
    for fact in trail.facts[1:]:
        first = trail.facts[0]
        evidence.report.find("fired-twice", trail, f"facts at {first.offset} and {fact.offset}")
    _judge_deaths(evidence, trail)
    _judge_expiry_of_deliveries(evidence, trail)


def _judge_fact(evidence: Evidence, trail: Trail, fact: TrackerFact) -> None:
    report = evidence.report
    expired = fact.cause == _MESSAGE_EXPIRED
    report.redelivered += trail.redelivery is not None
    report.message_expired += expired
    report.cancelled += fact.kind == CANCELLED and not expired
    report.abandoned += fact.kind == ABANDONED
    moments = _moments_due(trail, fact, evidence.logs[fact.log])
    _judge_by_log(evidence, trail, fact, moments)
    limit = evidence.limit
    if fact.cause == "TOO_LARGE" and limit is not None and trail.size + _HEADER_ROOM_BYTES < limit:
        report.find("dead-letter", trail, f"{trail.size} bytes are not too large")
    if fact.cause == "GONE" and not evidence.is_removed(trail):
        report.find("dead-letter", trail, "its record was not removed")
    asked = {"RELEASED": RELEASE, "REJECTED": REJECT}.get(fact.cause)
    if asked is not None and not trail.said & asked and not is_resumed(evidence, trail, fact):
        report.find("unexplained", trail, f"{fact.cause} without a request")
    if fact.cause == "EXPIRED":
        _judge_expiry(evidence, trail, fact, moments)
    elif fact.kind == DELIVERED and trail.deliveries and len(evidence.may_be(trail.queue, "expires_after_ms")) > 1:
        # A consumer left the message with its tracker, and one that read it again delivered it: its offset was not
        # committed, and the setting was changed between the two reads.
        trail.why_expired = Why.NOT_COMMITTED


def _judge_expiry(evidence: Evidence, trail: Trail, fact: TrackerFact, moments: _Moments) -> None:
    """Judge why a lease ended, and whether its holder noticed that, no later than the tracker."""
    report = evidence.report
    holder, until = (moments[0][0].holder, moments[0][1]) if moments else ("", fact.offset)
    read_again = any(offset >= until for offset, _, _ in trail.acquired)
    trail.why_expired = why_expired(evidence, trail, fact, holder, read_again=read_again)
    if trail.why_expired is None:
        report.find("unexplained", trail, "its lease ended without a cause")
    else:
        report.expiries[int(trail.why_expired)] += 1
    late = trail.acked_at is not None and trail.acked_at > fact.offset
    # If it was read again after the decision, its consumer does not learn that its ACQUIRE has no effect.
    clocks = evidence.befell(fact.log, evidence.process_of.get(holder, "")) & CLOCKS
    if late and not read_again and holder in trail.settled_by and not clocks:
        report.find("lease-not-noticed", trail, f"the copy stands at {fact.offset}, the ack at {trail.acked_at}")


def _judge_deaths(evidence: Evidence, trail: Trail) -> None:
    report = evidence.report
    dead = [fact for fact in trail.facts[:1] if fact.kind == DEAD_LETTERED]
    wanted = evidence.may_be(trail.queue, "dead_letter", default=True)
    unhandled = [fact for fact in dead if fact.cause in (*LOST_VALUES, _MESSAGE_EXPIRED)]
    if unhandled:
        # No handler gave it up, so it is always kept; an expired message that is dropped is CANCELLED.
        wanted = {True}
    name = "rejected" if any(fact.cause == "REJECTED" for fact in dead) else "transaction"
    if len(trail.deaths) > len(dead) or (len(trail.deaths) < len(dead) and False not in wanted):
        report.find(name, trail, f"{len(dead)} facts, {len(trail.deaths)} dead letters")
    if trail.deaths and wanted == {False}:
        report.find(name, trail, f"{trail.queue} keeps no dead letters")
    # It has the number of attempts used.
    used = [fact.attempt for fact in (dead if trail.queue in evidence.ordered else unhandled)] or [trail.attempt]
    for event in trail.deaths:
        if event["id"] != trail.id or event["attempt"] != used[0]:
            report.find("fidelity", trail, f"dead letter {event['id']} {event['attempt']}")


def _moments_due(trail: Trail, fact: TrackerFact, log: MarkersLog) -> _Moments:
    """Return the moments at which a message was due, the most likely one first.

    The log may contain later markers and TICKs before the fact. So of all moments at which the message was due, the
    last one that fits the fact's cause counts.
    """
    until, found = fact.offset, _Moments()
    for offset, standing in reversed(trail.changes):
        if offset < fact.offset:
            seen, waits = log.tick_before(fact.holder, until), standing is not None and standing.state not in IN_ORDER
            if standing is not None and waits and seen is not None and standing.due_ms <= seen[1]:
                found.append((standing, until))
            until = offset
    return sorted(found, key=lambda moment: not _fits(fact.cause, moment[0].state))


def _fits(cause: str, state: str) -> bool:
    if cause == _MESSAGE_EXPIRED:
        return state in (LEASED, RELEASED, DELAYED)
    # A cancelled message is not redelivered, so its redelivery cannot be too large.
    return cause == _ENDINGS[state][1] or (cause in LOST_VALUES and state != CANCELLED)


def _judge_decision(evidence: Evidence, trail: Trail, fire: Decision) -> None:
    """Judge what a tracker was about to do."""
    log, standing = evidence.log(fire.log), trail.at(fire.applied)
    judged = _Judged(evidence, trail, fire, f"{trail} at {log.name}/{fire.applied}", fire.version)
    clock_ms = log.clock_of_tick(fire.holder, fire.tick)
    if fire.tick is not None and clock_ms is not None and standing is not None:
        judged.expiry(log, [standing], (fire.tick, clock_ms), fire.applied)
    if fire.tick is None or clock_ms is None or not fire.fenced_at <= fire.tick <= fire.applied:
        judged.find("before-own-tick", f"own TICK {fire.tick}, fenced at {fire.fenced_at}")
    elif standing is not None and standing.state in IN_ORDER:
        judged.find("no-copy", f"{fire.kind}, but it stood {standing}")
    elif standing is None or standing.due_ms > clock_ms:
        judged.too_soon(standing, fire.applied, clock_ms)
    else:
        judged.ending(standing)


def _judge_by_log(evidence: Evidence, trail: Trail, fact: TrackerFact, moments: _Moments) -> None:
    """Judge a fact in the log, without the tracker's own account of how it decided."""
    log = evidence.logs[fact.log]
    judged = _Judged(evidence, trail, fact, f"{trail} at {log.name}/{fact.offset}", None)
    tick = log.tick_before(fact.holder, fact.offset)
    if tick is None:
        judged.find("before-own-tick", f"no TICK of {fact.holder} before")
        return
    # A request may have changed it between the decision and the fact; a RESCHEDULE also changes when it expires.
    judged.expiry(log, [standing for standing, _ in moments] or [fact.before], tick, fact.offset)
    if moments:
        judged.ending(moments[0][0])
    else:
        judged.too_soon(trail.at(tick[0]), *tick)


class _Judged(NamedTuple):
    """A decision or fact about a record; ``where`` names both, ``version`` the settings that count."""

    evidence: Evidence
    trail: Trail
    made: Decision | TrackerFact
    where: str
    version: int | None

    def find(self, property_: str, text: str) -> None:
        self.evidence.report.find(property_, self.where, text, self.trail)

    def too_soon(self, standing: Standing | None, applied: int, clock_ms: int) -> None:
        """Report that a message was not open, or not due; if it was due before a change, name that."""
        trail = self.trail
        if standing is None:
            earlier = [fact for fact in trail.facts if fact.offset <= applied]
            if earlier:
                self.find("fired-twice", f"its fact is in the log already, at {earlier[0].offset}")
            elif trail.acked_at is not None and trail.acked_at <= applied:
                self.find("after-ack", f"its ack was read back, at {trail.acked_at}")
            else:
                self.find("not-open", "it was never acquired")
            return
        place = standing.state, standing.holder
        before = trail.standings(applied + 1)
        name = "early"
        if any((other.state, other.holder) == place and other.due_ms <= clock_ms for other in before):
            name = "renewed" if standing.state in HELD else "moved" if standing.state in WAITING else name
        self.find(name, f"due {standing.due_ms}, the tracker's TICK says {clock_ms}")

    def ending(self, standing: Standing) -> None:
        """Judge the end that a tracker chose."""
        made = kind, attempt, cause = self.made[:3]
        limits = self.evidence.may_be(self.trail.queue, "max_attempts", DEFAULT_LIMIT, self.version)
        endings = [ending(standing, limit) for limit in limits]
        kinds, stood = {end.kind for end in endings}, f"{made}, but it stood {standing}"
        # A message that does not get its next attempt has used those before it.
        used = {end.attempt - (end.kind in COPIED) for end in endings}
        if cause == _MESSAGE_EXPIRED:
            attempts = used if kind == DEAD_LETTERED else {standing.attempt}
            if not kinds & {*COPIED} or kind not in (CANCELLED, DEAD_LETTERED) or attempt not in attempts:
                self.find("expired", stood)
        elif (kind == CANCELLED) != (standing.state == CANCELLED):
            self.find("cancelled", stood)
        elif (kind == ABANDONED) != (standing.state == DISPATCHED):
            self.find("dispatched", stood)
        elif cause in LOST_VALUES:
            if kind != DEAD_LETTERED or attempt not in used:
                self.find("attempts", stood)
        elif made in endings:
            return
        elif (kind == DEAD_LETTERED) not in {end == DEAD_LETTERED for end in kinds}:
            dead = "before its last attempt" if kind == DEAD_LETTERED else "no dead letter, which it should be"
            self.find("dead-letter", f"{made}, {dead}: limits {sorted(limits)}, it stood {standing}")
        else:
            counted = attempt in {end.attempt for end in endings}
            self.find("wrong-cause" if counted else "attempts", f"{made}, expected {endings}")

    def expiry(self, log: MarkersLog, standings: Sequence[Standing | None], tick: tuple[int, int], until: int) -> None:
        """Judge whether a message had expired between a tracker's TICK and the last marker that it can have read.

        The tracker decided on one of the ``standings``.
        """
        expiries = [_expiries_ms(self.evidence, self.trail, standing, self.version) for standing in standings]
        times_ms = list(chain.from_iterable(expiries))
        if self.made.kind in COPIED and tick[1] >= max(times_ms):
            self.find("expired", f"sent at {tick[1]}, expired at {max(times_ms)}")
        if self.made.cause == _MESSAGE_EXPIRED and log.clock.latest(tick[0], until + 1, -1) < min(times_ms):
            self.find("expired", f"ended at {tick[1]}, but expires at {min(times_ms)}")


def _judge_expiry_of_deliveries(evidence: Evidence, trail: Trail) -> None:
    """Judge that no handler got a message long after it had expired."""
    log = evidence.logs.get(trail.log)
    if log is None or evidence.befell(log.name) & CLOCKS:
        return
    latest_ms = max(_expiries_ms(evidence, trail, None))
    for delivery in trail.deliveries:
        if delivery.log_end is not None and delivery.time_ms >= latest_ms + LATE_MS:
            evidence.report.find("expired", trail, f"delivered at {delivery.time_ms}, expired at {latest_ms}")


def _expiries_ms(
    evidence: Evidence, trail: Trail, standing: Standing | None, version: int | None = None
) -> Iterator[float]:
    """Yield when a message may expire."""
    for settings in evidence.settings_of(trail.queue, version):
        if settings.get("ordering") == "key" or settings.get("by_key") or trail.expires_at_ms == NEVER:
            yield inf
            continue
        by_sender = inf if trail.expires_at_ms is None else trail.expires_at_ms
        after_ms = settings.get("expires_after_ms")
        yield from (
            [by_sender]
            if after_ms is None
            else [min(by_sender, due_ms + after_ms) for due_ms in _dues_ms(settings, trail, standing)]
        )


def _dues_ms(settings: Settings, trail: Trail, standing: Standing | None) -> list[int]:
    """Return when a message may have been due for the first time."""
    if standing is not None and standing.state == DELAYED:
        drawn, since_ms = is_synthetic(trail.place), standing.since_ms
        if dues_ms := [max(due, since_ms) for due in standing.dues_ms if drawn or due > since_ms]:
            return dues_ms
    sent_ms = trail.time_ms if trail.first_sent_ms is None else trail.first_sent_ms
    due_ms = sent_ms + settings.get("delay_ms", 0) if trail.deliver_at_ms is None else trail.deliver_at_ms
    return [max(sent_ms, due_ms)]
