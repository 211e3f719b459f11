"""One consumer process of Marq: drains the queue, handler per message, and prints what it measured as JSON."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

import marq
from bench.load import QUEUE, check


async def run_handler(consumer: marq.Consumer, count: int) -> tuple[list[bytes], float, float]:
    """``run`` with a handler that reads the value."""
    seen: list[bytes] = []
    done = asyncio.Event()
    first = 0.0

    async def handler(message: marq.Message) -> None:
        nonlocal first
        if not seen:
            first = time.perf_counter()
        seen.append(message.value)
        if len(seen) >= count:
            done.set()

    running = asyncio.create_task(consumer.run(handler, concurrency=64))
    waiting = asyncio.create_task(done.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    await consumer.flush()
    ended = time.perf_counter()
    running.cancel()
    await asyncio.wait([running])
    return seen, first, ended


async def iterate(consumer: marq.Consumer, count: int) -> tuple[list[bytes], float, float]:
    """``async for … async with message``."""
    seen: list[bytes] = []
    first = 0.0
    async for message in consumer:
        async with message:
            if not seen:
                first = time.perf_counter()
            seen.append(message.value)
        if len(seen) >= count:
            break
    await consumer.flush()
    return seen, first, time.perf_counter()


async def main(servers: str, prefix: str, count: int, way: str, start: str = "marked") -> None:
    begun = time.perf_counter()
    consumer = marq.Consumer(QUEUE, servers, prefix=prefix, start=start)
    await consumer.start()
    drain = run_handler if way == "run" else iterate
    seen, first, ended = await drain(consumer, count)
    used = resource.getrusage(resource.RUSAGE_SELF)
    await consumer.stop()
    check(seen, count)
    figures = {
        "rate": count / (ended - first),
        "startup_seconds": first - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "ended_at": time.time() - (time.perf_counter() - ended),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
