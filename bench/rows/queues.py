"""What many queues cost that one consumer serves: with one queue, and with ten thousand.

The queues take turns with each message, so that a consumer finds next to no two messages of one queue in a row. They
are defined in bulk, as a file of definitions is; messages come from a plain Kafka producer, which costs each the same.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import marq
from bench.bars import Bar
from bench.load import fill_queues
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker
from marq.core.definitions import layer_key
from marq.core.names import Names

#: For a look at how it grows: make bench ONLY=queues QUEUES=100.
QUEUES = int(os.environ.get("QUEUES") or 10_000)
GROUP = "many"
#: Of the messages.
PART = 0.5
LEAST_OF_ONE = 0.5
#: A worker knows definitions from the queues topic; figures of so many queues take it long to say.
ONE, MANY = "1 queue", f"{QUEUES:,} queues"


def grouped(bench: Bench, count: int) -> Figures:
    prefix, size = bench.prefix(), bench.size
    messages = int(size.messages * PART)
    queues = [f"queue-{number}" for number in range(count)]
    asyncio.run(define(bench.servers, prefix, queues))
    asyncio.run(fill_queues(bench.servers, Names(prefix), queues, messages, size.value_bytes, size.partitions))
    with BenchWorker(bench.servers, prefix, bench.folder) as worker:
        worker.wait_until_owner()
        meter = Meter({"worker": [worker.process.pid]})
        figures = measured("bench.clients.group", bench.servers, prefix, GROUP, str(messages))
        return {**figures, "worker_cpu_seconds_per_million": meter.seconds()["worker"] / messages * 1e6}


async def define(servers: str, prefix: str, queues: list[str]) -> None:
    async with marq.Queues(servers, prefix=prefix) as definitions:
        await definitions.publish({layer_key("change", queue): {"group": GROUP} for queue in queues})


def bars(medians: Medians) -> list[Bar]:
    of_one = medians[MANY]["messages_per_second"] / medians[ONE]["messages_per_second"]
    return [Bar(f"{MANY}, of the speed of one", of_one, LEAST_OF_ONE, "times", at_least=True)]


QUEUES_ROW = Row(
    "queues",
    f"one consumer of a group serves {MANY} that share a topic, beside a group of one",
    {ONE: partial(grouped, count=1), MANY: partial(grouped, count=QUEUES)},
    bars,
    runs=3,
)
