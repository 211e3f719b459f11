"""Which messages a consumer leaves with the tracker, because they seem to have expired."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marq.consumer.acquire import acquisitions
from marq.consumer.expiry import CHECKED_MS, expired
from marq.kafka.records import Records, Row
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.queue import QueueSettings
from marq.wire.markers import DUE_AT_ONCE, NOW, Headers, Source
from tests.unit.client import fakes
from tests.unit.client.fake_tracker import record
from tests.unit.client.fakes import P0, FakeRecord, spin

SOURCE = Source("marq.messages", 0)
NOW_MS = 1_000_000


def records(*rows: tuple[int, Headers]) -> Records:
    return Records.of([Row(number, time_ms, b"q", b"value", headers) for number, (time_ms, headers) in enumerate(rows)])


def at(time_ms: int) -> tuple[str, bytes]:
    return "marq-expires-at", b"%d" % time_ms


class Uncounted(Records):
    """Records that must not be looked at one by one."""

    def __iter__(self) -> Iterator[Row]:
        raise AssertionError("looked at each message")


def test_queues_and_messages_without_expiry_cost_nothing_for_each_message() -> None:
    plain = Uncounted([0, 1], [0, 0], [b"q"] * 2, [b"x"] * 2)
    typed = Uncounted([0], [0], [b"q"], [b"x"], [[("marq-type", b"t")]])

    assert expired(plain, QueueSettings(), NOW_MS) == ()
    assert expired(typed, QueueSettings(), NOW_MS) == ()
    assert expired(plain, QueueSettings(expires_after_ms=NOW_MS), NOW_MS) == [0, 1]


def test_each_message_has_its_own_expiry() -> None:
    rules = QueueSettings(expires_after_ms=500, delay_ms=100)
    sent = records((NOW_MS - 600, ()), (NOW_MS - 599, ()), (NOW_MS, (at(NOW_MS),)), (NOW_MS, (at(NOW_MS + 1),)))

    assert expired(sent, rules, NOW_MS) == [0, 2]
    assert expired(records((NOW_MS - 600, ()), (NOW_MS - 599, ())), rules, NOW_MS) == [0]


@pytest.mark.parametrize("now_ms", [None, NOW_MS])
def test_nothing_has_expired_without_the_brokers_time(now_ms: int | None) -> None:
    sent = records((0, (at(1),)))

    assert bool(expired(sent, QueueSettings(), now_ms)) is (now_ms is not None)


@pytest.mark.parametrize("rules", [QueueSettings(ordering="key"), QueueSettings(fair=True), QueueSettings()])
async def test_a_message_that_keeps_its_place_does_not_expire(
    make_ordered, monkeypatch: pytest.MonkeyPatch, rules: QueueSettings
) -> None:
    now_ms: int | None = None
    monkeypatch.setattr(fakes.Times, "broker_ms", lambda _: now_ms)
    made, _ = make_ordered(queue=lambda _: rules)
    made.reader.add(P0, record(0, "a"), FakeRecord(1, headers=(at(1),)))
    made.buffer.handler_demand = 2
    made.receiver.start()
    await spin(100)
    now_ms = NOW_MS
    made.reader.add(P0, record(2, "b"), FakeRecord(3, headers=(at(1),)))
    made.buffer.handler_demand = 4
    made.receiver.demand()
    await spin(100)
    made.receiver.prefetch.may_expire = True
    made.receiver.renewing(made.clock())

    left = [0, 1, 2, 3] if rules.by_key else [0, 2]
    assert [message.offset for message in await made.take(len(left))] == left
    assert not made.buffer.ready


@pytest.mark.parametrize(("age_ms", "left"), [(CHECKED_MS - 1, []), (CHECKED_MS, [0])])
def test_a_redelivery_counts_as_checked_for_a_while(age_ms: int, left: list[int]) -> None:
    sent = records((NOW_MS - age_ms, (at(1), ("marq-attempt", b"2"))))

    assert list(expired(sent, QueueSettings(), NOW_MS)) == left


def test_an_acquire_has_a_due_time_for_those_that_seem_to_have_expired() -> None:
    sent = records((0, (at(NOW_MS),)), (0, (at(NOW_MS + 1),)), (0, (at(1), ("marq-deliver-at", b"9000000"))))
    settings = ReceiverSettings(10, 2, 1_000_000)

    [taken] = acquisitions(("q", SOURCE), 7, sent, 0, settings, own_topic=False, now_ms=NOW_MS)

    assert taken.dues_ms == [DUE_AT_ONCE, NOW, 9_000_000]
    assert taken.messages.offsets == (1,)


def test_the_header_does_not_bring_the_payload_into_the_acquire() -> None:
    sent = records((0, (at(NOW_MS + 1),)), (0, ()))
    settings = ReceiverSettings(10, 2, 1_000_000)

    [taken] = acquisitions(("q", SOURCE), 7, sent, 0, settings, own_topic=False, now_ms=NOW_MS)

    assert [payload.left for payload in taken.marker.payloads] == [True, True]
