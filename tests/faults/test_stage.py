"""A stage waits for its processes, also for those that are told to kill themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lab.faults import stage as stages
from lab.faults.stage import Stage
from lab.rig.program import RigError
from lab.rig.recorder import Recorded
from lab.rig.worker import Worker

#: No broker answers there.
SERVERS = "127.0.0.1:1"


class Killed(Recorded):
    """A process that dies at once, before it records anything."""

    code = "import os; os.kill(os.getpid(), 9)"

    def __init__(
        self, name: str, _: object, options: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        super().__init__(name, ["-c", self.code, *options], environment, folder / f"{name}.log")

    def owned(self) -> dict[int, dict[str, object]]:
        """Return no partitions."""
        return {}


class Ended(Killed):
    """A process that ends by itself."""

    code = "raise SystemExit(1)"


async def test_a_worker_that_dies_as_told_before_its_partitions_are_seen_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "WorkerProcess", Killed)
    async with Stage(SERVERS, tmp_path) as stage:
        worker = await stage.worker("--die-in-transaction=1")

        assert worker.has_killed_itself


async def test_a_consumer_that_dies_as_told_before_it_is_ready_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "ConsumerProcess", Killed)
    async with Stage(SERVERS, tmp_path) as stage:
        consumer = await stage.consumer("--die-at=before-acquire")

        assert consumer.has_killed_itself


def test_a_delivery_gets_the_time_of_the_log_unless_the_brokers_clock_is_moving(tmp_path: Path) -> None:
    stage = Stage(SERVERS, tmp_path)
    now_ms = time.monotonic() * 1000
    stage.move_brokers_clock(3600, 2)

    for later_ms in (-1000, 1000, 3000):
        stage.take({"process": "c", "type": "ok", "op": "deliver", "attempt": 1, "at_ms": now_ms + later_ms})

    before, moving, after = [event.get("time_ms") for event in stage.events if event["op"] == "deliver"]
    assert moving is None
    assert after - before == pytest.approx(4000 + 3_600_000, abs=50)


@pytest.mark.parametrize(("process", "options"), [(Killed, []), (Ended, ["--die-in-transaction=1"])])
async def test_any_other_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: type[Killed], options: list[str]
) -> None:
    monkeypatch.setattr(stages, "WorkerProcess", process)
    async with Stage(SERVERS, tmp_path) as stage:
        with pytest.raises(RigError, match="worker-1 ended by itself"):
            await stage.worker(*options)


def test_a_wait_for_a_worker_that_has_died_ends_with_its_exit_code_and_log(tmp_path: Path) -> None:
    worker = Worker("worker", tmp_path, {}, command=["-c", "raise SystemExit('no such setting')"])
    with worker, pytest.raises(RigError, match=r"exit code 1:(.|\n)*no such setting"):
        worker.wait_until_owner()
