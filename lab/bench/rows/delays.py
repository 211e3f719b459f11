"""Many delayed messages: ``make delays PENDING=1000000``.

They are sent by ``send_many``, each with its own time within a day. While they wait, others are due at a steady rate,
and a consumer of the messages topic measures how late each arrives. Then the worker is killed (kill -9) and restarts
with its data, until it has delivered an overdue message from each markers partition.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import marq
from lab.bench.leases import Copies, copies
from lab.bench.load import CHUNK, QUEUE, values
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row, peak_mib
from lab.program import Worker
from lab.topics import make_topics

MAX_MEMORY_MIB = 700
RESTART_SECONDS = 10.0
LATENESS_P99_MS = 250.0
SCHEDULED_PER_SECOND = 50_000.0
#: Largest number of messages for which the bars apply.
BARRED_PENDING = 1_000_000

#: Messages that are due per second, and for how many seconds.
RATE, SECONDS = 5_000, 20
DAY_S = 24 * 3600
#: Shortest delay of the messages that wait: longer than the measurement.
FAR_S = 2 * 3600
#: Time between the last send at the steady rate and the first delivery.
AHEAD_S = 10
#: Number of messages that are overdue at the restart, their delay, and the time from the kill until they are due.
PROBES, PROBE_S, KILL_AHEAD_S = 40, 15.0, 2.0
LIMIT_SECONDS = 900.0


@dataclass(kw_only=True)
class Delays:
    """One namespace with its delayed messages; ``measurements`` fills up as the phases pass."""

    bench: Bench
    prefix: str
    producer: marq.Producer
    copies: Copies
    worker: Worker
    rate: int
    seconds: int
    sent: int = 0
    measurements: Measurements = field(default_factory=dict)

    async def measure(self) -> None:
        await asyncio.to_thread(self.worker.wait_until_owner)
        await self._schedule()
        await self._deliver()
        await self._restart()

    async def _send(self, delays: list[float] | None = None, at: list[datetime] | None = None) -> range:
        numbers = range(self.sent, self.sent + len(delays or at or ()))
        self.sent = numbers.stop
        messages = values(numbers.start, numbers.stop, self.bench.size.value_bytes)
        await self.producer.send_many(QUEUE, messages, delay=delays, at=at)
        return numbers

    async def _schedule(self) -> None:
        pending, chance = self.bench.size.messages, random.Random(1)
        began = time.monotonic()
        for start in range(0, pending, CHUNK):
            await self._send([FAR_S + chance.random() * DAY_S for _ in range(min(CHUNK, pending - start))])
        sent = time.monotonic()
        await asyncio.to_thread(
            self.worker.wait_until,
            lambda: self.worker.row(QUEUE).get("waiting_for_delivery") == pending,
            LIMIT_SECONDS,
            0.5,
        )
        self.measurements["pending"] = pending
        self.measurements["scheduled_per_second"] = pending / (sent - began)
        self.measurements["known_per_second"] = pending / (time.monotonic() - began)
        # Rows are written within a second or two.
        await asyncio.sleep(5.0)
        self._note_worker("pending")

    def _note_worker(self, name: str) -> None:
        disk = sum(path.stat().st_size for path in self.worker.data.rglob("*") if path.is_file())
        self.measurements |= {**self.worker.memory_mib(name), f"{name}_disk_mib": disk / 2**20}

    async def _deliver(self) -> None:
        """Let messages be due at a steady rate, and measure how late each arrives."""
        count = self.rate * self.seconds
        # The broker's clock, which is this machine's, minus the one that measures arrival.
        ahead_s = time.time() - time.monotonic()
        first_s = time.time() + AHEAD_S + count / SCHEDULED_PER_SECOND
        dues_s = [first_s + index / self.rate for index in range(count)]
        start = self.sent
        for index in range(0, count, CHUNK):
            await self._send(at=[datetime.fromtimestamp(due_s, UTC) for due_s in dues_s[index : index + CHUNK]])
        assert time.time() < first_s, "the machine is too slow: the first message was due before the last was sent"
        await self.copies.all_of(range(start, start + count), LIMIT_SECONDS)
        lateness_ms = sorted(
            (self.copies.seen[start + index] + ahead_s - due_s) * 1000 for index, due_s in enumerate(dues_s)
        )
        assert lateness_ms[0] > -5, f"a message came {-lateness_ms[0]} ms too early"
        self.measurements["lateness_p50_ms"] = lateness_ms[count // 2]
        self.measurements["lateness_p99_ms"] = lateness_ms[count * 99 // 100]
        self.measurements["lateness_max_ms"] = lateness_ms[-1]

    async def _restart(self) -> None:
        probes = await self._send([PROBE_S] * PROBES)
        due = time.monotonic() + PROBE_S
        # The table must have their rows.
        await asyncio.sleep(due - KILL_AHEAD_S - time.monotonic())
        self.worker.kill()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        self.worker = self.bench.start_worker(self.prefix)
        first, last = await self.copies.all_of(probes, LIMIT_SECONDS)
        self.measurements["restart_first_seconds"] = first - began
        self.measurements["restart_seconds"] = last - began
        self._note_worker("restarted")


async def delay(bench: Bench, rate: int = RATE, seconds: int = SECONDS) -> Measurements:
    prefix, partitions = bench.prefix(), bench.size.partitions
    client, _ = await make_topics(bench.servers, prefix, partitions)
    producing = marq.Producer(bench.servers, prefix=prefix, request_timeout=300)
    async with producing as producer, copies(bench.servers, client.names, partitions) as seen:
        worker = bench.start_worker(prefix)
        delays = Delays(
            bench=bench, prefix=prefix, producer=producer, copies=seen, worker=worker, rate=rate, seconds=seconds
        )
        try:
            await delays.measure()
        finally:
            delays.worker.kill()
    return delays.measurements


def bars(medians: Medians) -> list[Bar]:
    measurements = medians["marq"]
    if measurements["pending"] > BARRED_PENDING:
        return []
    return [
        Bar("peak memory of the worker", peak_mib(measurements), MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: delivering after", measurements["restart_seconds"], RESTART_SECONDS, "s"),
        Bar("lateness, 99 of 100 messages", measurements["lateness_p99_ms"], LATENESS_P99_MS, "ms"),
        Bar("scheduled", measurements["scheduled_per_second"], SCHEDULED_PER_SECOND, "a second", at_least=True),
    ]


DELAYS = Row(
    "delays",
    f"messages wait for hours, {RATE:,} more are due each second for {SECONDS} s, and the worker is killed",
    {"marq": lambda bench: asyncio.run(delay(bench))},
    bars,
    warm=0,
    by_name=True,
)
