"""The numbers of scenarios in the table of docs/guarantees.md, whose first two columns are written by hand."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path

from lab.faults.scenario import ScenarioResult, dead_again
from lab.report import between, placed

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
MARK = "faults"


def write_table(results: Sequence[ScenarioResult], *, whole: bool = True) -> None:
    """Write the numbers of these scenarios; with ``whole``, also the date.

    Raises:
        ValueError: the document has no such marks, or no row for a scenario.
    """
    page = DOCUMENT.read_text(encoding="utf-8")
    table = updated(between(page, MARK), results)
    if whole:
        today = dt.datetime.now(tz=dt.UTC).date()
        table = re.sub(r"`make faults`, [\d-]+", f"`make faults`, {today}", table, count=1)
    DOCUMENT.write_text(placed(page, MARK, table), encoding="utf-8")


def updated(table: str, results: Sequence[ScenarioResult]) -> str:
    """Return the table with the numbers of these scenarios."""
    head, *rows = table.splitlines()
    for result in results:
        named = [number for number, row in enumerate(rows) if f"(`{result.scenario.name}`)" in row]
        if not named:
            raise ValueError(f"{DOCUMENT}: describe {result.scenario.name} in a row of the table")
        fault, seen = rows[named[0]].split(" | ")[:2]
        rows[named[0]] = " | ".join([fault, seen, *numbers(result)]) + " |"
    names = [row for row in rows if "(`" in row]
    passed = sum("**failed**" not in row for row in names)
    return "\n".join([re.sub(r"\d+ of \d+", f"{passed} of {len(names)}", head), *rows])


def numbers(result: ScenarioResult) -> list[str]:
    """Return the cells sent, lost, duplicates by cause, and recovery."""
    statistics = result.statistics
    causes = ", ".join(f"{count} by {cause}" for cause, count in sorted(statistics.get("causes", {}).items()))
    duplicates = f"{statistics.get('duplicates', '?')}{f' ({causes})' if causes else ''}"
    recovery = "-" if result.recovery_seconds is None else f"{result.recovery_seconds:.1f} s"
    return [
        str(statistics.get("accepted", "?")),
        str(statistics.get("lost", "?")),
        "; ".join([duplicates, *dead_again(statistics)]),
        recovery if result.passed else "**failed**",
    ]
