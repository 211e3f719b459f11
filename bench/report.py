"""Shows what the suite has found, and puts it into a form to be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bars import Bar, show_bars
from bench.suite import Outcome, show_number


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the medians of each row, what it adds, and all bars in one table."""
    for outcome in outcomes:
        _show_medians(outcome, console)
        for system, why in outcome.skipped.items():
            console.print(f"{system}: skipped: {why}", highlight=False)
        for note in outcome.notes:
            console.print(note, highlight=False)
    show_bars([bar for outcome in outcomes for bar in outcome.bars], console)
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: FAILED: {outcome.error.splitlines()[-1]}", highlight=False)


def _show_medians(outcome: Outcome, console: Console) -> None:
    medians = outcome.medians
    if not medians:
        return
    figures = list(dict.fromkeys(key for found in medians.values() for key in found))
    runs = max(len(found) for found in outcome.runs.values())
    table = Table("medians", *medians, title=f"{outcome.row.name} ({runs} runs)", title_justify="left")
    for key in figures:
        cells = (show_number(found[key]) if key in found else "" for found in medians.values())
        table.add_row(key.replace("_", " "), *cells)
    console.print(table)


def kept(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all figures of all runs, and all bars."""
    return {
        "rows": {outcome.row.name: _kept(outcome) for outcome in outcomes},
        "bars": [{"row": outcome.row.name, **_judged(bar)} for outcome in outcomes for bar in outcome.bars],
        "failed": [outcome.row.name for outcome in outcomes if outcome.error],
    }


def _kept(outcome: Outcome) -> dict[str, Any]:
    return {
        "what": outcome.row.what,
        "seconds": round(outcome.seconds, 1),
        "medians": outcome.medians,
        "runs": outcome.runs,
        "skipped": outcome.skipped,
        "notes": outcome.notes,
        "error": outcome.error,
    }


def _judged(bar: Bar) -> dict[str, Any]:
    return {**asdict(bar), "met": bar.met}
