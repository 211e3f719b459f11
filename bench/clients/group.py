"""One consumer process of a named group: handles all messages of its queues."""

from __future__ import annotations

import asyncio
import sys
import time

import marq
from bench.clients.talk import say
from bench.load import check


async def main(servers: str, prefix: str, group: str, count: int) -> None:
    seen: list[bytes] = []
    first_s, begun_s = 0.0, time.monotonic()
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal first_s
        first_s = first_s or time.monotonic()
        seen.append(message.value)
        if len(seen) == count:
            done.set()

    async with marq.Consumer(group=group, bootstrap_servers=servers, prefix=prefix) as consumer:
        cpu = time.process_time()
        running = asyncio.create_task(consumer.run(handler))
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await consumer.flush()
        ended_s, cpu = time.monotonic(), time.process_time() - cpu
        running.cancel()
        await asyncio.wait([running])
    check(seen, count)
    say(
        messages_per_second=count / (ended_s - first_s),
        start_seconds=first_s - begun_s,
        consumer_cpu_seconds_per_million=cpu / count * 1e6,
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
