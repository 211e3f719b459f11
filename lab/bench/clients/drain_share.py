"""One process of a native share group, by confluent-kafka's ShareConsumer: each message is acknowledged individually.

All messages of a poll must be acknowledged before the next poll, so the messages of a poll are worked on at the same
time, and several consumers, each with a thread for its polls, take turns. :data:`BROKER_PROPERTIES` remove the broker's
delays and allow as many locked messages as possible.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException, Message, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from lab.bench.clients.client import call
from lab.bench.clients.drain_account import NO_WORK, NUMBER, Received, Work

#: The highest number of messages in flight, per partition, that the broker accepts.
MAX_LOCKS = 10_000
BROKER_PROPERTIES = {
    "group.share.partition.max.record.locks": str(MAX_LOCKS),
    "group.share.max.partition.max.record.locks": str(MAX_LOCKS),
    # A member learns its partitions from heartbeats: with the defaults, 5 s and 1 s, the first message takes 5 s.
    "group.share.heartbeat.interval.ms": "100",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.assignment.interval.ms": "0",
    "group.share.min.assignment.interval.ms": "0",
}
POLL_SECONDS, SHORT_SECONDS = 1.0, 0.05
#: Tasks that work on the messages of a poll; more are slower.
TASKS = 10_000


def begin_at_earliest(servers: str, group: str) -> None:
    """Let the group begin at the earliest message; only the broker can set this for a share group."""
    entry = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": servers})
    for answer in admin.incremental_alter_configs([resource]).values():
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
    """Return its value; raise KafkaException if the message stands for an error."""
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
    """Work on all messages at the same time, in tasks that each take one after another."""
    values = map(value_of, messages)

    async def take() -> None:
        for value in values:
            await work.do(value)
            received.values.append(value[NUMBER])

    await asyncio.gather(*[take() for _ in range(min(len(messages), TASKS))])


def main(servers: str, topic: str, count: int, work: Work = NO_WORK, consumers: int = 1, polled: int = 40_000) -> None:
    group = f"{topic}-share"
    begin_at_earliest(servers, group)
    received = Received(count)
    all_consumers = [connect(servers, topic, group, polled) for _ in range(consumers)]
    if work.ms:
        asyncio.run(work_on(all_consumers, received, work))
    else:
        look(all_consumers[0], received)
    received.end()
    for consumer in all_consumers:
        consumer.close()
    received.report()


if __name__ == "__main__":
    call(main)
