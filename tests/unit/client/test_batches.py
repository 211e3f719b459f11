"""Batches of a producer in memory: what callers learn when it stops."""

from __future__ import annotations

import asyncio

import pytest

import marq
from marq.testing import Broker
from marq.testing.cluster import MemorySender
from tests.unit.client.fakes import spin


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
