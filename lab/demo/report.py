"""The account of a run: the checker's report, further numbers from the history, tables, and one JSON object."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.audit import Audit
from lab.proof.checker import judge
from lab.proof.evidence import gather
from lab.proof.findings import Report, Why, told
from lab.proof.history import Event
from lab.report import terminal_table

#: Statistics that the checker and the data pipeline's audit have under the same names.
SHARED = ("sent", "acked", "dead", "acked_and_dead", "lost", "duplicates", "redelivered")
#: Maximum findings and differences to list.
MAX_LISTED = 10
_PIPELINE, _BROKER = ".venv/bin/python -m pipeline", ".venv/bin/python -m marq_worker.broker"
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


@dataclass(frozen=True)
class Account:
    """A judged run; ``broken``: the promises of the demo itself that it did not keep."""

    events: Sequence[Event]
    report: Report
    counts: dict[str, int]
    broken: list[str]
    seconds: float

    def statistics(self) -> dict[str, Any]:
        """Return the JSON object: counts and seconds."""
        report = self.report
        return {
            **{name: getattr(report, name) for name in SHARED},
            "duplicates_unexplained": report.violations["unexplained"] + report.violations["delivered-twice"],
            "from_nowhere": report.violations["from-nowhere"],
            "false_acks": report.violations["not-durable"],
            **self.counts,
            "seconds": round(self.seconds, 1),
        }


def account_of(events: Sequence[Event], held: int, rows: int, least_held: int, seconds: float) -> Account:
    """Judge a run, in which a consumer with ``held`` leases was killed, and a worker with ``rows`` open rows."""
    evidence = gather(events)
    report = judge(evidence)
    causes = Counter(fact.cause for trail in evidence.trails.values() if (fact := trail.redelivery) is not None)
    counts = {
        "redelivered_expired": causes["EXPIRED"],
        "redelivered_released": causes["RELEASED"],
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
    return Account(events, report, counts, broken, seconds)


# --- output -----------------------------------------------------------------------------------------------------------


def show(account: Account, audit: Audit | None, data: Path, console: Console, retry: str = "") -> int:
    """Print the tables, the audit and the findings, then the JSON object as the last line; return the exit code.

    It is 1 if the checker or the audit found something wrong, otherwise 2 if the audit failed. ``audit`` is None if it
    was left out, and ``retry`` says how to repeat a failed one.
    """
    statistics = account.statistics()
    failed = audit is not None and bool(audit.failure)
    differences = [] if audit is None or failed else audit.differences(statistics, {name: name for name in SHARED})
    statistics["audit"] = "skipped" if audit is None else "failed" if failed else "differs" if differences else "agrees"
    console.print(*_tables(account, statistics))
    for line in _verdict(audit, differences, data, retry):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in [*complaints(account), *_listed("THE AUDIT DIFFERS", differences)]:
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    console.file.write(json.dumps(statistics) + "\n")
    console.file.flush()
    if account.report.violations or account.broken or differences:
        return 1
    return 2 if failed else 0


def complaints(account: Account) -> list[str]:
    """Return the broken promises, and the checker's findings with the events that show them."""
    lines = [f"NOT AS PROMISED: {text}" for text in account.broken]
    lines += [f"{name.upper()}: {count}" for name, count in sorted(account.report.violations.items())]
    return lines + told(account.report.findings[:MAX_LISTED], account.events)


def how_to_retry(audit: Audit, data: Path, servers: str, prefix: str, broker: Path | None = None) -> str:
    """Return instructions to repeat a failed audit; ``broker`` is the directory of a broker that was stopped."""
    again = _job("audit --drained", data)
    if audit.ingested:
        return f"{data} is kept and has all records of the run; to try again: {again}"
    address = f"MARQ_BOOTSTRAP_SERVERS={shlex.quote(servers)}"
    jobs = f"{address} MARQ_PREFIX={prefix} {_job('ingest', data)} && {again}"
    if broker is None:
        return f"the topics {prefix}.* and {data} are kept; to try again: {jobs}"
    start = f"{address} {_BROKER} --data {shlex.quote(str(broker))}"
    return f"{broker} and {data} are kept; to try again, start the broker: {start}\n  and in another terminal: {jobs}"


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
    yield terminal_table("messages, by id", (), [(text, f"{statistics[name]:,}") for name, text in _ROWS.items()])
    causes = [
        (f"{cause}: {Why(cause).name.lower().replace('_', ' ')}", f"{count:,}")
        for cause, count in sorted(account.report.causes.items())
    ]
    yield terminal_table("duplicates, by their cause in docs/guarantees.md", (), causes or [("none", "0")])
