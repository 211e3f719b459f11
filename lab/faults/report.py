"""The table of scenarios and statistics in docs/guarantees.md."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path

from lab.faults.scenario import Result, dead_again

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def write_table(results: Sequence[Result], *, whole: bool = True) -> None:
    """Put the table between its two marks, or only the rows of these scenarios: all other rows stay as they are.

    Raises:
        ValueError: the document has no such marks.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    former, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT}: expected the lines {BEGIN} and {END}")
    found = table(results) if whole else merged(former, results)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


def merged(text: str, results: Sequence[Result]) -> str:
    """Return a table with the rows of these scenarios in it, in place of older ones or at its end."""
    head, *rows = text.strip().splitlines()
    for result in results:
        named = f"(`{result.scenario.name}`)"
        row = _row(result)
        if any(named in each for each in rows):
            rows = [row if named in each else each for each in rows]
        else:
            rows.append(row)
    names = [each for each in rows if "(`" in each]
    passed = sum("**failed**" not in each for each in names)
    head = re.sub(r"\d+ of \d+", f"{passed} of {len(names)}", head)
    return "\n".join([head, *rows])


def table(results: Sequence[Result]) -> str:
    """Return the table and the line above it."""
    today = dt.datetime.now(tz=dt.UTC).date()
    lines = [
        f"`make faults`, {today}: {sum(result.passed for result in results)} of {len(results)} scenarios passed.",
        "",
        "| what happens | what a user sees | sent | lost | duplicates, by cause | recovery |",
        "|---|---|---|---|---|---|",
        *[_row(result) for result in results],
    ]
    return "\n".join(lines)


def _row(result: Result) -> str:
    scenario, statistics = result.scenario, result.statistics
    causes = ", ".join(f"{count} by {cause}" for cause, count in sorted(statistics.get("causes", {}).items()))
    duplicates = f"{statistics.get('duplicates', '?')}{f' ({causes})' if causes else ''}"
    duplicates = "; ".join([duplicates, *dead_again(statistics)])
    recovery = "-" if result.recovery_seconds is None else f"{result.recovery_seconds:.1f} s"
    if not result.passed:
        recovery = "**failed**"
    sent, lost = statistics.get("accepted", "?"), statistics.get("lost", "?")
    return f"| {scenario.fault} (`{scenario.name}`) | {scenario.seen} | {sent} | {lost} | {duplicates} | {recovery} |"
