"""When a blocked event loop is logged, and what the log says: with a clock of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from marq_worker.watchdog.blocked_loop import BLOCKED_SECONDS, BlockedLoop

SIGNAL_SECONDS = 30.0


@pytest.fixture
def blocked() -> Iterator[BlockedLoop]:
    """An event loop in a thread; a coroutine blocks it until the end of the test."""
    loops: list[BlockedLoop] = []
    begun, release = threading.Event(), threading.Event()

    async def block_the_loop() -> None:
        loops.append(BlockedLoop())
        begun.set()
        release.wait()

    thread = threading.Thread(target=lambda: asyncio.run(block_the_loop()))
    thread.start()
    assert begun.wait(SIGNAL_SECONDS)
    yield loops[0]
    release.set()
    thread.join(SIGNAL_SECONDS)
    assert not thread.is_alive()


def test_a_blocked_loop_is_logged_once_with_its_stack_and_once_when_it_runs_again(
    blocked: BlockedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    blocked.look(1, 1.0)
    for _ in range(50):
        blocked.look(1, 1.0)
    blocked.look(2, 1.0)
    blocked.look(3, 1.0)

    warning, end = [record.getMessage() for record in caplog.records]
    assert "block_the_loop) has blocked the event loop for 2 s. " in warning
    assert "asyncio.to_thread" in warning
    first, _ = warning.partition("most recent call last:\n")[2].split("\n", 1)
    assert first.endswith("in block_the_loop"), "the frames that run the event loop tell nothing"
    assert "the event loop runs again: task " in end
    assert end.endswith("blocked it for 50 s")


def test_a_second_blockage_is_logged_too(blocked: BlockedLoop, caplog: pytest.LogCaptureFixture) -> None:
    for turns in (1, 2):
        for _ in range(4):
            blocked.look(turns, 1.0)

    assert sum("has blocked the event loop for" in record.getMessage() for record in caplog.records) == 2


def test_a_loop_that_runs_again_soon_or_was_suspended_with_its_process_is_not_logged(
    blocked: BlockedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    blocked.look(1, 1.0)
    blocked.look(1, BLOCKED_SECONDS - 0.1)
    blocked.look(2, 1.0)
    # After a suspension, the watchdog's thread may run before the event loop.
    blocked.look(2, BLOCKED_SECONDS)
    blocked.look(3, 1.0)

    assert not caplog.records


def test_a_description_that_fails_does_not_fail_in_each_check(
    blocked: BlockedLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> str:
        raise RuntimeError("no session")

    monkeypatch.setattr(blocked, "_describe", fails)
    blocked.look(1, 1.0)
    blocked.look(1, 1.0)
    with pytest.raises(RuntimeError):
        blocked.look(1, 1.0)
    blocked.look(1, 1.0)
    blocked.look(2, 1.0)

    assert [record.getMessage() for record in caplog.records] == [
        "the event loop runs again: unknown code blocked it for 3 s"
    ]
