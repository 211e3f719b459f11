"""Limits that figures must keep, and how figures and verdicts are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """A limit that a figure must not pass, or (``at_least``) must reach; a goal is better, and not asked for."""

    what: str
    found: float
    limit: float
    unit: str
    at_least: bool = False
    goal: float | None = None

    @property
    def met(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def show(figures: Mapping[str, list[float]], judged: Sequence[Bar], console: Console) -> None:
    table = Table("figure", "median", "worst")
    for name, found in figures.items():
        table.add_row(name.replace("_", " "), f"{median(found):,.2f}", f"{max(found):,.2f}")
    console.print(table)
    show_bars(judged, console)


def show_bars(judged: Sequence[Bar], console: Console) -> None:
    verdict = Table("bar", "limit", "found", "met", "goal")
    for bar in judged:
        found_and_limit = (f"{number:,.2f} {bar.unit}" for number in (bar.limit, bar.found))
        goal = "" if bar.goal is None else f"{bar.goal:,.2f} {bar.unit}"
        verdict.add_row(bar.what, *found_and_limit, "yes" if bar.met else "NO", goal)
    console.print(verdict)
