"""At most once in the lease book: what was spent is delivered no more, and nobody loses it silently."""

from __future__ import annotations

import pytest

from marq.core.fires import Destination
from marq.core.markers import Batch, Cause, Kind
from marq.core.rows import State
from tests.unit.core.batches import (
    HOLDER,
    LEASE_MS,
    OTHER,
    QUEUE,
    ack,
    acquire,
    fact,
    reject,
    release,
    renew,
    spend,
)
from tests.unit.core.test_leases import T0, Log, only


def fired(log: Log, now_ms: int) -> list[tuple[Destination, int, Cause, Kind]]:
    return [(fire.destination, fire.attempt, fire.cause, fire.fact_kind) for fire in log.book.due(now_ms)]


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_spent_and_not_finished_is_abandoned_and_counted(restart: bool) -> None:
    log = Log()
    log.fold(acquire([5]), spend([5]))
    if restart:
        log.write()
        log.restart()

    assert fired(log, T0 + LEASE_MS - 1) == []
    assert fired(log, T0 + LEASE_MS) == [(Destination.NOWHERE, 1, Cause.EXPIRED, Kind.ABANDONED)]

    log.fold(fact([5], Kind.ABANDONED, Cause.EXPIRED))

    assert len(log.book) == 0
    counts = log.book.counts[QUEUE]
    assert (counts.abandoned, counts.redelivered, counts.dead, counts.expired) == (1, 0, 0, 1)


def test_what_was_not_spent_comes_back() -> None:
    log = Log()
    log.fold(acquire([5, 6]), spend([6]))

    assert fired(log, T0 + LEASE_MS) == [
        (Destination.QUEUE, 2, Cause.EXPIRED, Kind.REDELIVERED),
        (Destination.NOWHERE, 1, Cause.EXPIRED, Kind.ABANDONED),
    ]


def test_its_holder_keeps_it_finishes_it_and_makes_it_a_dead_letter() -> None:
    log = Log()
    log.fold(acquire([5, 6, 7]), spend([5, 6, 7]), renew([5, 6, 7], lease_ms=5_000), ack([5]), reject([6]))

    assert fired(log, T0) == [(Destination.DEAD_LETTERS, 1, Cause.REJECTED, Kind.DEAD_LETTERED)]
    assert fired(log, T0 + 4_999) == []
    assert fired(log, T0 + 5_000) == [(Destination.NOWHERE, 1, Cause.EXPIRED, Kind.ABANDONED)]


@pytest.mark.parametrize(
    ("batch", "state"),
    [
        # Its holder says that nobody has seen it, or that somebody has.
        (release([5], counted=False), State.RELEASED),
        (release([5]), State.SPENT),
        (release([5], counted=False, holder=OTHER), State.SPENT),
        (acquire([5], holder=OTHER), State.SPENT),
        (renew([5], holder=OTHER), State.SPENT),
        (spend([5], holder=OTHER), State.SPENT),
    ],
)
def test_nothing_delivers_it_again_but_its_holder_who_says_that_nobody_has_seen_it(batch: Batch, state: State) -> None:
    log = Log()
    log.fold(acquire([5]), spend([5]), batch)

    lease = only(log)
    assert lease is not None
    assert lease.state is state
    assert lease.holder == (HOLDER if state is State.SPENT else 0)


def test_only_a_message_that_is_held_can_be_spent() -> None:
    log = Log()
    log.fold(acquire([5]), release([5], 700), spend([5]), spend([9]))

    lease = only(log)
    assert lease is not None
    assert lease.state is State.RELEASED


def test_it_counts_as_in_flight() -> None:
    log = Log()
    log.fold(acquire([5]), spend([5]))

    assert log.book.gauges()[QUEUE].in_flight == 1
