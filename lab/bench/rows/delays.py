"""Many delayed messages: ``make delays PENDING=1000000``.

They are sent by ``send_many``, each with its own time within a day. While they wait, others are due at a steady rate,
and a consumer of the messages topic measures how late each arrives. Then the worker is killed (kill -9) and restarts
with its data, until it has delivered an overdue message from each markers partition.
"""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime

import marq
from lab.bench.client import percentiles
from lab.bench.leases import copies
from lab.bench.load import CHUNK, QUEUE, values
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians, peak_mib
from lab.program import Worker

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


async def delay(bench: Bench, rate: int = RATE, seconds: int = SECONDS) -> Measurements:
    """Measure the three phases: messages wait, others are due at a steady rate, the worker restarts."""
    prefix, pending, chance = bench.prefix(), bench.size.messages, random.Random(1)
    client, _ = await bench.make_topics(prefix)
    sent, measurements = 0, dict[str, float]()

    async def send(delays: list[float] | None = None, at: list[datetime] | None = None) -> range:
        nonlocal sent
        numbers = range(sent, sent + len(delays or at or ()))
        sent = numbers.stop
        await producer.send_many(QUEUE, values(numbers.start, sent, bench.size.value_bytes), delay=delays, at=at)
        return numbers

    def note(name: str, worker: Worker) -> None:
        disk = sum(path.stat().st_size for path in worker.data.rglob("*") if path.is_file())
        measurements.update({**worker.memory_mib(name), f"{name}_disk_mib": disk / 2**20})

    async with marq.Producer(bench.servers, prefix=prefix, request_timeout=300) as producer, copies(client) as seen:
        first = await asyncio.to_thread(bench.worker, prefix)
        began = time.monotonic()
        for start in range(0, pending, CHUNK):
            await send([FAR_S + chance.random() * DAY_S for _ in range(min(CHUNK, pending - start))])
        scheduled = time.monotonic()
        await asyncio.to_thread(
            first.wait_until, lambda: first.row(QUEUE).get("waiting_for_delivery") == pending, LIMIT_SECONDS, 0.5
        )
        measurements["pending"] = pending
        measurements["scheduled_per_second"] = pending / (scheduled - began)
        measurements["known_per_second"] = pending / (time.monotonic() - began)
        # Rows are written within a second or two.
        await asyncio.sleep(5.0)
        note("pending", first)

        count = rate * seconds
        # The broker's clock, which is this machine's, minus the one that measures arrival.
        ahead_s = time.time() - time.monotonic()
        first_s = time.time() + AHEAD_S + count / SCHEDULED_PER_SECOND
        dues_s = [first_s + index / rate for index in range(count)]
        start = sent
        for index in range(0, count, CHUNK):
            await send(at=[datetime.fromtimestamp(due_s, UTC) for due_s in dues_s[index : index + CHUNK]])
        assert time.time() < first_s, "the machine is too slow: the first message was due before the last was sent"
        await seen.all_of(range(start, start + count), LIMIT_SECONDS)
        late_ms = [(seen.seen[start + index] + ahead_s - due_s) * 1000 for index, due_s in enumerate(dues_s)]
        assert min(late_ms) > -5, f"a message came {-min(late_ms)} ms too early"
        measurements |= {f"lateness_{name}": value for name, value in percentiles(late_ms).items()}

        probes = await send([PROBE_S] * PROBES)
        due = time.monotonic() + PROBE_S
        # The table must have their rows.
        await asyncio.sleep(due - KILL_AHEAD_S - time.monotonic())
        first.kill()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        again = bench.start_worker(prefix)
        earliest, last = await seen.all_of(probes, LIMIT_SECONDS)
        measurements["restart_first_seconds"] = earliest - began
        measurements["restart_seconds"] = last - began
        note("restarted", again)
    return measurements


def bars(medians: Medians) -> list[Bar]:
    found = medians["marq"]
    if found["pending"] > BARRED_PENDING:
        return []
    return [
        Bar("peak memory of the worker", peak_mib(found), MAX_MEMORY_MIB, "MiB"),
        Bar("restart with its data: delivering after", found["restart_seconds"], RESTART_SECONDS, "s"),
        Bar("lateness, 99 of 100 messages", found["lateness_p99_ms"], LATENESS_P99_MS, "ms"),
        Bar("scheduled", found["scheduled_per_second"], SCHEDULED_PER_SECOND, "a second", at_least=True),
    ]


DELAYS = BenchRow(
    "delays",
    f"messages wait for hours, {RATE:,} more are due each second for {SECONDS} s, and the worker is killed",
    {"marq": lambda bench: asyncio.run(delay(bench))},
    bars,
    warm=0,
    by_name=True,
)
