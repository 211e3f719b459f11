"""Whether messages ended when they had expired, and no earlier: judged by the clock of their markers log.

Settings change at run time, so a message may have several expiries: it must end after the latest, and must not end
before the earliest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from lab.proof.evidence import EVERYBODY, Decision, Evidence, MarkersLog, TrackerFact, Trail
from lab.proof.findings import Report
from lab.proof.states import COPIED, DELAYED, Standing
from lab.proof.tracker_decisions import MESSAGE_EXPIRED, decided_on
from marq.wire.names import is_synthetic

#: The expiry of a message that does not expire.
NEVER = -1
#: How long after its expiry a message may be delivered: a consumer checks it when it acquires it, and again while it
#: waits in its buffer, but its process may be suspended.
LATE_MS = 10_000


def judge_expiry_of_fact(report: Report, evidence: Evidence, trail: Trail, fact: TrackerFact) -> None:
    """Judge a fact by the tracker's last TICK before it."""
    log = evidence.logs[fact.log]
    ticks = log.ticks.get(fact.holder)
    tick = None if ticks is None else ticks.before(fact.offset)
    if tick is not None:
        # A request may have changed it between the decision and the fact.
        decided = decided_on(trail, fact, log)
        times_ms = list(_expiries_ms(evidence, trail, fact.before if decided is None else decided[0]))
        _judge(report, trail, (fact.kind, fact.cause), times_ms, log, (*tick, fact.offset))


def judge_expiry_of_decision(report: Report, evidence: Evidence, trail: Trail, fire: Decision) -> None:
    """Judge what a tracker was about to do by its TICK."""
    log, standing = evidence.log(fire.log), trail.at(fire.applied)
    ticks = log.ticks.get(fire.holder)
    clock_ms = None if ticks is None or fire.tick is None else ticks.at(fire.tick)
    if fire.tick is not None and clock_ms is not None and standing is not None:
        times_ms = list(_expiries_ms(evidence, trail, standing, fire.version))
        _judge(report, trail, (fire.kind, fire.cause), times_ms, log, (fire.tick, clock_ms, fire.applied))


def _judge(
    report: Report,
    trail: Trail,
    ending: tuple[str, str],
    times_ms: Sequence[float],
    log: MarkersLog,
    decided: tuple[int, int, int],
) -> None:
    """Judge an end; the tracker decided at a clock between its TICK and the last marker that it can have read."""
    (kind, cause), (tick, clock_ms, until) = ending, decided
    if kind in COPIED and clock_ms >= max(times_ms):
        report.find("expired", f"{trail}: sent at {clock_ms}, expired at {max(times_ms)}", trail.events)
    if cause == MESSAGE_EXPIRED and log.clock.latest(tick, until + 1, -1) < min(times_ms):
        report.find("expired", f"{trail}: ended at {clock_ms}, but expires at {min(times_ms)}", trail.events)


def judge_expiry_of_deliveries(report: Report, evidence: Evidence, trail: Trail) -> None:
    """Judge that no handler got a message long after it had expired."""
    log = evidence.logs.get(trail.log)
    if log is None or evidence.befell(log.name) & {"clock", "step"}:
        return
    latest_ms = max(_expiries_ms(evidence, trail, None))
    for delivery in trail.deliveries:
        if delivery.log_end is not None and delivery.time_ms >= latest_ms + LATE_MS:
            text = f"{trail}: delivered at {delivery.time_ms}, expired at {latest_ms}"
            report.find("expired", text, [*trail.events, delivery.number])


def _expiries_ms(
    evidence: Evidence, trail: Trail, standing: Standing | None, version: int | None = None
) -> Iterator[float]:
    """Yield when a message may expire: by one version of the settings, or by all of them."""
    versions = evidence.versions
    chosen = [versions[version]] if version in versions else [*versions.values()]
    for settings in chosen or [{}]:
        yield from _expiry_ms(settings.get(trail.queue) or settings.get(EVERYBODY) or {}, trail, standing)


def _expiry_ms(settings: Mapping[str, Any], trail: Trail, standing: Standing | None) -> Iterator[float]:
    if settings.get("ordering") == "key" or settings.get("by_key") or trail.expires_at_ms == NEVER:
        yield inf
        return
    by_sender = inf if trail.expires_at_ms is None else trail.expires_at_ms
    after_ms = settings.get("expires_after_ms")
    if after_ms is None:
        yield by_sender
        return
    sent_ms = trail.time_ms if trail.first_sent_ms is None else trail.first_sent_ms
    due_ms = sent_ms + settings.get("delay_ms", 0) if trail.deliver_at_ms is None else trail.deliver_at_ms
    dues_ms: tuple[int, ...] = (max(sent_ms, due_ms),)
    if standing is not None and standing.state == DELAYED:
        drawn = is_synthetic(trail.place)
        dues_ms = tuple(
            [max(due, standing.since_ms) for due in standing.dues_ms if drawn or due > standing.since_ms] or dues_ms
        )
    for due_ms in dues_ms:
        yield min(by_sender, due_ms + after_ms)
