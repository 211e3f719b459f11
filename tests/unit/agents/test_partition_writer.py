"""How an owner's transaction fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    ProducerFenced,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.transaction_manager import TransactionManager

from marq.owner.engine import OwnerTransaction
from marq.wire.markers import Tick
from marq.wire.names import Names
from marq_worker.owner.partition_writer import PartitionWriter


async def committing(producer: object, ticks: int = 1) -> None:
    context: Any = SimpleNamespace(names=Names("m"), max_message_bytes=1_000_000)
    writer = PartitionWriter(0, context)
    writer.producer = cast("Any", producer)
    await writer.commit(OwnerTransaction(now_ms=0, appended_ms=0, markers=[Tick(0, 0)] * ticks))


class FencedProducer:
    """Takes records, and fails each on its own, as aiokafka does when another producer has the transactional id."""

    def __init__(self) -> None:
        self.sent: list[asyncio.Future[None]] = []

    async def begin_transaction(self) -> None: ...

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        self.sent.append(asyncio.get_running_loop().create_future())
        if len(self.sent) == 3:
            for future in self.sent:
                future.set_exception(ProducerFenced())
        return self.sent[-1]


async def test_a_transaction_that_is_fenced_raises_one_error_and_leaves_none_behind() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    producer = FencedProducer()

    with pytest.raises(ProducerFenced):
        await committing(producer, ticks=3)

    assert len(producer.sent) == 3
    del producer
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


class EndedTransaction:
    """A producer with aiokafka's own states, whose transaction ends between two sends."""

    def __init__(self, end: Callable[[TransactionManager], None]) -> None:
        self._end = end
        self._txn_manager = TransactionManager("id", 1_000)
        self._txn_manager.set_pid_and_epoch(1, 1)
        self._message_accumulator = SimpleNamespace(_exception=None)

    async def begin_transaction(self) -> None:
        self._txn_manager.begin_transaction()

    async def send(self, *_: object, **__: object) -> asyncio.Future[None]:
        self._end(self._txn_manager)
        if not self._txn_manager.is_in_transaction():
            raise IllegalOperation("Can't send messages while not in transaction")
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("cause", [ProducerFenced(), TopicAuthorizationFailedError("m.markers"), KafkaError("x")])
@pytest.mark.parametrize("fatal", [False, True])
async def test_a_transaction_that_has_ended_raises_the_error_that_ended_it(cause: KafkaError, fatal: bool) -> None:
    """A fenced owner waits longer each time, and a missing permission must not restart the worker."""
    end = TransactionManager.fatal_error if fatal else TransactionManager.error_transaction

    with pytest.raises(type(cause)) as raised:
        await committing(EndedTransaction(lambda manager: end(manager, cause)))

    assert raised.value is cause


async def test_a_producer_that_has_failed_before_its_first_transaction_raises_that_error() -> None:
    producer = EndedTransaction(lambda _: None)
    # fatal_error() needs a transaction, so it fails after it has changed the state.
    with pytest.raises(AttributeError):
        producer._txn_manager.fatal_error(ProducerFenced())
    producer._message_accumulator._exception = ProducerFenced()

    with pytest.raises(ProducerFenced):
        await committing(producer)


async def test_an_assertion_in_an_open_transaction_is_a_defect() -> None:
    def fail(_: TransactionManager) -> None:
        raise AssertionError("of Marq's own code")

    with pytest.raises(AssertionError, match="own code"):
        await committing(EndedTransaction(fail))


async def test_a_partition_that_aiokafka_does_not_know_is_tried_again() -> None:
    metadata = SimpleNamespace(partitions_for_topic=lambda topic: {0})

    def fail(_: TransactionManager) -> None:
        AIOKafkaProducer._partition(SimpleNamespace(_metadata=metadata), "m.markers", 1, None, None, None, None)

    with pytest.raises(UnknownTopicOrPartitionError):
        await committing(EndedTransaction(fail))
