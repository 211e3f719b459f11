"""Whether a worker lives, and whether it does all of its work, with the reasons why not.

*Live* is what a restart would mend, and nothing else: a worker that waits for its broker, or for people to decide on an
alarm, is alive. *Ready* is whether it does what its roles say now: a rolling restart waits for it before the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.progress import Pace
from config.settings import Role

#: An event loop that is blocked for longer is not alive: the worker's own, and that of a handlers process.
MAX_LOOP_LAG_SECONDS = 10.0
#: Of a partition whose lag grows: with a smaller one it is still ready.
MAX_LAG_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why not: ``subject`` is what is wrong, ``found`` what was seen of it."""

    subject: str
    found: str


@dataclass(frozen=True)
class Condition:
    """What is known of a worker at a moment."""

    roles: Collection[Role]
    stopping: bool = False
    #: Whether the group has given this worker its partitions, if none, and no rebalance is under way.
    assigned: bool = True
    rebalancing: bool = False
    #: Whether the broker has answered within the last seconds.
    broker_answers: bool = True
    #: State and alarm of each owned partition.
    partitions: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    paces: Mapping[int, Pace] = field(default_factory=dict)
    #: What makes no progress although it has work.
    wedged: Sequence[str] = ()
    loop_lag_seconds: float = 0.0
    #: Groups of handlers, and whether the process of each runs.
    handlers: Mapping[str, bool] = field(default_factory=dict)
    #: The worker's groups in which no member has a partition, neither on this worker nor on another one.
    unassigned: Sequence[str] = ()
    #: Groups of handlers, and for how long a handler of each has blocked the event loop of its process.
    blocked: Mapping[str, float] = field(default_factory=dict)


def not_live(condition: Condition) -> list[Reason]:
    """Return why a worker should be started anew; nothing: it lives."""
    wedged = "makes no progress, although it has work and the broker lets it; the watchdog is about to end the worker"
    reasons = [Reason(subject, wedged) for subject in condition.wedged]
    if condition.loop_lag_seconds > MAX_LOOP_LAG_SECONDS:
        lag = f"gave nobody a turn for {condition.loop_lag_seconds:.1f} s (at most {MAX_LOOP_LAG_SECONDS:g} s)"
        reasons.append(Reason("event loop", lag))
    # A coroutine handler that awaits does not block the event loop, and a plain function runs in a thread: neither is
    # reported, however long it takes. A blocked event loop renews no lease, so its messages are redelivered meanwhile.
    reasons += [
        Reason(
            f"handlers of group {group}",
            f"a handler has blocked the event loop of their process for {blocked_s:.0f} s (at most"
            f" {MAX_LOOP_LAG_SECONDS:g} s), so no lease is renewed",
        )
        for group, blocked_s in sorted(condition.blocked.items())
        if blocked_s > MAX_LOOP_LAG_SECONDS
    ]
    return reasons


def not_ready(condition: Condition) -> list[Reason]:
    """Return what of a worker's work is not being done; nothing: it is ready."""
    if condition.stopping:
        return [Reason("worker", "is stopping")]
    reasons = not_live(condition)
    if not condition.broker_answers:
        reasons.append(Reason("broker", "does not answer"))
    if Role.TRACKER in condition.roles:
        if condition.rebalancing:
            reasons.append(Reason("group of the trackers", "a rebalance is under way"))
        elif not condition.assigned:
            reasons.append(Reason("group of the trackers", "has not given this worker its partitions yet"))
        reasons += _partitions(condition)
    reasons += [
        Reason(f"handlers of group {group}", "their process does not run")
        for group, runs in sorted(condition.handlers.items())
        if not runs
    ]
    reasons += [Reason(group, "no member has a partition, so nothing is read") for group in condition.unassigned]
    return reasons


def _partitions(condition: Condition) -> list[Reason]:
    reasons = []
    for partition, (state, alarm) in sorted(condition.partitions.items()):
        subject, pace = f"markers partition {partition}", condition.paces.get(partition, Pace())
        if state != "owner":
            reasons.append(Reason(subject, f"{state}: {alarm}" if alarm else state))
        elif pace.lag > MAX_LAG_RECORDS and pace.falls_behind:
            speeds = f"{pace.written_per_second:.0f}/s are written, {pace.read_per_second:.0f}/s read"
            reasons.append(Reason(subject, f"falls behind: {pace.lag} records are not read, {speeds}"))
    return reasons


def document(verdict: str, reasons: Sequence[Reason]) -> dict[str, Any]:
    """Return what a page shows: ``verdict`` is "live" or "ready"."""
    return {verdict: not reasons, "reasons": [{"subject": each.subject, "found": each.found} for each in reasons]}
