"""The watchdog's thread: which time counts, and what is done at the end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Hashable, Iterator
from types import SimpleNamespace

import pytest

from marq.settings.client import ClientSettings
from marq_worker.progress import ProgressReport
from marq_worker.watchdog import watchdog
from marq_worker.watchdog.blocked_loop import BlockedLoop
from marq_worker.watchdog.broker_probe import BrokerProbe, Rebalance
from marq_worker.watchdog.watchdog import LOOK_SECONDS, ProbeResult, Watchdog
from marq_worker.worker_exit_codes import EXIT_STALLED

SIGNAL_SECONDS = 30.0


def work_waits(subject: Hashable, standing: ProgressReport, last: bool) -> ProbeResult:
    return ProbeResult.WORK_WAITS


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the process would have been ended; the thread that does it waits for the end of the test instead."""
    event, over = threading.Event(), threading.Event()

    def end(code: int) -> None:
        assert code == EXIT_STALLED
        event.set()
        over.wait()

    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog, "LAST_WORDS_SECONDS", 3600.0)
    yield event
    over.set()


def clock(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Let each look of the watchdog come this long after the one before, by its clock."""
    times = itertools.count(0.0, step_s)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.001)


async def test_an_event_loop_that_is_blocked_ends_the_process_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock(monkeypatch, 0.001)
    dog = Watchdog(0.05, dict, work_waits)
    await dog.start()

    assert ended.wait(SIGNAL_SECONDS)
    await dog.stop()
    assert "watchdog: the event loop has had no turn, for 0.05 s (MARQ_WATCHDOG)" in caplog.text
    assert "exit code 75" in caplog.text


async def test_a_blocked_event_loop_is_named_before_and_after_although_it_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event
) -> None:
    clock(monkeypatch, 1.0)
    monkeypatch.setattr(watchdog, "SAY_SECONDS", 0.001)
    warned, runs_again = threading.Event(), asyncio.Event()
    texts: list[str] = []
    loop = asyncio.get_running_loop()
    dog = Watchdog(
        3600.0, dict, work_waits, watches_loop=False, describe=lambda task: "handler mail:send of queue mail"
    )

    def note(record: logging.LogRecord) -> bool:
        # Not from caplog, which gets the record only after this filter has woken the test.
        texts.append(record.getMessage())
        if "runs again" in record.msg:
            loop.call_soon_threadsafe(runs_again.set)
        elif "has blocked the event loop" in record.msg:
            warned.set()
        return True

    log = logging.getLogger("marq.watchdog")
    monkeypatch.setattr(log, "filters", [*log.filters, note])
    await dog.start()

    # The event loop waits for its watchdog.
    assert warned.wait(SIGNAL_SECONDS)
    async with asyncio.timeout(SIGNAL_SECONDS):
        await runs_again.wait()
    await dog.stop()

    assert "the event loop runs again: handler mail:send of queue mail blocked it" in "\n".join(texts)
    assert not ended.is_set()


async def test_suspended_time_does_not_count(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    """An hour passes between two samples: the process or the machine was suspended."""
    looks = threading.Semaphore(0)
    clock(monkeypatch, 3600.0)
    dog = Watchdog(3600.0, dict, work_waits)
    look = dog._stillness.look

    def counted(*arguments: object) -> str:
        looks.release()
        return look(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dog._stillness, "look", counted)
    await dog.start()
    for _ in range(5):
        assert looks.acquire(timeout=SIGNAL_SECONDS)
    await dog.stop()

    assert not ended.is_set()


async def test_a_defect_in_what_is_said_is_logged_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "SAY_SECONDS", 0.0)

    def defect() -> dict[Hashable, ProgressReport]:
        raise RuntimeError("nobody knows")

    dog = Watchdog(LOOK_SECONDS, defect, work_waits)
    await dog.start()
    for _ in range(10):
        await asyncio.sleep(0)
    await dog.stop()

    assert "the watchdog fails; it now checks only the event loop" in caplog.text
    assert dog._turns > 1
    assert not ended.is_set()


async def test_a_stopped_watchdog_ends_no_process(monkeypatch: pytest.MonkeyPatch, ended: threading.Event) -> None:
    clock(monkeypatch, 1.0)
    dog = Watchdog(0.001, dict, work_waits)
    await dog.stop()
    dog._watch(BlockedLoop())

    assert not ended.is_set()


async def test_a_defect_in_a_check_is_logged_and_the_next_checks_follow(
    monkeypatch: pytest.MonkeyPatch, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    clock(monkeypatch, 1.0)
    monkeypatch.setattr(watchdog, "SAY_SECONDS", 0.001)
    answers = iter([AssertionError("Unrecognized partition")])

    def ask(subject: Hashable, standing: ProgressReport, last: bool) -> ProbeResult:
        for error in answers:
            raise error
        return ProbeResult.WORK_WAITS

    standings = {"markers partition 0": ProgressReport((7,), 7)}
    dog = Watchdog(0.02, lambda: standings, ask, watches_loop=False)
    await dog.start()

    assert await asyncio.to_thread(ended.wait, SIGNAL_SECONDS)
    await dog.stop()
    assert "a check of the watchdog failed" in caplog.text
    assert "markers partition 0 stalled" in caplog.text


@pytest.mark.parametrize("error", [AssertionError("Unrecognized partition"), asyncio.CancelledError()])
def test_a_probe_that_fails_unexpectedly_is_logged_and_counts_as_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    probe = BrokerProbe(ClientSettings())

    async def rebalance(_: str) -> ProbeResult:
        raise error

    monkeypatch.setattr(BrokerProbe, "_rebalance", lambda _, group: rebalance(group))

    assert probe.ask(Rebalance("g"), ProgressReport((7,), 7), False) is ProbeResult.AWAY
    assert "its probe failed unexpectedly" in caplog.text
