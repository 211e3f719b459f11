"""The account of a run: the checker's report, further numbers from the history, tables, and one JSON object."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lab.audit import Audit
from lab.demo.run import Kill
from lab.proof.causes import Why
from lab.proof.checker import judge
from lab.proof.evidence import Evidence, gather
from lab.proof.findings import Report, told
from lab.proof.history import Event
from lab.proof.states import DEAD_LETTERED, LEASED, REDELIVERED

#: Statistics that the checker and the data pipeline's audit have under the same names.
SHARED = ("sent", "acked", "dead", "acked_and_dead", "lost", "duplicates", "redelivered")
#: Maximum findings and differences to list.
MAX_LISTED = 10
_PIPELINE = ".venv/bin/python -m pipeline"
_ROWS = {
    "sent": "sent",
    "acked": "handled and acked",
    "dead": "dead letters",
    "lost": "lost",
    "redelivered_expired": "redelivered: the lease ran out",
    "redelivered_released": "redelivered: the handler failed",
    "held_at_kill": "leases held by the consumer that got kill -9",
    "rows_at_worker_kill": "rows open in the worker that got kill -9",
}


class Lateness(NamedTuple):
    """Time between the end of a lease and its redelivery; ``inherited``: it ended before its tracker took over."""

    late_ms: int
    inherited: bool


@dataclass(frozen=True)
class Account:
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
        return [late_ms for late_ms, its in self.lateness if inherited is None or its is inherited]


def account_of(
    events: Sequence[Event],
    kills: Sequence[Kill],
    least_held: int,
    seconds: float,
    watched: Callable[[Iterable[Event]], Iterable[Event]] = iter,
) -> Account:
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
    report = judge(evidence)
    held, rows = _held_at(evidence, consumer), _rows_at(evidence, worker)
    acked_at, dead_at, both = _ends(evidence)
    # Counts as the audit does: an ack before the fact has ended the message, and a message has one dead letter.
    facts = Counter(
        fact.cause
        for trail in evidence.trails.values()
        for fact in trail.facts[:1]
        if fact.kind == REDELIVERED and (trail.acked_at is None or trail.acked_at > fact.offset)
    )
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
    return Account(report, counts, list(_lateness(evidence, events)), acked_at, dead_at, broken, seconds)


def _held_at(evidence: Evidence, kill: Kill) -> int:
    """Return how many leases a consumer held when it was killed, according to the log."""
    held = 0
    for trail in evidence.trails.values():
        standing = trail.at(kill.end[_partition(trail.log)] - 1) if trail.log else None
        if standing is not None and standing.state == LEASED and standing.due_ms > kill.at_ms:
            held += evidence.process_of.get(standing.holder) == kill.name
    return held


def _rows_at(evidence: Evidence, kill: Kill) -> int:
    """Return how many messages were open in a worker's markers partitions when it was killed, according to the log."""
    own = [trail for trail in evidence.trails.values() if trail.log and _partition(trail.log) in kill.partitions]
    return sum(trail.at(kill.end[_partition(trail.log)] - 1) is not None for trail in own)


def _lateness(evidence: Evidence, events: Sequence[Event]) -> Iterator[Lateness]:
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


# --- output -----------------------------------------------------------------------------------------------------------


def show(
    account: Account, events: Sequence[Event], audit: Audit | None, data: Path, console: Console, retry: str = ""
) -> int:
    """Print the tables, the audit and the findings, then the JSON object as the last line.

    Args:
        account: the judged run.
        events: its history, for the findings.
        audit: the data pipeline's account; None if it was left out.
        data: directory of the pipeline's data.
        console: output.
        retry: instructions to repeat a failed audit.

    Returns:
        The exit code: 1 if the checker or the audit found something wrong, otherwise 2 if the audit failed, otherwise
        0.
    """
    statistics = account.statistics()
    failed = audit is not None and bool(audit.failure)
    differences = [] if audit is None or failed else audit.differences(statistics, {name: name for name in SHARED})
    statistics["audit"] = "skipped" if audit is None else "failed" if failed else "differs" if differences else "agrees"
    console.print(*_tables(account, statistics))
    for line in _verdict(audit, differences, data, retry):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in [*complaints(account, events), *_listed("THE AUDIT DIFFERS", differences)]:
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    console.file.write(json.dumps(statistics) + "\n")
    console.file.flush()
    if account.report.violations or account.broken or differences:
        return 1
    return 2 if failed else 0


def complaints(account: Account, events: Sequence[Event]) -> list[str]:
    """Return the broken promises, and the checker's findings with the events that show them."""
    lines = [f"NOT AS PROMISED: {text}" for text in account.broken]
    lines += [f"{name.upper()}: {count}" for name, count in sorted(account.report.violations.items())]
    return lines + told(account.report.findings[:MAX_LISTED], events)


def how_to_retry(audit: Audit, data: Path, servers: str, prefix: str) -> str:
    """Return instructions to repeat a failed audit.

    Args:
        audit: the failed audit.
        data: directory of the pipeline's data.
        servers: address of a broker that still has the topics; empty if they are gone.
        prefix: prefix of the topics.
    """
    again = _job("audit --drained", data)
    if audit.ingested:
        return f"{data} is kept and has all records of the run; to try again: {again}"
    if not servers:
        return "the topics were deleted with the broker before they were ingested; to try again: make demo"
    variables = f"MARQ_BOOTSTRAP_SERVERS={shlex.quote(servers)} MARQ_PREFIX={prefix}"
    return f"the topics {prefix}.* and {data} are kept; to try again: {variables} {_job('ingest', data)} && {again}"


def _job(words: str, data: Path) -> str:
    return f"{_PIPELINE} {words} --data {shlex.quote(str(data))}"


def _verdict(audit: Audit | None, differences: Sequence[str], data: Path, retry: str) -> list[str]:
    if audit is None:
        return ["audit: left out (SPARK=skip)"]
    if audit.failure:
        return [f"audit: failed: {audit.failure}", f"  {retry}"]
    counts = ", ".join(f"{audit.statistics[name]:,} {name}" for name in SHARED)
    same = "differs" if differences else f"is the same: {counts}"
    lines = [f"audit: the data pipeline's account {same}", f"  to see it again: {_job('audit --drained', data)}"]
    if audit.plots:
        lines.append(f"plots of rates, times and lateness: {data / 'report.html'}")
    elif audit.plots_failure:
        lines.append(f"no plots: {audit.plots_failure}; to try again: {_job('stats', data)}")
    return lines


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"    and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"{title}: {len(items)}", *[f"    {item}" for item in items[:MAX_LISTED]], *more]


def _tables(account: Account, statistics: dict[str, Any]) -> Iterator[Table]:
    yield _table("messages, by id", ("", "count"), [(text, statistics[name]) for name, text in _ROWS.items()])
    attempts = sorted({*account.acked_at, *account.dead_at})
    ends = [(str(attempt), account.acked_at[attempt], account.dead_at[attempt]) for attempt in attempts]
    yield _table("attempts", ("ended at attempt", "acked", "dead"), ends)
    late = {
        "all": account.late_ms(),
        "lease ended while its tracker lived": account.late_ms(inherited=False),
        "lease ended before its tracker had taken over": account.late_ms(inherited=True),
    }
    shares = [
        (text, len(values), *[percentile(values, share) for share in (0.5, 0.99, 1.0)]) for text, values in late.items()
    ]
    yield _table("lateness past the lease, ms", ("", "redeliveries", "p50", "p99", "most"), shares)
    causes = [
        (f"{cause}: {Why(cause).name.lower().replace('_', ' ')}", count)
        for cause, count in sorted(account.report.causes.items())
    ]
    yield _table("duplicates, by their cause in docs/guarantees.md", ("cause", "count"), causes or [("none", 0)])


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> Table:
    """Return a table whose first cells are text, and all others numbers or missing."""
    table = Table(title=title, title_justify="left", min_width=60)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for text, *numbers in rows:
        table.add_row(str(text), *["-" if number is None else f"{number:,}" for number in numbers])
    return table
