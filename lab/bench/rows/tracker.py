"""The cost of a worker alone: folding markers, counting waiting messages, and being idle.

For `tracker` and `backlog` the worker is stopped (SIGSTOP) while the input is written; the time counts from SIGCONT on,
when only the worker and the broker run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from lab.bench.client import QUEUE, fill_queues, plain_producer, queue_name, say, values
from lab.bench.rows.restarts import BATCH, HOLDER, LONG_MS, changelog_written
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import Worker, measured
from lab.resources import Meter
from marq.settings.client import ClientSettings
from marq.wire.marker_codec import Columns, encode
from marq.wire.markers import Ack, Acquire, Source
from marq.wire.names import Names, markers_partition

#: Keeps a stopped worker in its group.
SESSION = {"MARQ_SESSION_TIMEOUT": "60"}


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    worker.pause()
    try:
        yield
    finally:
        worker.resume()


# --- tracker ----------------------------------------------------------------------------------------------------------

TOGETHER, WRITTEN = "acked in the same fetch", "written and deleted"
TOGETHER_PER_SECOND, WRITTEN_PER_SECOND = 250_000, 100_000
#: Writes the last rows soon instead of after a second.
FLUSH_SOON = {"MARQ_FLUSH_INTERVAL": "0.05"}
#: Time without new records after which the changelog is complete: longer than a flush.
QUIET_SECONDS = 0.3


async def write_markers(servers: str, prefix: str, partitions: int, count: int, size: int, kinds: str) -> None:
    """Write a consumer's markers without a consumer, so that a tracker finds all of them when it starts."""
    names = Names(prefix)

    async def write(partition: int, share: int) -> None:
        where = markers_partition(names.messages, partition, partitions)
        for record in marker_records(names, partition, share, size, kinds):
            sent = await producer.send(names.markers, record, partition=where)
        await sent

    async with plain_producer(servers) as producer:
        shares = [len(range(partition, count, partitions)) for partition in range(partitions)]
        await asyncio.gather(*(write(partition, share) for partition, share in enumerate(shares)))
    say(messages=count)


def marker_records(names: Names, partition: int, count: int, size: int, kinds: str) -> Iterator[bytes]:
    """Yield the ACQUIREs of one partition's messages, their ACKs, or both: each ACK after its ACQUIRE."""
    source, now_ms = Source(names.messages, partition), int(time.time() * 1000)
    for start in range(0, count, BATCH):
        stop = min(start + BATCH, count)
        if "acquire" in kinds:
            columns = Columns(QUEUE.encode(), [now_ms] * (stop - start), values(start, stop, size))
            yield encode(Acquire(QUEUE, HOLDER, source, range(start, stop), LONG_MS, start, columns))
        if "ack" in kinds:
            yield encode(Ack(QUEUE, HOLDER, source, range(start, stop)))


Wait = Callable[[Worker, ClientSettings], float]


def folded(bench: Bench, settings: dict[str, str], phases: dict[str, Wait]) -> Measurements:
    """Write markers of some kinds for all messages in phases, each with a function that waits for its end."""
    size, seconds = bench.size, 0.0
    worker = bench.worker(**settings)
    meter = Meter({"worker": [worker.pid]})
    for kinds, wait in phases.items():
        with stopped(worker):
            sizes = (size.partitions, size.messages, size.value_bytes)
            measured(write_markers, *bench.namespace, *sizes, kinds)
        began = time.monotonic()
        seconds += wait(worker, bench.client) - began
    taken = meter.seconds()
    # Writes its last records to the changelog.
    bench.end_processes()
    markers = 2 * size.messages
    return {
        "markers_per_second": markers / seconds,
        "worker_cpu_seconds_per_million_markers": taken["worker"] / markers * 1e6,
        "changelog_bytes_per_message": bench.log_bytes(bench.names.changelog) / size.messages,
    }


def together(bench: Bench) -> Measurements:
    """Write each ACK right after its ACQUIRE; the worker is done when it counts all messages as acked."""

    def wait(worker: Worker, _: ClientSettings) -> float:
        worker.wait_until(lambda: worker.row(QUEUE).get("acked") == bench.size.messages)
        return time.monotonic()

    return folded(bench, SESSION, {"acquire,ack": wait})


def written(bench: Bench) -> Measurements:
    """Write all ACQUIREs, until the changelog has all rows; then all ACKs, until it has all deletions."""

    def until(in_flight: int) -> Wait:
        return lambda worker, client: asyncio.run(changelog_written(worker, client, in_flight, QUIET_SECONDS))

    return folded(bench, {**SESSION, **FLUSH_SOON}, {"acquire": until(bench.size.messages), "ack": until(0)})


TRACKER = BenchRow(
    "tracker",
    "a worker folds an ACQUIRE with its payload, and an ACK, of each message; all are in the log when it begins",
    {TOGETHER: together, WRITTEN: written},
    lambda medians: [
        Bar(f"tracker, {how}", medians[how]["markers_per_second"], limit, "markers/s", at_least=True)
        for how, limit in ((TOGETHER, TOGETHER_PER_SECOND), (WRITTEN, WRITTEN_PER_SECOND))
    ],
)

# --- backlog ----------------------------------------------------------------------------------------------------------

QUEUES = 1_000
ONE, MANY = "1 queue", f"{QUEUES:,} queues"
COUNTED_PER_SECOND = 300_000
#: The worker updates its statistics once a second, and those of many queues take long to return.
CENSUS_POLL_SECONDS = 0.1


def backlog(bench: Bench, queues: int) -> Measurements:
    size, worker = bench.size, bench.worker(**SESSION)
    _wait_until_waiting(worker, 0)
    with stopped(worker):
        names = [queue_name(number) for number in range(queues)]
        asyncio.run(fill_queues(bench.servers, bench.names, names, size.messages, size.value_bytes, size.partitions))
    meter, began = Meter({"worker": [worker.pid]}), time.monotonic()
    _wait_until_waiting(worker, size.messages)
    return {
        "records_per_second": size.messages / (time.monotonic() - began),
        "worker_cpu_seconds_per_million_records": meter.seconds()["worker"] / size.messages * 1e6,
    }


def _wait_until_waiting(worker: Worker, count: int) -> None:
    def counted() -> bool:
        statistics = worker.statistics()
        complete = statistics.get("backlog", {}).get("complete")
        return bool(complete) and sum(row["waiting"] for row in statistics["queues"].values()) == count

    worker.wait_until(counted, pause=CENSUS_POLL_SECONDS)


BACKLOG = BenchRow(
    "backlog",
    "a worker counts waiting messages of queues that share a topic, sent by a plain producer while it was stopped",
    {ONE: partial(backlog, queues=1), MANY: partial(backlog, queues=QUEUES)},
    lambda medians: [
        Bar(f"backlog of {what}", medians[what]["records_per_second"], COUNTED_PER_SECOND, "records/s", at_least=True)
        for what in (ONE, MANY)
    ],
    runs=3,
)

# --- idle -------------------------------------------------------------------------------------------------------------

SETTLE_SECONDS = 2.0
IDLE_SECONDS = 10.0


def idle(bench: Bench) -> Measurements:
    worker = bench.worker()
    time.sleep(SETTLE_SECONDS)
    return {"idle_core_percent": worker.core_percent(IDLE_SECONDS)}


IDLE = BenchRow("idle", "a worker without messages: how much of a core it takes", {"marq": idle}, runs=1, warm=0)
