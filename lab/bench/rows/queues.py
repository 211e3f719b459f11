"""Many queues on one topic: served by one consumer, and by a consumer for each."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial

import marq
from lab.bench import peers
from lab.bench.client import fill_queues, place, queue_name, say, told
from lab.bench.rows.drain import relative
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import ask, measured
from lab.resources import Meter
from marq.settings.definitions import layer_key

# --- queues -----------------------------------------------------------------------------------------------------------

#: To see how costs grow: make bench ONLY=queues QUEUES=100.
QUEUES = int(os.environ.get("QUEUES") or 10_000)
GROUP = "many"
LEAST_OF_ONE = 0.5
ONE, MANY = "1 queue", f"{QUEUES:,} queues"


def grouped(bench: Bench, count: int) -> Measurements:
    """Measure a consumer of many queues that take turns, so that two messages in a row rarely share a queue."""
    size, queues = bench.size, [queue_name(number) for number in range(count)]
    asyncio.run(define(*bench.namespace, queues))
    asyncio.run(fill_queues(bench.servers, bench.names, queues, size.messages, size.value_bytes, size.partitions))
    meter = Meter({"worker": [bench.worker().pid]})
    measurements = measured(peers.drain, "marq", *bench.namespace, size.messages, 0, 1, ("run", 64, GROUP))
    return {
        "messages_per_second": measurements["rate"],
        "start_seconds": measurements["startup_seconds"],
        "consumer_cpu_seconds_per_million": measurements["cpu_seconds"] / size.messages * 1e6,
        "worker_cpu_seconds_per_million": meter.seconds()["worker"] / size.messages * 1e6,
    }


async def define(servers: str, prefix: str, queues: list[str]) -> None:
    """Define the queues in bulk, as a definitions file does."""
    async with marq.Queues(servers, prefix=prefix) as definitions:
        await definitions.publish({layer_key("change", queue): {"group": GROUP} for queue in queues})


QUEUES_ROW = BenchRow(
    "queues",
    f"one consumer of a group serves {MANY} that share a topic, next to a group with one queue",
    {ONE: partial(grouped, count=1), MANY: partial(grouped, count=QUEUES)},
    lambda medians: [
        relative(f"{MANY}: rate relative to one queue", medians, MANY, ONE, LEAST_OF_ONE, "messages_per_second")
    ],
    runs=3,
    of_messages=0.5,
)

# --- readers ----------------------------------------------------------------------------------------------------------

READERS, PROCESSES, PARTITIONS, MARKERS_PARTITIONS = 200, 4, 128, 4
#: Number of consumers that start at the same time.
STARTING = 10
EVERYWHERE, APART = "all partitions", "partitions = 1"
#: Messages of each queue. On all partitions, each consumer reads those of all queues. On one partition, other bytes
#: would dominate if there were few.
MESSAGES = {EVERYWHERE: 50, APART: 1_000}
#: Bytes read, divided by the payload's.
MOST_OF_PAYLOAD = 4.0
_READ = f"{READERS} consumers with a queue each, {PARTITIONS} partitions, partitions = 1: bytes read"


async def readers(servers: str, prefix: str, first: int, consumers: int, messages: int) -> None:
    """Run many consumers, each with its own queue, and count the bytes that the process receives for their messages.

    The count begins when all have joined, and ends when the last message is acked.
    """
    received, left = 0, consumers * messages
    done = asyncio.Event()
    feed = asyncio.StreamReader.feed_data

    def feed_and_count(reader: asyncio.StreamReader, data: bytes) -> None:
        nonlocal received
        received += len(data)
        feed(reader, data)

    async def handler(message: marq.Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    asyncio.StreamReader.feed_data = feed_and_count  # type: ignore[assignment]
    own = [marq.Consumer(queue_name(first + number), servers, prefix=prefix) for number in range(consumers)]
    for start in range(0, consumers, STARTING):
        await asyncio.gather(*(consumer.start() for consumer in own[start : start + STARTING]))
    before = received
    say(joined=True)
    await told()
    running = [asyncio.create_task(consumer.run(handler)) for consumer in own]
    await done.wait()
    await asyncio.gather(*(consumer.flush() for consumer in own))
    say(bytes_received=received - before)
    # The row ends this process.
    await asyncio.wait(running)


def read(bench: Bench, name: str) -> Measurements:
    """Measure the bytes that consumers read for each message they receive.

    By default each reads the whole topic. With ``partitions = 1`` it reads one partition, which it shares on average
    with (queues - 1) / partitions other queues: of 200 queues in 128 partitions, 2.6 times the bytes of its messages,
    each with some 20 bytes around the payload.
    """
    share, count = READERS // PROCESSES, MESSAGES[name]
    asyncio.run(prepare(bench, name))
    bench.worker()
    firsts = range(0, READERS, share)
    processes = bench.clients(*[(readers, *bench.namespace, first, share, count) for first in firsts])
    began = time.monotonic()
    bytes_per_message = sum(answer["bytes_received"] for answer in ask(*processes)) / (READERS * count)
    return {
        "bytes_read_per_message": bytes_per_message,
        "bytes_read_of_payload": bytes_per_message / bench.size.value_bytes,
        "seconds": time.monotonic() - began,
    }


async def prepare(bench: Bench, name: str) -> None:
    await bench.make_topics(PARTITIONS, markers_partitions=MARKERS_PARTITIONS)
    queues = [queue_name(number) for number in range(READERS)]
    if name == APART:
        await place(*bench.namespace, queues, 1, PARTITIONS)
    async with marq.Producer(bench.servers, prefix=bench.names.prefix) as producer:
        for queue in queues:
            await producer.send_many(queue, [b"x" * bench.size.value_bytes] * MESSAGES[name])


READERS_ROW = BenchRow(
    "readers",
    f"{READERS} consumers in {PROCESSES} processes, each with its own queue: bytes read for each message handled",
    {name: partial(read, name=name) for name in MESSAGES},
    lambda medians: [Bar(_READ, medians[APART]["bytes_read_of_payload"], MOST_OF_PAYLOAD, "times the payload")],
    # Bytes differ little from run to run.
    runs=1,
    warm=0,
)
