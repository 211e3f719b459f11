"""How fast one producer process sends; each message is durable when its call returns."""

from __future__ import annotations

import asyncio
from functools import partial

from aiokafka import AIOKafkaConsumer, TopicPartition

from bench.bars import Bar
from bench.clients.send import TASKS
from bench.suite import Bench, Figures, Medians, Row, measured

SEND_MANY_PER_SECOND = 250_000
SEND_PER_SECOND = 40_000
#: Of the messages, how many are sent one by one.
ONE_BY_ONE = 0.25


def send(bench: Bench, way: str, part: float = 1.0) -> Figures:
    prefix, size = bench.prefix(), bench.size
    count = int(size.messages * part)
    figures = measured("bench.clients.send", bench.servers, prefix, way, str(count), str(size.value_bytes))
    there = asyncio.run(records(bench.servers, f"{prefix}.messages", size.partitions))
    if there != count + 1:
        raise SystemExit(f"bench: {count} messages and one before them were sent, {there} are there")
    return figures


async def records(servers: str, topic: str, partitions: int) -> int:
    """Return how many records a topic without transactions has."""
    consumer = AIOKafkaConsumer(bootstrap_servers=servers)
    await consumer.start()
    try:
        ends = await consumer.end_offsets([TopicPartition(topic, partition) for partition in range(partitions)])
    finally:
        await consumer.stop()
    return sum(ends.values())


def bars(medians: Medians) -> list[Bar]:
    many, one = (medians[name]["messages_per_second"] for name in ("send_many", "send"))
    return [
        Bar("send_many", many, SEND_MANY_PER_SECOND, "messages/s", at_least=True),
        Bar(f"send from {TASKS} tasks", one, SEND_PER_SECOND, "messages/s", at_least=True),
    ]


SEND = Row(
    "send",
    f"one process sends: calls of send_many, and awaited calls of send from {TASKS} tasks",
    {"send_many": partial(send, way="send_many"), "send": partial(send, way="send", part=ONE_BY_ONE)},
    bars,
)
