"""What the demo shows at its end: tables for people, and one JSON object for programs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.account import Duplicate, Ending, Reason, late_ms, percentile
from demo.audit import SHARED, Audit
from demo.journal import What
from demo.run import Result
from marq.core.markers import Cause

#: Lines of a list of what should not be there.
MAX_LISTED = 10


def figures(result: Result) -> dict[str, Any]:
    """Return the JSON object: counts, times in ms, and seconds."""
    account, late = result.account, list(result.trails.lateness())
    entries = Counter(entry.what for journal in result.tally.journals.values() for entry in journal)
    return {
        "sent": account.sent,
        "acked": len(account.acked),
        "dead": len(account.dead),
        "lost": len(account.lost),
        "duplicates": len(account.duplicates),
        "duplicates_unexplained": len(account.unexplained),
        "acked_and_dead": len(account.acked & account.dead),
        "from_nowhere": len(account.from_nowhere),
        "false_acks": len(account.false_acks),
        "redelivered": sum(result.trails.redelivered.values()),
        "redelivered_expired": result.trails.redelivered[Cause.EXPIRED],
        "redelivered_released": result.trails.redelivered[Cause.RELEASED],
        "forgotten": entries[What.FORGOT],
        "failed": entries[What.FAILED],
        "lateness_p50_ms": percentile(late_ms(late), 0.5),
        "lateness_p99_ms": percentile(late_ms(late), 0.99),
        "lateness_owned_p99_ms": percentile(late_ms(late, inherited=False), 0.99),
        "held_at_kill": result.held_at_kill,
        "rows_at_worker_kill": result.rows_at_worker_kill,
        "open_at_end": result.open_at_end,
        "seconds": round(result.seconds, 1),
    }


def show(result: Result, audit: Audit, console: Console) -> bool:
    """Print the tables, the audit's verdict and what is wrong, then the JSON object as the last line.

    Returns whether nothing is wrong.
    """
    found = figures(result)
    differences = audit.differences(found)
    found["audit"] = "skipped" if audit.skipped else "differs" if differences else "agrees"
    console.print(_messages(found), _attempts(result), _lateness(result), _duplicates(result))
    console.print(_verdict(audit, differences), highlight=False)
    for line in [*complaints(result), *_listed("THE AUDIT DIFFERS", "finding", differences)]:
        console.print(line, style="bold red", highlight=False)
    console.file.write(json.dumps(found) + "\n")
    console.file.flush()
    return result.account.right and not result.broken and not differences


def _verdict(audit: Audit, differences: list[str]) -> str:
    if audit.skipped:
        return "audit: left out (SPARK=skip)"
    if differences:
        return "audit: the data pipeline's account is another one"
    told = ", ".join(f"{audit.figures[name]:,} {name}" for name in SHARED)
    again = f"to see it again: .venv/bin/python -m pipeline audit --data {audit.data}"
    return f"audit: the data pipeline's account is the same: {told}\n  {again}"


def complaints(result: Result) -> list[str]:
    """Say what is not as it should be."""
    account = result.account
    lines = [f"NOT AS PROMISED: {text}" for text in result.broken]
    lines += _listed("LOST", "message", account.lost)
    lines += _listed("FROM NOWHERE", "delivery", account.from_nowhere)
    lines += _listed("SAID TO BE DURABLE, AND NOT IN THE LOG", "ack", account.false_acks)
    lines += _listed("UNEXPLAINED DUPLICATES", "message", [_told(each) for each in account.unexplained])
    return lines


def _listed(title: str, noun: str, items: list[Any]) -> list[str]:
    if not items:
        return []
    shown = [f"    {noun} {item}" for item in items[:MAX_LISTED]]
    more = [f"    and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"{title}: {len(items)}", *shown, *more]


def _told(duplicate: Duplicate) -> str:
    return f"{duplicate.number}: {_ending(duplicate.first)}, then {_ending(duplicate.second)}"


def _ending(ending: Ending) -> str:
    how = "dead letter" if ending.consumer is None else f"handled by {ending.consumer}"
    return f"{how} at attempt {ending.attempt} (record {ending.key[0]}/{ending.key[1]}, {ending.at_ms} ms)"


def _messages(found: dict[str, Any]) -> Table:
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
        table.add_row(text, f"{found[name]:,}")
    return table


def _attempts(result: Result) -> Table:
    table = _table("attempts", "ended at attempt", "acked", "dead")
    acked, dead = result.account.acked_at, result.account.dead_at
    for attempt in sorted({*acked, *dead}):
        table.add_row(str(attempt), f"{acked[attempt]:,}", f"{dead[attempt]:,}")
    return table


def _lateness(result: Result) -> Table:
    late = list(result.trails.lateness())
    table = _table("lateness past the lease, ms", "", "redeliveries", "p50", "p99", "most")
    for text, inherited in (
        ("all", None),
        ("fell due while its tracker lived", False),
        ("fell due before its tracker had taken over", True),
    ):
        values = late_ms(late, inherited=inherited)
        shares = [percentile(values, share) for share in (0.5, 0.99, 1.0)]
        table.add_row(text, f"{len(values):,}", *["-" if value is None else f"{value:,}" for value in shares])
    return table


def _duplicates(result: Result) -> Table:
    table = _table("duplicates, and why", "reason", "count")
    reasons = result.account.reasons
    for reason in Reason:
        if reasons[reason]:
            table.add_row(str(reason), f"{reasons[reason]:,}")
    if not reasons:
        table.add_row("none", "0")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", min_width=60)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
