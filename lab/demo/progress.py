"""The demo's display: a line for each phase, and a progress bar or, without a terminal, a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 5.0
_COUNTS = ("sent", "acks", "dead", "in_flight", "waiting", "redelivered")
_STATISTICS = ("dead_lettered", "in_flight", "waiting_for_redelivery", "redelivered")
_TEXT = (
    "{task.elapsed:5.1f} s  sent {task.fields[sent]:,} · acks {task.fields[acks]:,} · dead {task.fields[dead]:,}"
    " · in flight {task.fields[in_flight]:,} · waiting {task.fields[waiting]:,}"
    " · redelivered {task.fields[redelivered]:,}"
)


class Display:
    """Shows the phases and counts of a run."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn(_TEXT), BarColumn(20), console=console, transient=False, disable=not console.is_terminal,
        )  # fmt: skip
        # Any, because rich takes them as keyword arguments among its own.
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        self._task = self._bar.add_task("", total=total, **self._counts)
        self._began_s = self._line_s = time.monotonic()

    def phase(self, text: str) -> None:
        """Print the name of the phase that begins."""
        self._line_s = time.monotonic()
        self.say(f"==> {text}")

    def detail(self, text: str) -> None:
        """Print a detail of the current phase, at most every few seconds."""
        now_s = time.monotonic()
        if now_s - self._line_s >= LINE_SECONDS:
            self._line_s = now_s
            self.say(text)

    def show(self, **counts: int) -> None:
        self._counts.update(counts)
        ended = self._counts["acks"] + self._counts["dead"]
        self._bar.update(self._task, completed=ended, **self._counts)
        if not self._console.is_terminal:
            self.detail(" · ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self._counts.items()))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        line = f"{time.monotonic() - self._began_s:5.1f} s  {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def statistics(self, queues: Mapping[str, Mapping[str, float]]) -> tuple[int, int]:
        """Show the workers' statistics; return those that only grow: dead letters and redeliveries."""
        total = {name: int(sum(row[name] for row in queues.values())) for name in _STATISTICS}
        self.show(
            dead=total["dead_lettered"],
            in_flight=total["in_flight"],
            waiting=total["waiting_for_redelivery"],
            redelivered=total["redelivered"],
        )
        return total["dead_lettered"], total["redelivered"]

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
