"""Measures the two ways to start messages: ``python -m bench.starts``. What a transaction saves, costs, and delays.

*kills*: a consumer under a steady load is killed (kill -9) at random moments and started again; both ways at a time,
each with a worker of its own. *drain*: throughput, one way after the other, medians. *delays*: how late redeliveries
of another queue are while the transaction of a dead process is open in their markers partitions.

The figures of a machine that does other things, too, are those of that machine: the load is noted beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from rich.console import Console
from rich.table import Table

import marq
from bench.load import QUEUE
from bench.result import write_result
from bench.rows import drain
from bench.settings import Size
from bench.start_process import CONNECT_TIMEOUT_S, command, transactions
from bench.suite import Bench, Figures
from bench.worker import BenchWorker
from broker import EmbeddedBroker
from marq.core.marker_codec import decode
from marq.core.markers import Acquire
from marq.core.names import Names
from marq.starts import MARKED, STARTS, TRANSACTIONAL

Say = Callable[[str], None]

#: The load: so many messages, so often that a consumer is always at work, and a kill may meet it at any step.
BURST, BURST_S = 10, 0.005
#: A kill comes so many seconds after the consumer has handled something.
KILL_AFTER_S = (0.2, 1.2)
#: Redeliveries that are looked at in each round, and their leases.
PROBES, PROBE_LEASE_S = 40, 1.0
#: How long anything may take before the run is given up.
LIMIT_S = 300.0


@dataclass(frozen=True)
class Extent:
    """How much is measured; ``leases``: in seconds, of the consumers that are killed."""

    kills: int = 20
    leases: tuple[float, ...] = (2.0, 30.0)
    messages: int = 200_000
    runs: int = 5
    rounds: int = 5
    only: frozenset[str] = frozenset(("kills", "drain", "delays"))


async def until(condition: Callable[[], Awaitable[bool]], pause_s: float = 0.05) -> None:
    """Return when something is so.

    Raises:
        TimeoutError: it was not within the limit.
    """
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(pause_s)


# --- kills ------------------------------------------------------------------------------------------------------------


@dataclass
class Victims:
    """Consumers of one installation that are killed one after the other."""

    servers: str
    prefix: str
    #: Where the consumers write what they have handled.
    folder: Path
    start: str
    lease_s: float
    sent: int = 0

    @property
    def path(self) -> Path:
        return self.folder / f"{self.prefix}.seen"

    def seen(self) -> list[tuple[int, int]]:
        """Number and attempt of each message that was handled; a line that a kill has cut is left out."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return [(int(number), int(attempt)) for number, attempt in map(bytes.split, lines)]

    async def feed(self, stopped: asyncio.Event) -> None:
        async with marq.Producer(self.servers, prefix=self.prefix, connect_timeout=CONNECT_TIMEOUT_S) as producer:
            while not stopped.is_set():
                await producer.send_many(QUEUE, [b"%d" % number for number in range(self.sent, self.sent + BURST)])
                self.sent += BURST
                await asyncio.sleep(BURST_S)

    async def consumer(self) -> Process:
        """Start one, and return when it has handled something."""
        before = self.path.stat().st_size if self.path.exists() else 0
        line = command("consume", self.servers, self.prefix, self.start, str(self.lease_s), self.path)
        process = await asyncio.create_subprocess_exec(*line, stdin=DEVNULL)

        async def handled() -> bool:
            return self.path.exists() and self.path.stat().st_size > before

        try:
            await until(handled)
        except BaseException:
            process.kill()
            raise
        return process

    async def run(self, worker: BenchWorker, kills: int, say: Say) -> Figures:
        """Kill so many, let the last one drain the queue, and count."""
        await asyncio.to_thread(worker.wait_until_owner)
        stopped = asyncio.Event()
        feeding = asyncio.create_task(self.feed(stopped))
        try:
            for number in range(kills):
                process = await self.consumer()
                await asyncio.sleep(random.uniform(*KILL_AFTER_S))
                process.kill()
                await process.wait()
                say(f"{self.start}, lease {self.lease_s:g} s: kill {number + 1} of {kills}")
        finally:
            # Not cancelled: what was sent is counted.
            stopped.set()
            await feeding
        last = await self.consumer()
        try:
            await until(partial(self._drained, worker), 0.5)
        finally:
            last.kill()
            await last.wait()
        return {"kills": kills, **self._count(), **await self._acquired()}

    async def _drained(self, worker: BenchWorker) -> bool:
        row = (await asyncio.to_thread(worker.figures)).get("queues", {}).get(QUEUE, {})
        return row.get("in_flight") == 0 and len(dict(self.seen())) >= self.sent

    def _count(self) -> Figures:
        seen = self.seen()
        times = Counter(number for number, _ in seen)
        attempts: dict[int, set[int]] = {}
        for number, attempt in seen:
            attempts.setdefault(number, set()).add(attempt)
        return {
            "sent": self.sent,
            "lost": self.sent - len(times),
            "duplicates": len(seen) - len(times),
            # The last attempt that was seen came after those that nobody saw.
            "attempts_unseen": sum(max(each) - len(each) for each in attempts.values()),
        }

    async def _acquired(self) -> Figures:
        """How many records stand in more than one ACQUIRE."""
        times: Counter[tuple[object, int]] = Counter()
        for value in await committed(self.servers, Names(self.prefix).markers):
            marker = decode(value)
            if isinstance(marker, Acquire):
                times.update((marker.source, offset) for offset in marker.offsets)
        return {"reacquired": sum(count > 1 for count in times.values())}


async def committed(servers: str, topic: str) -> list[bytes]:
    """Return what a reader of committed records finds in a topic."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in await consumer._client._wait_on_metadata(topic)]
        consumer.assign(partitions)
        ends, found = await consumer.end_offsets(partitions), []
        async with asyncio.timeout(LIMIT_S):
            while any([await consumer.position(each) < ends[each] for each in partitions]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    found += [record.value for record in records]
        return found
    finally:
        await consumer.stop()


async def measure_kills(servers: str, folder: Path, extent: Extent, say: Say) -> dict[str, Figures]:
    found: dict[str, Figures] = {}

    async def kill(start: str, lease_s: float) -> None:
        prefix, name = f"kills{int(time.time())}-{start}", f"{start}, lease {lease_s:g} s"
        with await asyncio.to_thread(BenchWorker, servers, prefix, folder) as worker:
            found[name] = await Victims(servers, prefix, folder, start, lease_s).run(worker, extent.kills, say)
        say(f"{name}: {found[name]}")

    for lease_s in extent.leases:
        await asyncio.gather(*(kill(start, lease_s) for start in STARTS))
    return found


# --- drain ------------------------------------------------------------------------------------------------------------


def measure_drain(broker: EmbeddedBroker, folder: Path, extent: Extent, say: Say) -> dict[str, Figures]:
    bench = Bench(broker.bootstrap_servers, folder, Size(extent.messages, extent.runs, frozenset()), say, broker)
    found: dict[str, list[Figures]] = {start: [] for start in STARTS}
    for turn in range(extent.runs):
        for start in STARTS if turn % 2 == 0 else reversed(STARTS):
            found[start].append(drain.marq(bench, start=start))
            bench.clear()
            say(f"{turn + 1}/{extent.runs} {start}: {found[start][-1]}")
    medians = {start: {key: median(run[key] for run in runs) for key in runs[0]} for start, runs in found.items()}
    medians[TRANSACTIONAL]["ratio"] = medians[TRANSACTIONAL]["rate"] / medians[MARKED]["rate"]
    return medians


# --- delays -----------------------------------------------------------------------------------------------------------


async def late_redeliveries(servers: str, prefix: str, during: Callable[[], Awaitable[None]]) -> list[float]:
    """Forget some messages; return by how many seconds each came too late. ``during`` is done when all are held."""
    late: list[float] = []
    options: Any = {"prefix": prefix, "connect_timeout": CONNECT_TIMEOUT_S}
    async with (
        marq.Producer(servers, **options) as producer,
        marq.Consumer("other", servers, lease=PROBE_LEASE_S, max_lease=PROBE_LEASE_S, **options) as consumer,
        asyncio.timeout(LIMIT_S),
    ):
        await producer.send_many("other", [b"%d" % number for number in range(PROBES)])
        held: dict[bytes, float] = {}
        while len(late) < PROBES:
            for message in await consumer.receive(PROBES, wait=20):
                if message.attempt == 1:
                    held[message.value] = message.lease_expires_at.timestamp()
                    continue
                late.append(max(0.0, time.time() - held[message.value]))
                await message.ack(wait=False)
            if len(held) == PROBES and not late:
                await during()
        await consumer.flush()
    return late


async def nothing() -> None:
    """No transaction is open."""


async def measure_delays(servers: str, folder: Path, extent: Extent, say: Say) -> dict[str, Figures]:
    prefix = f"delays{int(time.time())}"
    found: dict[str, list[float]] = {"no open transaction": [], "open": [], "open, member restarted": []}
    with await asyncio.to_thread(BenchWorker, servers, prefix, folder) as worker:
        await asyncio.to_thread(worker.wait_until_owner)
        for turn in range(extent.rounds):
            for name, late in found.items():
                late += await one_round(servers, prefix, name)
                say(f"{turn + 1}/{extent.rounds} {name}: {max(late):.2f} s at the most so far")
    return {name: {"late_p50_s": median(late), "late_max_s": max(late)} for name, late in found.items()}


async def one_round(servers: str, prefix: str, name: str) -> list[float]:
    """Return how late the redeliveries of a round are; ``name`` says what is open meanwhile."""
    if name == "no open transaction":
        return await late_redeliveries(servers, prefix, nothing)
    process = await asyncio.create_subprocess_exec(*command("leave_open", servers, prefix), stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout, opened = process.stdin, process.stdout, []

    async def open_and_kill() -> None:
        if opened:
            return
        opened.append(True)
        stdin.write(b"go\n")
        assert await stdout.readline() == b"open\n"
        process.kill()
        await process.wait()
        if name != "open":
            again = await transactions(servers, prefix)
            await again.start()
            await again.stop(1)

    try:
        async with asyncio.timeout(LIMIT_S):
            assert await stdout.readline() == b"ready\n"
        return await late_redeliveries(servers, prefix, open_and_kill)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --- all --------------------------------------------------------------------------------------------------------------


def measure(broker: EmbeddedBroker, folder: Path, extent: Extent, say: Say) -> dict[str, dict[str, Figures]]:
    """Measure on a broker that is there."""
    servers = broker.bootstrap_servers
    found: dict[str, dict[str, Figures]] = {}
    if "kills" in extent.only:
        found["kills"] = asyncio.run(measure_kills(servers, folder, extent, say))
    if "drain" in extent.only:
        found["drain"] = measure_drain(broker, folder, extent, say)
    if "delays" in extent.only:
        found["delays"] = asyncio.run(measure_delays(servers, folder, extent, say))
    return found


def show(found: Mapping[str, Mapping[str, Figures]], console: Console) -> None:
    table = Table("what", "how", "figure", "")
    for what, rows in found.items():
        for how, figures in rows.items():
            for name, figure in figures.items():
                table.add_row(what, how, name.replace("_", " "), f"{figure:,.2f}".removesuffix(".00"))
    console.print(table)


def read_extent() -> Extent:
    default = Extent()
    parser = argparse.ArgumentParser(prog="python -m bench.starts", description="The two ways to start messages.")
    parser.add_argument("--kills", type=int, default=default.kills, help="of each way, and of each lease")
    parser.add_argument("--leases", type=float, nargs="+", default=default.leases, help="seconds, of those killed")
    parser.add_argument("--messages", type=int, default=default.messages, help="that are drained in one run")
    parser.add_argument("--runs", type=int, default=default.runs, help="drains of each way; medians count")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="of redeliveries that are looked at")
    parser.add_argument("--only", choices=sorted(default.only), nargs="+", default=default.only)
    given = parser.parse_args()
    return Extent(given.kills, tuple(given.leases), given.messages, given.runs, given.rounds, frozenset(given.only))


def main() -> None:
    extent, console = read_extent(), Console(stderr=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder:
        broker = EmbeddedBroker(heap="1g").start()
        try:
            found = measure(broker, Path(folder), extent, partial(console.print, highlight=False))
        finally:
            broker.close()
    show(found, console)
    size: dict[str, Any] = {**asdict(extent), "only": sorted(extent.only)}
    write_result({"size": size, "load_before": load, "load_after": os.getloadavg()[0], "figures": found}, "starts-")


if __name__ == "__main__":
    main()
