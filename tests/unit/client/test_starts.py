"""The starts of handlers: when they are in the log, and in which order suspects run.

A message whose handler ended its process dead-lettered messages next to it, one of which no handler had ever seen. So
an attempt counts only if the log has its start, and suspects, whose previous leases have expired, do not share a start
with others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from marq.consumer.prefetch import FIRST_AWAY_MS
from marq.consumer.starts import NOTED_AFTER_S
from marq.kafka.marker_writer import MarkerRecord
from marq.leases.message import Message
from marq.settings.queue import QueueSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Acquire, Renew, Source
from marq.wire.names import ATTEMPT_HEADER, EXPIRED_HEADER, UNCOUNTED_HEADER
from tests.unit.client.fakes import FakeRecord, HangingEach, Rig, spin

P0 = Source("t", 0)
MakeRig = Callable[..., Rig]


def suspect(offset: int, attempt: int, uncounted: int = 0) -> FakeRecord:
    headers = [(ATTEMPT_HEADER, b"%d" % attempt), (EXPIRED_HEADER, b"1")]
    if uncounted:
        headers.append((UNCOUNTED_HEADER, b"%d" % uncounted))
    return FakeRecord(offset, headers=headers)


def starts(rig: Rig) -> list[int]:
    return [offset for each in rig.settler.of(Renew) if each.started for offset in each.offsets]


async def test_prefetched_messages_are_acquired_uncounted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add(1)

    await rig.take(1)

    assert [each.counted for each in rig.acquirer.of(Acquire)] == [False]


async def test_the_attempts_of_polled_messages_count_from_the_beginning(make_rig: MakeRig) -> None:
    rig = make_rig(prefetch=False)
    rig.add(1)

    await rig.take(1)

    assert [each.counted for each in rig.acquirer.of(Acquire)] == [True]


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


async def test_the_first_suspect_with_used_up_attempts_runs_alone_and_each_that_ends_lets_more_run(
    make_rig: MakeRig,
) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.reader.add(P0, *[suspect(offset, 2) for offset in range(6)], FakeRecord(6), FakeRecord(7))
    rig.work(handler, 8)
    await spin(60)
    assert sorted(handler.running) == [0, 6, 7]

    await handler.end(0)
    assert sorted(handler.running) == [1, 2, 6, 7]
    await handler.end(2)
    assert sorted(handler.running) == [1, 3, 4, 6, 7]


async def test_a_suspect_has_its_last_attempt_alone_however_many_have_ended(make_rig: MakeRig) -> None:
    rig, handler = make_rig(), HangingEach()
    last = QueueSettings().max_attempts
    rig.reader.add(P0, suspect(0, 2), suspect(1, 2), suspect(2, last), suspect(3, 2), FakeRecord(4))
    rig.work(handler, 5)
    await spin(60)
    await handler.end(0)
    assert sorted(handler.running) == [1, 4]

    await handler.end(1)
    assert sorted(handler.running) == [2, 4]
    await handler.end(2)
    assert sorted(handler.running) == [3, 4]


@pytest.mark.parametrize(("releases", "delay_ms"), [(0, FIRST_AWAY_MS), (3, 8 * FIRST_AWAY_MS), (30, 30_000)])
async def test_a_suspect_that_can_not_wait_is_away_for_longer_each_time(
    make_rig: MakeRig, releases: int, delay_ms: int
) -> None:
    rig, handler = make_rig(queue=lambda _: QueueSettings(max_attempts=1)), HangingEach()
    rig.reader.add(P0, *[suspect(offset, 1, releases) for offset in range(20)])
    rig.work(handler, 2)
    for _ in range(20):
        await spin(60)
        await rig.clock.advance(0.1)
        await rig.settled()

    assert {delay_ms for delay_ms, _, _ in rig.released.values()} == {delay_ms}


async def test_suspects_without_used_up_attempts_run_together_but_not_next_to_the_first_one_that_has_some(
    make_rig: MakeRig,
) -> None:
    rig, handler = make_rig(), HangingEach()
    rig.reader.add(P0, suspect(0, 2), suspect(1, 1), suspect(2, 1), suspect(3, 1))
    rig.work(handler, 5)
    await spin(60)
    assert handler.running == [0]

    await handler.end(0)
    assert sorted(handler.running) == [1, 2, 3]


async def test_a_suspect_of_a_queue_with_one_attempt_runs_alone(make_rig: MakeRig) -> None:
    rig, handler = make_rig(queue=lambda _: QueueSettings(max_attempts=1)), HangingEach()
    rig.reader.add(P0, suspect(0, 1), suspect(1, 1))
    rig.work(handler, 2)
    await spin(60)

    assert handler.running == [0]


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


async def test_other_messages_do_not_wait_behind_suspects(make_rig: MakeRig) -> None:
    rig, handler = make_rig(queue=lambda _: QueueSettings(max_attempts=1)), HangingEach()
    rig.reader.add(P0, *[suspect(offset, 1) for offset in range(20)], FakeRecord(20))
    rig.work(handler, 2)
    for _ in range(20):
        await spin(60)
        await rig.clock.advance(0.1)
        await rig.settled()

    assert sorted(handler.running) == [0, 20]
    # Four may wait for their turns, twice as many as there are handlers.
    assert len(rig.released) == 15


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


async def test_a_stop_does_not_wait_for_the_broker_for_longer_than_it_may(make_rig: MakeRig) -> None:
    rig, limits_s = make_rig(lease_ms=600_000), list[float]()

    async def write(records: Sequence[MarkerRecord], limit_s: float) -> None:
        limits_s.append(limit_s)
        raise BrokerUnavailable("gone")

    rig.add(1)
    rig.receiver.starts.returned(await rig.take(1))
    rig.settler.write = write  # type: ignore[method-assign]

    await rig.receiver.stop_reading(1)
    await rig.receiver.stop(1)

    assert len(limits_s) == 1
    assert limits_s[0] <= 1


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
