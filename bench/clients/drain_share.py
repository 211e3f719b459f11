"""One process of a native share group, by confluent-kafka's ShareConsumer: each message is acknowledged by itself.

All messages of a poll have to be acknowledged before the next poll, so a poll's messages are worked on at the same
time, and several consumers, each with a thread for its polls, take turns. The broker is told by
:data:`BROKER_PROPERTIES` to hold nothing back, and messages are asked for up to the number that it locks at a time.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException, Message, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from bench.clients.received import NUMBER, Received
from bench.clients.work import Work

#: The most that the broker can be told: messages of a partition that are in flight.
MAX_LOCKS = 10_000
BROKER_PROPERTIES = {
    "group.share.partition.max.record.locks": str(MAX_LOCKS),
    "group.share.max.partition.max.record.locks": str(MAX_LOCKS),
    # A member learns its partitions by heartbeats: with the defaults, 5 s and 1 s, the first message comes after 5 s.
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.assignment.interval.ms": "0",
    "group.share.min.assignment.interval.ms": "0",
}
POLL_SECONDS, SHORT_SECONDS = 1.0, 0.05
#: Tasks that work on the messages of a poll: more are slower.
TASKS = 10_000


def begin_at_earliest(servers: str, group: str) -> None:
    """Tell the broker that the group gets what was sent before it was there, which no consumer can ask for."""
    entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    asked = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": servers})
    for answer in admin.incremental_alter_configs([asked]).values():
        answer.result()


def connect(servers: str, topic: str, group: str, polled: int) -> ShareConsumer:
    consumer = ShareConsumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "max.poll.records": polled,
        }
    )
    consumer.subscribe([topic])
    return consumer


def look(consumer: ShareConsumer, received: Received) -> None:
    while not received.complete:
        messages = consumer.poll(POLL_SECONDS)
        if not messages:
            continue
        received.add(value_of(message) for message in messages)
        acknowledge(consumer, messages)
    consumer.commit_sync()


def acknowledge(consumer: ShareConsumer, messages: list[Message]) -> None:
    for message in messages:
        consumer.acknowledge(message)
    consumer.commit_async()


def value_of(message: Message) -> bytes:
    """Return its value.

    Raises:
        KafkaException: it stands for an error.
    """
    if message.error() is not None:
        raise KafkaException(message.error())
    value: bytes = message.value()
    return value


async def work_on(consumers: list[ShareConsumer], received: Received, work: Work) -> None:
    await asyncio.gather(*[_work_on(consumer, received, work) for consumer in consumers])


async def _work_on(consumer: ShareConsumer, received: Received, work: Work) -> None:
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    while not received.complete:
        messages = await loop.run_in_executor(thread, consumer.poll, SHORT_SECONDS if received.values else POLL_SECONDS)
        if not messages:
            continue
        received.begin()
        await work_on_all(messages, received, work)
        await loop.run_in_executor(thread, acknowledge, consumer, messages)
    await loop.run_in_executor(thread, consumer.commit_sync)
    thread.shutdown()


async def work_on_all(messages: list[Message], received: Received, work: Work) -> None:
    """Work on all at the same time, in tasks that take one after the other: fewer than one for each message."""
    values = map(value_of, messages)

    async def take() -> None:
        for value in values:
            await work.do(value)
            received.values.append(value[NUMBER])

    await asyncio.gather(*[take() for _ in range(min(len(messages), TASKS))])


def main(servers: str, topic: str, count: int, work: str = "0", consumers: str = "1", polled: str = "40000") -> None:
    group, doing = f"{topic}-share", Work.read(work)
    begin_at_earliest(servers, group)
    received = Received(count)
    all_consumers = [connect(servers, topic, group, int(polled)) for _ in range(int(consumers))]
    if doing.ms:
        asyncio.run(work_on(all_consumers, received, doing))
    else:
        look(all_consumers[0], received)
    received.end()
    for consumer in all_consumers:
        consumer.close()
    received.print()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
