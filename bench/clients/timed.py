"""One consumer process: how long after a message was to be sent its handler begins."""

from __future__ import annotations

import asyncio
import sys
import time

import marq
from bench.clients.stamps import percentiles, read_stamp
from bench.clients.talk import say


async def main(servers: str, prefix: str, queue: str, count: int, unmeasured: int) -> None:
    """Receive so many messages; the first ones, by their numbers, are not measured."""
    milliseconds: list[float] = []
    seen: set[int] = set()
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        number, intended_s = read_stamp(message.value)
        seen.add(number)
        if number >= unmeasured:
            milliseconds.append((time.monotonic() - intended_s) * 1000)
        if len(seen) == count:
            done.set()

    async with marq.Consumer(queue, servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler))
        say(ready=True)
        await done.wait()
        await consumer.flush()
        running.cancel()
        await asyncio.wait([running])
    say(**percentiles(milliseconds))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:6])))  # type: ignore[call-arg]
