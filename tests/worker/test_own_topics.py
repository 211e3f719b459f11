"""Redelivery of messages that came from a topic of their queue's own, by a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

import marq
from marq.core.names import Names
from tests.client.waiting import read_all
from tests.worker.harness import Installation, Worker, eventually, header

LEASE = 3.0


@pytest.fixture
async def topic(admin: AIOKafkaAdminClient, names: Names) -> str:
    await admin.create_topics([NewTopic(f"{names.prefix}-orders", 3, 1)])
    return f"{names.prefix}-orders"


@pytest.fixture
async def worker(servers: str, names: Names, topic: str, tmp_path: Path) -> AsyncIterator[Worker]:
    queues = f"""
[queues.orders]
topic = "{topic}"
lease = {LEASE}
max_attempts = 2
backoff = {{ base = 0.1, factor = 1, max = 0.1, jitter = false }}
"""
    worker = Worker(servers, tmp_path, prefix=names.prefix, queues=queues)
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


@pytest.fixture
async def kafka(servers: str) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=servers) as kafka:
        yield kafka


async def take(consumer: marq.Consumer, count: int = 1) -> list[marq.Message]:
    found: list[marq.Message] = []
    async with asyncio.timeout(120):
        while len(found) < count:
            found += await consumer.receive(count - len(found), wait=1)
    return found


async def records(servers: str, topic: str) -> list[Any]:
    return await read_all(servers, topic)


async def test_a_page_shows_records_of_queues_and_of_no_other_topic(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer, admin: AIOKafkaAdminClient, worker: Worker
) -> None:
    await admin.create_topics([NewTopic(f"{names.prefix}-salaries", 1, 1)])
    shown = []

    for name in (topic, f"{names.prefix}-salaries"):
        sent = await kafka.send_and_wait(name, b"payload-of-somebody", partition=0)
        shown.append(await worker.page(f"/api/message?id={name}/0/{sent.offset}"))

    assert ["payload-of-somebody" in text for _, text in shown] == [True, False]
    assert [status for status, _ in shown] == [200, 200]


@pytest.mark.usefixtures("worker")
async def test_a_copy_goes_back_to_its_partition_with_key_and_headers(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer
) -> None:
    await kafka.send_and_wait(topic, b"value", key=b"customer", headers=[("tenant", b"acme")], partition=2)

    async with marq.Consumer("orders", servers, prefix=names.prefix) as consumer:
        [first] = await take(consumer)
        await first.release()
        [second] = await take(consumer)
        await second.ack()

    assert (second.attempt, second.key, second.headers, second.partition) == (2, b"customer", {"tenant": b"acme"}, 2)
    _, copy = await records(servers, topic)
    assert (copy.key, copy.partition) == (b"customer", 2)
    assert header(copy)["marq-attempt"] == b"2"


async def test_a_dead_letter_is_known_by_its_queue_and_keeps_the_key(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer, worker: Worker
) -> None:
    await kafka.send_and_wait(topic, b"value", key=b"customer")

    async with marq.Consumer("orders", servers, prefix=names.prefix) as consumer:
        [message] = await take(consumer)
        await message.reject("no stock")

        async def letters() -> list[Any]:
            return await records(servers, names.dead_letters)

        [letter] = await eventually(letters)

    assert letter.key == b"orders"
    assert header(letter)["marq-key"] == b"customer"
    assert header(letter)["marq-reason"] == b"no stock"


async def test_without_its_topic_a_message_comes_back_through_the_shared_one(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer, admin: AIOKafkaAdminClient, worker: Worker
) -> None:
    await kafka.send_and_wait(topic, b"value", key=b"customer")
    async with marq.Consumer("orders", servers, prefix=names.prefix, lease=60) as consumer:
        [message] = await take(consumer)
        await admin.delete_topics([topic])
        await message.release(0)

        [again] = await take(consumer)
        await again.ack()

    assert (again.value, again.key, again.attempt) == (b"value", b"customer", 2)
    assert again.id == message.id


async def test_a_topic_that_refuses_copies_holds_nobody_up(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer, admin: AIOKafkaAdminClient, worker: Worker
) -> None:
    await kafka.send_and_wait(topic, b"value")
    async with marq.Consumer("orders", servers, prefix=names.prefix, lease=60) as consumer:
        [message] = await take(consumer)
        # Where records without a key are refused.
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"cleanup.policy": "compact"})])
        await message.release(0)

        [again] = await take(consumer)
        await again.ack()

    assert (again.value, again.key, again.attempt) == (b"value", None, 2)


async def test_after_the_setting_is_taken_away_nothing_is_left_behind(
    servers: str, names: Names, topic: str, kafka: AIOKafkaProducer, worker: Worker
) -> None:
    await kafka.send_and_wait(topic, b"value", key=b"customer")
    async with marq.Consumer("orders", servers, prefix=names.prefix, lease=60) as consumer:
        [message] = await take(consumer)
        async with marq.Queues(servers, prefix=names.prefix) as queues, Installation(servers, names) as installation:
            await queues.change("plain", topic=None)
            await installation.producer.send_and_wait(names.queues, None, b"file:orders")
            await eventually(lambda: asyncio.sleep(0, queues["orders"].topic), lambda found: found is None)
        await message.release(0)
        [again] = await take(consumer)
        await again.ack()

    assert (again.value, again.key, again.attempt) == (b"value", b"customer", 2)
