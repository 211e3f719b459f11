"""The starts of handlers: when they are in the log, and in which order suspects run.

A message whose handler ended its process dead-lettered messages next to it, one of which no handler had ever seen. So
an attempt counts only if the log has its start, and suspects, whose previous leases have expired, do not share a start
with others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from marq.consumer.prefetch import FIRST_AWAY_MS, NEXT_S
from marq.consumer.starts import NOTED_AFTER_S
from marq.leases.message import Message
from marq.settings.queue import QueueSettings
from marq.wire.markers import Acquire, Renew
from marq.wire.names import ATTEMPT_HEADER, EXPIRED_HEADER, UNCOUNTED_HEADER
from tests.unit.client.fakes import P0, FakeRecord, HangingEach, Rig, spin

MakeRig = Callable[..., Rig]


def suspect(offset: int, attempt: int, uncounted: int = 0) -> FakeRecord:
    headers = [(ATTEMPT_HEADER, b"%d" % attempt), (EXPIRED_HEADER, b"1")]
    if uncounted:
        headers.append((UNCOUNTED_HEADER, b"%d" % uncounted))
    return FakeRecord(offset, headers=headers)


def starts(rig: Rig) -> list[int]:
    return [offset for each in rig.settler.of(Renew) if each.started for offset in each.offsets]


@pytest.mark.parametrize("prefetch", [True, False])
async def test_the_attempts_of_polled_messages_count_from_their_acquires_on_and_those_of_prefetched_ones_do_not(
    make_rig: MakeRig, prefetch: bool
) -> None:
    rig = make_rig(prefetch=prefetch)
    rig.add(1)

    await rig.take(1)

    assert [each.counted for each in rig.acquirer.of(Acquire)] == [not prefetch]


async def test_the_start_of_a_handler_that_takes_a_while_is_in_the_log_and_those_that_wait_have_none(
    make_rig: MakeRig,
) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.add(3)
    rig.work(handler, 1)
    await spin(60)
    assert (handler.running, starts(rig)) == ([0], [])

    await rig.clock.advance(NOTED_AFTER_S)
    await spin(60)
    assert starts(rig) == [0]

    await rig.clock.advance(10 * NOTED_AFTER_S)
    await spin(60)
    assert starts(rig) == [0]


async def test_a_handler_that_returns_soon_needs_no_start(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.add(1)
    rig.work(handler, 1)
    await spin(60)

    await handler.end(0)
    await rig.clock.advance(10 * NOTED_AFTER_S)
    await spin(60)

    assert starts(rig) == []


async def test_a_start_that_is_written_with_that_of_a_longer_lease_does_not_lengthen_the_lease(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.add(2)
    long, short = await rig.take(2)
    rig.receiver.hold([long], 3_600_000)
    await rig.settled()

    rig.receiver.starts.returned([long, short])
    await spin(60)
    await rig.clock.advance(NOTED_AFTER_S)
    await spin(60)

    [start] = [each for each in rig.settler.of(Renew) if each.started]
    assert list(start.offsets) == [0, 1]
    assert start.lease_ms <= rig.receiver._settings.default_lease_ms


async def test_a_start_that_is_on_its_way_is_written_although_the_message_gets_another_lease(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(2)
    acked, message = await rig.take(2)
    rig.receiver.starts.returned([message])
    rig.settler.gate.clear()
    acking = asyncio.create_task(acked.ack())
    await spin(60)
    await rig.clock.advance(NOTED_AFTER_S)
    await spin(60)

    rig.receiver.hold([message], 60_000)
    rig.settler.gate.set()
    await acking
    await rig.settled()

    assert starts(rig) == [1]


async def test_a_suspect_is_handled_when_its_start_is_durable(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.settler.gate.clear()
    rig.reader.add(P0, suspect(0, 1))
    rig.work(handler, 1)
    await spin(60)
    assert handler.running == []

    rig.settler.gate.set()
    await spin(60)

    assert (handler.running, starts(rig)) == ([0], [0])


async def test_a_suspect_whose_start_is_durable_only_while_its_handlers_stop_is_released_uncounted(
    make_rig: MakeRig,
) -> None:
    """The stop waits for handlers that run already: it would cancel this one."""
    rig, handler = make_rig(), HangingEach()
    rig.add(1)
    rig.reader.add(P0, suspect(1, 1))
    pool = rig.work(handler, 2)
    await spin(60)
    rig.settler.gate.clear()
    rig.reader.add(P0, suspect(2, 1))
    await handler.end(1)
    await spin(60)

    stopping = asyncio.create_task(pool.stop(60))
    await spin(60)
    rig.settler.gate.set()
    await rig.settled()
    await handler.end(0)
    async with asyncio.timeout(60):
        await stopping
    await rig.settled()

    assert handler.running == []
    assert handler.seen == [0, 1]
    assert [(offset, counted) for offset, (_, counted, _) in rig.released.items()] == [(2, False)]


LAST = QueueSettings().max_attempts
#: The attempts of suspects that come together, which of them run, and which run after the end of another one.
RUNNING: dict[str, tuple[QueueSettings, list[int], list[int], dict[int, list[int]]]] = {
    "the first one with used-up attempts runs alone, and each that ends lets more run": (
        QueueSettings(), [2] * 6, [0], {0: [1, 2], 2: [1, 3, 4]},
    ),
    "a last attempt is alone however many have ended": (
        QueueSettings(), [2, 2, LAST, 2], [0], {0: [1], 1: [2], 2: [3]},
    ),
    "those without used-up attempts run together, but not next to the first one that has some": (
        QueueSettings(), [2, 1, 1, 1], [0], {0: [1, 2, 3]},
    ),
    "in a queue with one attempt each runs alone": (QueueSettings(max_attempts=1), [1, 1], [0], {0: [1]}),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "attempts", "first", "then"), RUNNING.values(), ids=RUNNING)
async def test_which_suspects_run_next_to_other_messages(
    make_rig: MakeRig, rules: QueueSettings, attempts: list[int], first: list[int], then: dict[int, list[int]]
) -> None:
    rig, handler = make_rig(queue=lambda _: rules), HangingEach()
    others = [len(attempts), len(attempts) + 1]
    rig.reader.add(P0, *[suspect(*each) for each in enumerate(attempts)], *[FakeRecord(offset) for offset in others])
    rig.work(handler, 8)
    await spin(60)
    assert sorted(handler.running) == [*first, *others]

    for ended, running in then.items():
        await handler.end(ended)
        assert sorted(handler.running) == [*running, *others]


@pytest.mark.parametrize(("releases", "delay_ms"), [(0, FIRST_AWAY_MS), (3, 8 * FIRST_AWAY_MS), (30, 30_000)])
async def test_suspects_that_can_not_wait_are_away_for_longer_each_time_and_hold_up_no_other_message(
    make_rig: MakeRig, releases: int, delay_ms: int
) -> None:
    rig, handler = make_rig(queue=lambda _: QueueSettings(max_attempts=1)), HangingEach()
    rig.reader.add(P0, *[suspect(offset, 1, releases) for offset in range(20)], FakeRecord(20))
    rig.work(handler, 2)
    for _ in range(20):
        await spin(60)
        await rig.clock.advance(0.1)
        await rig.settled()

    assert {delay_ms for delay_ms, _, _ in rig.released.values()} == {delay_ms}
    assert sorted(handler.running) == [0, 20]
    # Four may wait for their turns, twice as many as there are handlers.
    assert len(rig.released) == 15


async def test_suspects_that_may_run_together_are_not_released(make_rig: MakeRig) -> None:
    rig, ended = make_rig(), 0

    async def handler(message: Message) -> None:
        nonlocal ended
        # The first message keeps the consumer busy: if nothing is in flight, suspects begin one at a time again.
        await rig.clock.sleep(0.01 if message.offset else 10)
        ended += 1

    rig.add(1)
    rig.work(handler, 3)
    for first, end in pairwise([1, 4, 10, 22, 46]):
        rig.reader.add(P0, *[suspect(offset, 2) for offset in range(first, end)])
        while ended + len(rig.released) < end - 1:
            await spin(60)
            await rig.clock.advance(0.01)
            await rig.settled()

    assert rig.released == {}


async def test_messages_are_fetched_past_suspects_only_if_their_turns_do_not_come_soon(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    # One runs and three wait, so as many are here as two handlers prefetch.
    rig.reader.add(P0, *[suspect(offset, 2) for offset in range(5)], FakeRecord(5))
    rig.work(handler, 2)
    await spin(60)
    await rig.clock.advance(NEXT_S / 2)
    await spin(60)
    assert (handler.running, rig.receiver.prefetch.in_flight) == ([0], 4)

    await rig.clock.advance(NEXT_S / 2)
    await spin(60)
    assert (handler.running, rig.receiver.prefetch.in_flight) == ([0, 5], 6)


async def test_suspects_of_a_queue_do_not_hold_up_another_queue(make_rig: MakeRig) -> None:
    rig, handler = make_rig(["a", "b"]), HangingEach()
    rig.work(handler, 4, "a")
    rig.work(handler, 1, "b")
    rig.reader.add(P0, *[replace(suspect(offset, 2), key=b"a") for offset in range(8)])
    await spin(60)
    assert handler.running == [0]

    rig.reader.add(P0, FakeRecord(8, key=b"b"))
    await spin(60)
    assert handler.running == [0, 8]


async def test_a_suspect_that_has_waited_for_half_a_lease_goes_to_another_process(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.reader.add(P0, suspect(0, 2), suspect(1, 2))
    rig.work(handler, 2)
    await spin(60)

    await rig.clock.advance(rig.receiver._settings.default_lease_ms / 2_000)
    await spin(60)
    await rig.settled()

    [(offset, (_, counted, _))] = rig.released.items()
    assert (offset, counted) == (1, False)


async def test_suspects_that_wait_are_released_by_a_stop(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.reader.add(P0, suspect(0, 2), suspect(1, 2))
    rig.work(handler, 2)
    await spin(60)

    assert rig.receiver.prefetch.release() == 1
    await rig.settled()

    assert [(offset, counted) for offset, (_, counted, _) in rig.released.items()] == [(1, False)]


async def test_suspects_that_have_ended_are_forgotten_while_other_messages_run(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.add(1)
    rig.work(handler, 4)
    await spin(60)

    for offset in range(1, 6):
        rig.reader.add(P0, suspect(offset, 1))
        await spin(60)
        await handler.end(offset)
        await rig.settled()

    assert [message.offset for message in rig.receiver.prefetch._suspects_here] == [5]


async def test_suspects_do_not_seem_faster_than_other_messages(make_rig: MakeRig) -> None:
    rig, concurrency = make_rig(), 2

    async def handler(message: Message) -> None:
        await rig.clock.sleep(1.0)

    rig.add(2)
    rig.work(handler, concurrency)
    await spin(60)
    await rig.clock.advance(1.0)
    await rig.settled()
    rig.reader.add(P0, *[suspect(offset, 1) for offset in range(2, 200)])

    for _ in range(20):
        await spin(200)
        assert rig.receiver.prefetch.in_flight <= 4 * concurrency
        await rig.clock.advance(1.0)


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_stop_writes_the_starts_of_messages_that_calls_have_returned_unless_the_broker_is_gone(
    make_rig: MakeRig, is_gone: bool
) -> None:
    rig = make_rig(lease_ms=600_000)
    rig.add(1)
    rig.receiver.starts.returned(await rig.take(1))
    rig.settler.refuse = 1_000_000 if is_gone else 0

    await rig.receiver.stop_reading(1)
    async with asyncio.timeout(60):
        assert await rig.receiver.stop(0.1 if is_gone else 60) is not is_gone

    assert starts(rig) == ([] if is_gone else [0])


async def test_the_start_of_a_handler_that_runs_after_a_suspect_in_the_same_turn_is_in_the_log(
    make_rig: MakeRig,
) -> None:
    rig, hanging = make_rig(), asyncio.Event()

    async def handler(message: Message) -> None:
        if message.offset == 5:
            await hanging.wait()

    rig.add(4)
    rig.work(handler, 1)
    await spin(60)
    rig.settler.gate.clear()
    rig.reader.add(P0, suspect(4, 1), FakeRecord(5))
    await spin(60)
    await rig.clock.advance(2 * NOTED_AFTER_S)
    await spin(60)
    rig.settler.gate.set()
    await spin(60)

    await rig.clock.advance(2 * NOTED_AFTER_S)
    await spin(60)

    assert starts(rig) == [4, 5]


async def test_calls_get_all_suspects_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.reader.add(P0, suspect(0, 2), suspect(1, 2))

    assert sorted(message.offset for message in await rig.take(2)) == [0, 1]
