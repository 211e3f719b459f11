"""Queues that share a topic as operators see them: counts, commands and handlers (tests/conformance has the rest)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import Namespace, Worker, eventually, make_topic, take
from tests.worker.shell import Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")

EARLIER, LATER = 3, 2


@pytest_asyncio.fixture(loop_scope="session")
async def late(namespace: Namespace, queues: marq.Queues, queue: str) -> AsyncIterator[str]:
    """A queue that skips three of the five records of a topic, and shares it with the test's queue."""
    topic, name = f"{namespace.names.prefix}-{queue}", f"{queue}-late"
    await make_topic(namespace.bootstrap_servers, topic, 2)
    await queues.change(queue, topic=topic)
    for number in range(EARLIER):
        await namespace.producer.send_and_wait(topic, b"%d" % number, partition=number % 2)
    await queues.change(name, topic=topic, start="latest")
    for number in range(EARLIER, EARLIER + LATER):
        await namespace.producer.send_and_wait(topic, b"%d" % number, partition=number % 2)
    yield name
    for queue_name in queue, name:
        await queues.reset(queue_name)


async def test_each_queue_is_counted_and_purged_on_its_own(shared_worker: Worker, queue: str, late: str) -> None:
    worker = shared_worker

    async def waits(name: str, count: int) -> None:
        # A queue of which nothing is known is not listed.
        await eventually(lambda: worker.queue(name), lambda found: found.get("waiting", 0) == count)

    await waits(queue, EARLIER + LATER)
    await waits(late, LATER)
    async with Shell(worker) as shell:
        peeked = await shell.json("peek", late)
        assert sorted(message["value"] for message in peeked["messages"]) == ["3", "4"]
        purged = await shell.json("purge", late, "--yes")
        assert (purged["waiting"], purged["redelivery"]) == (LATER, 0)
    await waits(late, 0)

    async with marq.Consumer(queue, **client_of(worker)) as consumer:
        messages = await take(consumer, EARLIER + LATER)
        assert sorted(message.value for message in messages) == [b"0", b"1", b"2", b"3", b"4"]
        await consumer.ack(messages)
    async with marq.Consumer(late, **client_of(worker)) as consumer:
        assert await consumer.receive(wait=1) == []
    await waits(queue, 0)
