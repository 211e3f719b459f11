"""Stopping a client of aiokafka, which does not always end by itself."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, ProducerFenced

from marq.kafka.connection import abandon_producer, stop_consumer


class Connections:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


async def test_a_stop_that_passes_on_a_cancellation_of_its_own_still_closes_the_connections() -> None:
    """aiokafka's fetcher does so when it is stopped just after a fetch has failed."""

    async def stop() -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    connections = Connections()
    consumer = SimpleNamespace(stop=stop, _client=connections, _coordinator=None, _fetcher=None)

    assert not await stop_consumer(consumer, 5)

    assert connections.closed


async def test_a_stop_that_is_cancelled_still_closes_the_connections() -> None:
    """A rebalance cancels a question to the trackers, whose consumer may just be stopping."""
    begun, connections = asyncio.Event(), Connections()

    async def stop() -> None:
        begun.set()
        await asyncio.Event().wait()

    fetching = asyncio.ensure_future(asyncio.Event().wait())
    fetcher = SimpleNamespace(_fetch_task=fetching)
    consumer = SimpleNamespace(stop=stop, _client=connections, _coordinator=None, _fetcher=fetcher)
    stopping = asyncio.ensure_future(stop_consumer(consumer, 60))
    await begun.wait()
    stopping.cancel()

    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert connections.closed
    assert fetching.cancelled()


async def test_what_a_fenced_producer_leaves_behind_is_not_reported_as_an_oversight() -> None:
    """A worker that was stopped for longer than its membership, say: another one has its partition now."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    producer = AIOKafkaProducer(transactional_id="t")
    manager, accumulator = producer._txn_manager, producer._message_accumulator
    manager.set_pid_and_epoch(1, 0)
    await producer.begin_transaction()
    sent = await accumulator.add_message(TopicPartition("t", 0), None, b"x", 1)
    batch = await accumulator.add_batch(producer.create_batch(), TopicPartition("t", 1), 1)
    # As aiokafka's sender does when the coordinator refuses the producer.
    accumulator.fail_all(ProducerFenced())
    manager.fatal_error(ProducerFenced())

    await abandon_producer(producer)
    outcomes = await asyncio.gather(sent, batch, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [ProducerFenced, ProducerFenced]
    del producer, manager, accumulator, sent, batch, outcomes
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


async def test_a_batch_that_waits_to_be_sent_again_ends_without_a_traceback() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    producer = AIOKafkaProducer(enable_idempotence=True)
    accumulator = producer._message_accumulator
    producer._txn_manager.set_pid_and_epoch(1, 0)
    partition = TopicPartition("t", 0)
    sent = await accumulator.add_message(partition, None, b"x", 1)
    # As aiokafka's sender does when a broker goes away.
    accumulator.reenqueue(accumulator._pop_batch(partition))
    producer._sender._sender_task = asyncio.create_task(asyncio.Event().wait())

    await abandon_producer(producer)

    with pytest.raises(KafkaError, match="stopped before the broker confirmed"):
        await asyncio.wait_for(sent, 60)
    await asyncio.sleep(0)
    assert reported == []
