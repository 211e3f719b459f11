"""How fast a worker folds markers, when all it has to do is there already.

The worker runs and is stopped (SIGSTOP) while the markers are written; from SIGCONT on counts. Nothing else runs then
but the broker. *Acked in the same fetch*: each ACK stands behind its ACQUIRE, and the end is when the worker's own
figures say that all are acked. *Written and deleted*: first all ACQUIREs, until the changelog has all rows, then all
ACKs, until it has all deletions; both times count.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from bench.bars import Bar
from bench.load import QUEUE
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker
from marq.core.names import Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics

TOGETHER, WRITTEN = "acked in the same fetch", "written and deleted"
TOGETHER_PER_SECOND, WRITTEN_PER_SECOND = 250_000, 100_000
#: A worker that is stopped is not to be thrown out of its group.
SESSION = {"MARQ_SESSION_TIMEOUT": "60"}
#: The last rows are not to wait for a second.
FLUSH_SOON = {"MARQ_FLUSH_INTERVAL": "0.05"}
#: So long the changelog must stand still: longer than a flush.
QUIET_SECONDS = 0.3
POLL_SECONDS = 0.02
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Folding:
    """A worker, and what it is to fold."""

    bench: Bench
    names: Names
    worker: BenchWorker

    def run(self, kinds: str, wait: Callable[[], float]) -> float:
        """Write markers of these kinds for all messages; return how many seconds the worker then takes."""
        size = self.bench.size
        words = (self.names.prefix, size.partitions, size.messages, size.value_bytes)
        self.worker.process.send_signal(signal.SIGSTOP)
        try:
            measured("bench.clients.markers", self.bench.servers, *map(str, words), kinds)
        finally:
            self.worker.process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        return wait() - began

    def until_acked(self) -> float:
        """Return when the worker's figures say that each message is acked."""
        with limited() as check:
            while self._row().get("acked") != self.bench.size.messages:
                check(self._row)
                time.sleep(POLL_SECONDS)
        return time.monotonic()

    def until_written(self, in_flight: int) -> float:
        """Return when the changelog stood still, and so many messages were open.

        The worker is only asked then: to count what is open takes it the longer, the more that is.
        """
        return asyncio.run(self._until_written(in_flight))

    async def _until_written(self, in_flight: int) -> float:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.bench.servers)
        await consumer.start()
        try:
            written, ended = await self.changelog_end(consumer), time.monotonic()
            with limited() as check:
                while time.monotonic() - ended < QUIET_SECONDS or self._row().get("in_flight") != in_flight:
                    check(self._row)
                    await asyncio.sleep(POLL_SECONDS)
                    if (now := await self.changelog_end(consumer)) != written:
                        written, ended = now, time.monotonic()
        finally:
            await consumer.stop()
        return ended

    async def changelog_end(self, consumer: AIOKafkaConsumer) -> int:
        partitions = range(self.bench.size.partitions)
        ends = await consumer.end_offsets([TopicPartition(self.names.changelog, each) for each in partitions])
        return sum(ends.values())

    def _row(self) -> dict[str, Any]:
        found: dict[str, Any] = self.worker.figures().get("queues", {}).get(QUEUE, {})
        return found


@contextmanager
def limited() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Give a check that ends the run when it takes too long, and shows what there is."""
    until = time.monotonic() + LIMIT_SECONDS

    def check(look: Callable[[], object]) -> None:
        if time.monotonic() > until:
            raise SystemExit(f"bench: not folded after {LIMIT_SECONDS} s: {look()}")

    yield check


def together(bench: Bench) -> Figures:
    return _measured(bench, SESSION, lambda folding: folding.run("acquire,ack", folding.until_acked))


def written(bench: Bench) -> Figures:
    def both(folding: Folding) -> float:
        acquired = folding.run("acquire", lambda: folding.until_written(bench.size.messages))
        return acquired + folding.run("ack", lambda: folding.until_written(0))

    return _measured(bench, {**SESSION, **FLUSH_SOON}, both)


def _measured(bench: Bench, settings: dict[str, str], run: Callable[[Folding], float]) -> Figures:
    prefix, size = bench.prefix(), bench.size
    client = ClientSettings.read(bench.servers, {"prefix": prefix, "partitions": size.partitions}, environment={})
    asyncio.run(ensure_topics(client, changelog=True))
    with BenchWorker(bench.servers, prefix, bench.folder, settings=settings) as worker:
        worker.wait_until_owner()
        meter = Meter({"worker": [worker.process.pid]})
        seconds = run(Folding(bench, Names(prefix), worker))
        taken = meter.seconds()
    markers = 2 * size.messages
    return {
        "markers_per_second": markers / seconds,
        "worker_cpu_seconds_per_million_markers": taken["worker"] / markers * 1e6,
        "changelog_bytes_per_message": bench.log_bytes(Names(prefix).changelog) / size.messages,
    }


def bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"tracker, {how}", medians[how]["markers_per_second"], limit, "markers/s", at_least=True)
        for how, limit in ((TOGETHER, TOGETHER_PER_SECOND), (WRITTEN, WRITTEN_PER_SECOND))
    ]


TRACKER = Row(
    "tracker",
    "a worker folds an ACQUIRE and an ACK of each message, with payloads; all of them are in the log when it begins",
    {TOGETHER: together, WRITTEN: written},
    bars,
)
