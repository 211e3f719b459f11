from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_records import serving
from marq.wire.errors import BrokerUnavailable, LeaseLost
from marq.wire.marker_codec import decode
from marq.wire.markers import Ack, Renew, Source
from tests.unit.client.fakes import P0, P1, FakeRecord, HangingEach, spin


async def holding(make_rig, **changes):
    rig = make_rig(**changes)
    for source in (P0, P1):
        rig.reader.add(source, *[FakeRecord(offset) for offset in range(3)])
    return rig, await rig.take(6)


async def test_one_marker_for_each_partition_renews_all_that_is_held(make_rig) -> None:
    rig, messages = await holding(make_rig)
    await messages[1].ack()

    rig.clock.now_s += 10
    assert await rig.receiver.writer.renew()

    renewed = {each.source: list(each.offsets) for each in rig.settler.of(Renew)}
    finished = messages[1]
    expected = {P0: [0, 1, 2], P1: [0, 1, 2]}
    expected[Source("t", finished.partition)].remove(finished.offset)
    assert renewed == expected


async def test_a_renewal_that_is_durable_when_the_lease_has_ended_does_not_revive_it(make_rig) -> None:
    rig, messages = await holding(make_rig)
    held, sent_s, late_s = rig.receiver.writer.held, rig.clock() + 20, rig.clock() + 31

    held.renewed(held.shares(sent_s), sent_s, late_s)

    assert sum(len(lost.offsets) for lost in held.expire(late_s)) == len(messages)


async def test_a_stop_renews_leases_until_the_last_outcome_is_written(make_rig) -> None:
    rig, messages = await holding(make_rig)
    write, writable = rig.settler.write, asyncio.Event()

    async def write_slowly(records, limit_s: float) -> None:
        if any(isinstance(decode(record.value), Ack) for record in records):
            await writable.wait()
        await write(records, limit_s)

    rig.settler.write = write_slowly
    await messages[0].ack(wait=False)
    rig.receiver.writer.flush_soon()
    await spin()
    # Its outcome waits behind the write of the first one.
    await messages[1].ack(wait=False)
    await rig.receiver.stop_reading(0)
    stopping = asyncio.create_task(rig.receiver.stop(60))
    await spin()
    for _ in range(4):
        await rig.clock.advance(10)
    leased_until_s = messages[1]._batch.expires_s

    writable.set()
    assert await stopping
    assert leased_until_s > rig.clock()
    assert [list(each.offsets) for each in rig.settler.of(Ack)] == [[messages[0].offset], [messages[1].offset]]
    renewals = len(rig.settler.of(Renew))
    await rig.clock.advance(60)
    assert len(rig.settler.of(Renew)) == renewals


async def test_a_renewal_that_fails_keeps_nothing(make_rig) -> None:
    rig, (message, *_) = await holding(make_rig)
    rig.settler.refuse = 1
    rig.clock.now_s += 10

    assert not await rig.receiver.writer.renew()

    rig.clock.now_s += 20
    with pytest.raises(LeaseLost):
        await message.ack()


async def test_messages_that_wait_in_the_prefetch_are_renewed_too(make_rig) -> None:
    rig = make_rig()
    rig.add(3)
    rig.buffer.handler_demand = 3
    await rig.take(1)

    rig.clock.now_s += 10
    await rig.receiver.writer.renew()

    assert [list(each.offsets) for each in rig.settler.of(Renew)] == [[0, 1, 2]]


async def test_a_message_that_renewed_itself_for_longer_is_not_cut_short(make_rig) -> None:
    rig, (message, *_) = await holding(make_rig)
    await message.renew(300)
    rig.settler.written.clear()

    rig.clock.now_s += 10
    await rig.receiver.writer.renew()

    renewed = [(each.source.partition, offset) for each in rig.settler.of(Renew) for offset in each.offsets]
    assert (message.partition, message.offset) not in renewed
    assert len(renewed) == 5


async def test_a_longer_renewal_of_one_message_counts_whichever_of_two_is_confirmed_last(make_rig) -> None:
    """The tracker never shortens a lease, so the order of the two in the log does not matter."""
    rig, (message, *_) = await holding(make_rig)
    write, writable = rig.settler.write, asyncio.Event()

    async def write_shared_slowly(records, limit_s: float) -> None:
        if len(records) > 1:
            await writable.wait()
        await write(records, limit_s)

    rig.settler.write = write_shared_slowly
    rig.clock.now_s += 10
    renewal = asyncio.create_task(rig.receiver.writer.renew())
    await spin()
    await message.renew(300)
    ends_s = rig.clock.now_s + 300

    writable.set()
    assert await renewal

    assert message._expiry_s == ends_s
    assert message._batch.expires_s < ends_s


async def test_the_lease_of_one_message_can_be_made_to_end_earlier(make_rig) -> None:
    rig, (message, *_) = await holding(make_rig)
    rig.receiver.hold([message], 5_000, ends=True)
    rig.receiver.writer.flush_soon()
    await rig.receiver.writer.settled()

    assert message._expiry_s == rig.clock.now_s + 5
    [renewed] = rig.settler.of(Renew)
    assert (list(renewed.offsets), renewed.lease_ms, renewed.exactly) == ([message.offset], 5_000, True)


@pytest.mark.parametrize(
    ("seconds", "written"), [([(5, True), (9, False)], (9_000, True)), ([(9, False), (5, True)], (5_000, True))]
)
async def test_renewals_of_a_message_in_one_write_become_one_with_their_effect(make_rig, seconds, written) -> None:
    rig, (message, *_) = await holding(make_rig)
    for each, exactly in seconds:
        message._batch.renew(message.offset, each * 1_000, exactly=exactly)
    rig.receiver.writer.flush_soon()
    await rig.receiver.writer.settled()

    [renewed] = rig.settler.of(Renew)
    assert (renewed.lease_ms, renewed.exactly) == written
    assert message._expiry_s == rig.clock.now_s + written[0] / 1_000


async def test_until_its_own_renewal_is_durable_the_earlier_end_counts(make_rig) -> None:
    rig, (message, *_) = await holding(make_rig)
    ends_s = message._expiry_s
    rig.settler.refuse = 1
    longer = asyncio.create_task(message.renew(300))
    await rig.settler.until(lambda: rig.settler.refuse == 0)
    rig.clock.now_s += 10

    assert await rig.receiver.writer.renew()

    # That of the renewal of all messages.
    assert message._expiry_s == ends_s + 10
    rig.clock.now_s = ends_s + 10
    with pytest.raises(LeaseLost):
        await longer


async def test_a_lease_that_was_made_much_shorter_is_renewed_in_time_all_the_same(make_rig) -> None:
    leases = {"q": 600_000}
    rig = make_rig(leases_ms=leases)
    rig.reader.add(P0, FakeRecord(0))
    await rig.take(1)

    # The next renewal is 200 s away.
    leases["q"] = 3_000
    rig.reader.add(P0, FakeRecord(1))
    await rig.take(1)
    await spin()
    for _ in range(10):
        await rig.clock.advance(1)

    renewed = [each for each in rig.settler.of(Renew) if 1 in each.offsets]
    assert {each.lease_ms for each in renewed} == {3_000}
    assert len(renewed) >= 9


async def test_what_is_held_of_a_queue_that_is_not_served_any_more_is_renewed_at_its_own_pace(make_rig) -> None:
    rig = make_rig(["slow", "quick"], leases_ms={"slow": 30_000, "quick": 3_000})
    rig.reader.add(P0, FakeRecord(0, b"quick"))
    [message] = await rig.take(1, "quick")

    await rig.receiver.serve(serving("t", ["slow"], {}), lambda _: None)
    for _ in range(20):
        await rig.clock.advance(1)

    assert message.offset in message._batch.open


async def test_leases_that_stay_as_they_are_are_renewed_every_third_of_them(make_rig) -> None:
    rig, _ = await holding(make_rig, lease_ms=7)

    assert rig.settler.of(Renew) == []

    await rig.clock.advance(0.003)
    assert len(rig.settler.of(Renew)) == 2


async def test_leases_lost_within_seconds_share_a_log_line(make_rig, caplog) -> None:
    rig, messages = await holding(make_rig)
    for place, message in enumerate(messages):
        message._batch.own_expiry_s = {**message._batch.own_expiry_s, message.offset: rig.clock.now_s + 30 + place}
    rig.clock.now_s += 30

    for _ in messages:
        rig.receiver.writer.lose_expired()
        rig.clock.now_s += 1
    await rig.receiver.writer.stop(1.0)

    counts = [part for each in caplog.messages if "leases lost" in each for part in each.split() if "messages=" in part]
    assert counts == ["messages=1", "messages=5"]


async def test_failed_renewals_are_logged_every_30_s(make_rig, caplog) -> None:
    caplog.set_level("DEBUG", "marq")
    rig, _ = await holding(make_rig, lease_ms=300_000)
    rig.settler.refuse = 4
    rig.clock.now_s += 100

    for _ in range(4):
        await rig.receiver.writer.renew()
        rig.clock.now_s += 10

    levels = [each.levelname for each in caplog.records if "leases not renewed" in each.getMessage()]
    assert levels == ["WARNING", "DEBUG", "DEBUG", "WARNING"]


async def test_a_renewal_that_hangs_holds_up_no_queue_with_shorter_leases(make_rig) -> None:
    rig, handler, hung = make_rig(["a", "b"], leases_ms={"a": 30_000, "b": 2_000}), HangingEach(), False
    write = rig.settler.write

    async def slow_write(records: Sequence[MarkerRecord], limit_s: float) -> None:
        nonlocal hung
        markers = [decode(record.value) for record in records]
        if not hung and any(isinstance(marker, Renew) and not marker.started for marker in markers):
            hung = True
            await rig.clock.sleep(limit_s)
            raise BrokerUnavailable("no answer")
        await write(records, limit_s)

    rig.settler.write = slow_write
    rig.work(handler, 1, "a")
    rig.work(handler, 1, "b")
    rig.reader.add(P0, FakeRecord(0, key=b"a"))
    while not hung:
        await spin(20)
        await rig.clock.advance(0.1)
    rig.reader.add(P0, FakeRecord(1, key=b"b"))
    for _ in range(60):
        await spin(20)
        await rig.clock.advance(0.1)

    assert handler.running == [0, 1]
