"""One consumer process of Marq that drains a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import marq
from lab.bench.clients.client import call, until_handled
from lab.bench.clients.drain_account import NO_WORK, NUMBER, Received, Work
from lab.bench.load import QUEUE
from marq.consumer.consumer import DEFAULT_MAX_IN_FLIGHT

#: Maximum messages per call of a ``run_batch`` handler.
BATCH_MESSAGES = 1_000
#: Messages in flight for each one being worked on, so that the next one is always ready.
HELD = 4


async def run(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """Drain by ``run``, with a handler that takes one message."""
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

    await until_handled(consumer, consumer.run(work_on if work.ms else look, concurrency=concurrency), done)


async def run_batch(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """Drain by ``run_batch``, with a handler that takes many messages."""
    done = asyncio.Event()

    async def handler(messages: list[marq.Message]) -> None:
        received.add(message.value for message in messages)
        if received.complete:
            done.set()

    running = consumer.run_batch(handler, max_messages=BATCH_MESSAGES, concurrency=concurrency)
    await until_handled(consumer, running, done)


async def iterate(consumer: marq.Consumer, received: Received, work: Work, concurrency: int) -> None:
    """Drain by ``async for … async with message``."""
    async for message in consumer:
        async with message:
            received.add((message.value,))
        if received.complete:
            break
    await consumer.flush()


WAYS: dict[str, Callable[[marq.Consumer, Received, Work, int], Awaitable[None]]] = {
    way.__name__: way for way in (run, run_batch, iterate)
}


async def main(servers: str, prefix: str, count: int, way: str, work: Work = NO_WORK, concurrency: int = 64) -> None:
    received = Received(count)
    in_flight = max(DEFAULT_MAX_IN_FLIGHT, HELD * concurrency)
    async with marq.Consumer(QUEUE, servers, prefix=prefix, max_in_flight=in_flight) as consumer:
        await WAYS[way](consumer, received, work, concurrency)
        received.end()
    received.report()


if __name__ == "__main__":
    call(main)
