"""Queues that are paused and resumed while everything runs."""

from __future__ import annotations

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
        # What was begun ends.
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
