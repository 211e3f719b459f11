"""One consumer process of Marq: drains the queue, and prints what it measured as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import marq
from bench.clients.received import NUMBER, Received
from bench.clients.work import Work
from bench.load import QUEUE
from marq.consumer import DEFAULT_MAX_IN_FLIGHT

#: Messages that a handler of ``run_batch`` gets at the most.
BATCH_MESSAGES = 1_000
#: Messages held for each that is worked on, so that the next one is there.
HELD = 4


async def run(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """``run`` with a handler for each message."""
    done = asyncio.Event()
    values, count, do = received.values, received.count, work.do

    async def look(message: marq.Message) -> None:
        if not values:
            received.begin()
        values.append(message.value[NUMBER])
        if len(values) >= count:
            done.set()

    async def work_on(message: marq.Message) -> None:
        received.begin()
        value = message.value
        await do(value)
        values.append(value[NUMBER])
        if len(values) >= count:
            done.set()

    handler = work_on if work.ms else look
    await _until(done, consumer.run(handler, concurrency=concurrency), consumer)


async def run_batch(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """``run_batch`` with a handler that takes many."""
    done = asyncio.Event()

    async def handler(messages: list[marq.Message]) -> None:
        received.add(message.value for message in messages)
        if received.complete:
            done.set()

    running = consumer.run_batch(handler, max_messages=BATCH_MESSAGES, concurrency=concurrency)
    await _until(done, running, consumer)


async def iterate(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """``async for … async with message``."""
    async for message in consumer:
        async with message:
            received.add((message.value,))
        if received.complete:
            break
    await consumer.flush()


WAYS: dict[str, Callable[[marq.Consumer, Received, Work, int], Awaitable[None]]] = {
    "run": run,
    "run_batch": run_batch,
    "iterate": iterate,
}


async def _until(done: asyncio.Event, running: Awaitable[None], consumer: marq.Consumer) -> None:
    """Run until it is done and every ack is durable."""
    task, waiting = asyncio.ensure_future(running), asyncio.ensure_future(done.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    await consumer.flush()
    task.cancel()
    await asyncio.wait([task])


async def main(
    servers: str, prefix: str, count: int, way: str, start: str = "marked", work: str = "0", concurrency: str = "64"
) -> None:
    received, doing = Received(count), Work.read(work)
    held = max(DEFAULT_MAX_IN_FLIGHT, HELD * int(concurrency))
    async with marq.Consumer(QUEUE, servers, prefix=prefix, start=start, max_in_flight=held) as consumer:
        await WAYS[way](consumer, received, doing, int(concurrency))
        received.end()
    received.print()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
