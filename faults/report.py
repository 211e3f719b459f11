"""The table of scenarios and figures in docs/guarantees.md."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

from faults.scenario import Result, dead_again

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "guarantees.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def write_table(results: Sequence[Result]) -> None:
    """Put the table between its two marks.

    Raises:
        ValueError: the document has no such marks.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT}: expected the lines {BEGIN} and {END}")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")


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
    scenario, figures = result.scenario, result.figures
    causes = ", ".join(f"{count} by {cause}" for cause, count in sorted(figures.get("causes", {}).items()))
    duplicates = f"{figures.get('duplicates', '?')}{f' ({causes})' if causes else ''}"
    duplicates = "; ".join([duplicates, *dead_again(figures)])
    recovery = "-" if result.recovery_seconds is None else f"{result.recovery_seconds:.1f} s"
    if not result.passed:
        recovery = "**failed**"
    sent, lost = figures.get("accepted", "?"), figures.get("lost", "?")
    return f"| {scenario.fault} (`{scenario.name}`) | {scenario.seen} | {sent} | {lost} | {duplicates} | {recovery} |"
