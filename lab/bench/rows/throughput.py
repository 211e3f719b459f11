"""Throughput: of a producer, and of two consumers and workers."""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lab.bench.clients.producers import TASKS
from lab.bench.load import QUEUE, check_numbers, fill
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row
from lab.program import Client, measured
from lab.resources import Meter
from lab.topics import log_end, make_topics
from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings

# --- send -------------------------------------------------------------------------------------------------------------

SEND_MANY_PER_SECOND, SEND_PER_SECOND = 250_000, 40_000
#: Share of the messages that are sent one by one.
ONE_BY_ONE = 0.25


def send(bench: Bench, way: str, part: float = 1.0) -> Measurements:
    """Measure one producer process; each message is durable when its call returns."""
    prefix, size = bench.prefix(), bench.size
    count = int(size.messages * part)
    measurements = measured("producers", "send", bench.servers, prefix, way, count, size.value_bytes)
    written = asyncio.run(count_records(bench.servers, f"{prefix}.messages", size.partitions))
    if written != count + 1:
        raise SystemExit(f"bench: {count} messages were sent after a first one, but the topic has {written}")
    return measurements


async def count_records(servers: str, topic: str, partitions: int) -> int:
    async with log_end(servers, topic, partitions) as end:
        return await end()


def send_bars(medians: Medians) -> list[Bar]:
    many, one = (medians[name]["messages_per_second"] for name in ("send_many", "send"))
    return [
        Bar("send_many", many, SEND_MANY_PER_SECOND, "messages/s", at_least=True),
        Bar(f"send from {TASKS} tasks", one, SEND_PER_SECOND, "messages/s", at_least=True),
    ]


SEND = Row(
    "send",
    f"one process sends: calls of send_many, and awaited calls of send from {TASKS} tasks",
    {"send_many": partial(send, way="send_many"), "send": partial(send, way="send", part=ONE_BY_ONE)},
    send_bars,
)

# --- scale ------------------------------------------------------------------------------------------------------------

PARTITIONS = 8
ONE, TWO = "one of each", "two of each"
#: Two of each must not be slower than one, apart from the difference between two equal runs on an idle machine.
LEAST_OF_ONE, NOISE = 1.0, 0.05
JOIN_SECONDS = 60.0


def scale(bench: Bench, each: int) -> Measurements:
    """Measure several consumers and workers, all of which have joined before the first message is read."""
    prefix, size = bench.prefix(), bench.size
    client, _ = asyncio.run(make_topics(bench.servers, prefix, PARTITIONS))
    asyncio.run(fill(bench.servers, prefix, size.messages, size.value_bytes))
    files = [bench.folder / f"{prefix}-{number}" for number in range(each)]
    with ExitStack() as stack:
        workers = [stack.enter_context(bench.start_worker(prefix, f"machine-{number}")) for number in range(each)]
        workers[0].wait_until_shared(each, PARTITIONS)
        consumers = [stack.enter_context(Client("consumers", "shared", bench.servers, prefix, file)) for file in files]
        for consumer in consumers:
            consumer.read()
        asyncio.run(wait_until_joined(client, each))
        meter = Meter(
            {
                "consumer": [consumer.pid for consumer in consumers],
                "worker": [worker.pid for worker in workers],
                "broker": [bench.broker_pid],
            }
        )
        began = time.monotonic()
        for consumer in consumers:
            consumer.go()
        workers[0].wait_until_drained(QUEUE, size.messages)
        seconds, taken = time.monotonic() - began, meter.seconds()
        for consumer in consumers:
            consumer.go()
        most = max(consumer.read()["messages"] for consumer in consumers)
    check_handled(files, size.messages)
    million = 1e6 / size.messages
    return {
        "messages_per_second": size.messages / seconds,
        **{f"{part}_cpu_seconds_per_million": cpu * million for part, cpu in taken.items()},
        "largest_share": most / size.messages,
    }


async def wait_until_joined(client: ClientSettings, members: int) -> None:
    async with asyncio.timeout(JOIN_SECONDS), admin_client(client) as admin:
        while True:
            [answer] = await admin.describe_consumer_groups([client.names.group(QUEUE)])
            [(_, _, state, _, _, joined, *_)] = answer.groups
            if state == "Stable" and len(joined) == members:
                return
            await asyncio.sleep(0.1)


def check_handled(files: list[Path], count: int) -> None:
    numbers = array("Q")
    for file in files:
        numbers.frombytes(file.read_bytes())
        file.unlink()
    check_numbers(numbers, count)


def scale_bars(medians: Medians) -> list[Bar]:
    of_one = medians[TWO]["messages_per_second"] / medians[ONE]["messages_per_second"]
    what = f"two consumers and two workers: rate relative to one of each ({LEAST_OF_ONE:g} minus {NOISE:.0%} noise)"
    return [Bar(what, of_one, LEAST_OF_ONE - NOISE, "times", at_least=True)]


SCALE = Row(
    "scale",
    f"a queue of {PARTITIONS} partitions drained by one consumer and one worker, and by two of each",
    {ONE: partial(scale, each=1), TWO: partial(scale, each=2)},
    scale_bars,
    runs=3,
    # With fewer, a run takes two seconds, and depends most on the broker's JVM, which is still compiling.
    of_messages=3,
)
