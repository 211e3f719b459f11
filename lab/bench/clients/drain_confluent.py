"""One process of a confluent-kafka consumer group: the practical limit for a Python consumer of the same topic.

With work to do, it works on several messages at a time in an event loop, and commits in order, like a program that has
independent messages and only offsets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import Consumer, Message, TopicPartition

from lab.bench.clients.client import call
from lab.bench.clients.drain_account import NO_WORK, Received, Work

#: Maximum messages per call of `consume`: without work, and with work.
TAKEN, TAKEN_TO_WORK = 4_000, 1_000
#: Timeout of that call while other messages are being worked on.
SHORT_SECONDS = 0.01


def connect(servers: str, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"{topic}-confluent",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    return consumer


def look(consumer: Consumer, received: Received) -> None:
    while not received.complete:
        messages = consumer.consume(num_messages=TAKEN, timeout=1.0)
        if not messages:
            continue
        received.add(message.value() for message in messages)
        # Waits for the last commit only, which covers all before it.
        consumer.commit(asynchronous=not received.complete)


async def work_on(consumer: Consumer, received: Received, work: Work, concurrency: int) -> None:
    """Work on batches at the same time; commit their offsets in order."""
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    taken = min(TAKEN_TO_WORK, concurrency)
    going: deque[tuple[asyncio.Task[None], list[Message]]] = deque()
    asked = 0

    async def do(messages: list[Message]) -> None:
        await asyncio.gather(*[work.do(message.value()) for message in messages])
        received.add(message.value() for message in messages)

    while going or not received.complete:
        if asked < received.count and len(going) * taken < concurrency:
            messages = await loop.run_in_executor(thread, consumer.consume, taken, SHORT_SECONDS if going else 1.0)
            if messages:
                received.begin()
                asked += len(messages)
                going.append((asyncio.create_task(do(messages)), messages))
        else:
            await asyncio.wait([task for task, _ in going], return_when=asyncio.FIRST_COMPLETED)
        while going and going[0][0].done():
            task, messages = going.popleft()
            task.result()
            commit(consumer, messages, asynchronous=bool(going) or asked < received.count)
    thread.shutdown()


def commit(consumer: Consumer, messages: list[Message], *, asynchronous: bool) -> None:
    nexts = {(message.topic(), message.partition()): message.offset() + 1 for message in messages}
    offsets = [TopicPartition(*where, offset) for where, offset in nexts.items()]
    consumer.commit(offsets=offsets, asynchronous=asynchronous)


def main(servers: str, topic: str, count: int, work: Work = NO_WORK, concurrency: int = 1) -> None:
    received = Received(count)
    consumer = connect(servers, topic)
    if work.ms:
        asyncio.run(work_on(consumer, received, work, concurrency))
    else:
        look(consumer, received)
    received.end()
    consumer.close()
    received.report()


if __name__ == "__main__":
    call(main)
