"""Measures how a worker with a great many open leases recovers: ``python -m bench.recovery --leases 1000000``.

A real worker gets the leases, and kill -9 three times: it is started again with its data, and without; and at last a
second worker that ran beside it takes over. *Firing again* is when a copy of an overdue message of each markers
partition was read from the messages topic. The bars are those of the project's proof; the worst of all runs counts.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from rich.console import Console

from bench.bars import Bar, show
from bench.leases import Copies, Opener, copies, opener
from bench.load import QUEUE
from bench.result import write_result
from bench.worker import BenchWorker
from broker import EmbeddedBroker
from config.settings import load_settings
from marq.core.names import Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics

MAX_MEMORY_MIB = 700
RESTART_SECONDS = 5.0
REBUILD_SECONDS = 30.0
TAKEOVER_SECONDS = 2.0

#: Overdue messages of each partition, and how long their leases are.
PROBES = 10
PROBE_LEASE_MS = 4_000
#: How long the changelog must stand still to be complete: longer than a flush.
QUIET_SECONDS = 2.0
#: How long anything may take before the run is given up.
LIMIT_SECONDS = 600.0

_COPIED = re.compile(r"local copies of .* up to date")
_OWNED = re.compile(r"owner of markers partition (\d+)")


@dataclass(frozen=True)
class Size:
    """``leases`` with payloads of ``value_bytes``, in ``partitions``; each kill is done ``runs`` times."""

    leases: int = 1_000_000
    value_bytes: int = 200
    partitions: int = 4
    runs: int = 1


@dataclass
class Recovery:
    """One installation with its open leases."""

    servers: str
    folder: Path
    size: Size
    session_timeout: float
    opener: Opener
    copies: Copies
    names: Names
    say: Callable[[str], None]
    figures: dict[str, list[float]] = field(default_factory=dict)
    opened: int = 0
    _running: list[BenchWorker] = field(default_factory=list)

    def _note(self, **figures: float) -> None:
        for name, figure in figures.items():
            self.figures.setdefault(name, []).append(figure)
        self.say(", ".join(f"{name.replace('_', ' ')}: {figure:.2f}" for name, figure in figures.items()))

    def _note_memory(self, name: str, worker: BenchWorker) -> None:
        self._note(
            **{f"{name}_peak_mib": worker.memory("VmHWM") / 2**20, f"{name}_mib": worker.memory("VmRSS") / 2**20}
        )

    async def measure(self) -> None:
        worker = self._start()
        await asyncio.to_thread(worker.wait_until_owner)
        began = time.monotonic()
        await self.opener.open(0, self.size.leases)
        self.opened = self.size.leases
        await self._wait_until_written(worker)
        self._note(opened_per_second=self.size.leases / (time.monotonic() - began))
        self._note_memory("opened", worker)
        for _ in range(self.size.runs):
            worker = await self._kill_and_restart("restart", worker, lose=False)
        for _ in range(self.size.runs):
            worker = await self._kill_and_restart("rebuild", worker, lose=True)
        for turn in range(self.size.runs):
            worker = await self._take_over(worker, f"standby-{turn}")

    def close(self) -> None:
        """End the workers that run: what they had to say was said."""
        for worker in tuple(self._running):
            self._kill(worker)

    def _start(self, machine: str = "first") -> BenchWorker:
        worker = BenchWorker(self.servers, self.names.prefix, self.folder, machine)
        self._running.append(worker)
        return worker

    def _kill(self, worker: BenchWorker) -> None:
        worker.kill()
        self._running.remove(worker)

    async def _kill_and_restart(self, name: str, worker: BenchWorker, *, lose: bool) -> BenchWorker:
        probes, due = await self._open_probes(worker)
        self._kill(worker)
        if lose:
            shutil.rmtree(worker.data)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        worker = self._start()
        owner, (first, last) = await asyncio.gather(
            self._owner_of_all(worker), self.copies.all_of(probes, LIMIT_SECONDS)
        )
        self._note(
            **{
                f"{name}_owner_seconds": owner - began,
                f"{name}_first_copy_seconds": first - began,
                f"{name}_firing_seconds": last - began,
                f"{name}_cpu_seconds": worker.cpu_seconds(),
            }
        )
        self._note_memory(name, worker)
        return worker

    async def _take_over(self, worker: BenchWorker, machine: str) -> BenchWorker:
        standby = self._start(machine)
        await self._wait_until_shared(standby)
        probes, due = await self._open_probes(standby)
        self._kill(worker)
        killed = time.monotonic()
        assert killed < due, "the leases of the probes ended before the kill"
        _, last = await self.copies.all_of(probes, LIMIT_SECONDS)
        self._note(takeover_seconds=last - killed, takeover_over_session_seconds=last - killed - self.session_timeout)
        self._note_memory("takeover", standby)
        return standby

    async def _open_probes(self, worker: BenchWorker) -> tuple[range, float]:
        """Open a few leases of each partition that end soon; return the messages, and when they are overdue."""
        numbers = range(self.opened, self.opened + PROBES * self.size.partitions)
        await self.opener.open(numbers.start, len(numbers), PROBE_LEASE_MS, batch=PROBES)
        due = time.monotonic() + PROBE_LEASE_MS / 1000
        self.opened += len(numbers)
        # Their rows are to be in the table, too: that takes one flush.
        await asyncio.sleep(QUIET_SECONDS)
        return numbers, due

    # --- what is waited for -------------------------------------------------------------------------------------------

    async def _wait_until_written(self, worker: BenchWorker) -> None:
        """Return when the book has all messages, and the changelog has stood still for longer than a flush."""
        await self._until(
            lambda: worker.figures().get("queues", {}).get(QUEUE, {}).get("in_flight") == self.opened, pause=1.0
        )
        consumer = AIOKafkaConsumer(bootstrap_servers=self.servers)
        await consumer.start()
        try:
            before: object = None
            while (ends := await consumer.end_offsets(self._changelog())) != before:
                before = ends
                await asyncio.sleep(QUIET_SECONDS)
        finally:
            await consumer.stop()

    def _changelog(self) -> list[TopicPartition]:
        return [TopicPartition(self.names.changelog, partition) for partition in range(self.size.partitions)]

    async def _owner_of_all(self, worker: BenchWorker) -> float:
        await self._until(lambda: len(set(_OWNED.findall(worker.log()))) == self.size.partitions, pause=0.02)
        return time.monotonic()

    async def _wait_until_shared(self, standby: BenchWorker) -> None:
        """Return when both workers own partitions, and the standby has copies of those that it may take over."""

        def shared() -> bool:
            found = [worker["partitions"] for worker in standby.figures().get("workers", [])]
            owners = [part for parts in found for part in parts if part["state"] == "owner"]
            return len(found) == 2 and all(found) and len(owners) == self.size.partitions

        await self._until(shared, pause=1.0)
        await self._until(lambda: bool(_COPIED.search(standby.log())), pause=0.1)

    async def _until(self, fits: Callable[[], bool], *, pause: float) -> None:
        until = time.monotonic() + LIMIT_SECONDS
        while not await asyncio.to_thread(fits):
            if time.monotonic() > until:
                raise SystemExit(f"bench: not within {LIMIT_SECONDS} s; the logs: {self.folder}")
            await asyncio.sleep(pause)


def bars(figures: Mapping[str, list[float]], session_timeout: float) -> list[Bar]:
    """Return what is asked of a recovery, each by the worst of its runs."""
    memory = max(max(found) for name, found in figures.items() if name.endswith("_peak_mib"))
    return [
        Bar("memory of a worker, at the most", memory, MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: firing after", max(figures["restart_firing_seconds"]), RESTART_SECONDS, "s"),
        Bar("data lost: firing after", max(figures["rebuild_firing_seconds"]), REBUILD_SECONDS, "s"),
        Bar("standby: firing after", max(figures["takeover_seconds"]), session_timeout + TAKEOVER_SECONDS, "s"),
    ]


async def measure(
    servers: str, folder: Path, size: Size, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], list[Bar]]:
    """Measure on a broker that is there; return the figures of each run, and the bars."""
    session_timeout = load_settings().session_timeout
    prefix = f"recovery{int(time.time())}"
    client = ClientSettings.read(servers, {"prefix": prefix, "partitions": size.partitions}, environment={})
    await ensure_topics(client, changelog=True)
    writing = opener(servers, client.names, size.partitions, size.value_bytes)
    async with writing as leases, copies(servers, client.names, size.partitions) as found:
        recovery = Recovery(servers, folder, size, session_timeout, leases, found, client.names, say)
        try:
            await recovery.measure()
        finally:
            recovery.close()
    return recovery.figures, bars(recovery.figures, session_timeout)


def read_size() -> Size:
    default = Size()
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description="How workers recover, measured.")
    parser.add_argument("--leases", type=int, default=default.leases)
    parser.add_argument("--payload", type=int, default=default.value_bytes, help="bytes of each message's value")
    parser.add_argument("--partitions", type=int, default=default.partitions, help="of both topics")
    parser.add_argument("--runs", type=int, default=default.runs, help="kills of each kind; the worst one counts")
    given = parser.parse_args()
    return Size(given.leases, given.payload, given.partitions, given.runs)


def main() -> None:
    size, console = read_size(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder:
        broker = EmbeddedBroker(heap="1g").start()
        try:
            say = partial(console.print, highlight=False)
            figures, judged = asyncio.run(measure(broker.bootstrap_servers, Path(folder), size, say))
        finally:
            broker.close()
    show(figures, judged, console)
    met = [{**asdict(bar), "met": bar.met} for bar in judged]
    write_result({"size": asdict(size), "figures": figures, "bars": met}, "recovery-")
    sys.exit(not all(bar.met for bar in judged))


if __name__ == "__main__":
    main()
