"""The lease book: hard cases, firing, and rows. test_transitions.py and test_lease_machine.py have the transitions."""

from __future__ import annotations

import pytest

from marq.core import lease_book
from marq.core.storage import rows
from marq.wire.markers import Acquire, Payload, Source
from tests.unit.core.batches import (
    HOLDER,
    LEASE_MS,
    OTHER,
    QUEUE,
    SOURCE,
    ack,
    acquire,
    payload,
    reject,
    release,
    renew,
)
from tests.unit.core.logs import T0, Log

# --- hard cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_a_topic_that_was_created_again_is_told_once(restart: bool) -> None:
    former, now = Source("orders@aaaaaaaaaaaa", 0), Source("orders@bbbbbbbbbbbb", 0)
    log = Log(acquire([0], source=Source("orders", 0)), acquire([0], source=former), acquire([0]))
    assert log.book.take_recreated() == []
    if restart:
        log.restart()

    log.fold(acquire([0], source=now), acquire([1], source=now), acquire([2], source=former))

    assert log.book.take_recreated() == [(QUEUE, now)]
    assert log.book.take_recreated() == []


def test_a_record_whose_marker_was_lost_is_opened_although_later_ones_are_known() -> None:
    log = Log(acquire([10, 11], from_offset=10), ack([10, 11]))

    log.fold(acquire([5, 6, 10], holder=OTHER, from_offset=5))

    assert log.leases().keys() == {5, 6}


def test_a_record_that_was_folded_is_not_folded_again() -> None:
    log = Log(acquire([1]))

    with pytest.raises(AssertionError, match="folded after"):
        log.book.fold(ack([1]), T0, 0)


# --- firing -----------------------------------------------------------------------------------------------------------


def test_a_message_that_ends_while_it_fires_is_not_due_again() -> None:
    log = Log(acquire([0, 1]))
    assert len(log.book.due(T0 + LEASE_MS)) == 2
    log.fold(ack([0]))

    log.book.forget_firing()

    assert [fire.offset for fire in log.book.due(T0 + LEASE_MS)] == [1]


def test_the_index_of_due_moments_does_not_grow_with_what_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_book, "MAX_STALE_HINTS", 100)
    log = Log()

    for start in range(0, 20_000, 100):
        log.fold(acquire(range(start, start + 100)), ack(range(start, start + 100)))
    log.fold(acquire([20_000]))

    assert log.book._due.size < 300
    assert [fire.offset for fire in log.book.due(T0 + LEASE_MS)] == [20_000]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_applied_row_comes_last() -> None:
    log = Log(acquire([1]))

    assert list(log.write())[-1] == rows.APPLIED_KEY


def test_changes_are_given_once() -> None:
    log = Log(acquire([1]))
    assert log.book.changed
    log.write()

    assert not log.book.changed
    assert list(log.book.take_changes()) == [rows.APPLIED_KEY]


def test_a_renewal_of_a_written_message_does_not_write_its_payload_again() -> None:
    log = Log(Acquire(QUEUE, HOLDER, SOURCE, [1], LEASE_MS, 1, [payload(value=b"x" * 10_000)]))
    log.write()
    log.fold(renew([1]), at=T0 + 400)

    changes = log.write()

    (key,) = [key for key in changes if key[:1] in (b"r", b"s")]
    assert key[:1] == b"s"
    assert len(changes[key] or b"") < 100


def test_a_payload_is_to_be_had_from_the_book_until_its_row_is_written() -> None:
    log = Log()
    original = Payload(5, 2, b"key", (("tenant", b"acme"),), b"value")
    log.fold(Acquire(QUEUE, HOLDER, SOURCE, [3, 9], LEASE_MS, 0, [payload(), original]))

    assert log.book.fresh_payload(QUEUE, SOURCE, 9) == original
    log.write()

    assert log.book.fresh_payload(QUEUE, SOURCE, 9) is None
    assert rows.decode_payload(log.table[rows.row_key(QUEUE, SOURCE, 9)]) == original


def test_pending_rows_are_counted_for_their_limit() -> None:
    log = Log()
    assert log.book.pending_rows == 0
    log.fold(acquire([1, 2, 3]))
    assert log.book.pending_rows == 3
    log.write()
    assert log.book.pending_rows == 0

    log.fold(ack([1]), renew([2]))

    assert log.book.pending_rows == 2


def test_a_row_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown key"):
        Log().book.restore([(b"zzz", b"")])


def test_gauges_say_what_is_open_and_since_when() -> None:
    log = Log()
    log.fold(acquire([1, 2, 3, 4]))
    log.fold(acquire([5]), release([2, 3], 10), reject([4]), at=T0 + 400)

    gauge = log.book.gauges()[QUEUE]

    assert (gauge.in_flight, gauge.released, gauge.rejected, gauge.oldest_ms) == (2, 2, 1, T0)


def test_a_delivery_time_that_can_not_be_read_is_counted_once_for_each_message() -> None:
    log = Log()
    payloads = [
        payload(headers=[("marq-deliver-at", b"tomorrow")]),
        payload(headers=[("marq-deliver-at", b"5")]),
        payload(),
        payload(headers=[("marq-deliver-at", b"")]),
        payload(attempt=2, headers=[("marq-deliver-at", b"tomorrow"), ("marq-attempt", b"2")]),
    ]
    batch = Acquire(QUEUE, HOLDER, SOURCE, range(5), LEASE_MS, 0, payloads)

    # Written twice, as after a commit that failed.
    log.fold(batch, batch)

    assert log.book.counts[QUEUE].invalid_deliver_at == 2
    assert log.book.invalid_times.take() == {QUEUE: (2, f"{SOURCE.topic}/{SOURCE.partition}/0")}
    assert log.book.invalid_times.take() == {}
