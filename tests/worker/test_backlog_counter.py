"""The backlog of queues as a real worker counts it, for all kinds of senders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition

import marq
from marq.kafka.topics import topic_id
from marq.settings.client import ClientSettings
from marq.wire.markers import Payload, Source
from marq.wire.names import Names
from tests.worker.harness import Namespace, Sent, Worker, eventually

pytestmark = pytest.mark.verify

OWN_TOPIC = '[queues.orders]\ntopic = "{}-orders"\n'


async def counts(worker: Worker, *queues: str) -> dict[str, Any]:
    """What waits of each of these queues, once all is counted."""
    statistics = await worker.published()
    if not statistics.get("backlog", {}).get("complete") or statistics["backlog"]["uncounted"]:
        return {}
    return {queue: statistics["queues"].get(queue, {}).get("waiting", 0) for queue in queues}


async def wait(worker: Worker, **expected: int) -> None:
    await eventually(lambda: counts(worker, *expected), lambda found: found == expected)


async def test_waiting_messages_of_any_sender_are_counted(
    new_worker: Any, names: Names, servers: str, admin: AIOKafkaAdminClient
) -> None:
    await admin.create_topics([NewTopic(f"{names.prefix}-orders", 3, 1)])
    worker = await new_worker(prefix=names.prefix, queues=OWN_TOPIC.format(names.prefix)).start().ready()
    async with Namespace(servers, names) as namespace:
        await wait(worker, emails=0, orders=0)
        # Plain producers, several queues on one topic, a key that is none's, transactions, a topic of a queue's own.
        sent = await namespace.send_many("emails", 30)
        await namespace.send_many("emails", 5, partition=1)
        await namespace.send_many("reports", 7)
        await namespace.send("", key=b"\xff\xfe")
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{names.prefix}-t") as kafka:
            for number in range(3):
                async with kafka.transaction():
                    await kafka.send(f"{names.prefix}-orders", b"%d" % number, partition=number)
                    await kafka.send(names.messages, b"", b"reports", partition=1)
        async with marq.Producer(bootstrap_servers=servers, prefix=names.prefix) as producer:
            await producer.send_many("emails", [b"more"] * 10)

        await wait(worker, emails=45, reports=10, orders=3)
        statistics = await worker.published()
        assert statistics["backlog"]["unknown"] == 1
        assert statistics["queues"]["emails"]["arrived"] == 45
        assert statistics["queues"]["emails"]["oldest_waiting_seconds"] > 0

        # Acquiring a message ends its waiting; committed offsets do not matter.
        await namespace.acquire(*sent[:20], lease=600, from_offset=0)
        await wait(worker, emails=25, reports=10, orders=3)

        # The next owner counts what waits once more, and nothing that came before.
        await worker.stop()
        worker = await new_worker(like=worker).start().ready()
        await wait(worker, emails=25, reports=10, orders=3)
        assert (await worker.published())["queues"]["emails"]["arrived"] == 0

        # What retention takes waits no more.
        last = (await namespace.ends(names.messages))[0]
        await admin.delete_records({TopicPartition(names.messages, 0): RecordsToDelete(before_offset=last)})
        left = {1: len([r for r in await namespace.records(names.messages) if r.partition == 1 and r.key == b"emails"])}
        await wait(worker, emails=left[1], orders=3)

        # A queue's own topic that is deleted holds up no other queue, and is said.
        await admin.delete_topics([f"{names.prefix}-orders"])
        await namespace.send("emails", partition=1)
        statistics = await eventually(
            worker.published,
            lambda found: (
                any("can't be read" in text for text in found["backlog"]["trouble"])
                and found["queues"]["emails"]["waiting"] == left[1] + 1
                and not found["queues"].get("orders", {}).get("waiting")
            ),
        )
        assert not statistics["backlog"]["complete"]


async def test_two_workers_count_each_partition_once(new_worker: Any, names: Names, servers: str) -> None:
    one = await new_worker(prefix=names.prefix).start().ready()
    async with Namespace(servers, names) as namespace:
        for partition in range(2):
            await namespace.send_many("emails", 10 + partition, partition=partition)
        await wait(one, emails=21)

        other = new_worker(prefix=names.prefix, data_directory=one.directory / "other")
        await other.start().ready(1)
        await one.ready(1)
        await wait(other, emails=21)
        await namespace.send("emails")
        await wait(one, emails=22)

        one.kill()
        await other.ready(2)
        await wait(other, emails=22)


async def test_messages_of_aborted_transactions_do_not_wait(new_worker: Any, names: Names, servers: str) -> None:
    """Nor do they once a consumer that reads committed has started again behind them, and never acquires them."""
    worker = await new_worker(prefix=names.prefix).start().ready()
    async with Namespace(servers, names) as namespace, _transactional(servers, names) as kafka:
        first = await namespace.send("emails")
        await namespace.acquire(first, lease=600)
        await kafka.begin_transaction()
        await kafka.send_and_wait(names.messages, b"aborted", b"emails", partition=0)
        await kafka.abort_transaction()
        second, third = await namespace.send_many("emails", 2)

        await wait(worker, emails=2)

        await namespace.acquire(second, third, lease=600)
        await wait(worker, emails=0)


async def test_a_takeover_during_a_transaction_keeps_the_position_after_it(
    new_worker: Any, names: Names, servers: str, admin: AIOKafkaAdminClient
) -> None:
    """Consumers that read uncommitted have acquired messages that the counter cannot read yet."""
    topic = f"{names.prefix}-orders"
    await admin.create_topics([NewTopic(topic, 1, 1)])
    settings = {"prefix": names.prefix, "queues": OWN_TOPIC.format(names.prefix)}
    worker = await new_worker(**settings).start().ready()
    async with Namespace(servers, names) as namespace, _transactional(servers, names) as kafka:
        source = Source(topic, 0).of(await topic_id(ClientSettings(bootstrap_servers=servers), topic))

        async def send(producer: AIOKafkaProducer) -> Sent:
            kept = await producer.send_and_wait(topic, b"x", partition=0)
            return Sent("orders", source, kept.offset, Payload(kept.timestamp, 1, None, (), b"x"))

        await kafka.begin_transaction()
        acquired = [await send(kafka), await send(namespace.producer), await send(namespace.producer)]
        await namespace.applied(await namespace.acquire(*acquired, lease=600))
        await worker.stop()
        worker = await new_worker(like=worker).start().ready()
        await send(namespace.producer)

        # Not the whole topic once more.
        await eventually(worker.published, lambda found: found["backlog"]["uncounted"] == 1)
        await eventually(worker.published, lambda found: not found["backlog"]["complete"])
        await kafka.commit_transaction()
        await wait(worker, orders=1)


@asynccontextmanager
async def _transactional(servers: str, names: Names) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(
        bootstrap_servers=servers, transactional_id=f"{names.prefix}-t", transaction_timeout_ms=600_000
    )
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def test_a_backlog_that_is_switched_off_counts_nothing(new_worker: Any, names: Names, servers: str) -> None:
    worker = await new_worker(prefix=names.prefix, environment={"MARQ_COUNT_WAITING": "false"}).start().ready()
    async with Namespace(servers, names) as namespace:
        sent = await namespace.send("emails")
        await namespace.applied(await namespace.acquire(sent, lease=600))

        statistics = await eventually(worker.published, lambda found: "emails" in found["queues"])

    assert "waiting" not in statistics["queues"]["emails"]
    assert statistics["backlog"] == {
        "counted": False, "complete": False, "uncounted": 0, "unknown": 0, "unknown_queues": 0, "switched_off": 1,
        "trouble": [],
    }  # fmt: skip


async def test_a_queue_with_waiting_messages_and_no_consumer_is_noticed(
    new_worker: Any, names: Names, servers: str
) -> None:
    worker = await new_worker(prefix=names.prefix).start().ready()
    client = {"bootstrap_servers": servers, "prefix": names.prefix}

    async def without(queue: str) -> float | None:
        return (await worker.published())["queues"].get(queue, {}).get("no_consumer_seconds")

    async with marq.Producer(**client) as producer, marq.Consumer("emails", max_in_flight=1, **client) as busy:
        await producer.send_many("emails", [b"held", b"waits", b"waits"])
        await busy.receive(wait=30)
        await producer.send_many("lonely", [b"x"] * 5)

        # Two looks later.
        await eventually(lambda: without("lonely"), bool)
        statistics = (await worker.published())["queues"]
        assert statistics["emails"]["waiting"] >= 1
        assert statistics["emails"]["no_consumer_seconds"] == 0

        # A consumer that has messages in flight, and can take no more.
        async with marq.Consumer("lonely", max_in_flight=1, **client) as late:
            await late.receive(wait=30)
            await eventually(lambda: without("lonely"), lambda seconds: seconds == 0)
