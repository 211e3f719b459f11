"""Counters of a worker: they begin at 0, never fall, and are not those that a partition brings with it."""

from __future__ import annotations

from marq.core.storage.rows import EventCounts
from marq_worker.web.partition_statistics import Totals

QUEUE = "emails"


def counted(acked: int) -> dict[str, EventCounts]:
    return {QUEUE: EventCounts(acked=acked)}


def test_what_was_counted_stays_when_the_partition_goes_and_comes_back() -> None:
    totals = Totals()
    totals.note(0, counted(10), counted(15))

    # Meanwhile another worker counted 85.
    totals.note(0, counted(100), counted(101))

    assert totals.by_queue() == counted(6)


def test_an_owner_that_keeps_what_it_knows_counts_on() -> None:
    totals, before = Totals(), counted(10)
    totals.note(0, before, counted(15))

    totals.note(0, before, counted(16))

    assert totals.by_queue() == counted(6)


def test_partitions_add_up() -> None:
    totals = Totals()

    totals.note(0, {}, counted(2))
    totals.note(1, {}, {**counted(3), "other": EventCounts(dead_lettered=1)})

    assert totals.by_queue() == {**counted(5), "other": EventCounts(dead_lettered=1)}
