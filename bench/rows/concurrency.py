"""How many handlers that wait one process serves at a time, beside the same coroutines without a queue."""

from __future__ import annotations

import asyncio

from bench.bars import Bar
from bench.load import fill
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker

WORK_MS, CONCURRENCY = 10, 1_000
LEAST_OF_LOOP = 0.5
#: Of the messages, how many are enough: at the most 100,000 a second can be done.
PART = 0.5


def concurrent(bench: Bench) -> Figures:
    prefix, count = bench.prefix(), int(bench.size.messages * PART)
    asyncio.run(fill(bench.servers, prefix, count, bench.size.value_bytes))
    with BenchWorker(bench.servers, prefix, bench.folder) as worker:
        worker.wait_until_owner()
        words = (prefix, count, WORK_MS, CONCURRENCY)
        return measured("bench.clients.concurrency", bench.servers, *map(str, words))


def bars(medians: Medians) -> list[Bar]:
    of_loop = medians["marq"]["of_bare_loop"]
    return [Bar(f"{CONCURRENCY:,} handlers of {WORK_MS} ms, of a bare loop", of_loop, LEAST_OF_LOOP, "times", True)]


CONCURRENCY_ROW = Row(
    "concurrency",
    f"{CONCURRENCY:,} handlers at a time in one process, each waits for {WORK_MS} ms",
    {"marq": concurrent},
    bars,
)
