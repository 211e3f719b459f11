"""Delayed messages in the lease book: leases without a holder."""

from __future__ import annotations

import pytest

from marq.core import due_messages
from marq.core.due_index import SPAN_MS
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.wire.markers import MAX_TIME_MS, Answer, Batch, Cause, Fact, Kind, RequestOutcome, Source
from marq.wire.names import synthetic_topic
from tests.unit.core.batches import DRAWN, OTHER, QUEUE, cancel, delay, reschedule
from tests.unit.core.test_lease_book import T0, Log

HOUR_MS = 3_600_000


def fired(log: Log, now_ms: int) -> list[tuple[int, Destination, int, Cause, Kind]]:
    return [(f.offset, f.destination, f.attempt, f.cause, f.fact_kind) for f in log.book.due(now_ms)]


def told(kind: Kind, offsets: list[int], cause: Cause, source: Source = DRAWN) -> Batch:
    return Fact(kind, QUEUE, 99, source, offsets, [1] * len(offsets), [cause] * len(offsets))


def answers(log: Log) -> list[tuple[int, list[int], list[int]]]:
    return [(answer.holder, list(answer.offsets), list(answer.outcomes)) for answer in log.book.take_answers()]


def test_a_delayed_message_is_delivered_at_its_time_as_its_first_attempt_and_not_before() -> None:
    log = Log()
    log.fold(delay([0], [5_000]))

    assert log.book.next_due_ms == T0 + 5_000
    assert fired(log, T0 + 4_999) == []
    assert fired(log, T0 + 5_000) == [(0, Destination.QUEUE, 1, Cause.DUE, Kind.DELIVERED)]
    assert fired(log, T0 + HOUR_MS) == []

    log.fold(told(Kind.DELIVERED, [0], Cause.DUE))

    assert (len(log.book), log.book.counts[QUEUE].delayed, log.book.counts[QUEUE].delivered) == (0, 1, 1)


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_due_in_the_same_millisecond_comes_in_the_order_in_which_it_was_delayed(restart: bool) -> None:
    """However many were delayed together, and whether they were moved: some wait in the heap, others in spans."""
    log, other = Log(), Source(synthetic_topic(1), 2)
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

    found: list[DueAction] = []
    while (due_ms := log.book.next_due_ms) is not None:
        fires = log.book.due(due_ms)
        assert {fire.lease.due_ms for fire in fires} == {due_ms}
        found += fires
        log.fold(told(Kind.DELIVERED, [fire.offset for fire in fires], Cause.DUE), at=T0)

    assert [fire.offset for fire in found] == sorted(range(3_000), key=lambda number: (times[number], number))


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_the_longest_time_that_the_format_allows_is_in_the_far_future(relative: bool, moved: bool) -> None:
    log = Log()
    longest_ms = 2**63 - 1
    log.fold(delay([0], [5 if moved else longest_ms], relative=relative or moved))
    if moved:
        log.fold(reschedule([0], longest_ms, relative=relative))

    log.write()
    log.restart()

    assert log.book.next_due_ms == MAX_TIME_MS
    log.fold(cancel([0]))
    assert fired(log, T0) == [(0, Destination.NOWHERE, 1, Cause.CANCELLED, Kind.CANCELLED)]


def test_cancel_is_told_of_as_a_fact_and_no_copy_is_sent() -> None:
    log = Log()
    log.fold(delay([0, 1], [HOUR_MS, HOUR_MS]), cancel([0]))

    assert answers(log) == []
    assert fired(log, T0) == [(0, Destination.NOWHERE, 1, Cause.CANCELLED, Kind.CANCELLED)]

    log.fold(told(Kind.CANCELLED, [0], Cause.CANCELLED))

    assert [offset for _, offset, _ in log.book.open_leases()] == [1]
    assert log.book.counts[QUEUE].cancelled == 1


def test_a_late_reschedule_is_answered_when_the_delivery_is_decided() -> None:
    log = Log()
    log.fold(delay([0, 1], [1, 1]))
    gone, _ = log.book.due(T0 + 1)
    log.fold(reschedule([0, 1], HOUR_MS))
    assert answers(log) == []

    log.fold(told(Kind.DELIVERED, [gone.offset], Cause.DUE))
    log.book.forget_firing()

    assert answers(log) == [(OTHER, [0, 1], [RequestOutcome.TOO_LATE, RequestOutcome.DONE])]
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS)] == [1]


def test_a_synthetic_source_is_forgotten_with_its_last_message() -> None:
    log = Log()
    for number in range(50):
        source = Source(synthetic_topic(number), 0)
        log.fold(delay([0], [0], source=source))
        log.write()
        log.book.due(T0)
        log.fold(told(Kind.DELIVERED, [0], Cause.DUE, source))
        log.write()

    assert len(log.book._sources) == 0
    assert [key for key in log.table if key[:1] in b"rsm"] == []


def test_the_index_of_a_message_that_is_moved_again_and_again_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_messages, "MAX_STALE_HINTS", 100)
    log = Log()
    log.fold(delay([0], [HOUR_MS]))
    for turn in range(5_000):
        log.fold(reschedule([0], HOUR_MS + turn * SPAN_MS))

    assert log.book._due.size < 300
    assert isinstance(log.book.take_answers()[0], Answer)
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS + 4_999 * SPAN_MS)] == [0]
