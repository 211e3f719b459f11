"""How fast messages come back whose leases end all at once."""

from __future__ import annotations

import asyncio

from bench.bars import Bar
from bench.load import fill
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker

#: Of the messages: 200,000 leases.
PART = 0.5
PER_SECOND = 40_000


def expire(bench: Bench) -> Figures:
    prefix, count = bench.prefix(), int(bench.size.messages * PART)
    asyncio.run(fill(bench.servers, prefix, count, bench.size.value_bytes))
    with BenchWorker(bench.servers, prefix, bench.folder) as worker:
        worker.wait_until_owner()
        meter = Meter({"worker": [worker.process.pid]})
        figures = measured("bench.clients.expiry", bench.servers, prefix, str(count))
        return {**figures, "worker_cpu_seconds": meter.seconds()["worker"]}


def bars(medians: Medians) -> list[Bar]:
    rate = medians["marq"]["redelivered_per_second"]
    return [Bar("leases that end at once: handled again and acked", rate, PER_SECOND, "messages/s", at_least=True)]


EXPIRY = Row(
    "expiry",
    "a consumer leaves with all messages in hand: from the end of the first lease until another has acked them all",
    {"marq": expire},
    bars,
    runs=3,
)
