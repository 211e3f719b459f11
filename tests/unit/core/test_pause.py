"""A queue that is paused, as the lease book sees it: nothing is delivered, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import replace

from marq.core.redeliver_or_dead_letter import Destination, is_delivery
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire.markers import Batch, Delay
from tests.unit.core import logs
from tests.unit.core.batches import DRAWN, LEASE_MS, QUEUE, ack, acquire, payload, reject, release
from tests.unit.core.logs import T0, Log

SETTINGS = replace(logs.SETTINGS, max_attempts=2)


def paused_log(*batches: Batch, queue: str = QUEUE) -> Log:
    log = Log(settings=SETTINGS)
    log.paused = {queue}
    log.fold(*batches)
    return log


def due(log: Log, at: int) -> list[tuple[int, Destination]]:
    return [(fire.offset, fire.destination) for fire in log.book.due(at)]


def test_what_would_be_delivered_waits_and_what_dies_or_is_over_does_not() -> None:
    log = paused_log(acquire([1, 2, 3]), acquire([4], attempt=2), release([2]), reject([3]))
    log.fold(Delay(QUEUE, 1, DRAWN, [9], [T0], False, None, [payload()]))

    assert due(log, T0 + LEASE_MS) == [(3, Destination.DEAD_LETTERS), (4, Destination.DEAD_LETTERS)]

    # No clock is asked for in vain.
    assert log.book.next_due_ms is None
    assert len(log.book) == 5


def test_all_that_waited_comes_once_it_is_resumed_in_its_order() -> None:
    log = paused_log(acquire([1, 2, 3]), release([2]))
    log.fold(Delay(QUEUE, 1, DRAWN, [9], [T0 + 10], False, None, [payload()]))
    assert due(log, T0 + LEASE_MS) == []
    # What ends meanwhile does not come back.
    log.fold(ack([3]), at=T0 + 5_000)

    log.paused.clear()

    assert log.book.next_due_ms == T0
    fires = log.book.due(T0 + 5_000)
    assert [fire.offset for fire in fires] == [2, 9, 1]
    assert {fire.destination for fire in fires} == {Destination.QUEUE}
    # None of them was late: they were not due before.
    assert {log.book.wanted_ms(fire.lease) for fire in fires} == {T0 + 5_000}
    assert due(log, T0 + 5_000) == []


def test_other_queues_go_on_and_a_message_that_is_moved_comes_at_its_new_time_only() -> None:
    log = paused_log(acquire([1]), acquire([2], queue="other"), queue="other")
    assert due(log, T0 + LEASE_MS) == [(1, Destination.QUEUE)]

    # The next reader of its partition acquires it again, and its earlier lease ends.
    log.fold(acquire([2], queue="other", holder=99), at=T0 + 2 * LEASE_MS)
    log.paused.clear()

    assert log.book.next_due_ms == T0 + 3 * LEASE_MS
    assert due(log, T0 + 2 * LEASE_MS) == []
    assert due(log, T0 + 3 * LEASE_MS) == [(2, Destination.QUEUE)]


def test_what_waits_survives_a_new_owner() -> None:
    log = paused_log(acquire([1]), release([1]))
    assert due(log, T0) == []
    log.restart()

    assert due(log, T0) == []
    log.paused.clear()
    assert due(log, T0) == [(1, Destination.QUEUE)]


def test_a_message_that_was_read_during_the_pause_comes_at_once_and_was_due_since_then() -> None:
    """Its place in the order is the one in which messages were read."""
    log = paused_log(acquire([5, 6], dues_ms=[0, 0]))
    log.fold(acquire([7, 8], dues_ms=[T0 + 5_000, 0]), at=T0 + 1_000)
    assert due(log, T0 + 1_000) == []
    # The next owner has not seen the pause.
    log.restart()
    log.paused.clear()

    fires = log.book.due(T0 + 2_000)

    assert [fire.offset for fire in fires] == [5, 6, 8]
    assert [log.book.wanted_ms(fire.lease) for fire in fires] == [T0, T0, T0 + 1_000]
    assert due(log, T0 + 5_000) == [(7, Destination.QUEUE)]


def test_a_released_lease_counts_as_a_delivery_only_while_attempts_are_left() -> None:
    settings = QueueSettings(max_attempts=2)
    assert is_delivery(LeaseRow(QUEUE, 0, 1, T0, T0, State.RELEASED), settings)
    assert not is_delivery(LeaseRow(QUEUE, 0, 2, T0, T0, State.RELEASED), settings)
    assert is_delivery(LeaseRow(QUEUE, 0, 2, T0, T0, State.RELEASED, False), settings)
    assert not is_delivery(LeaseRow(QUEUE, 0, 1, T0, T0, State.DISPATCHED), settings)
