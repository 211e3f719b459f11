"""Measures a great many delayed messages: ``python -m bench.delays --pending 1000000``.

A real worker gets them by ``send_many``, each with a time of its own within a day, and shows its memory and disk; more
are due at a steady rate while those wait, and how late each of these comes is measured at a consumer of the messages
topic; then it is killed by kill -9 and started again with its data: until the first overdue message of each markers
partition is delivered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

import marq
from bench.bars import Bar, show
from bench.leases import Copies, copies
from bench.load import QUEUE, values
from bench.result import write_result
from bench.worker import BenchWorker
from broker import EmbeddedBroker
from marq.settings import ClientSettings
from marq.topics import ensure_topics

MAX_MEMORY_MIB = 700
RESTART_SECONDS = 10.0
LATENESS_P99_MS = 250.0
SCHEDULED_PER_SECOND = 50_000.0
#: What the bars are for.
BARRED_PENDING = 1_000_000

CHUNK = 20_000
DAY_S = 24 * 3600
#: Within which the first of the messages that wait is not due: longer than the measurement.
FAR_S = 2 * 3600
#: From when the last message of the steady rate was sent until the first is due.
AHEAD_S = 10
#: Overdue messages at the restart, and how long before the kill they are sent.
PROBES, PROBE_S = 40, 4.0
LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Size:
    """``pending`` messages wait while ``rate`` a second are due for ``seconds``."""

    pending: int = BARRED_PENDING
    rate: int = 5_000
    seconds: int = 20
    value_bytes: int = 200
    partitions: int = 4


@dataclass
class Delays:
    """One installation with its messages that wait."""

    servers: str
    folder: Path
    size: Size
    prefix: str
    producer: marq.Producer
    copies: Copies
    say: Callable[[str], None]
    figures: dict[str, list[float]] = field(default_factory=dict)
    sent: int = 0
    worker: BenchWorker | None = None

    def _note(self, **figures: float) -> None:
        for name, figure in figures.items():
            self.figures.setdefault(name, []).append(figure)
        self.say(", ".join(f"{name.replace('_', ' ')}: {figure:,.2f}" for name, figure in figures.items()))

    async def measure(self) -> None:
        self.worker = BenchWorker(self.servers, self.prefix, self.folder)
        await asyncio.to_thread(self.worker.wait_until_owner)
        await self._schedule()
        await self._deliver()
        await self._restart()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()

    async def _send(self, delays: list[float] | None = None, at: list[datetime] | None = None) -> range:
        count = len(delays or at or ())
        numbers = range(self.sent, self.sent + count)
        self.sent += count
        chosen = values(numbers.start, numbers.stop, self.size.value_bytes)
        await self.producer.send_many(QUEUE, chosen, delay=delays, at=at)
        return numbers

    async def _schedule(self) -> None:
        size, chance = self.size, random.Random(1)
        began = time.monotonic()
        for start in range(0, size.pending, CHUNK):
            count = min(CHUNK, size.pending - start)
            await self._send([FAR_S + chance.random() * DAY_S for _ in range(count)])
        sent = time.monotonic()
        await self._until_known(size.pending)
        self._note(
            scheduled_per_second=size.pending / (sent - began),
            known_per_second=size.pending / (time.monotonic() - began),
        )
        # Rows are written within a second or two.
        await asyncio.sleep(5.0)
        self._note_worker("pending")

    def _note_worker(self, name: str) -> None:
        worker = self.worker
        assert worker is not None
        disk = sum(path.stat().st_size for path in worker.data.rglob("*") if path.is_file())
        self._note(
            **{
                f"{name}_peak_mib": worker.memory("VmHWM") / 2**20,
                f"{name}_mib": worker.memory("VmRSS") / 2**20,
                f"{name}_disk_mib": disk / 2**20,
            }
        )

    async def _until_known(self, count: int) -> None:
        worker = self.worker
        assert worker is not None

        def known() -> bool:
            queues = worker.figures().get("queues", {})
            return bool(queues.get(QUEUE, {}).get("waiting_for_delivery") == count)

        until = time.monotonic() + LIMIT_SECONDS
        while not await asyncio.to_thread(known):
            if time.monotonic() > until:
                raise SystemExit(f"bench: not all known after {LIMIT_SECONDS} s: {worker.figures().get('queues')}")
            await asyncio.sleep(0.5)

    async def _deliver(self) -> None:
        """Let messages be due at a steady rate, and measure how late each of them comes."""
        size = self.size
        count = size.rate * size.seconds
        # By so much the broker's clock, which is this machine's, is ahead of the one that arrival is measured by.
        ahead_s = time.time() - time.monotonic()
        first_s = time.time() + AHEAD_S + count / SCHEDULED_PER_SECOND
        dues_s = [first_s + index / size.rate for index in range(count)]
        start = self.sent
        for place in range(0, count, CHUNK):
            await self._send(at=[datetime.fromtimestamp(due_s, UTC) for due_s in dues_s[place : place + CHUNK]])
        assert time.time() < first_s, "the machine is too slow: the first message was due before the last was sent"
        await self.copies.all_of(range(start, start + count), LIMIT_SECONDS)
        lateness_ms = sorted(
            (self.copies.seen[start + index] + ahead_s - due_s) * 1000 for index, due_s in enumerate(dues_s)
        )
        assert lateness_ms[0] > -5, f"a message came {-lateness_ms[0]} ms too early"
        self._note(
            lateness_p50_ms=lateness_ms[count // 2],
            lateness_p99_ms=lateness_ms[count * 99 // 100],
            lateness_max_ms=lateness_ms[-1],
        )

    async def _restart(self) -> None:
        probes = await self._send([PROBE_S] * PROBES)
        due = time.monotonic() + PROBE_S
        # Their rows are to be in the table, too.
        await asyncio.sleep(PROBE_S / 2)
        self.close()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        self.worker = BenchWorker(self.servers, self.prefix, self.folder)
        first, last = await self.copies.all_of(probes, LIMIT_SECONDS)
        self._note(restart_first_seconds=first - began, restart_seconds=last - began)
        self._note_worker("restarted")


def bars(figures: dict[str, list[float]]) -> list[Bar]:
    """Return what is asked of a million messages that wait."""
    memory = max(max(found) for name, found in figures.items() if name.endswith("_peak_mib"))
    return [
        Bar("memory of the worker, at the most", memory, MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: delivering after", max(figures["restart_seconds"]), RESTART_SECONDS, "s"),
        Bar("lateness, 99 of 100 messages", max(figures["lateness_p99_ms"]), LATENESS_P99_MS, "ms"),
        Bar("scheduled", min(figures["scheduled_per_second"]), SCHEDULED_PER_SECOND, "a second", at_least=True),
    ]


async def measure(servers: str, folder: Path, size: Size, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Measure on a broker that is there; return the figures."""
    prefix = f"delays{int(time.time())}"
    client = ClientSettings.read(servers, {"prefix": prefix, "partitions": size.partitions}, environment={})
    await ensure_topics(client, changelog=True)
    producing = marq.Producer(servers, prefix=prefix, request_timeout=300)
    async with producing as producer, copies(servers, client.names, size.partitions) as found:
        delays = Delays(servers, folder, size, prefix, producer, found, say)
        try:
            await delays.measure()
        finally:
            delays.close()
    return delays.figures


def read_size() -> Size:
    default = Size()
    parser = argparse.ArgumentParser(prog="python -m bench.delays", description="Delayed messages, measured.")
    parser.add_argument("--pending", type=int, default=default.pending, help="messages that wait for hours")
    parser.add_argument("--rate", type=int, default=default.rate, help="messages that are due each second")
    parser.add_argument("--seconds", type=int, default=default.seconds, help="for how long")
    parser.add_argument("--payload", type=int, default=default.value_bytes, help="bytes of each message's value")
    parser.add_argument("--partitions", type=int, default=default.partitions, help="of both topics")
    given = parser.parse_args()
    return Size(given.pending, given.rate, given.seconds, given.payload, given.partitions)


def main() -> None:
    size, console = read_size(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder:
        broker = EmbeddedBroker(heap="1g").start()
        try:
            say = partial(console.print, highlight=False)
            figures = asyncio.run(measure(broker.bootstrap_servers, Path(folder), size, say))
        finally:
            broker.close()
    # Of more messages the figures are printed, and no bar is set.
    judged = bars(figures) if size.pending <= BARRED_PENDING else []
    show(figures, judged, console)
    met = [{**asdict(bar), "met": bar.met} for bar in judged]
    write_result({"size": asdict(size), "figures": figures, "bars": met}, "delays-")
    sys.exit(not all(bar.met for bar in judged))


if __name__ == "__main__":
    main()
