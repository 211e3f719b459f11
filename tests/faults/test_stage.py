"""A stage waits for its processes, also for those that are told to kill themselves."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError

from lab import stage as stages
from lab import topics
from lab.faults.scenarios import same_twice
from lab.program import Program, RunError, Worker
from lab.proof import history
from lab.proof.evidence import EVERYBODY
from lab.stage import ORDERED, QUEUE, Stage
from lab.topics import TopicScan

#: No broker answers there.
SERVERS = "127.0.0.1:1"


#: Processes that die at once, before they record anything: by kill -9, and by themselves.
KILLED, ENDED = "import os; os.kill(os.getpid(), 9)", "raise SystemExit(1)"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let all programs of the stage run some code instead."""

    def run(code: str) -> None:
        monkeypatch.setattr(stages, "recorded", lambda name, folder, module, options: ["-c", code, *options])

    return run


@pytest.mark.parametrize(("start", "point"), [(Stage.worker, "in-transaction"), (Stage.consumer, "before-acquire")])
async def test_a_program_that_dies_as_told_before_it_is_ready_is_not_waited_for(
    tmp_path: Path, runs: Callable[[str], None], start: Callable[..., Awaitable[Program]], point: str
) -> None:
    runs(KILLED)
    async with Stage(SERVERS, tmp_path) as stage:
        program = await start(stage, f"--die-at={point}")

        assert program.has_killed_itself


def test_the_checker_gets_the_settings_in_the_definitions_file(tmp_path: Path) -> None:
    stage = Stage(SERVERS, tmp_path)
    stage.define(own="delay = 1.5\nlimits = { concurrency = 8 }\n", max_attempts=3)

    told = stage.events[-1]["queues"]
    plain, ordered = told[QUEUE], told[ORDERED]
    assert (plain["max_attempts"], plain["backoff"], plain["delay_ms"]) == (3, [100, 2, 200, True, ()], 1_500)
    assert [(its["ordering"], its["by_key"]) for its in (plain, ordered)] == [("none", True), ("key", True)]
    assert (told[EVERYBODY]["max_attempts"], told[EVERYBODY]["by_key"]) == (5, False)


def test_a_delivery_gets_the_time_of_the_log_unless_the_brokers_clock_is_moving(tmp_path: Path) -> None:
    stage = Stage(SERVERS, tmp_path)
    now_ms = time.monotonic() * 1000
    stage.move_brokers_clock(3600, 2)

    for later_ms in (-1000, 1000, 3000):
        stage.take({"process": "c", "type": "ok", "op": "deliver", "attempt": 1, "at_ms": now_ms + later_ms})

    before, moving, after = [event.get("time_ms") for event in stage.events if event["op"] == "deliver"]
    assert moving is None
    assert after - before == pytest.approx(4000 + 3_600_000, abs=50)


def test_an_interruption_between_the_readings_of_two_clocks_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run, a delivery was dated 7 ms before an ack that it followed, which looked like a wrong order."""
    interruptions_s = iter([0.007, 0.0, 0.5])
    clock_s = 10.0

    def interrupted() -> float:
        nonlocal clock_s
        clock_s += next(interruptions_s)
        return clock_s + 1_000

    monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: clock_s, time=interrupted))

    assert history.wall_clock_ahead_s() == 1_000


@pytest.mark.parametrize(("code", "options"), [(KILLED, []), (ENDED, ["--die-at=in-transaction"])])
async def test_any_other_end_is_reported(
    tmp_path: Path, runs: Callable[[str], None], code: str, options: list[str]
) -> None:
    runs(code)
    async with Stage(SERVERS, tmp_path) as stage:
        with pytest.raises(RunError, match="worker-1 ended by itself"):
            await stage.worker(*options)


async def test_a_program_may_stop_before_another_one_with_its_instance_id_is_ready(
    tmp_path: Path, runs: Callable[[str], None]
) -> None:
    runs("import signal; print('another one has joined', flush=True); signal.pause()")

    async def another(stage: Stage) -> None:
        [former] = stage.consumers
        await stage.until(lambda: "joined" in former.log(), "the former one says why it stops")
        former.signal(signal.SIGTERM)
        await stage.until(lambda: not former.running, "the former one has stopped")

    async with Stage(SERVERS, tmp_path, partitions=0) as stage:
        consumer = await stage.consumer(ready=False)
        await same_twice("consumers", another)(stage)

        assert stage.events[-1]["target"] == consumer.name


def test_a_wait_for_a_worker_that_has_died_ends_with_its_exit_code_and_log(tmp_path: Path) -> None:
    worker = Worker("worker", tmp_path, {}, command=["-c", "raise SystemExit('no such setting')"])
    with worker, pytest.raises(RunError, match=r"exit code 1:(.|\n)*no such setting"):
        worker.wait_until_owned()


class Disconnected:
    """A Kafka client whose broker has died during a read: it returns nothing, and reports no error."""

    #: Whether it knows its position.
    positioned = True

    def __init__(self, *topics: str, **options: object) -> None:
        self.reads = 0

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition("topic", 0)}

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 5)

    async def position(self, partition: TopicPartition) -> int:
        if not self.positioned:
            await asyncio.Event().wait()
        return 3

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[object]]:
        self.reads += 1
        assert self.reads < 10, "endless reads"
        return {}


async def test_a_scan_ends_if_its_broker_dies_before_it_knows_its_position(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(topics, "STALLED_SECONDS", 0.0)
    monkeypatch.setattr(topics, "AIOKafkaConsumer", Disconnected)
    monkeypatch.setattr(Disconnected, "positioned", False)

    async with TopicScan(Stage(SERVERS, tmp_path).settings, "topic") as scan:
        with pytest.raises(KafkaTimeoutError, match="topic topic: no progress"):
            assert [record async for record in scan.to_end()] == []


async def test_a_scan_ends_if_its_broker_dies_while_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = itertools.count(step=topics.STALLED_SECONDS / 2)
    monkeypatch.setattr(topics, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(topics, "AIOKafkaConsumer", Disconnected)

    async with TopicScan(Stage(SERVERS, tmp_path).settings, "topic") as scan:
        with pytest.raises(KafkaTimeoutError, match="topic topic: no progress for 120 s"):
            assert [record async for record in scan.to_end()] == []
