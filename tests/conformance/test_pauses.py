"""Queues that are paused and resumed while everything runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import marq
from tests.conformance.backend import Backend
from tests.conformance.receiving import nothing_comes, take, take_one


async def test_a_paused_queue_delivers_nothing_and_loses_nothing(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"begun")
        begun = await take_one(consumer)
        given_back = await backend.producer.send(queue, b"given back")
        await (await take_one(consumer)).release(delay=0.1)

        assert (await backend.queues.pause(queue)).paused
        await backend.seen_by_all()
        await backend.producer.send(queue, b"sent meanwhile")
        await backend.producer.send(queue, b"delayed", delay=0.1)
        await nothing_comes(backend, consumer)
        # A message that was in flight before can be acknowledged.
        await begun.ack()

        assert not (await backend.queues.resume(queue)).paused
        found = {message.value: message for message in await take(consumer, 3)}
        assert set(found) >= {b"sent meanwhile", b"delayed"}
        assert given_back.queue == queue
        await consumer.ack(list(found.values()))
    await backend.statistics(queue, acked=4)


async def test_the_other_queues_of_a_group_go_on_while_one_is_paused(backend: Backend) -> None:
    group, paused, other = backend.new_name("group"), backend.new_name("paused"), backend.new_name("other")
    await backend.queues.change(paused, group=group, max_attempts=2)
    await backend.queues.change(other, group=group)
    await backend.queues.pause(paused)
    await backend.seen_by_all()
    async with backend.consumer(group=group) as consumer:
        for turn in range(3):
            await backend.producer.send(paused, b"p%d" % turn)
            await backend.producer.send(other, b"o%d" % turn)

        ended = await take(consumer, 3)
        assert sorted(message.value for message in ended) == [b"o0", b"o1", b"o2"]
        await consumer.ack(ended)
        await nothing_comes(backend, consumer)

        await backend.queues.resume(paused)
        late = await take(consumer, 3)
        assert sorted(message.value for message in late) == [b"p0", b"p1", b"p2"]
        assert {message.attempt for message in late} == {1}
        await consumer.ack(late)
    await backend.statistics(paused, acked=3)


async def test_a_pause_in_a_file_can_be_ended_at_run_time(backend: Backend) -> None:
    queue = backend.new_name()
    await backend.queues.publish({f"file:{queue}".encode(): {"paused": True}})
    assert backend.queues[queue].paused

    assert not (await backend.queues.resume(queue)).paused


#: Long enough to see that a queue is paused on a busy machine.
PAUSE_S = 6


async def test_a_pause_with_an_end_ends_without_the_client_that_paused(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        async with marq.Queues(**backend.client) as gone:
            begun_s = backend.now_s()
            settings = await gone.pause(queue, timedelta(seconds=PAUSE_S))
        assert isinstance(settings.paused, str)
        await backend.seen_by_all()
        await backend.producer.send(queue, b"sent meanwhile")
        await backend.producer.send(queue, b"delayed", delay=0.1)

        found = await take(consumer, 2)

        assert backend.now_s() - begun_s > PAUSE_S - 0.1
        assert {message.value for message in found} == {b"sent meanwhile", b"delayed"}
        assert {message.attempt for message in found} == {1}
        await consumer.ack(found)
    assert backend.queues[queue].paused is False
    await backend.statistics(queue, acked=2)


async def test_the_trackers_resume_a_queue_whose_pause_ends(backend: Backend) -> None:
    queue = backend.new_name()
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        message = await take_one(consumer)
        await backend.queues.pause(queue, PAUSE_S)
        await backend.seen_by_all()
        # Due during the pause.
        await message.release(delay=0.1)

        again = await take_one(consumer)

        assert (again.id, again.attempt) == (message.id, 2)
        assert backend.queues[queue].paused is False
        await again.ack()


async def test_a_pause_can_get_another_end_or_none_or_be_resumed_before(backend: Backend) -> None:
    queue = backend.new_name()
    async with marq.Queues(**backend.client) as others, backend.consumer(queue) as consumer:
        first = (await backend.queues.pause(queue, 3_600)).paused
        second = (await backend.queues.pause(queue, 2 * 3_600)).paused
        assert isinstance(first, str)
        assert isinstance(second, str)
        assert first < second
        await backend.until(lambda: others[queue].paused == second)

        # A shorter pause also replaces the former one; a pause without an end stays.
        await backend.queues.pause(queue, PAUSE_S)
        assert (await backend.queues.pause(queue)).paused is True
        await backend.advance(PAUSE_S + 1)
        assert others[queue].paused is True

        await backend.queues.pause(queue, 3_600)
        assert (await backend.queues.resume(queue)).paused is False
        await backend.seen_by_all()
        await backend.producer.send(queue, b"x")
        await (await take_one(consumer)).ack()


async def test_a_pause_that_ended_before_a_start_does_not_count(backend: Backend) -> None:
    queue = backend.new_name()
    ended = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    assert (await backend.queues.change(queue, paused=ended)).paused is False
    async with backend.consumer(queue) as consumer:
        await backend.producer.send(queue, b"x")
        await (await take_one(consumer)).ack()


async def test_the_end_of_a_pause_is_checked(backend: Backend) -> None:
    queue = backend.new_name()
    for wrong in (0, -1, 366 * 86_400, "10m"):
        with pytest.raises(marq.ConfigError, match="duration="):
            await backend.queues.pause(queue, wrong)
    with pytest.raises(marq.ConfigError, match=f"queue '{queue}': paused: expected true, false, or a time"):
        await backend.queues.change(queue, paused="tomorrow")
    assert backend.queues[queue].paused is False
