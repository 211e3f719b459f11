"""The end of the demo: tables for people, and one JSON object for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.audit import Audit
from lab.demo.result import SHARED, Result, percentile
from lab.proof.causes import Why
from lab.proof.findings import told
from lab.proof.history import Event

#: Maximum findings and differences to list.
MAX_LISTED = 10
_PIPELINE = ".venv/bin/python -m pipeline"


def show(
    result: Result, events: Sequence[Event], audit: Audit | None, data: Path, console: Console, retry: str = ""
) -> int:
    """Print the tables, the audit and the findings, then the JSON object as the last line.

    Args:
        result: the judged run.
        events: its history, for the findings.
        audit: the data pipeline's account; None if it was left out.
        data: directory of the pipeline's data.
        console: output.
        retry: instructions to repeat a failed audit.

    Returns:
        The exit code: 1 if the checker or the audit found something wrong, otherwise 2 if the audit failed, otherwise
        0.
    """
    statistics = result.statistics()
    failed = audit is not None and bool(audit.failure)
    differences = [] if audit is None or failed else audit.differences(statistics, {name: name for name in SHARED})
    statistics["audit"] = "skipped" if audit is None else "failed" if failed else "differs" if differences else "agrees"
    console.print(_messages(statistics), _attempts(result), _lateness(result), _duplicates(result))
    for line in _verdict(audit, differences, data, retry):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in [*complaints(result, events), *_listed("THE AUDIT DIFFERS", differences)]:
        console.print(line, style="bold red", highlight=False, markup=False, soft_wrap=True)
    console.file.write(json.dumps(statistics) + "\n")
    console.file.flush()
    if result.report.violations or result.broken or differences:
        return 1
    return 2 if failed else 0


def complaints(result: Result, events: Sequence[Event]) -> list[str]:
    """Return the broken promises, and the checker's findings with the events that show them."""
    lines = [f"NOT AS PROMISED: {text}" for text in result.broken]
    for name, count in sorted(result.report.violations.items()):
        lines.append(f"{name.upper()}: {count}")
    return lines + told(result.report.findings[:MAX_LISTED], events)


def how_to_retry(audit: Audit, data: Path, servers: str, prefix: str) -> str:
    """Return instructions to repeat a failed audit.

    Args:
        audit: the failed audit.
        data: directory of the pipeline's data.
        servers: address of a broker that still has the topics; empty if they are gone.
        prefix: prefix of the topics.
    """
    again = f"{_PIPELINE} audit --drained --data {shlex.quote(str(data))}"
    if audit.ingested:
        return f"{data} is kept and has all records of the run; to try again: {again}"
    if not servers:
        return "the topics were deleted with the broker before they were ingested; to try again: make demo"
    variables = f"MARQ_BOOTSTRAP_SERVERS={shlex.quote(servers)} MARQ_PREFIX={prefix}"
    ingest = f"{_PIPELINE} ingest --data {shlex.quote(str(data))}"
    return f"the topics {prefix}.* and {data} are kept; to try again: {variables} {ingest} && {again}"


def _verdict(audit: Audit | None, differences: Sequence[str], data: Path, retry: str) -> list[str]:
    if audit is None:
        return ["audit: left out (SPARK=skip)"]
    if audit.failure:
        return [f"audit: failed: {audit.failure}", f"  {retry}"]
    again = f"{_PIPELINE} audit --drained --data {shlex.quote(str(data))}"
    told = ", ".join(f"{audit.statistics[name]:,} {name}" for name in SHARED)
    lines = [f"audit: the data pipeline's account is the same: {told}", f"  to see it again: {again}"]
    if differences:
        lines[0] = "audit: the data pipeline's account differs"
    if audit.plots:
        lines.append(f"plots of rates, times and lateness: {data / 'report.html'}")
    elif audit.plots_failure:
        lines.append(
            f"no plots: {audit.plots_failure}; to try again: {_PIPELINE} stats --data {shlex.quote(str(data))}"
        )
    return lines


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"    and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"{title}: {len(items)}", *[f"    {item}" for item in items[:MAX_LISTED]], *more]


def _messages(statistics: dict[str, Any]) -> Table:
    table = _table("messages, by id", "", "count")
    for name, text in (
        ("sent", "sent"),
        ("acked", "handled and acked"),
        ("dead", "dead letters"),
        ("lost", "lost"),
        ("redelivered_expired", "redelivered: the lease ran out"),
        ("redelivered_released", "redelivered: the handler failed"),
        ("held_at_kill", "leases held by the consumer that got kill -9"),
        ("rows_at_worker_kill", "rows open in the worker that got kill -9"),
    ):
        table.add_row(text, f"{statistics[name]:,}")
    return table


def _attempts(result: Result) -> Table:
    table = _table("attempts", "ended at attempt", "acked", "dead")
    for attempt in sorted({*result.acked_at, *result.dead_at}):
        table.add_row(str(attempt), f"{result.acked_at[attempt]:,}", f"{result.dead_at[attempt]:,}")
    return table


def _lateness(result: Result) -> Table:
    table = _table("lateness past the lease, ms", "", "redeliveries", "p50", "p99", "most")
    for text, inherited in (
        ("all", None),
        ("lease ended while its tracker lived", False),
        ("lease ended before its tracker had taken over", True),
    ):
        values = result.late_ms(inherited=inherited)
        shares = [percentile(values, share) for share in (0.5, 0.99, 1.0)]
        table.add_row(text, f"{len(values):,}", *["-" if value is None else f"{value:,}" for value in shares])
    return table


def _duplicates(result: Result) -> Table:
    table = _table("duplicates, by their cause in docs/guarantees.md", "cause", "count")
    for cause, count in sorted(result.report.causes.items()):
        table.add_row(f"{cause}: {Why(cause).name.lower().replace('_', ' ')}", f"{count:,}")
    if not result.report.causes:
        table.add_row("none", "0")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=60)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
