"""Queues with a topic of their own when that topic, or the setting, goes away; and what pages show of topics.

How such queues are sent to, received and redelivered is in tests/conformance/test_own_topics.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, admin

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def topic(namespace: Namespace, queues: marq.Queues, queue: str) -> AsyncIterator[str]:
    """The topic of the test's queue."""
    name = f"{namespace.names.prefix}-{queue}"
    async with admin(namespace.bootstrap_servers) as client:
        await client.create_topics([NewTopic(name, 3, 1)])
    await queues.change(queue, topic=name)
    yield name
    # A topic that no longer exists would end other clients.
    await queues.reset(queue)


async def test_a_page_shows_records_of_queues_and_of_no_other_topic(
    namespace: Namespace, shared_worker: Worker, topic: str
) -> None:
    other = f"{namespace.names.prefix}-salaries"
    async with admin(namespace.bootstrap_servers) as client:
        await client.create_topics([NewTopic(other, 1, 1)])
    shown = []

    for name in (topic, other):
        sent = await namespace.producer.send_and_wait(name, b"payload-of-somebody", partition=0)
        shown.append(await shared_worker.page(f"/api/message?id={name}/0/{sent.offset}"))

    assert ["payload-of-somebody" in text for _, text in shown] == [True, False]
    assert [status for status, _ in shown] == [200, 200]


async def delete(namespace: Namespace, topic: str) -> None:
    async with admin(namespace.bootstrap_servers) as client:
        await client.delete_topics([topic])


async def refuse_records_without_key(namespace: Namespace, topic: str) -> None:
    async with admin(namespace.bootstrap_servers) as client:
        compact = {"cleanup.policy": "compact"}
        await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, compact)])


@pytest.mark.parametrize(
    ("how", "key"),
    [(delete, b"customer"), (refuse_records_without_key, None), (None, b"customer")],
    ids=["deleted", "refusing", "reset"],
)
async def test_a_copy_takes_the_shared_topic(
    namespace: Namespace,
    shared_worker: Worker,
    queues: marq.Queues,
    topic: str,
    queue: str,
    how: Callable[[Namespace, str], Awaitable[None]] | None,
    key: bytes | None,
) -> None:
    await namespace.producer.send_and_wait(topic, b"value", key=key)
    async with marq.Consumer(queue, **client_of(shared_worker), lease=600) as consumer:
        [message] = await consumer.receive(1, wait=LIMIT_SECONDS)
        await (how(namespace, topic) if how else queues.reset(queue))
        await message.release(0)

        [again] = await consumer.receive(1, wait=LIMIT_SECONDS)
        await again.ack()

    assert (again.value, again.key, again.attempt, again.id) == (b"value", key, 2, message.id)
