"""Histories of programs, read while they grow, and after kill -9."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path

import pytest

from lab.cpu_waits import is_stall, recorded_stalls
from lab.program import Program, RunError
from lab.proof.history import History
from lab.recorder import Recorder

#: Records a thousand events and then kills itself.
PROGRAM = """
import sys
from pathlib import Path
from lab.recorder import Recorder
recorder = Recorder("one", Path(sys.argv[1]))
for number in range(1000):
    recorder.add("ok", "deliver", number=number)
recorder.die()
"""


def block() -> None:
    """Block the event loop with a call that waits."""
    time.sleep(0.15)


def program(folder: Path, *options: str) -> Program:
    return Program("one", ["-c", PROGRAM, str(folder / "one.jsonl"), *options], {}, folder / "one.log")


def test_new_events_are_returned_once(tmp_path: Path) -> None:
    reading, recorder = program(tmp_path), Recorder("one", tmp_path / "one.jsonl")

    recorder.add("ok", "deliver", number=1)
    first, second = reading.new_events(), reading.new_events()
    recorder.add("ok", "deliver", number=2)
    third = reading.new_events()

    assert [[event["number"] for event in events] for events in (first, second, third)] == [[1], [], [2]]


def test_a_line_that_is_not_written_to_its_end_waits(tmp_path: Path) -> None:
    reading = program(tmp_path)
    assert reading.new_events() == []

    reading.history.write_text('{"number": 1}\n{"num')
    first = reading.new_events()
    with reading.history.open("a") as file:
        file.write('ber": 2}\n')
    second = reading.new_events()

    assert (first, second) == ([{"number": 1}], [{"number": 2}])


@pytest.mark.parametrize(
    ("late_s", "wait_s", "stall"),
    [(1.2, 1.2, True), (1.2, 0.5, False), (1.2, 0.0, False), (0.5, 0.5, False)],
    ids=["no CPU", "busy itself", "a blocking call", "short"],
)
def test_a_late_check_is_a_stall_if_leases_may_have_ended_and_the_machine_gave_the_process_no_cpu(
    late_s: float, wait_s: float, stall: bool
) -> None:
    assert is_stall(late_s, wait_s, lease_s=3.0) is stall


async def test_a_blocking_handler_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    told, readings = History(), list[float]()

    def waited_s() -> float:
        # The kernel counts no wait for a thread that sleeps.
        readings.append(7.0)
        return 7.0

    monkeypatch.setattr("lab.cpu_waits.waited_s", waited_s)

    async with recorded_stalls("one", lambda *event, **fields: told.add("one", *event, **fields), lease_s=0.1):
        # Each check takes two.
        while len(readings) < 4:
            await asyncio.sleep(0)
            block()

    assert told.events == []


async def first_pause(lease_s: float) -> list[tuple[str, str, object]]:
    """Return the two events of the first pause that is recorded."""
    told, recorded = list[tuple[str, str, object]](), asyncio.Event()

    def add(type_: str, op: str, *, target: str, **_: object) -> None:
        told.append((op, type_, target))
        if type_ == "ok":
            recorded.set()

    async with recorded_stalls("one", add, lease_s):
        await recorded.wait()
    return told[:2]


PAUSE = [("pause", "invoke", "one"), ("pause", "ok", "one")]


async def test_waits_are_recorded_although_each_turn_of_the_event_loop_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = itertools.count(step=0.5)
    monkeypatch.setattr("lab.cpu_waits.waited_s", lambda: next(waits))
    monkeypatch.setattr("lab.cpu_waits._CHECK_INTERVAL_S", 0.0)

    assert await first_pause(lease_s=600.0) == PAUSE


async def test_a_stall_is_recorded_as_a_pause_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.cpu_waits.is_stall", lambda *_: True)

    assert await first_pause(lease_s=3.0) == PAUSE


def test_events_outlive_kill_9(tmp_path: Path) -> None:
    with program(tmp_path, "--die") as dying:
        dying.wait(60)

        *events, kill = dying.new_events()
        dying.check()  # as it was told to

    assert dying.exit_code == -signal.SIGKILL
    assert [event["number"] for event in events] == list(range(1000))
    assert kill["op"] == "kill"


def test_a_program_that_dies_untold_is_reported_with_its_log(tmp_path: Path) -> None:
    with program(tmp_path) as dying:
        dying.wait(60)

        with pytest.raises(RunError, match=r"one ended by itself, exit code -9"):
            dying.check()
