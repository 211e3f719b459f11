"""A long run under steady load, with a random fault each minute: ``python -m lab.faults --soak MINUTES``.

It is a scenario like the others, in which memory, open files, unfinished messages and backlog must also be bounded.
They are sampled each second, and the maximum of the last third must not be far above that of the first.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from functools import partial

from lab.consumer import LEASE_SECONDS
from lab.faults.scenario import Scenario, Step, begin
from lab.faults.scenarios import consumer, down, end, require, then, worker
from lab.resources import memory_bytes, open_files
from lab.stage import SESSION_SECONDS, Stage
from marq_worker.broker import EmbeddedBroker

RATE = 100
SECONDS_BETWEEN_FAULTS = 60.0
SAMPLE_SECONDS = 1.0
#: How much more the last third may have than the first: a factor, and a constant on top. Memory and open files are
#: those of the largest process of each kind. Open are leases, and the backlog has accepted messages that no consumer
#: has received yet.
GROWTH = 1.5
SLACK = {"worker_mib": 50.0, "consumer_mib": 50.0, "broker_mib": 200.0, "files": 100.0, "open": 500.0, "backlog": 500.0}


def faults(chance: random.Random) -> dict[str, Step]:
    """Return the faults that may come next, by name."""
    return {
        "consumer killed": then(end("consumers", chance), consumer()),
        "consumer paused": end("consumers", chance, Stage.pause, chance.uniform(1, 4 * LEASE_SECONDS)),
        "worker killed": then(end("workers", chance), worker(again=True)),
        "worker paused": end("workers", chance, Stage.pause, chance.uniform(1, 2 * SESSION_SECONDS)),
        "worker restarted": then(end("workers", chance, Stage.stop), worker(again=True)),
        "broker killed": down(),
        "broker paused": down(chance.uniform(1, 10), EmbeddedBroker.pause, EmbeddedBroker.resume),
    }


class Soak:
    """The random faults of one run, and its samples."""

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        #: The state of the run at some moments.
        self._samples: list[dict[str, float]] = []

    async def play(self, stage: Stage) -> None:
        """Act in the middle of each minute."""
        print(f"seed {stage.seed}", flush=True)
        chance = random.Random(stage.seed)
        began_s = time.monotonic()
        sampling = asyncio.create_task(self._sample(stage))
        until_s = began_s + self._minutes * 60
        try:
            while (left_s := until_s - time.monotonic()) > SECONDS_BETWEEN_FAULTS / 2:
                await stage.play(min(SECONDS_BETWEEN_FAULTS / 2, left_s))
                name, fault = chance.choice([*faults(chance).items()])
                print(f"{time.monotonic() - began_s:6.0f} s  {name}", flush=True)
                next_s = time.monotonic() + SECONDS_BETWEEN_FAULTS / 2
                await then(fault, Stage.owned)(stage)
                await stage.play(max(0, next_s - time.monotonic()))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def _sample(self, stage: Stage) -> None:
        while True:
            workers = [program.pid for program in stage.workers if program.running]
            consumers = [program.pid for program in stage.consumers if program.running]
            partitions = await stage.partitions()
            self._samples.append(
                {
                    "worker_mib": max(map(_mib, workers), default=0.0),
                    "consumer_mib": max(map(_mib, consumers), default=0.0),
                    "broker_mib": _mib(stage.place.pid) if stage.place.pid is not None else 0.0,
                    "files": max(map(open_files, [*workers, *consumers]), default=0),
                    "open": sum(part["unfinished"] for part in partitions),
                    "backlog": stage.accepted_by.total() - stage.received,
                }
            )
            await asyncio.sleep(SAMPLE_SECONDS)

    async def is_bounded(self, stage: Stage) -> None:
        """Print the highest samples; raise RunError if some grew."""
        print(json.dumps({name: max((sample[name] for sample in self._samples), default=0.0) for name in SLACK}))
        require(not (grown := unbounded(self._samples)), "; ".join(grown))


def _mib(pid: int) -> float:
    return round(memory_bytes(pid) / (1 << 20), 1)


def unbounded(samples: Sequence[dict[str, float]]) -> list[str]:
    """Return the samples that grew from the first third of the run to the last by more than allowed."""
    third = len(samples) // 3
    grown = []
    for name, slack in SLACK.items():
        first = max((sample[name] for sample in samples[:third]), default=0.0)
        last = max((sample[name] for sample in samples[-third:]), default=0.0)
        if last > first * GROWTH + slack:
            grown.append(f"{name} grew from {first:g} to {last:g}")
    return grown


def soak(minutes: float) -> Scenario:
    run = Soak(minutes)
    setup = begin(workers=2, load=partial(Stage.send, rate=RATE), some=0)
    return Scenario("soak", [run.play], setup, EmbeddedBroker, run.is_bounded, some=0)
