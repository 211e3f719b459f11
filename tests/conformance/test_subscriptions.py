"""Several queues on one topic: each receives all of its records, and settles them for itself."""

from __future__ import annotations

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one


async def two_queues(backend: Backend, **settings: object) -> tuple[str, str, str]:
    """Return two queues with the same settings, and their topic."""
    topic = await backend.create_topic(2)
    first, second = [await backend.new_queue(stem, topic=topic, **settings) for stem in ("billing", "search")]
    return first, second, topic


async def test_each_queue_receives_and_acknowledges_every_record(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend)
    ids = {await backend.produce(topic, b"%d" % number, partition=number % 2) for number in range(4)}
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        for consumer in first, second:
            messages = await take(consumer, 4)
            assert {message.id for message in messages} == ids
            assert {message.queue for message in messages} == {consumer.queue}
            await consumer.ack(messages)
    await backend.statistics(billing, acked=4)
    await backend.statistics(search, acked=4)


async def test_a_message_is_redelivered_only_to_the_queue_that_failed(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend, backoff=[0])
    await backend.produce(topic, b"x", b"customer")
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        failed, done = await take_one(first), await take_one(second)
        await failed.release()
        await done.ack()

        again = await take_one(first)

        assert (again.value, again.key, again.attempt, again.id) == (b"x", b"customer", 2, failed.id)
        await nothing_comes(backend, second)
        await again.ack()
    assert len(await backend.records(topic)) == 1
    await backend.statistics(billing, acked=1, redelivered=1)
    await backend.statistics(search, acked=1, redelivered=0)


async def test_an_ack_in_one_queue_leaves_the_lease_of_the_other(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend)
    await backend.produce(topic, b"x")
    async with backend.consumer(billing, lease=4, max_lease=4) as first, backend.consumer(search) as second:
        held, done = await take_one(first), await take_one(second)
        await done.ack()
        await backend.statistics(search, acked=1)

        again = await take_one(first)

        assert (again.id, again.attempt) == (held.id, 2)
        await again.ack()


async def test_a_dead_letter_of_one_queue_is_redriven_to_it_alone(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend)
    await backend.produce(topic, b"x")
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        await (await take_one(second)).ack()
        await (await take_one(first)).reject("no good")
        [letter] = await backend.dead_letters(billing)
        assert (letter.queue, letter.body) == (billing, b"x")
        async with marq.DeadLetters(**backend.client) as letters:
            await letters.redrive(billing)

        again = await take_one(first)

        assert (again.value, again.attempt) == (b"x", 1)
        await again.ack()
        await nothing_comes(backend, second)


async def test_a_delayed_message_goes_to_its_queue_alone(backend: Backend) -> None:
    billing, search, _ = await two_queues(backend)
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        await backend.producer.send(billing, b"later", delay=1)
        message = await take_one(first)
        assert message.value == b"later"
        await message.ack()
        await nothing_comes(backend, second)

        await backend.producer.send(billing, b"now")
        assert [(await take_one(each)).value for each in (first, second)] == [b"now", b"now"]


async def test_a_cancel_names_its_queue_or_all(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend)
    for number in range(2):
        await backend.produce(topic, b"%d" % number)
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        for consumer in first, second:
            for message in await take(consumer, 2):
                await message.release(3600)
    # Now the releases are durable.
    assert await backend.producer.cancel(marq.Receipt(billing, topic, 0, 0))
    assert not await backend.producer.cancel(marq.Receipt(billing, topic, 0, 0))
    # An id is the record's, so it names the messages of all queues.
    assert await backend.producer.cancel(f"{topic}/0/1")
    assert await backend.producer.cancel(marq.Receipt(search, topic, 0, 0))
    await backend.statistics(billing, cancelled=2)
    await backend.statistics(search, cancelled=2)


async def test_each_request_gets_the_answer_for_its_queue(backend: Backend) -> None:
    billing, search, topic = await two_queues(backend)
    await backend.produce(topic, b"x", partition=0)
    async with backend.consumer(billing) as first, backend.consumer(search) as second:
        in_flight = await take_one(first)
        await (await take_one(second)).release(3600)

        both = [marq.Receipt.of(in_flight.id, queue) for queue in (billing, search)]
        assert await backend.producer.cancel(both) == [False, True]
        await in_flight.ack()
    await backend.statistics(billing, acked=1, cancelled=0)
    await backend.statistics(search, acked=0, cancelled=1)


@pytest.mark.parametrize("known_before", [True, False])
async def test_a_queue_that_starts_at_the_latest_record_skips_earlier_ones(
    backend: Backend, known_before: bool
) -> None:
    topic = await backend.create_topic(2)
    earliest = await backend.new_queue("earliest", topic=topic)
    await backend.produce(topic, b"earlier", partition=0)
    queue = backend.new_name("latest")
    if known_before:
        await backend.queues.change(queue, lease=20)
    await backend.queues.change(queue, topic=topic, start="latest")
    # Sent while the queue has no consumer yet.
    await backend.produce(topic, b"later", partition=0)
    await backend.produce(topic, b"other partition", partition=1)

    for name, values in (queue, {b"later", b"other partition"}), (earliest, {b"earlier", b"later", b"other partition"}):
        async with backend.consumer(name) as consumer:
            messages = await take(consumer, len(values))
            assert {message.value for message in messages} == values
            await consumer.ack(messages)
            await nothing_comes(backend, consumer)


async def test_a_queue_that_starts_at_the_latest_record_skips_none_of_a_topic_that_is_created_again(
    backend: Backend,
) -> None:
    topic = await backend.create_topic(1)
    await backend.produce(topic, b"earlier")
    queue = await backend.new_queue("latest", topic=topic, start="latest")
    await backend.recreate_topic(topic, 1)

    await backend.produce(topic, b"new")

    async with backend.consumer(queue) as consumer:
        message = await take_one(consumer)
        assert message.value == b"new"
        await message.ack()
    await backend.statistics(queue, acked=1)


async def test_order_holds_for_each_queue(backend: Backend) -> None:
    topic = await backend.create_topic(1)
    ordered = await backend.new_queue("ordered", topic=topic, ordering="key", backoff=[86_400])
    also = await backend.new_queue("also", topic=topic, ordering="key")
    for value in (b"1", b"2"):
        await backend.produce(topic, value, b"a")
    async with backend.consumer(ordered) as first, backend.consumer(also) as second:
        await (await take_one(first)).release()
        for value in (b"1", b"2"):
            message = await take_one(second)
            assert message.value == value
            await message.ack()
        # In the other queue the first message blocks its key.
        await nothing_comes(backend, first)
    await backend.statistics(also, acked=2)


async def test_two_queues_of_one_group_may_not_name_one_topic(backend: Backend) -> None:
    topic = await backend.create_topic(1)
    group = backend.new_name("group")
    first = await backend.new_queue("first", topic=topic, group=group)
    second = backend.new_name("second")
    with pytest.raises(
        marq.ConfigError,
        match=rf"queue '{second}': topic '{topic}' is also that of queue '{first}' in the same group '{group}'",
    ):
        await backend.queues.change(second, topic=topic, group=group)
    await backend.queues.change(second, topic=topic)


async def test_a_group_reads_several_topics_whose_acknowledgements_stay_apart(backend: Backend) -> None:
    """One consumer of two queues writes ACKs for both; each ends the messages of its own queue."""
    shared, other = await backend.create_topic(1), await backend.create_topic(1)
    group = backend.new_name("group")
    one = await backend.new_queue("one", topic=shared, group=group)
    two = await backend.new_queue("two", topic=other, group=group)
    alone = await backend.new_queue("alone", topic=shared)
    for topic in shared, other:
        await backend.produce(topic, b"x")
    async with backend.consumer(group=group) as both, backend.consumer(alone) as consumer:
        held = await take_one(consumer)
        await both.ack(await take(both, 2))
        for queue in one, two:
            await backend.statistics(queue, acked=1)
        await held.ack()
    await backend.statistics(alone, acked=1, late=0)
