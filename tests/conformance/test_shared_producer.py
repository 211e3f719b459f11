"""A producer that the calls of a server share."""

from __future__ import annotations

import asyncio

import marq
from marq.producer.shared import SharedProducer
from marq_worker.sqs.polling import PolledConsumer
from tests.conformance.backend import LIMIT_S


async def test_messages_sent_at_the_same_time_share_a_partition(backend, settings) -> None:
    queue = await backend.new_queue()
    async with SharedProducer.of(settings) as producer:
        receipts = await asyncio.gather(*[producer.send(queue, b"x") for _ in range(8)])

    assert len({receipt.partition for receipt in receipts}) == 1
    assert sorted(receipt.offset for receipt in receipts) == [receipts[0].offset + index for index in range(8)]


async def test_messages_that_come_while_others_are_sent_share_the_next_batch(backend, settings, monkeypatch) -> None:
    queue = await backend.new_queue()
    async with SharedProducer.of(settings) as producer:
        batches = producer._running.batches
        really_send, sizes, first_is_sent, end = batches._send, [], asyncio.Event(), asyncio.Event()

        async def send(batch):
            sizes.append(batch.count)
            first_is_sent.set()
            await end.wait()
            return await really_send(batch)

        monkeypatch.setattr(batches, "_send", send)
        first = asyncio.create_task(producer.send(queue, b"x"))
        await first_is_sent.wait()
        second = asyncio.create_task(producer.send(queue, b"x"))
        # Another turn of the event loop, in which a producer without a linger would send the second one.
        await asyncio.sleep(0)
        third = asyncio.create_task(producer.send(queue, b"x"))
        end.set()
        await asyncio.gather(first, second, third)

    assert sizes == [1, 2]


async def test_each_message_of_a_batch_has_its_own_headers_and_outcome(backend, settings) -> None:
    queue = await backend.new_queue()
    async with SharedProducer.of(settings) as producer:
        first, too_large, last = await producer.send_each(
            queue, [(b"a", [("name", b"ann")]), (b"x" * (4 << 20), []), (b"b", [])]
        )
    assert isinstance(too_large, marq.MessageTooLarge)
    received = {}
    async with PolledConsumer(queue, settings) as consumer:
        while len(received) < 2:
            await consumer.wait(10, LIMIT_S)
            received |= {message.id: (message.body, message.headers) for message in await consumer.poll(10)}

    assert received == {first.id: (b"a", {"name": b"ann"}), last.id: (b"b", {})}


async def test_messages_that_the_broker_does_not_confirm_have_an_error_each(backend, settings, monkeypatch) -> None:
    queue = await backend.new_queue()
    async with SharedProducer.of(settings) as producer:

        async def fail(batch):
            raise marq.BrokerUnavailable("by the test")

        monkeypatch.setattr(producer._running.batches, "_send", fail)
        outcomes = await producer.send_each(queue, [(b"a", []), (b"b", [])])

    assert [type(outcome) for outcome in outcomes] == [marq.BrokerUnavailable] * 2
