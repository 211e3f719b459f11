"""Limits of waits, which count only the time without progress."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lab.demo.progress import Display, RunCounts
from lab.demo.run import DemoPlan, DemoRun
from lab.program import RunError
from lab.proof.history import log_name, name_of
from marq.wire.markers import Source

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
    display.show(sent=10, acked=7)

    assert text.getvalue().splitlines() == [
        "  1.0 s  ==> drain [1]",
        "  7.0 s  sent 10 = 7 acked + 0 dead + 0 in flight + 3 waiting + 0 delayed · 0 redelivered",
    ]


_NUMBERS = st.fixed_dictionaries(
    {}, optional={name: st.integers(0, 20) for name in RunCounts._fields if name != "waiting"}
)


@given(st.lists(_NUMBERS))
def test_counts_add_up_at_every_moment_and_what_is_ended_never_falls(numbers: list[dict[str, int]]) -> None:
    known: dict[str, int] = {}
    before = RunCounts()
    for new in numbers:
        known |= new
        shown = before.after(known)

        assert shown.sent == sum(shown[1:6])
        assert min(shown) >= 0
        for name in ("sent", "acked", "dead", "redelivered"):
            assert getattr(shown, name) >= getattr(before, name)
        before = shown


def test_counts_of_one_moment_are_shown_as_they_are() -> None:
    known = {"sent": 20, "acked": 9, "dead": 1, "in_flight": 3, "delayed": 5, "redelivered": 4}

    assert RunCounts().after(known) == RunCounts(20, 9, 1, 3, 2, 5, 4)


def test_the_dashboard_and_the_report_are_named_whenever_they_change() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=200), 10, "data/report.html")

    for dashboard in ("http://127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:2"):
        display.place(dashboard)

    assert [line.partition(" s  ")[2] for line in text.getvalue().splitlines()] == [
        "dashboard: http://127.0.0.1:1 · report at the end: data/report.html",
        "dashboard: http://127.0.0.1:2 · report at the end: data/report.html",
    ]


def test_a_message_that_is_delivered_and_acknowledged_twice_counts_once(tmp_path: Path) -> None:
    run = DemoRun(DemoPlan(), "kafka:9092", "demo-1", tmp_path, 4, Display(Console(), 1), None)
    source, content = Source("demo-1.messages", 2), "a.b.c"

    for offset in (7, 9):
        named = {"process": "consumer-1", "queue": "q", "at_ms": 0.0}
        run.take({"type": "ok", "op": "deliver", "record": name_of(source, offset), "attempt": 1, "content": content}
                 | named)  # fmt: skip
        run.take({"type": "ok", "op": "ack", "source": log_name(source), "offsets": [offset]} | named)

    assert run.progress()[1] == 1  # type: ignore[index]
