"""Delayed messages in the lease book: a lease that nobody holds."""

from __future__ import annotations

import pytest

from marq.core import leases, rows
from marq.core.fires import Destination, Fire
from marq.core.markers import Acquire, Answer, Batch, Cause, Fact, Kind, Outcome, Source
from marq.core.names import drawn_topic
from marq.core.open_messages import SPAN_MS
from marq.core.rows import State
from tests.unit.core.batches import (
    DRAWN,
    HOLDER,
    OTHER,
    QUEUE,
    SOURCE,
    ack,
    acquire,
    cancel,
    delay,
    fact,
    payload,
    reject,
    release,
    renew,
    reschedule,
)
from tests.unit.core.test_leases import T0, Log, only

HOUR_MS = 3_600_000


def fired(log: Log, now_ms: int) -> list[tuple[int, Destination, int, Cause, Kind]]:
    return [(f.offset, f.destination, f.attempt, f.cause, f.fact_kind) for f in log.book.due(now_ms)]


def told(kind: Kind, offsets: list[int], cause: Cause, source: Source = DRAWN) -> Batch:
    return Fact(kind, QUEUE, 99, source, offsets, [1] * len(offsets), [cause] * len(offsets))


def answers(log: Log) -> list[tuple[int, list[int], list[int]]]:
    return [(each.holder, list(each.offsets), list(each.outcomes)) for each in log.book.take_answers()]


def test_a_delayed_message_is_delivered_at_its_time_as_its_first_attempt_and_not_before() -> None:
    log = Log()
    log.fold(delay([0], [5_000]))

    assert log.book.next_due_ms == T0 + 5_000
    assert fired(log, T0 + 4_999) == []
    assert fired(log, T0 + 5_000) == [(0, Destination.QUEUE, 1, Cause.DUE, Kind.DELIVERED)]
    assert fired(log, T0 + HOUR_MS) == []

    log.fold(told(Kind.DELIVERED, [0], Cause.DUE))

    assert (len(log.book), log.book.counts[QUEUE].delayed, log.book.counts[QUEUE].delivered) == (0, 1, 1)


def test_a_time_may_be_absolute_and_in_the_past() -> None:
    log = Log()
    log.fold(delay([0, 1], [T0 + 50, 7], relative=False))

    assert [offset for offset, *_ in fired(log, T0)] == [1]
    assert [offset for offset, *_ in fired(log, T0 + 50)] == [0]


def test_messages_are_delivered_by_time_and_then_in_the_order_in_which_they_were_delayed() -> None:
    log, other = Log(), Source(drawn_topic(1), 2)
    log.fold(delay([0, 1, 2], [3_000, 1_000, 3_000]), at=T0)
    log.fold(delay([0], [2_990], source=other), at=T0 + 10)

    order = [(fire.source, fire.offset) for fire in log.book.due(T0 + HOUR_MS)]

    assert order == [(DRAWN, 1), (DRAWN, 0), (DRAWN, 2), (other, 0)]


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_due_in_the_same_millisecond_comes_in_the_order_in_which_it_was_delayed(restart: bool) -> None:
    """However many were delayed together, and whether they were moved: some wait in the heap, others in spans."""
    log, other = Log(), Source(drawn_topic(1), 2)
    log.fold(delay([0], [T0 + 5_000], relative=False), at=T0)
    log.fold(delay(range(20), [T0 + 5_000] * 20, relative=False, source=other), at=T0 + 1)
    log.fold(delay([1], [T0 + 5_000], relative=False), at=T0 + 2)
    log.fold(delay([2], [T0 + 9_000], relative=False), at=T0 + 3)
    log.fold(delay([3], [T0 + 5_000], relative=False), at=T0 + 4)
    log.fold(reschedule([2], T0 + 5_000, relative=False), at=T0 + 5)
    if restart:
        log.write()
        log.restart()

    order = [(fire.source, fire.offset) for fire in log.book.due(T0 + HOUR_MS)]

    assert order == [(DRAWN, 0), *[(other, number) for number in range(20)], (DRAWN, 1), (DRAWN, 2), (DRAWN, 3)]


@pytest.mark.parametrize("restart", [False, True])
def test_a_day_of_delays_is_hinted_at_in_its_order(restart: bool) -> None:
    log = Log()
    times = [(number * 7_919) % 86_400_000 for number in range(3_000)]
    log.fold(delay(range(3_000), times))
    if restart:
        log.write()
        log.restart()

    found: list[Fire] = []
    while (due_ms := log.book.next_due_ms) is not None:
        fires = log.book.due(due_ms)
        assert {fire.lease.due_ms for fire in fires} == {due_ms}
        found += fires
        log.fold(told(Kind.DELIVERED, [fire.offset for fire in fires], Cause.DUE), at=T0)

    assert [fire.offset for fire in found] == sorted(range(3_000), key=lambda number: (times[number], number))


def test_nobody_can_settle_a_delayed_message_but_an_ack_ends_it() -> None:
    log = Log()
    log.fold(acquire_delayed([5], [T0 + HOUR_MS]))
    log.fold(renew([5]), release([5]), reject([5]))

    lease = only(log)
    assert lease is not None
    assert (lease.state, lease.due_ms, lease.attempt) == (State.DELAYED, T0 + HOUR_MS, 1)

    log.fold(ack([5]))

    assert len(log.book) == 0


def acquire_delayed(offsets: list[int], dues_ms: list[int]) -> Acquire:
    return Acquire(QUEUE, HOLDER, SOURCE, offsets, 1_000, offsets[0], [payload()] * len(offsets), dues_ms)


def test_an_acquire_may_hold_some_messages_and_delay_others() -> None:
    log = Log()
    log.fold(acquire_delayed([5, 6, 7], [-1, T0 + HOUR_MS, -1]))

    states = {offset: (lease.state, lease.holder) for _, offset, lease in log.book.open_leases()}
    assert states == {5: (State.LEASED, HOLDER), 6: (State.DELAYED, 0), 7: (State.LEASED, HOLDER)}
    assert (log.book.counts[QUEUE].acquired, log.book.counts[QUEUE].delayed) == (2, 1)


def test_a_delayed_record_that_is_read_again_is_not_delayed_again() -> None:
    log = Log()
    log.fold(acquire_delayed([5], [T0 + 10]), acquire_delayed([5], [T0 + HOUR_MS]))

    assert [offset for offset, *_ in fired(log, T0 + 10)] == [5]
    log.fold(fact([5], Kind.DELIVERED, Cause.DUE), acquire_delayed([5], [T0 + HOUR_MS]))

    assert len(log.book) == 0


def test_a_batch_that_says_what_is_known_counts_once_also_when_all_of_it_was_delivered() -> None:
    log = Log()
    log.fold(delay([10, 20], [5, 5], from_offset=0))
    log.fold(delay([10, 20], [5, 5], from_offset=0))
    assert [offset for offset, *_ in fired(log, T0 + 5)] == [10, 20]
    log.fold(told(Kind.DELIVERED, [10, 20], Cause.DUE))
    log.write()
    log.restart()

    log.fold(delay([10, 20], [5, 5], from_offset=0), delay([15], [5], from_offset=0))

    assert len(log.book) == 0


def test_cancel_is_told_of_as_a_fact_and_no_copy_is_sent() -> None:
    log = Log()
    log.fold(delay([0, 1], [HOUR_MS, HOUR_MS]), cancel([0]))

    assert answers(log) == []
    assert fired(log, T0) == [(0, Destination.NOWHERE, 1, Cause.CANCELLED, Kind.CANCELLED)]

    log.fold(told(Kind.CANCELLED, [0], Cause.CANCELLED))

    assert [offset for _, offset, _ in log.book.open_leases()] == [1]
    assert log.book.counts[QUEUE].cancelled == 1


@pytest.mark.parametrize("batch", [cancel([0]), reschedule([0], 5)])
def test_what_is_not_waiting_is_answered_as_too_late(batch: Batch) -> None:
    log = Log()
    log.fold(batch)
    assert answers(log) == [(OTHER, [0], [Outcome.TOO_LATE])]

    log.fold(delay([0], [1]))
    log.book.due(T0 + 1)
    log.fold(told(Kind.DELIVERED, [0], Cause.DUE), batch)

    assert answers(log) == [(OTHER, [0], [Outcome.TOO_LATE])]


@pytest.mark.parametrize("batch", [cancel([5], source=SOURCE), reschedule([5], 5, source=SOURCE)])
def test_a_message_that_somebody_holds_can_be_neither_cancelled_nor_moved(batch: Batch) -> None:
    log = Log()
    log.fold(acquire([5]), batch)

    lease = only(log)
    assert lease is not None
    assert lease.state is State.LEASED
    assert answers(log) == [(OTHER, [5], [Outcome.TOO_LATE])]


@pytest.mark.parametrize("restart", [False, True])
def test_a_message_is_delivered_at_its_new_time_only(restart: bool) -> None:
    log = Log()
    log.fold(delay([0, 1], [100, 100]), reschedule([0], HOUR_MS), reschedule([1], T0 + 3, relative=False))
    assert answers(log) == [(OTHER, [0, 1], [Outcome.DONE, Outcome.DONE])]
    if restart:
        log.write()
        log.restart()

    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS - 1)] == [1]
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS)] == [0]


def test_a_message_that_waits_to_be_delivered_again_may_be_moved_and_cancelled() -> None:
    log = Log()
    log.fold(acquire([5, 6]), release([5, 6], HOUR_MS))
    log.fold(reschedule([5], 0, source=SOURCE), cancel([6], source=SOURCE))

    assert fired(log, T0) == [
        (5, Destination.QUEUE, 2, Cause.RELEASED, Kind.REDELIVERED),
        (6, Destination.NOWHERE, 1, Cause.CANCELLED, Kind.CANCELLED),
    ]


def test_who_moves_a_message_that_is_on_its_way_is_answered_when_that_is_decided() -> None:
    log = Log()
    log.fold(delay([0, 1], [1, 1]))
    gone, back = log.book.due(T0 + 1)
    log.fold(reschedule([0, 1], HOUR_MS))
    assert answers(log) == []

    log.fold(told(Kind.DELIVERED, [gone.offset], Cause.DUE))
    log.book.unfire([back])

    assert answers(log) == [(OTHER, [0, 1], [Outcome.TOO_LATE, Outcome.DONE])]
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS)] == [1]


def test_a_cancel_that_comes_while_the_message_is_on_its_way_counts_only_if_it_did_not_leave() -> None:
    log = Log()
    log.fold(delay([0], [1]))
    log.book.due(T0 + 1)
    log.fold(cancel([0]))
    assert fired(log, T0 + HOUR_MS) == []

    log.book.forget_firing()

    assert fired(log, T0 + 1) == [(0, Destination.NOWHERE, 1, Cause.CANCELLED, Kind.CANCELLED)]


def test_a_source_that_somebody_drew_is_forgotten_with_its_last_message() -> None:
    log = Log()
    for number in range(50):
        source = Source(drawn_topic(number), 0)
        log.fold(delay([0], [0], source=source))
        log.write()
        log.book.due(T0)
        log.fold(told(Kind.DELIVERED, [0], Cause.DUE, source))
        log.write()

    assert len(log.book._sources) == 0
    assert [key for key in log.table if key[:1] in b"rsm"] == []


def test_the_index_of_a_message_that_is_moved_again_and_again_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_STALE_HINTS", 100)
    log = Log()
    log.fold(delay([0], [HOUR_MS]))
    for turn in range(5_000):
        log.fold(reschedule([0], HOUR_MS + turn * SPAN_MS))

    assert log.book._due.size < 300
    assert isinstance(log.book.take_answers()[0], Answer)
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS + 4_999 * SPAN_MS)] == [0]


def test_rows_of_delayed_messages_say_state_and_time() -> None:
    log = Log()
    log.fold(delay([0], [5]))
    log.write()

    row = log.table[rows.row_key(DRAWN, 0)]
    lease, _ = rows.decode_lease(row)

    assert (lease.state, lease.due_ms, lease.since_ms, lease.holder) == (State.DELAYED, T0 + 5, T0, 0)
    assert rows.decode_payload(row) == payload()
