"""Many deduplication ids: ``make ids IDS=1000000``.

The messages are delivered to their queue, and the worker remembers their ids. Then it is killed (kill -9) and restarts
with its data, until it has dropped a duplicate.
"""

from __future__ import annotations

import asyncio
import time

import marq
from lab.bench.load import CHUNK, QUEUE, values
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians

MAX_IDS_MIB = 300
RESTART_SECONDS = 10.0
#: Largest number of ids for which the bars apply.
BARRED_IDS = 1_000_000
#: Longer than a measurement.
WINDOW_S = 24 * 3600
LIMIT_SECONDS = 900.0


async def remember(bench: Bench) -> Measurements:
    """Return the memory of the ids, how fast they are accepted, and how long a restart takes."""
    prefix, count = bench.prefix(), bench.size.messages
    await bench.make_topics(prefix)
    worker = await asyncio.to_thread(bench.worker, prefix)
    idle_mib = worker.memory_mib("idle")["idle_mib"]
    measurements: Measurements = {"ids": count, "idle_mib": idle_mib}
    async with (
        marq.Queues(bench.servers, prefix=prefix) as queues,
        marq.Producer(bench.servers, prefix=prefix, request_timeout=300) as producer,
    ):
        await queues.change(QUEUE, deduplication_window=WINDOW_S)
        began = time.monotonic()
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            messages = values(numbers.start, numbers.stop, bench.size.value_bytes)
            ids = [f"order-{number}" for number in numbers]
            await producer.send_many(QUEUE, messages, deduplication_ids=ids)
        measurements["sent_per_second"] = count / (time.monotonic() - began)
        await asyncio.to_thread(
            worker.wait_until, lambda: worker.row(QUEUE).get("delivered") == count, LIMIT_SECONDS, 0.5
        )
        measurements["delivered_per_second"] = count / (time.monotonic() - began)
        # Rows are written within a second or two.
        await asyncio.sleep(5.0)
        measurements |= worker.memory_mib("remembered")
        worker.kill()
        restarted = time.monotonic()
        again = bench.start_worker(prefix)
        await producer.send(QUEUE, b"again", deduplication_id="order-0")
        await asyncio.to_thread(again.wait_until, lambda: again.row(QUEUE).get("deduplicated") == 1, LIMIT_SECONDS)
        measurements["restart_seconds"] = time.monotonic() - restarted
        measurements |= again.memory_mib("restarted")
    # Measured on the restarted worker, because the first one also had all messages in memory.
    measurements["ids_mib"] = measurements["restarted_mib"] - idle_mib
    return measurements


def bars(medians: Medians) -> list[Bar]:
    found = medians["marq"]
    if found["ids"] > BARRED_IDS:
        return []
    return [
        Bar("memory of the ids", found["ids_mib"], MAX_IDS_MIB, "MiB"),
        Bar("restart with its data: dropping a duplicate after", found["restart_seconds"], RESTART_SECONDS, "s"),
    ]


DEDUPLICATION = BenchRow(
    "deduplication",
    "messages with different deduplication ids are delivered, and the worker is killed",
    {"marq": lambda bench: asyncio.run(remember(bench))},
    bars,
    warm=0,
    by_name=True,
)
