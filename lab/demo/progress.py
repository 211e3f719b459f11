"""The demo's display: a line for each phase, and a progress bar or, without a terminal, a line every few seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_SECONDS = 5.0
_STATISTICS = ("dead_lettered", "in_flight", "waiting_for_delivery", "waiting_for_redelivery", "redelivered")


class RunCounts(NamedTuple):
    """The state of all messages: ``sent`` is the sum of the following ones, except ``redelivered``."""

    sent: int = 0
    acked: int = 0
    dead: int = 0
    in_flight: int = 0
    waiting: int = 0
    delayed: int = 0
    redelivered: int = 0

    def __str__(self) -> str:
        return (
            f"sent {self.sent:,} = {self.acked:,} acked + {self.dead:,} dead + {self.in_flight:,} in flight"
            f" + {self.waiting:,} waiting + {self.delayed:,} delayed · {self.redelivered:,} redelivered"
        )

    def after(self, known: Mapping[str, int]) -> RunCounts:
        """Return the next counts from the latest ``known`` ones.

        These are from different moments and programs, so they do not add up, and some fall when a worker is killed. A
        message counts in the first state that has room for it; the number of waiting ones is what is left.
        """
        sent = max(self.sent, known.get("sent", 0))
        # A message may be acknowledged twice, or before its sender knows that it was sent.
        acked = max(self.acked, min(known.get("acked", 0), sent - self.dead))
        dead = max(self.dead, min(known.get("dead", 0), sent - acked))
        left = sent - acked - dead
        in_flight = min(known.get("in_flight", 0), left)
        delayed = min(known.get("delayed", 0), left - in_flight)
        redelivered = max(self.redelivered, known.get("redelivered", 0))
        return RunCounts(sent, acked, dead, in_flight, left - in_flight - delayed, delayed, redelivered)


class Display:
    """Shows the phases and counts of a run; ``report`` says where its report will be, empty for none."""

    def __init__(self, console: Console, total: int, report: str = "") -> None:
        self._console = console
        self._report = report
        self._bar = Progress(
            TextColumn("{task.elapsed:5.1f} s  {task.fields[counts]}"), BarColumn(20), TextColumn("{task.description}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        #: The latest counts from each program, and those that are shown.
        self._known: dict[str, int] = {}
        self._counts = RunCounts()
        self._places = ""
        self._task = self._bar.add_task("", total=total, counts=self._counts)
        self._began_s = self._line_s = time.monotonic()

    def phase(self, text: str) -> None:
        self._line_s = time.monotonic()
        self.say(f"==> {text}")

    def detail(self, text: str) -> None:
        """Print a detail of the current phase, at most every few seconds."""
        now_s = time.monotonic()
        if now_s - self._line_s >= LINE_SECONDS:
            self._line_s = now_s
            self.say(text)

    def place(self, dashboard: str) -> None:
        """Name the dashboard that shows the run, empty for none, and the report that follows."""
        named = {"dashboard": dashboard, "report at the end": self._report}
        places = " · ".join(f"{name}: {place}" for name, place in named.items() if place)
        if places == self._places:
            return
        self._places = places
        self._bar.update(self._task, description=f"\n{places}")
        if not self._console.is_terminal:
            self.say(places)

    def show(self, **counts: int) -> None:
        """Show counts of messages: ``sent``, ``acked``, ``dead``, ``in_flight``, ``delayed``, ``redelivered``."""
        self._known.update(counts)
        self._counts = shown = self._counts.after(self._known)
        self._bar.update(self._task, completed=shown.acked + shown.dead, counts=shown)
        if not self._console.is_terminal:
            self.detail(str(shown))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        line = f"{time.monotonic() - self._began_s:5.1f} s  {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def statistics(self, queues: Mapping[str, Mapping[str, float]]) -> tuple[int, int]:
        """Show the workers' statistics; return those that only grow: dead letters and redeliveries."""
        total: Counter[str] = Counter()
        for row in queues.values():
            total.update({name: int(row[name]) for name in _STATISTICS})
        self.show(
            dead=total["dead_lettered"],
            in_flight=total["in_flight"],
            delayed=total["waiting_for_delivery"] + total["waiting_for_redelivery"],
            redelivered=total["redelivered"],
        )
        return total["dead_lettered"], total["redelivered"]

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
