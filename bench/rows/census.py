"""What it costs to count what waits: a worker reads the keys of all messages, and nobody consumes them.

The worker runs and is stopped (SIGSTOP) while a plain Kafka producer sends; from SIGCONT on counts, until the worker's
own figures say that all of it waits. Nothing else runs then but the broker.
"""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial

from bench.bars import Bar
from bench.load import fill_queues
from bench.processes import Meter
from bench.rows.tracker import SESSION, limited
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker
from marq.core.names import Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics

QUEUES = 1_000
ONE, MANY = "1 queue", f"{QUEUES:,} queues"
RECORDS_PER_SECOND = 300_000
#: The worker's figures are made anew once a second; to say those of many queues takes it long.
POLL_SECONDS = 0.1


def counted(bench: Bench, queues: int) -> Figures:
    prefix, size = bench.prefix(), bench.size
    client = ClientSettings.read(bench.servers, {"prefix": prefix, "partitions": size.partitions}, environment={})
    asyncio.run(ensure_topics(client, changelog=True))
    with BenchWorker(bench.servers, prefix, bench.folder, settings=SESSION) as worker:
        worker.wait_until_owner()
        _until_waiting(worker, 0)
        worker.process.send_signal(signal.SIGSTOP)
        try:
            names = [f"queue-{number}" for number in range(queues)]
            asyncio.run(
                fill_queues(bench.servers, Names(prefix), names, size.messages, size.value_bytes, size.partitions)
            )
        finally:
            worker.process.send_signal(signal.SIGCONT)
        meter, began = Meter({"worker": [worker.process.pid]}), time.monotonic()
        _until_waiting(worker, size.messages)
        seconds, taken = time.monotonic() - began, meter.seconds()
    return {
        "records_per_second": size.messages / seconds,
        "worker_cpu_seconds_per_million_records": taken["worker"] / size.messages * 1e6,
    }


def _until_waiting(worker: BenchWorker, count: int) -> None:
    def found() -> int | None:
        figures = worker.figures()
        if not figures.get("census", {}).get("complete"):
            return None
        return sum(row["waiting"] for row in figures["queues"].values())

    with limited() as check:
        while found() != count:
            check(found)
            time.sleep(POLL_SECONDS)


def bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"census of {what}", medians[what]["records_per_second"], RECORDS_PER_SECOND, "records/s", at_least=True)
        for what in (ONE, MANY)
    ]


CENSUS = Row(
    "census",
    "a worker counts what waits in queues that share a topic, sent by a plain producer while it stood still",
    {ONE: partial(counted, queues=1), MANY: partial(counted, queues=QUEUES)},
    bars,
    runs=3,
)
