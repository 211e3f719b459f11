"""One producer process: sends messages in calls of ``send_many``, or one by one from many tasks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import marq
from bench.clients.talk import say
from bench.load import CHUNK, QUEUE, values

TASKS = 100


async def in_calls(producer: marq.Producer, messages: list[bytes]) -> None:
    for start in range(0, len(messages), CHUNK):
        await producer.send_many(QUEUE, messages[start : start + CHUNK])


async def one_by_one(producer: marq.Producer, messages: list[bytes]) -> None:
    left = iter(messages)

    async def work(left: Iterator[bytes]) -> None:
        for message in left:
            await producer.send(QUEUE, message)

    await asyncio.gather(*(work(left) for _ in range(TASKS)))


async def main(servers: str, prefix: str, way: str, count: int, size: int) -> None:
    messages = values(0, count, size)
    async with marq.Producer(servers, prefix=prefix) as producer:
        # Connects, and is not measured.
        await producer.send("another", b"")
        began, cpu = time.monotonic(), time.process_time()
        await (in_calls if way == "send_many" else one_by_one)(producer, messages)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    say(messages_per_second=count / seconds, producer_cpu_seconds_per_million=cpu / count * 1e6)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
