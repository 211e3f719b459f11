"""The progress bar; without a terminal, a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 5.0
_COUNTS = ("sent", "acks", "dead", "in_flight", "waiting", "redelivered")
_TEXT = (
    "sent {task.fields[sent]:,} · acks {task.fields[acks]:,} · dead {task.fields[dead]:,}"
    " · in flight {task.fields[in_flight]:,} · waiting {task.fields[waiting]:,}"
    " · redelivered {task.fields[redelivered]:,}"
)


class Display:
    """Shows the counts of a run."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(), TextColumn(_TEXT), TimeElapsedColumn(), console=console, transient=False,
            disable=not console.is_terminal,
        )  # fmt: skip
        # Any, because rich takes them as keyword arguments among its own.
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        self._task = self._bar.add_task("", total=total, **self._counts)
        self._began_s = self._line_s = time.monotonic()

    def show(self, **counts: int) -> None:
        self._counts.update(counts)
        ended = self._counts["acks"] + self._counts["dead"]
        self._bar.update(self._task, completed=ended, **self._counts)
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._line_s >= LINE_SECONDS:
            self._line_s = now_s
            self.say(" · ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in self._counts.items()))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(f"{time.monotonic() - self._began_s:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def statistics(self, queues: Mapping[str, Mapping[str, float]]) -> None:
        """Show the workers' statistics."""
        self.show(
            dead=int(sum(row["dead_lettered"] for row in queues.values())),
            in_flight=int(sum(row["in_flight"] for row in queues.values())),
            waiting=int(sum(row["waiting_for_redelivery"] for row in queues.values())),
            redelivered=int(sum(row["redelivered"] for row in queues.values())),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
