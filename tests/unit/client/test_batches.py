"""Batches of a producer in memory: what callers learn when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.errors import InvalidTimestampError, KafkaError, ProducerClosed

import marq
from marq.testing import Broker
from marq.testing.cluster import MemoryCluster, MemorySender, MemoryWriter
from marq.wire.errors import Refused
from tests.unit.client.fakes import HeldWrites, spin

#: A send, what it sends, and its options.
CALLS = [
    ("send", b"1", {}),
    ("send", b"1", {"ordering_key": "customer-7"}),
    ("send", b"1", {"delay": 60}),
    ("send", b"1", {"deduplication_id": "one"}),
    ("send_many", [b"1", b"2"], {}),
    ("send_many", [b"1", b"2"], {"ordering_key": "customer-7"}),
    ("send_many", [b"1", b"2"], {"delay": 60}),
    ("send_many", [b"1", b"2"], {"deduplication_ids": ["one", "two"]}),
]


@pytest.mark.parametrize("turns", range(6))
async def test_every_caller_learns_about_its_message_if_a_stop_is_cancelled(turns: int) -> None:
    async with Broker() as broker:
        producer = broker.producer()
        await producer.start()
        # The queue's route is known from here on.
        await producer.send("q", b"0")

        sending = asyncio.create_task(producer.send("q", b"1"))
        stopping = asyncio.create_task(producer.stop())
        await spin(turns)
        stopping.cancel()
        await asyncio.wait([stopping])
        await producer.stop()
        await spin()

        assert sending.done()
        assert sending.exception() is None or isinstance(sending.exception(), marq.MarqError)
        assert producer.sent + producer.failed == 2


@pytest.mark.parametrize("key", [{"ordering_key": "customer-7"}, {}])
async def test_send_many_fails_if_the_producer_is_stopped_meanwhile(
    key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = asyncio.Event()

    async def unanswered(self: MemorySender, batch: object, topic: str, *, partition: int) -> None:
        sending.set()
        await asyncio.Event().wait()

    async with Broker() as broker:
        broker.define("orders", ordering="key")
        producer = broker.producer()
        await producer.start()
        monkeypatch.setattr(MemorySender, "send_batch", unanswered)
        call = asyncio.create_task(producer.send_many("orders", [b"1", b"2"], **key))
        await sending.wait()
        stopping = asyncio.create_task(producer.stop())
        await spin()
        stopping.cancel()
        await asyncio.wait([stopping])

        with pytest.raises(marq.SendManyFailed, match="the producer was stopped"):
            await call


@pytest.mark.parametrize(("call", "content", "options"), CALLS)
async def test_a_connection_that_closes_under_a_send_does_not_cancel_its_caller(
    call: str, content: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed(self: object, *_: object, **__: object) -> None:
        # As aiokafka does to a call that waits for metadata when its client closes.
        raise asyncio.CancelledError

    async with Broker() as broker:
        broker.define("orders", ordering="key")
        async with broker.producer() as producer:
            monkeypatch.setattr(MemorySender, "send_batch", closed)
            monkeypatch.setattr(MemoryWriter, "write", closed)
            with pytest.raises(marq.BrokerUnavailable, match="the producer was stopped"):
                await getattr(producer, call)("orders", content, **options)
            monkeypatch.undo()


@pytest.mark.parametrize(("call", "content", "options"), CALLS)
@pytest.mark.parametrize("turns", range(5))
async def test_every_send_ends_with_receipts_or_a_documented_error_if_the_producer_stops_meanwhile(
    call: str, content: Any, options: dict[str, Any], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unanswered(self: object, *_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async with Broker() as broker:
        broker.define("orders", ordering="key")
        producer = broker.producer()
        await producer.start()
        monkeypatch.setattr(MemorySender, "send_batch", unanswered)
        monkeypatch.setattr(MemoryWriter, "write", unanswered)
        monkeypatch.setattr("marq.producer.producer._DELAYS_STOP_S", 0)
        sending = asyncio.create_task(getattr(producer, call)("orders", content, **options))
        await spin(turns)
        stopping = asyncio.create_task(producer.stop())
        await spin(2)
        stopping.cancel()
        await asyncio.wait([stopping])
        await spin()

        assert sending.done()
        assert isinstance(sending.exception(), marq.MarqError)
        monkeypatch.undo()


async def test_a_stop_waits_for_delayed_messages_of_send_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker() as broker:
        producer = broker.producer()
        await producer.start()
        held = HeldWrites(monkeypatch)
        sending = asyncio.create_task(producer.send_many("q", [b"1", b"2"], delay=60))
        await held.begun.wait()
        stopping = asyncio.create_task(producer.stop())
        await spin()
        assert not stopping.done()
        held.go_on.set()
        await stopping

        assert len(await sending) == 2


class Connections:
    """Connections that answer to some values with an error, and whose close can be held up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[bytes, KafkaError] = {}
        #: Values whose confirmation waits for `go_on`.
        self.slow: set[bytes] = set()
        self.go_on, self.may_close = asyncio.Event(), asyncio.Event()
        self.closed: list[object] = []
        send, real_close, connections = MemorySender.send_batch, MemoryCluster.close, self

        async def send_batch(self: MemorySender, batch: Any, topic: str, *, partition: int) -> Any:
            if self in connections.closed:
                raise ProducerClosed
            [(_, value, _)] = batch.records
            answer = await send(self, batch, topic, partition=partition)
            return asyncio.create_task(connections.answer(self, value, answer))

        async def close(self: MemoryCluster, sender: object, limit_s: float) -> None:
            connections.closed.append(sender)
            await connections.may_close.wait()
            await real_close(self, sender, limit_s)

        monkeypatch.setattr(MemorySender, "send_batch", send_batch)
        monkeypatch.setattr(MemoryCluster, "close", close)

    async def answer(self, sender: object, value: bytes, answer: asyncio.Future[Any]) -> Any:
        if value in self.errors:
            raise self.errors[value]
        if value in self.slow:
            await self.go_on.wait()
        if sender in self.closed:
            raise KafkaError("closed")
        return await answer


async def test_a_refused_message_harms_no_other_send(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections(monkeypatch)
    connections.errors[b"refused"], connections.slow = InvalidTimestampError(), {b"on its way"}
    async with Broker() as broker, broker.producer() as producer:
        await producer.send("q", b"first")
        before = asyncio.create_task(producer.send("q", b"on its way"))
        await spin()
        with pytest.raises(Refused):
            await producer.send("q", b"refused")
        after = asyncio.create_task(producer.send("q", b"new"))
        await spin()
        waited = not (before.done() or after.done() or connections.closed)
        connections.go_on.set()
        connections.may_close.set()

        await before
        await after
        assert waited
        assert len(connections.closed) == 1


async def test_until_a_failed_connection_is_replaced_sends_say_that_nothing_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = Connections(monkeypatch)
    connections.errors[b"fails"] = KafkaError("no answer")
    async with Broker() as broker, broker.producer() as producer:
        with pytest.raises(marq.BrokerUnavailable, match=r"did not confirm \(KafkaError: no answer\): unknown whether"):
            await producer.send("q", b"fails")
        new = asyncio.create_task(producer.send("q", b"new"))
        await spin()
        connections.may_close.set()
        with pytest.raises(marq.BrokerUnavailable, match="is being replaced, so nothing was sent; retry"):
            await new
        await spin()

        await producer.send("q", b"new")
