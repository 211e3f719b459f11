"""Queues with a topic of their own when that topic, or the setting, goes away; and what pages show of topics.

How such queues are sent to, received and redelivered is in tests/conformance/test_own_topics.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, delete_topic, eventually, make_topic

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def topic(namespace: Namespace, queues: marq.Queues, queue: str) -> AsyncIterator[str]:
    """The topic of the test's queue."""
    name = f"{namespace.names.prefix}-{queue}"
    await make_topic(namespace.bootstrap_servers, name, 3)
    await queues.change(queue, topic=name)
    yield name
    # A topic that no longer exists would end other clients.
    await queues.reset(queue)


async def test_a_page_shows_records_of_queues_and_of_no_other_topic(
    namespace: Namespace, shared_worker: Worker, topic: str
) -> None:
    other = f"{namespace.names.prefix}-salaries"
    await make_topic(namespace.bootstrap_servers, other, 1)
    for name in (topic, other):
        await namespace.producer.send_and_wait(name, b"payload-of-somebody", partition=0)

    # The worker hears of the queue's topic a moment later.
    await eventually(
        lambda: shared_worker.page(f"/api/message?id={topic}/0/0"), lambda page: "payload-of-somebody" in page[1]
    )
    status, text = await shared_worker.page(f"/api/message?id={other}/0/0")
    assert (status, "payload-of-somebody" in text) == (200, False)


async def delete(namespace: Namespace, topic: str) -> None:
    await delete_topic(namespace.bootstrap_servers, topic)


async def refuse_records_without_key(namespace: Namespace, topic: str) -> None:
    await namespace.alter(topic, {"cleanup.policy": "compact"})


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
