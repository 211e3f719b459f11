"""Throughput: of a producer, and of two consumers and workers."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import marq
from lab.bench.client import CHUNK, QUEUE, check, say, told, values
from lab.bench.rows.drain import relative
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import RunError, ask, measured
from lab.resources import Meter
from lab.topics import TopicScan
from marq.kafka.connection import admin_client
from marq.settings.client import ClientSettings

# --- send -------------------------------------------------------------------------------------------------------------

SEND_MANY_PER_SECOND, SEND_PER_SECOND = 250_000, 40_000
#: Share of the messages that are sent one by one, and number of tasks that do.
ONE_BY_ONE, TASKS = 0.25, 100


async def send_all(servers: str, prefix: str, way: str, count: int, size: int) -> None:
    """Send messages in calls of ``send_many``, or one by one from many tasks."""
    messages = values(0, count, size)
    left = iter(messages)

    async def send_one_by_one() -> None:
        for message in left:
            await producer.send(QUEUE, message)

    async with marq.Producer(servers, prefix=prefix) as producer:
        # Connects, and is not measured.
        await producer.send("another", b"")
        began_s, cpu_s = time.monotonic(), time.process_time()
        if way == "send_many":
            for start in range(0, count, CHUNK):
                await producer.send_many(QUEUE, messages[start : start + CHUNK])
        else:
            await asyncio.gather(*(send_one_by_one() for _ in range(TASKS)))
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    say(messages_per_second=count / seconds, producer_cpu_seconds_per_million=cpu_s / count * 1e6)


def send(bench: Bench, way: str, part: float = 1.0) -> Measurements:
    """Measure one producer process; each message is durable when its call returns."""
    count = int(bench.size.messages * part)
    measurements = measured(send_all, *bench.namespace, way, count, bench.size.value_bytes)
    written = asyncio.run(count_records(bench.client))
    if written != count + 1:
        raise RunError(f"{count} messages were sent after a first one, but the topic has {written}")
    return measurements


async def count_records(client: ClientSettings) -> int:
    async with TopicScan(client, client.names.messages, committed=False) as reader:
        return await reader.written()


_PER_SECOND = "messages_per_second"
SEND = BenchRow(
    "send",
    f"one process sends: calls of send_many, and awaited calls of send from {TASKS} tasks",
    {"send_many": partial(send, way="send_many"), "send": partial(send, way="send", part=ONE_BY_ONE)},
    lambda medians: [
        Bar("send_many", medians["send_many"][_PER_SECOND], SEND_MANY_PER_SECOND, "messages/s", True),
        Bar(f"send from {TASKS} tasks", medians["send"][_PER_SECOND], SEND_PER_SECOND, "messages/s", True),
    ],
)

# --- scale ------------------------------------------------------------------------------------------------------------

PARTITIONS = 8
ONE, TWO = "one of each", "two of each"
#: Two of each must not be slower than one, apart from the difference between two equal runs on an idle machine.
LEAST_OF_ONE, NOISE = 1.0, 0.05
_RELATIVE = f"two consumers and two workers: rate relative to one of each ({LEAST_OF_ONE:g} minus {NOISE:.0%} noise)"
JOIN_SECONDS = 60.0


async def shared(servers: str, prefix: str) -> None:
    """Join, wait for the other consumers, handle messages until told, and report their numbers."""
    numbers: list[int] = []

    async def handler(message: marq.Message) -> None:
        numbers.append(int.from_bytes(message.value[:8], "big"))

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        say(joined=True)
        await told()
        running = asyncio.create_task(consumer.run(handler))
        await told()
        running.cancel()
        await asyncio.wait([running])
    say(numbers=numbers)


def scale(bench: Bench, number: int) -> Measurements:
    """Measure several consumers and workers, all of which have joined before the first message is read."""
    messages = bench.size.messages
    asyncio.run(bench.make_topics(PARTITIONS))
    bench.fill()
    workers = [bench.start_worker(f"machine-{index}") for index in range(number)]
    workers[0].wait_until_owned(number, PARTITIONS)
    consumers = bench.clients(*[(shared, *bench.namespace)] * number)
    asyncio.run(wait_until_joined(bench.client, number))
    parts = {"consumer": [consumer.pid for consumer in consumers], "worker": [worker.pid for worker in workers]}
    meter, began = Meter({**parts, "broker": [bench.broker_pid]}), time.monotonic()
    for consumer in consumers:
        consumer.go()
    workers[0].wait_until_drained(QUEUE, messages)
    seconds, taken = time.monotonic() - began, meter.seconds()
    handled = [answer["numbers"] for answer in ask(*consumers)]
    check([number for numbers in handled for number in numbers], messages)
    million = 1e6 / messages
    return {
        _PER_SECOND: messages / seconds,
        **{f"{part}_cpu_seconds_per_million": cpu * million for part, cpu in taken.items()},
        "largest_share": max(map(len, handled)) / messages,
    }


async def wait_until_joined(client: ClientSettings, members: int) -> None:
    async with asyncio.timeout(JOIN_SECONDS), admin_client(client) as admin:
        while True:
            [answer] = await admin.describe_consumer_groups([client.names.group(QUEUE)])
            [(_, _, state, _, _, joined, *_)] = answer.groups
            if state == "Stable" and len(joined) == members:
                return
            await asyncio.sleep(0.1)


SCALE = BenchRow(
    "scale",
    f"a queue of {PARTITIONS} partitions drained by one consumer and one worker, and by two of each",
    {ONE: partial(scale, number=1), TWO: partial(scale, number=2)},
    lambda medians: [relative(_RELATIVE, medians, TWO, ONE, LEAST_OF_ONE - NOISE, _PER_SECOND)],
    runs=3,
    # With fewer, a run takes two seconds, and depends most on the broker's JVM, which is still compiling.
    of_messages=3,
)
