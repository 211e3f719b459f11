"""Delayed messages in the lease book: leases without a holder."""

from __future__ import annotations

import pytest

from marq.core import lease_book
from marq.core.lease_book import SPAN_MS
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.wire.markers import Answer, Batch, Cause, Fact, Kind, RequestOutcome, Source
from marq.wire.names import synthetic_topic
from tests.unit.core.batches import DRAWN, OTHER, QUEUE, delay, reschedule
from tests.unit.core.logs import T0, Log

HOUR_MS = 3_600_000


def fired(log: Log, now_ms: int) -> list[tuple[int, Destination, int, Cause, Kind]]:
    return [(f.offset, f.destination, f.attempt, f.cause, f.fact_kind) for f in log.book.due(now_ms)]


def told(kind: Kind, offsets: list[int], cause: Cause, source: Source = DRAWN) -> Batch:
    return Fact(kind, QUEUE, 99, source, offsets, [1] * len(offsets), [cause] * len(offsets))


def answers(log: Log) -> list[tuple[int, list[int], list[int]]]:
    return [(answer.holder, list(answer.offsets), list(answer.outcomes)) for answer in log.book.take_answers()]


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
        log.restart()

    order = [(fire.source, fire.offset) for fire in log.book.due(T0 + HOUR_MS)]

    assert order == [(DRAWN, 0), *[(other, number) for number in range(20)], (DRAWN, 1), (DRAWN, 2), (DRAWN, 3)]


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


@pytest.mark.parametrize("restart", [False, True])
def test_a_day_of_delays_is_hinted_at_in_its_order(restart: bool) -> None:
    log = Log()
    times = [(number * 7_919) % 86_400_000 for number in range(3_000)]
    log.fold(delay(range(3_000), times))
    if restart:
        log.restart()

    found: list[DueAction] = []
    while (due_ms := log.book.next_due_ms) is not None:
        fires = log.book.due(due_ms)
        assert {fire.lease.due_ms for fire in fires} == {due_ms}
        found += fires
        log.fold(told(Kind.DELIVERED, [fire.offset for fire in fires], Cause.DUE), at=T0)

    assert [fire.offset for fire in found] == sorted(range(3_000), key=lambda number: (times[number], number))


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
    monkeypatch.setattr(lease_book, "MAX_STALE_HINTS", 100)
    log = Log(delay([0], [HOUR_MS]))
    for turn in range(5_000):
        log.fold(reschedule([0], HOUR_MS + turn * SPAN_MS))

    assert log.book._due.size < 300
    assert isinstance(log.book.take_answers()[0], Answer)
    assert [offset for offset, *_ in fired(log, T0 + HOUR_MS + 4_999 * SPAN_MS)] == [0]
