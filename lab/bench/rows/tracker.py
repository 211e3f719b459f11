"""The cost of a worker alone: folding markers, counting waiting messages, and being idle.

For `tracker` and `backlog` the worker is stopped (SIGSTOP) while the input is written; the time counts from SIGCONT on,
when only the worker and the broker run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lab.bench.load import QUEUE, fill_queues, queue_name
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row
from lab.program import LIMIT_SECONDS, POLL_SECONDS, Worker, measured
from lab.resources import Meter
from lab.topics import log_end, make_topics
from marq.wire.names import Names

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


@dataclass(frozen=True)
class Folding:
    """A worker and the markers that it folds."""

    bench: Bench
    names: Names
    worker: Worker

    def run(self, kinds: str, wait: Callable[[], float]) -> float:
        """Write markers of these kinds for all messages; return the seconds that the worker then takes."""
        size = self.bench.size
        with stopped(self.worker):
            sizes = (size.partitions, size.messages, size.value_bytes)
            measured("producers", "markers", self.bench.servers, self.names.prefix, *sizes, kinds)
        began = time.monotonic()
        return wait() - began

    def until_acked(self) -> float:
        """Return when the worker's statistics count each message as acked."""
        self.worker.wait_until(lambda: self.worker.row(QUEUE).get("acked") == self.bench.size.messages)
        return time.monotonic()

    def until_written(self, in_flight: int) -> float:
        """Return when the changelog was complete, with this many messages in flight.

        The worker is asked only then, because counting messages in flight costs it time.
        """
        return asyncio.run(self._until_written(in_flight))

    async def _until_written(self, in_flight: int) -> float:
        async with log_end(self.bench.servers, self.names.changelog, self.bench.size.partitions) as end:
            written, ended = await end(), time.monotonic()
            async with asyncio.timeout(LIMIT_SECONDS):
                while time.monotonic() - ended < QUIET_SECONDS or self._in_flight() != in_flight:
                    await asyncio.sleep(POLL_SECONDS)
                    if (now := await end()) != written:
                        written, ended = now, time.monotonic()
        return ended

    def _in_flight(self) -> int | None:
        return self.worker.row(QUEUE).get("in_flight")


def together(bench: Bench) -> Measurements:
    """Write each ACK right after its ACQUIRE; the worker is done when it counts all messages as acked."""
    return _folded(bench, SESSION, lambda folding: folding.run("acquire,ack", folding.until_acked))


def written(bench: Bench) -> Measurements:
    """Write all ACQUIREs, until the changelog has all rows; then all ACKs, until it has all deletions."""

    def both(folding: Folding) -> float:
        acquired = folding.run("acquire", lambda: folding.until_written(bench.size.messages))
        return acquired + folding.run("ack", lambda: folding.until_written(0))

    return _folded(bench, {**SESSION, **FLUSH_SOON}, both)


def _folded(bench: Bench, settings: dict[str, str], run: Callable[[Folding], float]) -> Measurements:
    prefix, size = bench.prefix(), bench.size
    asyncio.run(make_topics(bench.servers, prefix, size.partitions))
    with bench.worker(prefix, settings=settings) as worker:
        meter = Meter({"worker": [worker.pid]})
        seconds = run(Folding(bench, Names(prefix), worker))
        taken = meter.seconds()
    markers = 2 * size.messages
    return {
        "markers_per_second": markers / seconds,
        "worker_cpu_seconds_per_million_markers": taken["worker"] / markers * 1e6,
        "changelog_bytes_per_message": bench.log_bytes(Names(prefix).changelog) / size.messages,
    }


def tracker_bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"tracker, {how}", medians[how]["markers_per_second"], limit, "markers/s", at_least=True)
        for how, limit in ((TOGETHER, TOGETHER_PER_SECOND), (WRITTEN, WRITTEN_PER_SECOND))
    ]


TRACKER = Row(
    "tracker",
    "a worker folds an ACQUIRE and an ACK of each message, with payloads; all are in the log when it begins",
    {TOGETHER: together, WRITTEN: written},
    tracker_bars,
)

# --- backlog ----------------------------------------------------------------------------------------------------------

QUEUES = 1_000
ONE, MANY = "1 queue", f"{QUEUES:,} queues"
COUNTED_PER_SECOND = 300_000
#: The worker updates its statistics once a second, and those of many queues take long to return.
CENSUS_POLL_SECONDS = 0.1


def backlog(bench: Bench, queues: int) -> Measurements:
    prefix, size = bench.prefix(), bench.size
    asyncio.run(make_topics(bench.servers, prefix, size.partitions))
    with bench.worker(prefix, settings=SESSION) as worker:
        _wait_until_waiting(worker, 0)
        with stopped(worker):
            names = [queue_name(number) for number in range(queues)]
            asyncio.run(
                fill_queues(bench.servers, Names(prefix), names, size.messages, size.value_bytes, size.partitions)
            )
        meter, began = Meter({"worker": [worker.pid]}), time.monotonic()
        _wait_until_waiting(worker, size.messages)
        seconds, taken = time.monotonic() - began, meter.seconds()
    return {
        "records_per_second": size.messages / seconds,
        "worker_cpu_seconds_per_million_records": taken["worker"] / size.messages * 1e6,
    }


def _wait_until_waiting(worker: Worker, count: int) -> None:
    def counted() -> bool:
        statistics = worker.statistics()
        complete = statistics.get("backlog", {}).get("complete")
        return bool(complete) and sum(row["waiting"] for row in statistics["queues"].values()) == count

    worker.wait_until(counted, pause=CENSUS_POLL_SECONDS)


def backlog_bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"backlog of {what}", medians[what]["records_per_second"], COUNTED_PER_SECOND, "records/s", at_least=True)
        for what in (ONE, MANY)
    ]


BACKLOG = Row(
    "backlog",
    "a worker counts waiting messages of queues that share a topic, sent by a plain producer while it was stopped",
    {ONE: partial(backlog, queues=1), MANY: partial(backlog, queues=QUEUES)},
    backlog_bars,
    runs=3,
)

# --- idle -------------------------------------------------------------------------------------------------------------

SETTLE_SECONDS = 2.0
IDLE_SECONDS = 10.0


def idle(bench: Bench) -> Measurements:
    with bench.worker(bench.prefix()) as worker:
        time.sleep(SETTLE_SECONDS)
        before = worker.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        return {"idle_core_percent": 100 * (worker.cpu_seconds() - before) / IDLE_SECONDS}


IDLE = Row("idle", "a worker without messages: how much of a core it takes", {"marq": idle}, runs=1, warm=0)
