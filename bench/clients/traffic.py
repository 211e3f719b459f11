"""One process that sends to a queue and handles its messages, at a steady rate, until the row ends it."""

from __future__ import annotations

import asyncio
import sys

import marq
from bench.clients.talk import say, told

TURN_S = 0.005


async def feed(producer: marq.Producer, queue: str, rate: int) -> None:
    messages = [b"x" * 200] * int(rate * TURN_S)
    while True:
        await producer.send_many(queue, messages)
        await asyncio.sleep(TURN_S)


async def main(servers: str, prefix: str, queue: str, rate: int) -> None:
    handled = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        handled.set()

    async with (
        marq.Producer(servers, prefix=prefix) as producer,
        marq.Consumer(queue, servers, prefix=prefix) as consumer,
    ):
        tasks = [asyncio.create_task(consumer.run(handler)), asyncio.create_task(feed(producer, queue, rate))]
        await handled.wait()
        say(ready=True)
        await told()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))  # type: ignore[call-arg]
