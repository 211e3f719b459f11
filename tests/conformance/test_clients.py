"""Clients that share their work, stop in the middle of it, or are used incorrectly."""

from __future__ import annotations

import asyncio

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import numbered, running, send, served, take, take_one


async def test_two_consumers_of_a_queue_both_receive_messages(backend: Backend) -> None:
    queue = backend.new_name()
    async with served(backend.consumer(queue)) as one, served(backend.consumer(queue)) as other:
        sent = 0
        # Wait until both have partitions.
        while not (one.seen and other.seen):
            await send(backend, queue, sent, sent + 10)
            sent += 10
            await backend.until(lambda: len(one.seen) + len(other.seen) == sent)  # noqa: B023

    assert sorted(one.seen + other.seen) == sorted(numbered(queue, 0, sent))


async def test_consumers_by_the_name_of_a_group_and_of_its_only_queue_share_the_work(backend: Backend) -> None:
    queue, group = backend.new_name(), backend.new_name("group")
    await backend.queues.change(queue, group=group)
    async with served(backend.consumer(queue)) as by_name, served(backend.consumer(group=group)) as by_group:
        await send(backend, queue, 0, 100)
        await backend.statistics(queue, acked=100)

    assert sorted(by_name.seen + by_group.seen) == sorted(numbered(queue, 0, 100))


async def test_a_list_of_messages_may_come_from_all_queues_of_a_group(backend: Backend) -> None:
    one, other, group, seen = backend.new_name(), backend.new_name(), backend.new_name("group"), []
    await backend.queues.change(one, group=group)
    await backend.queues.change(other, group=group)
    await send(backend, one, 0, 20)
    await send(backend, other, 0, 20)

    async def handle(messages: list[marq.Message]) -> None:
        seen.extend((message.queue, message.value) for message in messages)

    consumer = backend.consumer(group=group)
    async with running(consumer, lambda: consumer.run_batch(handle)):
        await backend.until(lambda: len(seen) == 40)

    assert sorted(seen) == sorted(numbered(one, 0, 20) + numbered(other, 0, 20))


async def test_a_group_reads_the_records_that_a_topic_had_before_it_belonged_to_a_queue(backend: Backend) -> None:
    topic, group = await backend.create_topic(), backend.new_name("group")
    shared, own = backend.new_name("shared"), backend.new_name("own")
    before = await backend.produce(topic, b"before", key=b"customer", headers=[("tenant", b"acme")])
    await backend.queues.change(shared, group=group)
    async with backend.consumer(group=group) as consumer:
        await backend.producer.send(shared, b"x")
        await (await take_one(consumer)).ack()

        await backend.queues.change(own, group=group, topic=topic)
        first = await take_one(consumer)
        after = await backend.produce(topic, b"after")
        second = await take_one(consumer)

        assert [message.id for message in (first, second)] == [before, after]
        assert (first.queue, first.key, first.headers) == (own, b"customer", {"tenant": b"acme"})
        await consumer.ack([first, second])
        assert await consumer.receive(wait=0.3) == []


async def test_a_handler_that_does_not_fit_the_call_is_refused(backend: Backend) -> None:
    @marq.handler("emails")
    async def handle(message: marq.Message) -> None: ...

    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        with pytest.raises(marq.ConfigError, match=f"handler of queue 'emails'.*messages of queue '{queue}'"):
            await consumer.run(handle)
        with pytest.raises(marq.ConfigError, match="takes one message; use run"):
            await consumer.run_batch(handle)  # type: ignore[arg-type]
        with pytest.raises(marq.ConfigError, match="max_messages=0"):
            await consumer.run_batch(print, max_messages=0)


async def test_a_handler_cannot_wait_for_the_stop_of_its_own_consumer(backend: Backend) -> None:
    queue, errors, stops = backend.new_name(), [], []
    consumer = backend.consumer(queue)

    async def handle(message: marq.Message) -> None:
        try:
            await consumer.stop()
        except marq.MarqError as error:
            errors.append(str(error))
        stops.append(asyncio.create_task(consumer.stop()))

    await consumer.start()
    await backend.producer.send(queue, b"x")
    await consumer.run(handle)
    await asyncio.gather(*stops)

    assert "a handler can't await it" in errors[0]


async def test_a_cancelled_stop_cancels_handlers_and_still_leaves_the_group(backend: Backend) -> None:
    queue, begun, before = backend.new_name(), asyncio.Event(), asyncio.all_tasks()

    async def hang(message: marq.Message) -> None:
        begun.set()
        await asyncio.Event().wait()

    consumer = backend.consumer(queue, shutdown_timeout=3_600)
    await consumer.start()
    handling = asyncio.create_task(consumer.run(hang))
    await backend.producer.send(queue, b"x")
    await backend.until(begun.is_set)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.05)

    assert handling.done()
    assert not [task for task in asyncio.all_tasks() - before if task.get_name().startswith("marq-")]
    async with backend.consumer(queue) as other:
        await backend.producer.send_many(queue, [b"y"] * 20)
        await other.ack(await take(other, 21))


async def test_a_message_that_loses_its_lease_in_a_block_ends_it_without_an_error(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue, lease=4, max_lease=4) as consumer:
        await backend.producer.send(queue, b"x")
        async with await take_one(consumer) as lost:
            again = await take_one(consumer)

        assert (again.id, lost.attempt, again.attempt) == (lost.id, 1, 2)
        with pytest.raises(marq.LeaseLost):
            await lost.release()
        await again.ack()


async def test_a_value_that_cannot_be_encoded_is_named_and_nothing_is_sent(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.new_producer(codec=marq.JSON) as producer, backend.consumer(queue) as consumer:
        with pytest.raises(TypeError, match=rf"queue '{queue}', item 1: marq\.JSON can't encode the value"):
            await producer.send_many(queue, [1, {2}, 3])
        with pytest.raises(ValueError, match=rf"queue \['{queue}', 'b'\]: marq\.JSON can't encode the value"):
            await producer.send([queue, "b"], float("nan"))
        with pytest.raises(marq.MessageTooLarge, match="item 1"):
            await producer.send_many(queue, ["a", "x" * 1_100_000])
        await producer.send(queue, "ä")

        [message] = await take(consumer)
        assert message.body == '"ä"'.encode()
        await message.ack()


async def test_settings_can_be_read_and_changed_only_between_start_and_stop(backend: Backend) -> None:
    queue, queues = backend.new_name(), marq.Queues(**backend.client)
    with pytest.raises(marq.MarqError, match="not started"):
        queues[queue]
    with pytest.raises(marq.MarqError, match="not started"):
        await queues.change(queue, lease=5)
    for lease in (5, 6):
        await queues.start()
        await queues.start()
        assert (await queues.change(queue, lease=lease)).lease == lease
        await queues.stop()
        await queues.stop()
    assert await backend.queues.reset(queue) == backend.queues[backend.new_name()]
