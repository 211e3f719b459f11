"""Messages that a process polls, and any process settles by their tokens."""

from __future__ import annotations

import asyncio

import pytest

import marq
from marq.client import message_token
from marq.client.message_token import Token
from marq.wire.markers import Acquire, Renew, Source
from marq_worker.sqs.polling import MAX_SHORTFALL_S, PolledConsumer, TokenSettler
from tests.conformance.backend import LIMIT_S

#: Long enough for an ack on a busy machine.
LEASE_S = 6


def of(message: marq.Message) -> Token:
    return message_token.decode(message.token)


async def poll(consumer: PolledConsumer, count: int = 10) -> list[marq.Message]:
    """Return the next messages."""
    while not (messages := await consumer.poll(count)):
        await consumer.wait(count, LIMIT_S)
    return messages


async def poll_one(consumer: PolledConsumer) -> marq.Message:
    [message] = await poll(consumer)
    return message


async def test_a_polled_message_is_acked_by_another_client(backend, settings, settler) -> None:
    queue = await backend.new_queue()
    await backend.producer.send_many(queue, [b"a", b"b", b"c"])
    async with PolledConsumer(queue, settings) as consumer:
        messages: list[marq.Message] = []
        while len(messages) < 3:
            messages += await poll(consumer)

        await settler.ack([of(message) for message in messages])

        assert sorted(message.value for message in messages) == [b"a", b"b", b"c"]
        assert consumer.in_flight == 0
        await backend.statistics(queue, acked=3, late=0, expired=0)


async def test_its_lease_ends_although_the_consumer_runs(backend, settings, settler) -> None:
    queue = await backend.new_queue(lease=LEASE_S)
    await backend.producer.send(queue, b"x", headers={"a": b"1"})
    async with PolledConsumer(queue, settings) as consumer:
        first = await poll_one(consumer)
        again = await poll_one(consumer)

        assert (again.id, again.attempt, again.headers) == (first.id, 2, {"a": b"1"})
        await settler.ack([of(first)])
        await settler.ack([of(again)])
    await backend.statistics(queue, expired=1, redelivered=1, acked=1, late=1)


async def test_a_message_that_has_waited_for_a_poll_is_leased_in_full(backend, settings, settler) -> None:
    queue = await backend.new_queue(lease=600)
    await backend.producer.send(queue, b"x")
    async with PolledConsumer(queue, settings) as consumer:
        # Acquired for a poll that has ended meanwhile.
        await consumer.wait(1, LIMIT_S)
        await backend.advance(1.5 * MAX_SHORTFALL_S)

        message = await poll_one(consumer)

        assert [batch.lease_ms for batch in await backend.markers(Renew) if batch.queue == queue] == [600_000]
        await settler.ack([of(message)])
    await backend.statistics(queue, acked=1, expired=0)


async def test_a_renewed_lease_is_as_long_as_its_renew_says(backend, settings, settler) -> None:
    queue = await backend.new_queue(lease=600)
    await backend.producer.send_many(queue, [b"short", b"long"])
    async with PolledConsumer(queue, settings) as consumer:
        messages: dict[bytes, marq.Message] = {}
        while len(messages) < 2:
            messages |= {message.value: message for message in await poll(consumer)}

        await settler.renew([(of(messages[b"short"]), 100), (of(messages[b"long"]), 1_200_000)])

        again = await poll_one(consumer)
        assert (again.value, again.attempt) == (b"short", 2)
        await settler.ack([of(again), of(messages[b"long"])])
    await backend.statistics(queue, expired=1, renewed=2, acked=2)


async def test_a_release_counts_the_attempt_unless_no_program_has_seen_the_message(backend, settings, settler) -> None:
    queue = await backend.new_queue(lease=600)
    await backend.producer.send(queue, b"x")
    async with PolledConsumer(queue, settings) as consumer:
        first = await poll_one(consumer)
        await settler.release([of(first)])
        second = await poll_one(consumer)
        await settler.release([of(second)], counted=False)
        third = await poll_one(consumer)

        assert [each.attempt for each in (first, second, third)] == [1, 2, 2]
        await settler.ack([of(third)])
    await backend.statistics(queue, released=2, acked=1)


async def test_nothing_is_acquired_before_a_call_asks_for_it(backend, settings) -> None:
    queue = await backend.new_queue()
    await backend.producer.send_many(queue, [b"%d" % number for number in range(50)])
    async with PolledConsumer(queue, settings) as consumer:
        polled: list[bytes] = []
        while len(polled) < 4:
            polled += [message.value for message in await poll(consumer, 2)]
        await backend.advance(0.5)

    acquired = [batch.offsets for batch in await backend.markers(Acquire) if batch.queue == queue]
    assert sum(map(len, acquired)) == 4


async def test_a_queue_with_a_circuit_breaker_is_polled_without_it(backend, settings, settler) -> None:
    queue = await backend.new_queue(breaker={"window": 1}, lease=600)
    await backend.producer.send_many(queue, [b"%d" % number for number in range(5)])
    polled = 0
    async with PolledConsumer(queue, settings) as consumer:
        while polled < 5:
            messages = await poll(consumer)
            polled += len(messages)
            await settler.ack([of(message) for message in messages])
    await backend.statistics(queue, acked=5)


async def test_the_broker_s_time_is_known_from_the_first_message_and_the_first_outcome_on(
    backend, settings, settler
) -> None:
    queue = await backend.new_queue()
    await backend.producer.send(queue, b"x")
    consumer = PolledConsumer(queue, settings)
    assert consumer.broker_ms() is None
    async with consumer:
        message = await poll_one(consumer)
        await settler.ack([of(message)])

        # The sender has the same clock here.
        sent_ms = message.sent_at.timestamp() * 1000
        for broker_ms in (consumer.broker_ms(), settler.broker_ms()):
            assert broker_ms == pytest.approx(sent_ms, abs=60_000)


async def test_a_stopped_settler_writes_nothing(backend, settings) -> None:
    settler = TokenSettler(settings)
    with pytest.raises(marq.MarqError, match="the settler is not started"):
        await settler.ack([Token("q", 1, Source(backend.names.messages, 0), 0)])


async def test_calls_that_come_during_a_write_share_the_next_one(backend, settings, settler, monkeypatch) -> None:
    queue = await backend.new_queue()
    await backend.producer.send_many(queue, [b"a", b"b", b"c"])
    writer = settler._running._writer
    really_write, writes, begun, end = writer.write, [], asyncio.Event(), asyncio.Event()

    async def write(records, limit_s):
        writes.append(records)
        begun.set()
        await end.wait()
        await really_write(records, limit_s)

    async with PolledConsumer(queue, settings) as consumer:
        messages: list[marq.Message] = []
        while len(messages) < 3:
            messages += await poll(consumer)
        monkeypatch.setattr(writer, "write", write)

        first = asyncio.create_task(settler.ack([of(messages[0])]))
        await begun.wait()
        others = [asyncio.create_task(settler.ack([of(message)])) for message in messages[1:]]
        # They have begun to wait.
        await asyncio.sleep(0)
        end.set()
        await asyncio.gather(first, *others)

        assert len(writes) == 2
