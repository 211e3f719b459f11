"""Groups: queues that are read together; a queue that joins or leaves misses nothing and gets nothing twice."""

from __future__ import annotations

from collections import Counter

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import numbered, running, send, served, take_one


async def test_one_consumer_serves_all_queues_of_a_group(backend: Backend) -> None:
    async with served(backend.consumer(group="both")) as group:
        await send(backend, "group-a", 0, 20)
        await send(backend, "group-b", 0, 20)
        await send(backend, backend.new_name("not-in-it"), 0, 20)
        await backend.until(lambda: len(group.seen) >= 40)

    assert Counter(group.seen) == Counter(numbered("group-a", 0, 20) + numbered("group-b", 0, 20))
    await backend.statistics("group-a", acked=20)


async def test_part_of_a_group_and_unknown_groups_are_refused_with_a_way_out(backend: Backend) -> None:
    with pytest.raises(marq.ConfigError, match=r"'group-a' belongs to group 'both' together with 'group-b'"):
        await backend.consumer("group-a").start()
    with pytest.raises(marq.ConfigError, match=r"group 'none': no queue's settings name it.*'both'"):
        await backend.consumer(group="none").start()
    with pytest.raises(marq.ConfigError, match="expected one of them"):
        backend.consumer("group-a", group="both")
    with pytest.raises(marq.ConfigError, match="expected a queue's name"):
        backend.consumer()


async def test_a_queue_that_is_alone_in_its_group_may_be_served_by_its_name(backend: Backend) -> None:
    async with served(backend.consumer("alone-in-a-group")) as alone:
        await send(backend, "alone-in-a-group", 0, 5)
        await backend.until(lambda: len(alone.seen) >= 5)

    assert Counter(alone.seen) == Counter(numbered("alone-in-a-group", 0, 5))


async def test_queues_of_a_group_may_differ_in_being_transactional(backend: Backend) -> None:
    group = backend.new_name("group")
    one = await backend.new_queue("one", group=group, transactional=True)
    other = await backend.new_queue("other", group=group)
    async with served(backend.consumer(group=group)) as both:
        await send(backend, one, 0, 20)
        await send(backend, other, 0, 20)
        await backend.until(lambda: len(both.seen) >= 40)

    assert Counter(both.seen) == Counter(numbered(one, 0, 20) + numbered(other, 0, 20))
    await backend.statistics(one, acked=20, reacquired=0)
    await backend.statistics(other, acked=20, reacquired=0)


async def test_a_queue_with_a_handler_is_the_workers(backend: Backend) -> None:
    queue = backend.new_name()
    await backend.queues.change(queue, handler="tests.conformance.no_such_module:handle")
    try:
        with pytest.raises(marq.ConfigError, match=f"queue '{queue}' has the handler"):
            await backend.consumer(queue).start()
    finally:
        await backend.queues.reset(queue)


async def test_a_queue_that_joins_a_running_group_keeps_its_messages_and_none_comes_twice(
    backend: Backend,
) -> None:
    group, late = backend.new_name("group"), backend.new_name("late")
    old = await backend.new_queue("old", group=group)
    await send(backend, late, 0, 10)
    async with served(backend.consumer(group=group)) as both:
        await send(backend, old, 0, 10)
        await backend.until(lambda: len(both.seen) >= 10)

        await backend.queues.change(late, group=group)
        await send(backend, late, 10, 20)
        await send(backend, old, 10, 20)
        await backend.until(lambda: len(both.seen) >= 40)
        await backend.advance(0.5)

    assert Counter(both.seen) == Counter(numbered(old, 0, 20) + numbered(late, 0, 20))


async def test_a_queue_that_moves_to_another_group_goes_on_where_it_was(backend: Backend) -> None:
    one, other = backend.new_name("one"), backend.new_name("other")
    stays, moves = await backend.new_queue("stays", group=one), await backend.new_queue("moves", group=one)
    await backend.new_queue("there", group=other)
    async with served(backend.consumer(group=one)) as former:
        await send(backend, moves, 0, 10)
        await backend.until(lambda: len(former.seen) >= 10)
        async with served(backend.consumer(group=other)) as later:
            await backend.queues.change(moves, group=other)
            await send(backend, moves, 10, 20)
            await send(backend, stays, 0, 5)
            await backend.seen_by_all()
            await send(backend, moves, 20, 30)
            await backend.until(lambda: len({*former.seen, *later.seen}) >= 35)
            await backend.advance(0.5)

    assert {*former.seen, *later.seen} == {*numbered(moves, 0, 30), *numbered(stays, 0, 5)}
    seen = Counter(former.seen + later.seen)
    # Messages sent before all clients know of the move may come to both groups.
    assert all(seen[each] == 1 for each in [*numbered(moves, 0, 10), *numbered(moves, 20, 30), *numbered(stays, 0, 5)])
    assert set(numbered(moves, 20, 30)) <= set(later.seen)


async def test_a_consumer_whose_queue_goes_to_a_group_ends_and_the_group_goes_on(backend: Backend) -> None:
    group, moves, there = backend.new_name("group"), backend.new_name("moves"), backend.new_name("there")
    async with served(backend.consumer(moves)) as own:
        await send(backend, moves, 0, 10)
        await backend.until(lambda: len(own.seen) >= 10)
        await backend.queues.change(there, group=group)
        await backend.queues.change(moves, group=group)
        await backend.until(own.task.done)
        assert isinstance(own.task.exception(), marq.ConfigError)
    async with served(backend.consumer(group=group)) as later:
        await send(backend, moves, 10, 20)
        await backend.until(lambda: len(later.seen) >= 10)
        await backend.advance(0.3)

    assert Counter(later.seen) == Counter(numbered(moves, 10, 20))


async def test_a_queue_that_moves_away_and_back_gets_nothing_twice_although_nothing_else_was_committed(
    backend: Backend,
) -> None:
    group = backend.new_name("group")
    queue, seen = await backend.new_queue("returns", group=group), list[bytes]()
    for first, own in ((0, False), (10, True), (20, False), (30, True)):
        await backend.define(queue, group=None if own else group)
        async with served(backend.consumer(queue) if own else backend.consumer(group=group)) as consumer:
            await send(backend, queue, first, first + 10)
            await backend.until(lambda consumer=consumer: len(consumer.seen) >= 10)
            await backend.advance(0.3)
        seen += consumer.seen

    assert Counter(seen) == Counter(numbered(queue, 0, 40))


async def test_a_decorated_handler_gets_no_messages_of_a_queue_that_joins_its_group_and_goes_on(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    group, late = backend.new_name("group"), backend.new_name("late")
    old = await backend.new_queue("old", group=group)
    seen: list[tuple[str, bytes]] = []

    @marq.handler(old)
    async def handle(message: marq.Message) -> None:
        seen.append((message.queue, message.value))

    consumer = backend.consumer(group=group)
    async with running(consumer, lambda: consumer.run(handle)) as task:
        await send(backend, old, 0, 1)
        await backend.until(lambda: len(seen) == 1)
        await backend.define(late, group=group)
        await send(backend, late, 0, 1)
        await send(backend, old, 1, 2)
        await backend.until(lambda: len(seen) == 2)
        assert not task.done()
    assert seen == numbered(old, 0, 2)
    assert f"would be called with messages of queue '{late}'" in caplog.text
    async with served(backend.consumer(group=group)) as both:
        await backend.until(lambda: len(both.seen) == 1)
    await backend.statistics(late, acked=1, reacquired=0)


async def test_a_queue_that_gets_a_handler_stops_no_other_queue_of_its_group(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers run its handler, so consumers of the group no longer serve it, now and after a restart."""
    group = backend.new_name("group")
    stays, handled = [await backend.new_queue(name, group=group) for name in ("stays", "handled")]
    try:
        async with served(backend.consumer(group=group)) as consumer:
            await backend.define(handled, handler="no_such_module:handle")
            await send(backend, stays, 0, 1)
            await backend.until(lambda: len(consumer.seen) == 1)
            assert not consumer.task.done()
        async with served(backend.consumer(group=group)) as restarted:
            await send(backend, stays, 1, 2)
            await backend.until(lambda: len(restarted.seen) == 1)
        assert f"queue '{handled}' has the handler 'no_such_module:handle'" in caplog.text
    finally:
        await backend.queues.reset(handled)


async def test_a_group_starts_although_the_topic_of_one_queue_is_missing(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    group, lacks = backend.new_name("group"), backend.new_name("lacks")
    stays = await backend.new_queue("stays", group=group)
    try:
        await backend.define(lacks, group=group, topic="no-such-topic")
        async with served(backend.consumer(group=group)) as consumer:
            await send(backend, stays, 0, 1)
            await backend.until(lambda: len(consumer.seen) == 1)
            await backend.until(lambda: "topic no-such-topic does not exist" in caplog.text)

            topic = await backend.create_topic()
            await backend.queues.change(lacks, topic=topic)
            await backend.produce(topic, b"0")
            await backend.until(lambda: len(consumer.seen) == 2)
        assert consumer.seen == [*numbered(stays, 0, 1), *numbered(lacks, 0, 1)]
    finally:
        await backend.queues.reset(lacks)


async def test_a_queue_whose_topic_is_missing_stops_no_other_queue_of_its_running_group(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    group, late = backend.new_name("group"), backend.new_name("late")
    stays, leaves = [await backend.new_queue(name, group=group) for name in ("stays", "leaves")]
    try:
        async with served(backend.consumer(group=group)) as consumer:
            await backend.queues.change(late, group=group, topic="no-such-topic")
            await backend.until(lambda: "topic no-such-topic does not exist" in caplog.text)
            # Another consumer may serve it from now on.
            await backend.queues.change(leaves, group=None)
            await backend.seen_by_all()
            await backend.advance(6)
            async with backend.consumer(leaves) as former:
                await send(backend, stays, 0, 5)
                await backend.until(lambda: len(consumer.seen) == 5)
                await send(backend, leaves, 0, 1)
                await (await take_one(former)).ack()

            topic = await backend.create_topic()
            await backend.queues.change(late, topic=topic)
            await backend.produce(topic, b"0")
            await backend.until(lambda: len(consumer.seen) == 6)
        assert Counter(consumer.seen) == Counter(numbered(stays, 0, 5) + numbered(late, 0, 1))
        assert caplog.text.count("topic no-such-topic does not exist") == 1
    finally:
        await backend.queues.reset(late)
