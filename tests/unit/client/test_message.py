from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import marq
from marq.client import message_token
from marq.kafka.records import Records
from marq.leases.held import LeasedBatch
from marq.wire.errors import ConfigError, LeaseLost
from marq.wire.markers import Ack, Release, Renew
from tests.unit.client.fakes import P0, FakeRecord, spin


@pytest.fixture
async def held(make_rig):
    """A rig and three messages that it holds."""
    rig = make_rig()
    rig.reader.add(P0, *[FakeRecord(offset, timestamp=1_700_000_000_000) for offset in range(3)])
    return rig, await rig.take(3)


async def test_an_ack_that_can_not_be_written_is_written_later_and_logged_once_in_a_while(held, caplog) -> None:
    rig, (message, *_) = held
    rig.settler.refuse = 3

    await asyncio.wait_for(message.ack(), 60)

    assert [list(each.offsets) for each in rig.settler.of(Ack)] == [[0]]
    assert caplog.messages == ["outcomes not written, retrying: batches=1 error=refused by the test"]


async def test_an_ack_that_became_durable_after_the_lease_says_so(held) -> None:
    rig, (message, *_) = held
    rig.settler.gate.clear()
    acking = asyncio.create_task(message.ack())
    await spin()

    rig.clock.now_s += 31
    rig.settler.gate.set()

    with pytest.raises(LeaseLost):
        await acking


async def test_the_lease_holds_until_its_last_moment_counted_from_before_the_acquire(held) -> None:
    rig, (message, *_) = held
    rig.clock.now_s += 29.999

    await message.release()

    assert rig.settler.of(Release)


async def test_renew_never_makes_a_lease_shorter(held) -> None:
    rig, (message, *_) = held

    await message.renew(5)

    assert rig.settler.of(Renew) == []
    rig.clock.now_s += 29
    await message.ack()


async def test_a_token_finishes_the_message_and_ends_its_renewal(held) -> None:
    rig, (message, *_) = held

    rig.receiver.writer.ack_by_token(message_token.decode(message.token))
    await rig.settled()

    assert rig.acked == [0]
    assert rig.receiver.prefetch.in_flight == 2


async def test_a_codec_decodes_at_first_use_and_once(make_rig) -> None:
    class Counting:
        def encode(self, value: object) -> bytes:
            raise NotImplementedError

        def decode(self, data: bytes) -> object:
            decoded.append(data)
            return [data]

    decoded: list[bytes] = []
    rig = make_rig(codec=Counting())
    rig.reader.add(P0, FakeRecord(0))

    (message,) = await rig.take(1)

    assert decoded == []
    assert message.value == [b"v"]
    assert message.value is message.value
    assert (decoded, message.body) == ([b"v"], b"v")


async def test_an_unhandled_decode_error_names_its_message(make_rig) -> None:
    rig = make_rig(codec=marq.JSON)
    rig.reader.add(P0, FakeRecord(0, value=b"{"))
    (message,) = await rig.take(1)

    for _ in range(2):
        with pytest.raises(marq.DecodeError) as caught:
            _ = message.value
        assert caught.value.__notes__ == ["queue 'q', message t/0/0, attempt 1"]


@pytest.mark.parametrize(
    ("own_topic", "key", "headers", "expected"),
    [
        (False, b"q", [], None),
        (True, None, [], None),
        (True, b"customer 5", [], b"customer 5"),
        (True, b"q", [], b"q"),
        (False, b"q", [("marq-key", b"customer 5")], b"customer 5"),
        (False, b"q", [("marq-key", None)], None),
        (True, b"q", [("marq-key", None)], None),
        (False, b"q", [("marq-key", b"first"), ("marq-key", b"last")], b"last"),
        (False, b"q", [("marq-id", b"x"), ("key", b"y")], None),
    ],
)
async def test_the_key_is_the_senders_also_where_the_queue_took_its_place(
    make_rig, own_topic, key, headers, expected
) -> None:
    records = Records.of([FakeRecord(0, key=key, headers=headers)])
    lease = LeasedBatch(make_rig(started=False).receiver.writer, "q", P0, 1, records, 0.0, 30.0, own_topic=own_topic)

    message = marq.Message(lease, 0, b"v")

    assert message.key == expected


@pytest.mark.parametrize("count", [1, 3])
async def test_a_lease_keeps_no_value_which_may_have_a_megabyte_after_its_message_has_gone(make_rig, count) -> None:
    rig = make_rig()
    rig.add(count)

    messages = await rig.take(count)

    assert [message.body for message in messages] == [b"v"] * count
    assert [value for message in messages for value in message._batch.records.values if value is not None] == []


async def test_a_negative_delay_is_refused_with_what_was_expected(held) -> None:
    _, (message, *_) = held

    with pytest.raises(ConfigError, match="delay=-1: expected seconds"):
        await message.release(-1)


async def test_messages_held_for_a_lease_of_their_own_are_renewed_by_it(make_rig) -> None:
    rig = make_rig()
    rig.add(4)
    short, long, other, lost = await rig.take(4)
    lost._batch.open.discard(lost.offset)

    rig.receiver.hold([short, lost], 3_000)
    await rig.settled()
    rig.receiver.hold([long], 120_000)
    await rig.settled()

    renewed = [(list(each.offsets), each.lease_ms) for each in rig.settler.of(Renew)]
    assert renewed == [([0], 3_000), ([1], 120_000)]
    assert [message._expiry_s - rig.clock() for message in (short, long, other)] == [3, 120, 30]
    await rig.clock.advance(100)
    renewed = {(offset, each.lease_ms) for each in rig.settler.of(Renew) for offset in each.offsets}
    assert renewed == {(0, 3_000), (1, 120_000), (2, 30_000)}
    assert [message._expiry_s > rig.clock() for message in (short, long, other)] == [True, True, True]
    await short.renew()
    assert rig.settler.of(Renew)[-1].lease_ms == 3_000
    await short.ack()
    await other.ack()
    assert long.lease_expires_at is not None


@pytest.mark.parametrize("timestamp", [1_700_000_000_000_000, 1_700_000_000_000_000_000, 2**63 - 1])
async def test_a_time_that_no_calendar_has_is_the_last_one_of_the_calendar(make_rig, timestamp) -> None:
    """Some programs write microseconds or nanoseconds; a middleware that measures ages must not fail their messages."""
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(0, timestamp=timestamp))

    (message,) = await rig.take(1)

    assert (message.sent_at.year, message.sent_at.utcoffset()) == (9999, timedelta(0))
