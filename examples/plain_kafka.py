"""Fills queues with a plain Kafka producer, without Marq: ``python -m examples.plain_kafka QUEUE [TOPIC]``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import os
import random
import sys
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

SERVERS = os.environ.get("MARQ_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
MESSAGES = os.environ.get("MARQ_PREFIX", "marq") + ".messages"


def anywhere(key: bytes | None, partitions: Sequence[int], available: Sequence[int]) -> int:
    """Choose any partition: the key is the queue's name, so the default partitioner would choose only one."""
    return random.choice(available or partitions)


async def send(queue: str) -> None:
    # Idempotence implies acks="all", so a confirmed message is as safe as one from marq.Producer.
    async with AIOKafkaProducer(bootstrap_servers=SERVERS, enable_idempotence=True, partitioner=anywhere) as producer:
        for number in range(1, 4):
            value = b'{"to": "ann@example.org", "subject": "plain %d"}' % number
            await producer.send_and_wait(MESSAGES, value, key=queue.encode(), headers=[("sender", b"plain")])
    print("sent 3 messages to queue", queue)


async def send_to_own_topic(topic: str) -> None:
    # A queue with the setting `topic = "orders"` receives all records of that topic, with any key.
    async with AIOKafkaProducer(bootstrap_servers=SERVERS, enable_idempotence=True) as producer:
        for customer in (b"ann", b"bob", b"cy"):
            await producer.send_and_wait(topic, b"one of everything", key=customer)
    print("sent 3 records to topic", topic)


async def make_topic(topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=SERVERS)
    await admin.start()
    try:
        # If the topic exists, nothing changes.
        await admin.create_topics([NewTopic(topic, num_partitions=4, replication_factor=1)])
    finally:
        await admin.close()


async def main(queue: str, topic: str | None = None) -> None:
    await send(queue)
    if topic is not None:
        await make_topic(topic)
        await send_to_own_topic(topic)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
