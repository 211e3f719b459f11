"""What happens to clocks: the wall clock of a consumer, a worker or the broker jumps ahead and back."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker import EmbeddedBroker
from faults.clocks import MOVE_SECONDS, Clock
from faults.scenario import AtBroker, Scenario
from faults.stage import LEASE_SECONDS, Stage
from proof.causes import EVERYBODY

#: Messages before, between and after faults.
SOME = 300
AHEAD_SECONDS, BACK_SECONDS = 7200.0, -3600.0
#: Long enough for leases to be taken and to end by the new clock.
STAY_SECONDS = 2 * LEASE_SECONDS


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
    """Move a clock, and let messages pass by it."""
    stage.note("info", "clock", target=target, seconds=seconds)
    clock.move(seconds)
    await stage.play(MOVE_SECONDS + STAY_SECONDS)
    await stage.delivered_more(SOME)


async def of_a_consumer(stage: Stage, _: Any) -> None:
    """No clock of a client is ever compared with another."""
    clock = Clock(stage.folder / "clock")
    await stage.worker()
    stage.load()
    await stage.consumer()
    moved = await stage.consumer(**clock.environment)
    await stage.delivered_more(SOME)
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, moved.name)
    # One that is wrong from its start, and leaves messages behind.
    victim = await stage.consumer(**clock.environment)
    await stage.delivered_more(SOME)
    await stage.kill(victim)
    await stage.delivered_more(SOME)


async def of_a_worker(stage: Stage, _: Any) -> None:
    """Its tables keep times, too: it comes back to them by a clock that is an hour behind."""
    clock = Clock(stage.folder / "clock")
    worker = await stage.worker(**clock.environment)
    stage.load()
    await stage.consumer()
    await stage.delivered_more(SOME)
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, worker.name)
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data, **clock.environment)
        await stage.delivered_more(SOME)


async def of_the_broker_ahead(stage: Stage, here: MovableBroker) -> None:
    """What is acquired or released between the jump and the next TICK comes back by so much too late.

    So the same time goes by once more, for everybody: while no worker runs, nobody can tell it from a jump.
    """
    await of_the_broker(stage, here, AHEAD_SECONDS)
    [worker] = stage.workers
    await stage.stop(worker)
    await move(stage, here.clock, 2 * AHEAD_SECONDS, EVERYBODY)
    await stage.worker(data=worker.data)
    await stage.delivered_more(SOME)


async def of_the_broker_back(stage: Stage, here: MovableBroker) -> None:
    await of_the_broker(stage, here, BACK_SECONDS)


async def of_the_broker(stage: Stage, here: MovableBroker, seconds: float) -> None:
    """It stamps all markers, so it is the one clock that leases go by."""
    await stage.worker()
    stage.load()
    await stage.consumer()
    victim = await stage.consumer()
    await stage.delivered_more(SOME)
    await move(stage, here.clock, seconds, EVERYBODY)
    # What it held must come back although time has jumped.
    await stage.kill(victim)
    await stage.delivered_more(SOME)


_STEPS = f"by {AHEAD_SECONDS / 3600:+.0f} h, then by {BACK_SECONDS / 3600:+.0f} h"

SCENARIOS = [
    Scenario(
        "consumer-clock-moved",
        f"the wall clock of a consumer is moved {_STEPS}; another one starts with it and is killed",
        "nothing",
        of_a_consumer,
    ),
    Scenario(
        "worker-clock-moved",
        f"the wall clock of the only worker is moved {_STEPS}; each time it is killed and comes back",
        "nothing; redelivery stands still while there is no worker",
        of_a_worker,
    ),
    Scenario(
        "broker-clock-ahead",
        f"the wall clock of the broker is moved by {AHEAD_SECONDS / 3600:+.0f} h; then a consumer is killed",
        "an alarm (`clock_jump_ms`); what was acquired or released at that moment comes back by so much later",
        of_the_broker_ahead,
        movable_broker,
    ),
    Scenario(
        "broker-clock-back",
        f"the wall clock of the broker is moved by {BACK_SECONDS / 3600:+.0f} h; then a consumer is killed",
        "an alarm (`clock_jump_ms`)",
        of_the_broker_back,
        movable_broker,
    ),
]
