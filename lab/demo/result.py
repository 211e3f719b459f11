"""The numbers of a run: the checker's report, and further ones from the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lab.demo.run import Kill
from lab.proof.checker import judge
from lab.proof.evidence import Evidence, gather
from lab.proof.findings import Report
from lab.proof.history import Event
from lab.proof.states import DEAD_LETTERED, LEASED, REDELIVERED

#: Statistics that the checker and the data pipeline's audit have under the same names.
SHARED = ("sent", "acked", "dead", "acked_and_dead", "lost", "duplicates", "redelivered")


class Lateness(NamedTuple):
    """Time between the end of a lease and its redelivery; ``inherited``: it ended before its tracker took over."""

    late_ms: int
    inherited: bool


@dataclass(frozen=True)
class Result:
    """A judged run; ``broken``: the promises of the demo itself that it did not keep."""

    report: Report
    counts: dict[str, int]
    lateness: list[Lateness]
    #: Messages by the attempt that ended them.
    acked_at: Counter[int]
    dead_at: Counter[int]
    broken: list[str]
    seconds: float

    def statistics(self) -> dict[str, Any]:
        """Return the JSON object: counts, times in ms, and seconds."""
        report = self.report
        return {
            **{name: getattr(report, name) for name in ("sent", "acked", "lost", "duplicates")},
            "duplicates_unexplained": report.violations["unexplained"] + report.violations["delivered-twice"],
            "from_nowhere": report.violations["from-nowhere"],
            "false_acks": report.violations["not-durable"],
            **self.counts,
            "lateness_p50_ms": percentile(self.late_ms(), 0.5),
            "lateness_p99_ms": percentile(self.late_ms(), 0.99),
            "lateness_owned_p99_ms": percentile(self.late_ms(inherited=False), 0.99),
            "seconds": round(self.seconds, 1),
        }

    def late_ms(self, *, inherited: bool | None = None) -> list[int]:
        """Return the lateness of all redeliveries, or of those whose lease ended before the tracker took over."""
        return [each.late_ms for each in self.lateness if inherited is None or each.inherited is inherited]


def result_of(
    events: Sequence[Event],
    kills: Sequence[Kill],
    least_held: int,
    seconds: float,
    watched: Callable[[Iterable[Event]], Iterable[Event]] = iter,
) -> Result:
    """Judge a run.

    Args:
        events: its history.
        kills: first the consumer's, then the worker's.
        least_held: number of leases that the consumer must have held.
        seconds: duration of the run.
        watched: function that passes the events on, and shows how many the checker has read.
    """
    consumer, worker = kills
    evidence = gather(watched(events))
    # Consumers record messages, not ACQUIREs. If no consumer recorded a holder, its messages never left the library:
    # the killed consumer had acquired them, and died before it delivered them.
    for event in events:
        if event["op"] == "marker" and event["kind"] == "ACQUIRE":
            evidence.process_of.setdefault(event["holder"], consumer.name)
    report = judge(evidence)
    held, rows = held_at(evidence, consumer), rows_at(evidence, worker)
    acked_at, dead_at, both = _ends(evidence)
    # Counts as the audit does: an ack before the fact has ended the message, and a message has one dead letter.
    firsts = [
        fact
        for trail in evidence.trails.values()
        for fact in trail.facts[:1]
        if trail.acked_at is None or trail.acked_at > fact.offset
    ]
    facts = Counter(fact.cause for fact in firsts if fact.kind == REDELIVERED)
    counts = {
        "dead": sum(dead_at.values()),
        "redelivered": sum(facts.values()),
        "acked_and_dead": both,
        "redelivered_expired": facts["EXPIRED"],
        "redelivered_released": facts["RELEASED"],
        "forgotten": sum(event["op"] == "hang" for event in events),
        "failed": sum(event["op"] == "release" and event["type"] == "invoke" for event in events),
        "held_at_kill": held,
        "rows_at_worker_kill": rows,
        "open_at_end": sum(len(log.open) for log in evidence.logs.values()),
    }
    broken = []
    if held < least_held:
        broken.append(f"the consumer that was killed held {held} leases, not at least {least_held}")
    if not rows:
        broken.append("the worker that was killed had no row open")
    return Result(report, counts, list(lateness(evidence, events)), acked_at, dead_at, broken, seconds)


def held_at(evidence: Evidence, kill: Kill) -> int:
    """Return how many leases a consumer held when it was killed, according to the log."""
    held = 0
    for trail in evidence.trails.values():
        standing = trail.at(kill.end[_partition(trail.log)] - 1) if trail.log else None
        if standing is not None and standing.state == LEASED and standing.due_ms > kill.at_ms:
            held += evidence.process_of.get(standing.holder) == kill.name
    return held


def rows_at(evidence: Evidence, kill: Kill) -> int:
    """Return how many messages were open in a worker's markers partitions when it was killed, according to the log."""
    own = [trail for trail in evidence.trails.values() if trail.log and _partition(trail.log) in kill.partitions]
    return sum(trail.at(kill.end[_partition(trail.log)] - 1) is not None for trail in own)


def lateness(evidence: Evidence, events: Sequence[Event]) -> Iterator[Lateness]:
    """Yield the lateness of each redelivery after a lease that ran out, by the log's clock."""
    first_seen: dict[str, int] = {}
    for event in events:
        if event["op"] == "marker" and event["kind"] in ("TICK", REDELIVERED, DEAD_LETTERED):
            first_seen.setdefault(event["holder"], event["time_ms"])
    for trail in evidence.trails.values():
        for fact in trail.facts[:1]:
            if fact.cause == "EXPIRED" and fact.before is not None:
                due_ms = fact.before.due_ms
                yield Lateness(events[fact.number]["time_ms"] - due_ms, due_ms <= first_seen[fact.holder])


def _ends(evidence: Evidence) -> tuple[Counter[int], Counter[int], int]:
    """Return messages by the attempt that ended them, acked and dead, and how many were both."""
    acked: dict[str, int] = {}
    dead: dict[str, int] = {}
    for trail in sorted(evidence.trails.values(), key=lambda trail: trail.attempt):
        if any(fact.kind == DEAD_LETTERED for fact in trail.facts[:1]):
            dead.setdefault(trail.id, trail.attempt)
        if trail.acked_at is not None:
            acked.setdefault(trail.id, trail.attempt)
    return Counter(acked.values()), Counter(dead.values()), len(acked.keys() & dead.keys())


def _partition(log: str) -> int:
    return int(log.rpartition("/")[2])


def percentile(values: Iterable[int], share: float) -> int | None:
    """Return the value that this share of the values does not exceed; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
