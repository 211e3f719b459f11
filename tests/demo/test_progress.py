"""Limits of waits, which count only the time without progress."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lab.demo.plan import DemoPlan
from lab.demo.progress import Display
from lab.demo.run import DemoRun
from lab.program import RunError

LIMIT_SECONDS, LOOKS = 5.0, 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second each time a wait reads it."""
    seconds = itertools.count()
    monkeypatch.setattr("lab.stage.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr("lab.stage.POLL_SECONDS", 0.0)
    return


class Waiting(DemoRun):
    """A run whose consumers deliver a message at each look, until they have delivered some."""

    def __init__(self, folder: Path, deliveries: int) -> None:
        display = Display(Console(file=io.StringIO()), 1)
        super().__init__(DemoPlan(), "kafka:9092", "demo-1", folder, 4, display, None)
        self._deliveries = deliveries

    def look(self) -> None:
        self.delivered = min(self.delivered + 1, self._deliveries)


async def test_a_wait_lasts_as_long_as_there_is_progress(clock: None, tmp_path: Path) -> None:
    run = Waiting(tmp_path, LOOKS)

    await run.until(lambda: run.delivered == LOOKS, "all is delivered", LIMIT_SECONDS)


async def test_a_wait_ends_when_there_has_been_no_progress_for_its_limit(clock: None, tmp_path: Path) -> None:
    run = Waiting(tmp_path, LOOKS // 2)

    with pytest.raises(RunError, match="time ran out before all is delivered: no progress for 5 s"):
        await run.until(lambda: run.delivered == LOOKS, "all is delivered", LIMIT_SECONDS)

    assert run.delivered == LOOKS // 2


def test_without_a_terminal_each_phase_is_a_line_and_counts_follow_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([0.0, 1.0, 1.0, 2.0, 7.0, 7.0])
    monkeypatch.setattr("lab.demo.progress.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    text = io.StringIO()
    display = Display(Console(file=text, width=200), 10)

    display.phase("drain [1]")
    display.detail("too soon")
    display.show(sent=10, acks=7)

    assert text.getvalue().splitlines() == [
        "  1.0 s  ==> drain [1]",
        "  7.0 s  sent 10 · acks 7 · dead 0 · in flight 0 · waiting 0 · redelivered 0",
    ]
