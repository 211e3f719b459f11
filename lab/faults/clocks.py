"""Wrong wall clocks of consumers, workers and the broker; the monotonic clock stays correct.

Debian's libfaketime, loaded into the processes, reads the offset from a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.faults.scenario import AtBroker, ConditionError, scenario
from lab.proof.causes import EVERYBODY
from lab.stage import LEASE_SECONDS, Stage
from marq_worker.broker import EmbeddedBroker

#: Paths in Debian, Ubuntu and Fedora of the variant for multithreaded programs.
LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
#: Time within which a move takes effect.
MOVE_SECONDS = 1
AHEAD_SECONDS, BACK_SECONDS = 7200.0, -3600.0
#: Long enough for leases to begin and end by the new clock.
STAY_SECONDS = 2 * LEASE_SECONDS
_AHEAD, _BEHIND = f"{AHEAD_SECONDS / 3600:.0f} h ahead", f"{-BACK_SECONDS / 3600:.0f} h behind"


class Clock:
    """The wall clock of all processes that start with `environment`; correct until `move()`.

    Raises:
        ConditionError: libfaketime is not installed.
    """

    def __init__(self, file: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self._file = file
        self._library = _find(libraries)
        self.move(0)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for these processes."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # How often the file is read. Reading it at each call would take 5 us, and a JVM calls often.
            "FAKETIME_CACHE_DURATION": str(MOVE_SECONDS),
            # Durations come from the monotonic clock, which no machine sets.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # With its default, a JVM's timed waits return at once or never.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def move(self, seconds: float) -> None:
        """Set the clock this much ahead of the machine's, or behind it if negative."""
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}.new")
        new.write_text(f"{seconds:+f}\n", encoding="ascii")
        new.replace(self._file)  # atomic for readers


def _find(patterns: Sequence[str]) -> Path:
    for pattern in patterns:
        for library in sorted(Path("/").glob(pattern.lstrip("/"))):
            return library
    raise ConditionError(
        f"moving a process's clock needs libfaketime, which is not at {' or '.join(patterns)}: apt-get install faketime"
    )


@dataclass(frozen=True)
class MovableBroker(AtBroker):
    """A broker whose wall clock can be moved."""

    clock: Clock


@contextmanager
def movable_broker() -> Iterator[MovableBroker]:
    with tempfile.TemporaryDirectory(prefix="marq-clock-") as folder:
        clock = Clock(Path(folder) / "clock")
        with EmbeddedBroker(environment=clock.environment) as broker:
            yield MovableBroker(broker, clock)


async def move(stage: Stage, clock: Clock, seconds: float, target: str) -> None:
    """Move a clock, and let messages pass."""
    stage.note("info", "clock", target=target, seconds=seconds)
    if target == EVERYBODY:
        stage.move_brokers_clock(seconds, 2 * MOVE_SECONDS)
    clock.move(seconds)
    await stage.play(MOVE_SECONDS + STAY_SECONDS)
    await stage.delivered_more()


@scenario(
    "consumer-clock-moved",
    f"a consumer's wall clock is set {_AHEAD}, then {_BEHIND}; another consumer starts with the wrong clock and is"
    " killed",
    "no effect",
)
async def of_a_consumer(stage: Stage, _: Any) -> None:
    """Clocks of clients are never compared with others."""
    clock = Clock(stage.folder / "clock")
    await stage.worker()
    stage.load()
    await stage.consumer()
    moved = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, moved.name)
    # A consumer whose clock is wrong from the start, and which dies with messages in flight.
    victim = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    await stage.kill(victim)
    await stage.delivered_more()


@scenario(
    "worker-clock-moved",
    f"the only worker's wall clock is set {_AHEAD}, then {_BEHIND}; each time it is killed and restarted",
    "no effect, except that redelivery pauses while no worker runs",
)
async def of_a_worker(stage: Stage, _: Any) -> None:
    """Its tables contain times: it restarts with them and a clock that is an hour behind."""
    clock = Clock(stage.folder / "clock")
    worker = await stage.worker(**clock.environment)
    stage.load()
    await stage.consumer()
    await stage.delivered_more()
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, worker.name)
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data, **clock.environment)
        await stage.delivered_more()


async def of_the_broker(stage: Stage, here: MovableBroker, seconds: float) -> None:
    """It stamps all markers, so leases follow its clock alone."""
    await stage.begin()
    await move(stage, here.clock, seconds, EVERYBODY)
    # Its messages must return although time has jumped.
    await stage.kill(stage.consumers[-1])
    await stage.delivered_more()


@scenario(
    "broker-clock-ahead",
    f"the broker's wall clock is set {_AHEAD}; then a consumer is killed",
    "an alarm (`clock_jump_ms`); messages acquired or released at that moment are redelivered late by the size of the"
    " jump",
    movable_broker,
)
async def of_the_broker_ahead(stage: Stage, here: MovableBroker) -> None:
    """Messages that are acquired or released between the jump and the next TICK return late by the size of the jump.

    So the clock jumps once more, while no worker runs: then nothing can tell the jump from the passage of time.
    """
    await of_the_broker(stage, here, AHEAD_SECONDS)
    [worker] = stage.workers
    await stage.stop(worker)
    await move(stage, here.clock, 2 * AHEAD_SECONDS, EVERYBODY)
    await stage.worker(data=worker.data)
    await stage.delivered_more()


@scenario(
    "broker-clock-back",
    f"the broker's wall clock is set {_BEHIND}; then a consumer is killed",
    "an alarm (`clock_jump_ms`)",
    movable_broker,
)
async def of_the_broker_back(stage: Stage, here: MovableBroker) -> None:
    await of_the_broker(stage, here, BACK_SECONDS)
