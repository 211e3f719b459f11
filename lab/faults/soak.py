"""``python -m lab.faults.soak --minutes N``: a long run under steady load, with a random fault each minute.

Memory, open files, unfinished messages and backlog are sampled each second. At the end the checker judges the whole
history. The samples must be bounded: the maximum of the last third must not be far above that of the first. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.program import Program, RunError, Worker
from lab.proof.checker import check
from lab.proof.findings import told
from lab.resources import memory_bytes, open_files
from lab.stage import LEASE_SECONDS, SESSION_SECONDS, Stage, recovery_seconds
from marq_worker.broker import EmbeddedBroker

RATE = 100
CONSUMERS, WORKERS = 2, 2
SECONDS_BETWEEN_FAULTS = 60.0
SAMPLE_SECONDS = 1.0
#: How much more the last third may have than the first: a factor, and a constant on top.
GROWTH = 1.5
SLACK = {"worker_mib": 50.0, "consumer_mib": 50.0, "broker_mib": 200.0, "files": 100.0, "open": 500.0, "backlog": 500.0}


@dataclass(frozen=True)
class Sample:
    """The state of the run at one moment; of each kind of process, the largest one."""

    seconds: float
    worker_mib: float
    consumer_mib: float
    broker_mib: float
    #: Open files of the process that has the most, except the broker.
    files: int
    #: Open leases, and accepted messages that no consumer has received yet.
    open: int
    backlog: int


class Soak:
    """One run."""

    def __init__(self, stage: Stage, broker: EmbeddedBroker, seed: int) -> None:
        self._stage = stage
        self._broker = broker
        self._random = random.Random(seed)
        self.samples: list[Sample] = []
        self.faults: list[tuple[float, str]] = []
        self._began_s = time.monotonic()
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "consumer killed": self._kill_consumer,
            "consumer paused": self._pause_consumer,
            "worker killed": self._kill_worker,
            "worker paused": self._pause_worker,
            "worker restarted": self._restart_worker,
            "broker killed": self._kill_broker,
            "broker paused": self._pause_broker,
        }

    async def play(self, minutes: float) -> None:
        """Do everything until the load has ended."""
        for _ in range(WORKERS):
            await self._stage.worker()
        self._stage.load(RATE)
        for _ in range(CONSUMERS):
            await self._stage.consumer()
        sampling = asyncio.create_task(self._sample())
        self._began_s = time.monotonic()
        until_s = self._began_s + minutes * 60
        try:
            while (left_s := until_s - time.monotonic()) > SECONDS_BETWEEN_FAULTS / 2:
                await self._stage.play(min(SECONDS_BETWEEN_FAULTS / 2, left_s))
                name = self._random.choice(list(self._faults))
                self.faults.append((time.monotonic() - self._began_s, name))
                print(f"{self.faults[-1][0]:6.0f} s  {name}", flush=True)
                next_s = time.monotonic() + SECONDS_BETWEEN_FAULTS / 2
                await self._faults[name]()
                await self._stage.play(max(0, next_s - time.monotonic()))
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _consumer(self) -> Program:
        return self._random.choice([each for each in self._stage.consumers if each.running])

    def _worker(self) -> Worker:
        return self._random.choice([each for each in self._stage.workers if each.running])

    async def _kill_consumer(self) -> None:
        await self._stage.kill(self._consumer())
        await self._stage.consumer()

    async def _pause_consumer(self) -> None:
        await self._stage.pause(self._consumer(), self._random.uniform(1, 4 * LEASE_SECONDS))

    async def _kill_worker(self) -> None:
        worker = self._worker()
        await self._stage.kill(worker)
        await self._stage.worker(data=worker.data)

    async def _pause_worker(self) -> None:
        await self._stage.pause(self._worker(), self._random.uniform(1, 2 * SESSION_SECONDS))
        await self._stage.owned()

    async def _restart_worker(self) -> None:
        worker = self._worker()
        await self._stage.stop(worker)
        await self._stage.worker(data=worker.data)

    async def _kill_broker(self) -> None:
        with self._stage.fault("cut", "*"):
            await asyncio.to_thread(self._broker.kill)
            await asyncio.to_thread(self._broker.start)
            await self._stage.owned()

    async def _pause_broker(self) -> None:
        with self._stage.fault("cut", "*"):
            self._broker.pause()
            await self._stage.play(self._random.uniform(1, 10))
            self._broker.resume()
            await self._stage.owned()

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            stage = self._stage
            workers = [each.pid for each in stage.workers if each.running]
            consumers = [each.pid for each in stage.consumers if each.running]
            broker = self._broker.pid
            partitions = await stage.partitions()
            self.samples.append(
                Sample(
                    round(time.monotonic() - self._began_s, 1),
                    max(map(_mib, workers), default=0.0),
                    max(map(_mib, consumers), default=0.0),
                    _mib(broker) if broker is not None else 0.0,
                    max(map(open_files, [*workers, *consumers]), default=0),
                    sum(part["unfinished"] for part in partitions),
                    stage.accepted - stage.received,
                )
            )
            await asyncio.sleep(SAMPLE_SECONDS)


def _mib(pid: int) -> float:
    return round(memory_bytes(pid) / (1 << 20), 1)


def unbounded(samples: Sequence[Sample]) -> list[str]:
    """Return the samples that grew from the first third of the run to the last by more than allowed."""
    third = len(samples) // 3
    found = []
    for name, slack in SLACK.items():
        first = max((getattr(sample, name) for sample in samples[:third]), default=0.0)
        last = max((getattr(sample, name) for sample in samples[-third:]), default=0.0)
        if last > first * GROWTH + slack:
            found.append(f"{name} grew from {first:g} to {last:g}")
    return found


async def run(minutes: float, seed: int) -> dict[str, object]:
    """Play and check.

    Raises:
        RunError: it could not be played to its end.
    """
    folder = Path(tempfile.mkdtemp(prefix="marq-soak-"))
    with EmbeddedBroker() as broker:
        async with Stage(broker.bootstrap_servers, folder) as stage:
            soak = Soak(stage, broker, seed)
            await soak.play(minutes)
            await stage.finish()
    report = check(stage.events)
    if report.findings:
        stage.write(folder / "history.jsonl")
        print("\n".join(told(report.findings[:5], stage.events)), f"\nsee {folder}")
    else:
        stage.forget()
    grown = unbounded(soak.samples)
    top = {name: max(asdict(sample)[name] for sample in soak.samples) for name in SLACK}
    statistics = report.summary()
    wanted = ("accepted", "lost", "duplicates", "causes", "violations", "redelivered", "dead")
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "minutes": minutes,
        "seed": seed,
        "faults": len(soak.faults),
        **{name: statistics[name] for name in wanted},
        "highest": top,
        "unbounded": grown,
        "recovery_seconds": recovery_seconds(stage.events),
        "passed": not report.findings and not grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None, help="which faults come (default: by chance)")
    given = parser.parse_args()
    # The outages are intended.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    try:
        found = asyncio.run(run(given.minutes, seed))
    except RunError as error:
        print(f"error: seed {seed}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
