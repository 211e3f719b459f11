"""Transactions of other programs in topics of queues: only their committed records are messages."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

import marq
from marq.kafka.inspector import Inspector
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from tests.worker.harness import eventually, make_topic, take


@pytest.fixture
async def program(servers: str) -> AsyncIterator[AIOKafkaProducer]:
    """Another program, which writes transactions."""
    producer = AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"program-{uuid.uuid4().hex}")
    await producer.start()
    yield producer
    await producer.stop()


async def write(program: AIOKafkaProducer, topic: str, key: bytes, *values: bytes) -> None:
    for value in values:
        await program.send(topic, value, key, partition=0)
    await program.flush()


@pytest.fixture(params=["own topic", "messages topic"])
async def topic(request: pytest.FixtureRequest, servers: str, names: Names, queues: marq.Queues, producer) -> str:
    """Where the queue ``q`` has its messages."""
    if request.param == "messages topic":
        return names.messages
    own = f"own-{uuid.uuid4().hex}"
    await make_topic(servers, own, 1)
    await queues.change("q", topic=own)
    return own


async def test_only_committed_records_are_delivered_and_counted(
    program: AIOKafkaProducer, topic: str, servers: str, prefix: str, queues: marq.Queues
) -> None:
    for values, end in (
        ([b"aborted 1", b"aborted 2"], program.abort_transaction),
        ([b"committed"], program.commit_transaction),
        ([b"aborted 3"], program.abort_transaction),
    ):
        await program.begin_transaction()
        await write(program, topic, b"q", *values)
        await end()
    async with AIOKafkaProducer(bootstrap_servers=servers) as plain:
        await plain.send_and_wait(topic, b"plain", b"q", partition=0)

    inspector = Inspector(ClientSettings.read(servers, {"prefix": prefix}, owner="test"), queues.definitions)
    # The broker ends a transaction a moment after it says so.
    await eventually(lambda: inspector.waiting(["q"]), lambda found: found.counts["q"] == 2)
    assert [peeked.row.value for peeked in (await inspector.peek("q", 10))[0]] == [b"committed", b"plain"]
    async with marq.Consumer("q", servers, prefix=prefix) as consumer:
        assert [message.value for message in await take(consumer, 2)] == [b"committed", b"plain"]
        await program.begin_transaction()
        await write(program, topic, b"q", b"aborted 4")
        await program.abort_transaction()
        await program.begin_transaction()
        await write(program, topic, b"q", b"last")
        await program.commit_transaction()

        assert [message.value for message in await take(consumer, 1)] == [b"last"]


async def test_a_queue_waits_for_an_open_transaction_of_another_program(
    program: AIOKafkaProducer, topic: str, servers: str, prefix: str
) -> None:
    await program.begin_transaction()
    await write(program, topic, b"q", b"in a transaction")
    async with AIOKafkaProducer(bootstrap_servers=servers) as plain:
        await plain.send_and_wait(topic, b"plain", b"q", partition=0)

    async with marq.Consumer("q", servers, prefix=prefix) as consumer:
        assert await consumer.receive(wait=2) == []
        await program.commit_transaction()

        assert [message.value for message in await take(consumer, 2)] == [b"in a transaction", b"plain"]
