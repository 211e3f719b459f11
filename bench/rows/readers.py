"""How many bytes consumers read for each message they get, when many queues share a topic.

Each of the consumers serves one queue. Without ``spread`` each reads the whole topic. With a spread of one partition a
consumer reads its own partition, in which on average (queues - 1) / partitions other queues live, too: of 200 queues
in 128 partitions 1.6, so it reads 2.6 times the bytes of its own messages, each with some 20 bytes around the payload.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial

import marq
from bench.bars import Bar
from bench.children import Child
from bench.placing import place
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker
from marq.settings import ClientSettings
from marq.topics import ensure_topics

QUEUES, PROCESSES, PARTITIONS, MARKERS_PARTITIONS = 200, 4, 128, 4
WITHOUT, WITH = "without spread", "spread of 1"
#: Of each queue: without spread each is read 200 times, which takes long, and with it what else a client receives would
#: count for too much.
MESSAGES = {WITHOUT: 50, WITH: 1_000}
#: Bytes read, of the payload's.
MOST_OF_PAYLOAD = 4.0


def queue_name(number: int) -> str:
    return f"queue-{number}"


def read(bench: Bench, name: str) -> Figures:
    prefix, size, count = bench.prefix(), bench.size, MESSAGES[name]
    asyncio.run(prepare(bench.servers, prefix, name, size.value_bytes))
    each = QUEUES // PROCESSES
    with ExitStack() as stack:
        worker = stack.enter_context(BenchWorker(bench.servers, prefix, bench.folder))
        worker.wait_until_owner()
        processes = [
            stack.enter_context(Child("bench.clients.readers", bench.servers, prefix, number * each, each, count))
            for number in range(PROCESSES)
        ]
        for process in processes:
            process.said()
        began = time.monotonic()
        for process in processes:
            process.tell()
        received = sum(process.said()["bytes_received"] for process in processes)
        seconds = time.monotonic() - began
    messages = QUEUES * count
    return {
        "bytes_read_per_message": received / messages,
        "bytes_read_of_payload": received / messages / size.value_bytes,
        "seconds": seconds,
    }


async def prepare(servers: str, prefix: str, name: str, size: int) -> None:
    """Make the topics and the definitions, and send the messages."""
    options = {"prefix": prefix, "partitions": PARTITIONS, "markers_partitions": MARKERS_PARTITIONS}
    await ensure_topics(ClientSettings.read(servers, options, environment={}), changelog=True)
    queues = [queue_name(number) for number in range(QUEUES)]
    if name == WITH:
        await place(servers, prefix, queues, 1, PARTITIONS)
    async with marq.Producer(servers, prefix=prefix) as producer:
        values = [b"x" * size] * MESSAGES[name]
        for queue in queues:
            await producer.send_many(queue, values)


def bars(medians: Medians) -> list[Bar]:
    of_payload = medians[WITH]["bytes_read_of_payload"]
    what = f"{QUEUES} consumers of a queue each, {PARTITIONS} partitions, spread of 1: bytes read"
    return [Bar(what, of_payload, MOST_OF_PAYLOAD, "times the payload")]


READERS = Row(
    "readers",
    f"{QUEUES} consumers in {PROCESSES} processes, each of a queue of its own: bytes read for each message handled",
    {name: partial(read, name=name) for name in MESSAGES},
    bars,
    # Bytes differ little from run to run.
    runs=1,
    warm=0,
)
