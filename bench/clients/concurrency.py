"""One consumer process whose handlers wait, beside the same coroutines in a bare loop."""

from __future__ import annotations

import asyncio
import sys
import time

import marq
from bench.clients.talk import say
from bench.load import QUEUE, check


async def bare(values: list[bytes], work_s: float, concurrency: int) -> float:
    """Return how many a second go through coroutines that do nothing else."""
    seen: list[bytes] = []
    left = iter(values)

    async def handler(value: bytes) -> None:
        seen.append(value)
        await asyncio.sleep(work_s)

    async def work() -> None:
        for value in left:
            await handler(value)

    began = time.monotonic()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return len(seen) / (time.monotonic() - began)


async def consumed(servers: str, prefix: str, count: int, work_s: float, concurrency: int) -> tuple[float, list[bytes]]:
    seen: list[bytes] = []
    ended, first_s = 0, 0.0
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal ended, first_s
        if not seen:
            first_s = time.monotonic()
        seen.append(message.value)
        await asyncio.sleep(work_s)
        ended += 1
        if ended == count:
            done.set()

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler, concurrency=concurrency))
        await done.wait()
        await consumer.flush()
        rate = count / (time.monotonic() - first_s)
        running.cancel()
        await asyncio.wait([running])
    return rate, seen


async def main(servers: str, prefix: str, count: int, work_ms: int, concurrency: int) -> None:
    rate, seen = await consumed(servers, prefix, count, work_ms / 1000, concurrency)
    check(seen, count)
    loop = await bare(seen, work_ms / 1000, concurrency)
    say(messages_per_second=rate, bare_loop_per_second=loop, of_bare_loop=rate / loop)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:6])))  # type: ignore[call-arg]
