"""Whether two consumers and two workers get more done than one of each, and what each part takes of the processors.

All consumers have joined, and all workers own their partitions, before the first message is read. Measured from then
until the figures of the workers say that each message is acked.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient

from bench.bars import Bar
from bench.children import Child
from bench.load import QUEUE, check_numbers, fill
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker
from marq.core.names import Names
from marq.settings import ClientSettings
from marq.topics import ensure_topics

PARTITIONS = 8
#: Of the messages: with fewer a run takes two seconds, and the broker's Java, which still compiles, decides.
OF_MESSAGES = 3
ONE, TWO = "one of each", "two of each"
#: Not slower: what two runs of the same differ by on a machine that does nothing else is not counted as slower.
LEAST_OF_ONE, NOISE = 1.0, 0.05
LIMIT_SECONDS = 60.0


def drained(bench: Bench, each: int) -> Figures:
    prefix, size = bench.prefix(), bench.size
    client = ClientSettings.read(bench.servers, {"prefix": prefix, "partitions": PARTITIONS}, environment={})
    asyncio.run(ensure_topics(client, changelog=True))
    asyncio.run(fill(bench.servers, prefix, size.messages, size.value_bytes))
    files = [bench.folder / f"{prefix}-{number}" for number in range(each)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(BenchWorker(bench.servers, prefix, bench.folder, f"machine-{number}"))
            for number in range(each)
        ]
        wait_until_shared(workers)
        consumers = [stack.enter_context(Child("bench.clients.shared", bench.servers, prefix, file)) for file in files]
        for consumer in consumers:
            consumer.said()
        asyncio.run(wait_until_joined(bench.servers, Names(prefix).group(QUEUE), each))
        meter = Meter(
            {
                "consumer": [consumer.pid for consumer in consumers],
                "worker": [worker.process.pid for worker in workers],
                "broker": [bench.broker_pid],
            }
        )
        began = time.monotonic()
        for consumer in consumers:
            consumer.tell()
        workers[0].wait_until_drained(QUEUE, size.messages)
        seconds, taken = time.monotonic() - began, meter.seconds()
        for consumer in consumers:
            consumer.tell()
        most = max(consumer.said()["messages"] for consumer in consumers)
    check_handled(files, size.messages)
    million = 1e6 / size.messages
    return {
        "messages_per_second": size.messages / seconds,
        **{f"{part}_cpu_seconds_per_million": cpu * million for part, cpu in taken.items()},
        "largest_share": most / size.messages,
    }


def wait_until_shared(workers: list[BenchWorker]) -> None:
    """Return when all partitions have owners, and each worker is one."""
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        found = [worker["partitions"] for worker in workers[0].figures().get("workers", [])]
        owned = [part for parts in found for part in parts if part["state"] == "owner"]
        if len(found) == len(workers) and all(found) and len(owned) == PARTITIONS:
            return
        time.sleep(0.2)
    raise SystemExit(f"bench: the partitions were not shared by {len(workers)} workers after {LIMIT_SECONDS} s")


async def wait_until_joined(servers: str, group: str, members: int) -> None:
    """Return when a group has so many members, and is stable."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                [answer] = await admin.describe_consumer_groups([group])
                [(_, _, state, _, _, found, *_)] = answer.groups
                if state == "Stable" and len(found) == members:
                    return
                await asyncio.sleep(0.1)
    finally:
        await admin.close()


def check_handled(files: list[Path], count: int) -> None:
    numbers = array("Q")
    for file in files:
        numbers.frombytes(file.read_bytes())
        file.unlink()
    check_numbers(numbers, count)


def bars(medians: Medians) -> list[Bar]:
    of_one = medians[TWO]["messages_per_second"] / medians[ONE]["messages_per_second"]
    what = f"two consumers and two workers, of the speed of one of each ({LEAST_OF_ONE:g} less {NOISE:.0%} of noise)"
    return [Bar(what, of_one, LEAST_OF_ONE - NOISE, "times", at_least=True)]


SCALE = Row(
    "scale",
    f"a queue of {PARTITIONS} partitions emptied by one consumer and one worker, and by two of each",
    {ONE: partial(drained, each=1), TWO: partial(drained, each=2)},
    bars,
    runs=3,
    of_messages=OF_MESSAGES,
)
