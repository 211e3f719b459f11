"""Queues that deliver at most once: how their messages are acquired, and when they are dispatched.

ACQUIRE and commit share a transaction. Found by the fault scenario ``at-most-once-killed``: a consumer that died
between the two left messages which were redelivered when their leases ended, and their records were read and
delivered, too.

A message is dispatched when its handler begins. Before, a consumer dispatched twice as many messages as handlers ran,
and a kill abandoned messages that no handler had seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from marq.kafka.marker_writer import MarkerRecord
from marq.leases.message import Message
from marq.settings.queue import AT_LEAST_ONCE, AT_MOST_ONCE, QueueSettings
from marq.wire.markers import MAX_BATCH_MARKERS, Acquire, Dispatch, Release
from tests.unit.client.fakes import P0, FakeRecord, HangingEach, Rig, spin


@pytest.fixture
async def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A receiver of a queue that delivers at most once, with ten messages to read."""
    rig = make_rig(queue=lambda _: QueueSettings(delivery=AT_MOST_ONCE))
    rig.add(10)
    return rig


def dispatches(rig: Rig) -> list[list[int]]:
    return [list(each.offsets) for each in rig.settler.of(Dispatch)]


@pytest.mark.parametrize(("delivery", "dispatched"), [(AT_MOST_ONCE, [[5, 6]]), (AT_LEAST_ONCE, [])])
async def test_only_messages_that_are_delivered_at_most_once_are_dispatched_and_acquired_with_their_commit(
    make_rig: Callable[..., Rig], delivery: str, dispatched: list[list[int]]
) -> None:
    rig = make_rig(queue=lambda _: QueueSettings(delivery=delivery))
    rig.reader.add(P0, FakeRecord(5), FakeRecord(6))

    messages = await rig.receiver.starts.started(await rig.take(2))

    assert [message.offset for message in messages] == [5, 6]
    in_one, marker_first = ([list(each.offsets) for each in writer.of(Acquire)] for writer in (rig.once, rig.acquirer))
    assert (in_one, marker_first) == (([[5, 6]], []) if dispatched else ([], [[5, 6]]))
    assert dispatches(rig) == dispatched


async def test_a_message_is_dispatched_only_when_its_handler_begins_and_handlers_that_begin_together_share_a_marker(
    rig: Rig,
) -> None:
    handler = HangingEach()
    pool = rig.work(handler, 2)

    await handler.has_seen(2)
    await spin()
    assert (handler.seen, dispatches(rig)) == ([0, 1], [[0, 1]])

    await handler.end(0)
    await handler.has_seen(3)
    await spin()
    assert (handler.seen, dispatches(rig)) == ([0, 1, 2], [[0, 1], [2]])
    await pool.stop(0)


async def test_a_batch_is_dispatched_only_when_its_handler_begins(rig: Rig) -> None:
    seen: list[int] = []
    begun = asyncio.Event()

    async def handler(messages: list[Message]) -> None:
        seen.extend(message.offset for message in messages)
        begun.set()
        await asyncio.Event().wait()

    pool = rig.work_on_batches(handler, max_messages=3)
    async with asyncio.timeout(60):
        await begun.wait()
    await spin()

    assert (seen, dispatches(rig)) == ([0, 1, 2], [[0, 1, 2]])
    await pool.stop(0)


async def test_a_stop_releases_messages_whose_handlers_have_not_begun(rig: Rig) -> None:
    rig.settler.gate.clear()
    handler = HangingEach()
    pool = rig.work(handler, 2)
    await spin()

    rig.buffer.close()
    await asyncio.gather(rig.receiver.stop_reading(1), pool.stop(1))
    count = rig.receiver.prefetch.release()
    rig.settler.gate.set()
    await rig.receiver.stop(10)

    assert handler.seen == []
    assert sorted(rig.released) == list(range(2 + count))
    # In one batch or in two.
    assert {each.counted for each in rig.settler.of(Release)} == {False}


async def test_nothing_is_dispatched_after_a_stop(rig: Rig) -> None:
    messages = await rig.take(2)
    await rig.receiver.stop_reading(1)

    assert await rig.receiver.starts.started(messages) == []

    await rig.settler.until(lambda: sorted(rig.released) == [0, 1])
    assert dispatches(rig) == []


async def test_a_call_that_is_cancelled_releases_what_it_would_have_returned(rig: Rig) -> None:
    messages = await rig.take(2)
    rig.settler.gate.clear()
    call = asyncio.create_task(rig.receiver.starts.started(messages))
    await spin()

    call.cancel()
    await asyncio.wait([call])
    rig.settler.gate.set()
    await rig.settler.until(lambda: sorted(rig.released) == [0, 1])

    assert call.cancelled()


async def test_a_stop_in_the_same_turn_of_the_event_loop_ends_a_call_that_is_about_to_dispatch(rig: Rig) -> None:
    messages = await rig.take(2)

    call = asyncio.create_task(rig.receiver.starts.started(messages))
    await asyncio.gather(asyncio.sleep(0), rig.receiver.stop_reading(1))

    async with asyncio.timeout(60):
        assert await call == []
    await rig.settler.until(lambda: sorted(rig.released) == [0, 1])


async def test_the_end_of_a_lease_that_is_done_with_does_not_end_a_worker_that_waits_to_dispatch(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(queue=lambda _: QueueSettings(delivery=AT_MOST_ONCE))
    rig.add(200)
    seen: list[int] = []
    away = asyncio.Event()

    async def handler(message: Message) -> None:
        seen.append(message.offset)
        if len(seen) == 41:
            # The broker goes away: acks and DISPATCH markers wait.
            rig.settler.gate.clear()
            away.set()

    pool = rig.work(handler, 4)
    async with asyncio.timeout(60):
        await away.wait()
    for _ in range(45):
        await rig.clock.advance(1)
        await spin()

    assert [task.done() for task in pool.tasks] == [False] * 4
    rig.settler.gate.set()
    await pool.stop(0)


async def test_a_message_whose_lease_ends_before_it_is_dispatched_is_not_seen_but_its_neighbours_are(rig: Rig) -> None:
    first, second = await rig.take(2)
    second._batch.own_expiry_s = {second.offset: rig.clock() + 600}
    rig.settler.refuse = 1_000_000
    call = asyncio.create_task(rig.receiver.starts.started([first, second]))
    await spin()
    await rig.clock.advance(40)

    rig.settler.refuse = 0
    await rig.clock.advance(1)

    assert await call == [second]
    assert dispatches(rig)[-1] == [1]


async def test_a_dispatch_that_is_not_known_to_be_durable_is_repeated(rig: Rig) -> None:
    messages = await rig.take(1)
    rig.settler.refuse_written = 1
    call = asyncio.create_task(rig.receiver.starts.started(messages))
    await spin()

    await rig.clock.advance(1)

    assert await call == messages
    assert dispatches(rig) == [[0], [0]]


async def test_more_messages_than_fit_into_a_marker_are_dispatched_with_several(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(queue=lambda _: QueueSettings(delivery=AT_MOST_ONCE), max_in_flight=MAX_BATCH_MARKERS + 1)
    rig.add(MAX_BATCH_MARKERS + 1)

    messages = await rig.receiver.starts.started(await rig.take(MAX_BATCH_MARKERS + 1))

    assert len(messages) == MAX_BATCH_MARKERS + 1
    assert sorted(map(len, dispatches(rig))) == [1, MAX_BATCH_MARKERS]


class BrokenWriter:
    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        raise RuntimeError("a bug")


async def test_an_error_that_no_retry_can_repair_ends_the_run(rig: Rig) -> None:
    rig.receiver.writer._writer = BrokenWriter()
    handler = HangingEach()
    pool = rig.work(handler, 2)

    async with asyncio.timeout(60):
        await rig.receiver.failed.wait()
        await pool.done()

    assert "a bug" in str(rig.receiver.error)
    assert handler.seen == []


async def test_of_several_queues_that_are_taken_together_only_those_that_deliver_at_most_once_are_dispatched(
    make_rig: Callable[..., Rig],
) -> None:
    deliveries = {"once": AT_MOST_ONCE, "often": AT_LEAST_ONCE}
    rig = make_rig(["once", "often"], queue=lambda name: QueueSettings(delivery=deliveries[name]))
    rig.reader.add(P0, FakeRecord(0, key=b"often"), FakeRecord(1, key=b"once"), FakeRecord(2, key=b"often"))

    messages = await rig.receiver.starts.started([*await rig.take(2, "often"), *await rig.take(1, "once")])

    assert [message.offset for message in messages] == [0, 2, 1]
    assert [(each.queue, list(each.offsets)) for each in rig.settler.of(Dispatch)] == [("once", [1])]
