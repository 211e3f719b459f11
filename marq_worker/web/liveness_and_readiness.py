"""Whether a worker is live and ready, with the reasons why not.

A worker is *not live* if a restart would help: a worker that waits for its broker, or for an operator's decision, is
live. It is *ready* if it does the work of its roles: a rolling restart waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from marq_worker.config.settings import Role
from marq_worker.progress import PartitionProgress

#: Longest time that the event loop of the worker or of a handler process may be blocked.
MAX_LOOP_LAG_SECONDS = 10.0
#: A worker with a smaller lag is ready, even if the lag grows.
MAX_LAG_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason: ``subject`` names the part that has a problem, ``found`` the problem."""

    subject: str
    found: str


@dataclass(frozen=True)
class Condition:
    """The condition of a worker."""

    roles: Collection[Role]
    stopping: bool = False
    #: True once the group has assigned partitions to this worker, possibly none.
    assigned: bool = True
    rebalancing: bool = False
    #: True if the broker has answered within the last seconds.
    broker_answers: bool = True
    #: State and alarm of each owned partition.
    partitions: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    paces: Mapping[int, PartitionProgress] = field(default_factory=dict)
    #: Subjects that make no progress although they have work.
    stalled: Sequence[str] = ()
    loop_lag_seconds: float = 0.0
    #: Groups of handlers, and whether their processes run.
    handlers: Mapping[str, bool] = field(default_factory=dict)
    #: The worker's groups in which no member of any worker has a partition.
    unassigned: Sequence[str] = ()
    #: Groups of handlers, and for how long a handler has blocked the event loop of their process.
    blocked: Mapping[str, float] = field(default_factory=dict)


def not_live(condition: Condition) -> list[Reason]:
    """Return why a worker should be restarted; empty if it is live."""
    stalled = (
        "makes no progress, although it has work and the broker is available; the watchdog is about to stop the worker"
    )
    reasons = [Reason(subject, stalled) for subject in condition.stalled]
    if condition.loop_lag_seconds > MAX_LOOP_LAG_SECONDS:
        lag = f"blocked for {condition.loop_lag_seconds:.1f} s (at most {MAX_LOOP_LAG_SECONDS:g} s)"
        reasons.append(Reason("event loop", lag))
    # Coroutine handlers that await, and plain functions (in threads), do not block the event loop. A blocked event loop
    # renews no lease, so its messages are redelivered.
    reasons += [
        Reason(
            f"handlers of group {group}",
            f"the event loop of their process has not run for {blocked_s:.0f} s (at most {MAX_LOOP_LAG_SECONDS:g} s),"
            " so no lease is renewed: a handler blocks it, or a signal has stopped the process",
        )
        for group, blocked_s in sorted(condition.blocked.items())
        if blocked_s > MAX_LOOP_LAG_SECONDS
    ]
    return reasons


def not_ready(condition: Condition) -> list[Reason]:
    """Return which work is not being done; empty if the worker is ready."""
    if condition.stopping:
        return [Reason("worker", "is stopping")]
    reasons = not_live(condition)
    if not condition.broker_answers:
        reasons.append(Reason("broker", "does not answer"))
    if Role.TRACKER in condition.roles:
        if condition.rebalancing:
            reasons.append(Reason("group of the trackers", "a rebalance is under way"))
        elif not condition.assigned:
            reasons.append(Reason("group of the trackers", "has not assigned partitions to this worker yet"))
        reasons += _partitions(condition)
    reasons += [
        Reason(f"handlers of group {group}", "their process does not run; the worker's log shows why it ends")
        for group, runs in sorted(condition.handlers.items())
        if not runs
    ]
    reasons += [Reason(group, "no member has a partition, so nothing is read") for group in condition.unassigned]
    return reasons


def _partitions(condition: Condition) -> list[Reason]:
    reasons = []
    for partition, (state, alarm) in sorted(condition.partitions.items()):
        subject, pace = f"markers partition {partition}", condition.paces.get(partition, PartitionProgress())
        if state != "owner":
            reasons.append(Reason(subject, f"{state}: {alarm}" if alarm else state))
        elif pace.lag > MAX_LAG_RECORDS and pace.falls_behind:
            speeds = f"{pace.written_per_second:.0f}/s are written, {pace.read_per_second:.0f}/s read"
            reasons.append(Reason(subject, f"falls behind: {pace.lag} records are not read, {speeds}"))
    return reasons


def document(verdict: str, reasons: Sequence[Reason]) -> dict[str, Any]:
    """Return the answer; ``verdict`` is "live" or "ready"."""
    return {verdict: not reasons, "reasons": [{"subject": reason.subject, "found": reason.found} for reason in reasons]}
