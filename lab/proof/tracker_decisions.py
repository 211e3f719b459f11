"""Whether a tracker was right to send a copy: judged by what it had read, message by message.

With the tracker's own ``fire`` events the judgement is exact, because they say what it had read. Facts are judged by
the log alone: at some TICK of the same tracker, before the fact, the message must have been open and due.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lab.proof.evidence import Decision, MarkersLog, TrackerFact, Trail
from lab.proof.findings import Report
from lab.proof.states import (
    ABANDONED,
    CANCELLED,
    COPIED,
    DEAD_LETTERED,
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
    Standing,
)

#: Room for marq's headers: a redelivery must be smaller than the topic's limit by this much.
HEADER_ROOM_BYTES = 1_024


class DueEnding(NamedTuple):
    """The end of a due message: kind of the fact, attempt, cause."""

    kind: str
    attempt: int
    cause: str


def ending(standing: Standing, max_attempts: int) -> DueEnding:
    """Return what happens to a message that is due."""
    if standing.state == REJECTED:
        return DueEnding(DEAD_LETTERED, standing.attempt, "REJECTED")
    if standing.state == EXHAUSTED:
        return DueEnding(DEAD_LETTERED, standing.attempt, "RELEASED")
    if standing.state == DELAYED:
        return DueEnding(DELIVERED, standing.attempt, "DUE")
    if standing.state == CANCELLED:
        return DueEnding(CANCELLED, standing.attempt, "CANCELLED")
    if standing.state == DISPATCHED:
        return DueEnding(ABANDONED, standing.attempt, "EXPIRED")
    cause = "EXPIRED" if standing.state == LEASED else "RELEASED"
    if not standing.counted:
        return DueEnding(REDELIVERED, standing.attempt, cause)
    if standing.attempt < max_attempts:
        return DueEnding(REDELIVERED, standing.attempt + 1, cause)
    return DueEnding(DEAD_LETTERED, standing.attempt, cause)


def judge_decision(report: Report, trail: Trail, fire: Decision, log: MarkersLog, limits: Collection[int]) -> None:
    """Judge what a tracker was about to do."""
    where = f"{trail} at {log.name}/{fire.applied}"
    events = [*trail.events, fire.number]
    clock_ms = None
    if fire.tick is not None and fire.holder in log.ticks:
        clock_ms = log.ticks[fire.holder].at(fire.tick)
    if fire.tick is None or clock_ms is None or not fire.fenced_at <= fire.tick <= fire.applied:
        report.find("before-own-tick", f"{where}: own TICK {fire.tick}, fenced at {fire.fenced_at}", events)
        return
    standing = trail.at(fire.applied)
    if standing is None:
        _not_open(report, trail, fire.applied, where, events)
    elif standing.state in IN_ORDER:
        report.find("no-copy", f"{where}: {fire.kind}, but it stood {standing}", events)
    elif standing.due_ms > clock_ms:
        _early(report, trail, standing, fire.applied, clock_ms, where, events)
    else:
        _judge_ending(report, trail, (fire.kind, fire.attempt, fire.cause), standing, limits, (where, events))


def decided_on(trail: Trail, fact: TrackerFact, log: MarkersLog) -> tuple[Standing, int] | None:
    """Return a message's standing when a tracker found it due, and the offset before which that must have been.

    The log may contain later markers and TICKs before the fact. So of all moments at which the message was due, the
    last one that fits the fact's cause counts.
    """
    ticks = log.ticks.get(fact.holder)
    until = fact.offset
    found: list[tuple[Standing, int]] = []
    for offset, standing in reversed(trail.changes):
        if offset >= fact.offset or ticks is None:
            continue
        seen = ticks.before(until)
        waits = standing is not None and standing.state not in IN_ORDER
        if standing is not None and waits and seen is not None and standing.due_ms <= seen[1]:
            found.append((standing, until))
        until = offset
    fitting = [pair for pair in found if _fits(fact.cause, pair[0].state)]
    return next(iter(fitting + found), None)


def _fits(cause: str, state: str) -> bool:
    # A cancelled message is not redelivered, so its redelivery cannot be too large.
    if cause == MESSAGE_EXPIRED:
        return state in (LEASED, RELEASED, DELAYED)
    return cause == _CAUSES[state] or (cause in LOST_VALUES and state != CANCELLED)


#: The causes of dead letters whose messages the tracker can't deliver again.
LOST_VALUES = ("TOO_LARGE", "GONE")
#: The cause of the end of a message that is too old to be delivered.
MESSAGE_EXPIRED = "MESSAGE_EXPIRED"
_CAUSES = {
    LEASED: "EXPIRED", RELEASED: "RELEASED", REJECTED: "REJECTED", DELAYED: "DUE", CANCELLED: "CANCELLED",
    DISPATCHED: "EXPIRED", EXHAUSTED: "RELEASED",
}  # fmt: skip


def judge_fact(report: Report, trail: Trail, fact: TrackerFact, log: MarkersLog, limits: Collection[int]) -> None:
    """Judge a fact in the log, without the tracker's own account of how it decided."""
    where = f"{trail} at {log.name}/{fact.offset}"
    ticks = log.ticks.get(fact.holder)
    last = None if ticks is None else ticks.before(fact.offset)
    if last is None:
        report.find("before-own-tick", f"{where}: no TICK of {fact.holder} before", trail.events)
        return
    decided = decided_on(trail, fact, log)
    if decided is not None:
        found = (fact.kind, fact.attempt, fact.cause)
        _judge_ending(report, trail, found, decided[0], limits, (where, trail.events))
        return
    open_at = trail.at(last[0])
    if open_at is None:
        _not_open(report, trail, last[0], where, trail.events)
    else:
        _early(report, trail, open_at, last[0], last[1], where, trail.events)


def _not_open(report: Report, trail: Trail, applied: int, where: str, events: list[int]) -> None:
    earlier = [fact for fact in trail.facts if fact.offset <= applied]
    if earlier:
        report.find("fired-twice", f"{where}: its fact is in the log already, at {earlier[0].offset}", events)
    elif trail.acked_at is not None and trail.acked_at <= applied:
        report.find("after-ack", f"{where}: its ack was read back, at {trail.acked_at}", events)
    else:
        report.find("not-open", f"{where}: it was never acquired", events)


def _early(
    report: Report, trail: Trail, standing: Standing, applied: int, clock_ms: int, where: str, events: list[int]
) -> None:
    """Report an early decision; name the change if the message was due before it was renewed or moved."""
    before = [
        other
        for offset, other in trail.changes
        if offset <= applied and other is not None and other.state == standing.state and other.holder == standing.holder
    ]
    name = "early"
    if any(other.due_ms <= clock_ms for other in before):
        name = {**dict.fromkeys(HELD, "renewed"), **dict.fromkeys(WAITING, "moved")}.get(standing.state, name)
    text = f"{where}: due {standing.due_ms}, the tracker's TICK says {clock_ms}"
    report.find(name, text, events)


def _judge_ending(
    report: Report,
    trail: Trail,
    found: tuple[str, int, str],
    standing: Standing,
    limits: Collection[int],
    place: tuple[str, list[int]],
) -> None:
    """Judge the end that a tracker chose; ``limits``: the values that max_attempts may have had for it."""
    where, events = place
    kind, attempt, cause = found
    if cause == MESSAGE_EXPIRED:
        # Whether it had expired is judged in lab/proof/expiry.py.
        sent = any(ending(standing, limit).kind in COPIED for limit in limits)
        if not sent or kind not in (CANCELLED, DEAD_LETTERED) or attempt != standing.attempt:
            report.find("expired", f"{where}: {found}, but it stood {standing}", events)
        return
    if (kind == CANCELLED) != (standing.state == CANCELLED):
        report.find("cancelled", f"{where}: {found}, but it stood {standing}", events)
        return
    if (kind == ABANDONED) != (standing.state == DISPATCHED):
        report.find("dispatched", f"{where}: {found}, but it stood {standing}", events)
        return
    if cause in LOST_VALUES:
        if (kind, attempt) != (DEAD_LETTERED, standing.attempt):
            report.find("attempts", f"{where}: {found}, but it stood {standing}", events)
        return
    endings = [ending(standing, limit) for limit in limits]
    if found in endings:
        return
    if (kind == DEAD_LETTERED) not in {end.kind == DEAD_LETTERED for end in endings}:
        dead = "before its last attempt" if kind == DEAD_LETTERED else "no dead letter, which it should be"
        report.find("dead-letter", f"{where}: {found}, {dead}: limits {sorted(limits)}, it stood {standing}", events)
    elif attempt not in {end.attempt for end in endings}:
        report.find("attempts", f"{where}: {found}, expected {endings}", events)
    else:
        report.find("wrong-cause", f"{where}: {found}, expected {endings}", events)
