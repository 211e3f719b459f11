"""Batches of a producer in memory: what callers learn when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import marq
from marq.testing import Broker
from marq.testing.cluster import MemorySender, MemoryWriter
from tests.unit.client.fakes import spin

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
    writing, go_on, write = asyncio.Event(), asyncio.Event(), MemoryWriter.write

    async def slow(self: MemoryWriter, *arguments: Any) -> list[int]:
        writing.set()
        await go_on.wait()
        return await write(self, *arguments)

    async with Broker() as broker:
        producer = broker.producer()
        await producer.start()
        monkeypatch.setattr(MemoryWriter, "write", slow)
        sending = asyncio.create_task(producer.send_many("q", [b"1", b"2"], delay=60))
        await writing.wait()
        stopping = asyncio.create_task(producer.stop())
        await spin()
        assert not stopping.done()
        go_on.set()
        await stopping

        assert len(await sending) == 2
