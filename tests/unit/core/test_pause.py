"""A queue that is paused, as the lease book sees it: nothing is delivered, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import replace

from marq.core.lease_book import LeaseBook
from marq.core.redeliver_or_dead_letter import Destination, is_delivery
from marq.core.storage.rows import LeaseRow, State
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.markers import Batch, Delay
from tests.unit.core.batches import DRAWN, LEASE_MS, QUEUE, ack, acquire, payload, reject, release

T0 = 1_000_000


class Paused:
    """Settings of a book, with the queues that a test has paused."""

    def __init__(self) -> None:
        self.queues: set[str] = set()
        self.settings = QueueSettings(max_attempts=2, backoff=Backoff(100, 2.0, 1_000, jitter=False))

    def __call__(self, queue: str) -> QueueSettings:
        return replace(self.settings, paused=queue in self.queues)


def fold(book: LeaseBook, *batches: Batch, at: int = T0) -> None:
    for batch in batches:
        book.fold(batch, at, book.applied + 1)


def due(book: LeaseBook, at: int) -> list[tuple[int, Destination]]:
    return [(fire.offset, fire.destination) for fire in book.due(at)]


def test_what_would_be_delivered_waits_and_what_dies_or_is_over_does_not() -> None:
    paused = Paused()
    paused.queues = {QUEUE}
    book = LeaseBook(paused)
    fold(book, acquire([1, 2, 3]), acquire([4], attempt=2), release([2]), reject([3]))
    fold(book, Delay(QUEUE, 1, DRAWN, [9], [T0], False, None, [payload()]))

    assert due(book, T0 + LEASE_MS) == [(3, Destination.DEAD_LETTERS), (4, Destination.DEAD_LETTERS)]

    # No clock is asked for in vain.
    assert book.next_due_ms is None
    assert len(book) == 5


def test_all_that_waited_comes_once_it_is_resumed_in_its_order() -> None:
    paused = Paused()
    paused.queues = {QUEUE}
    book = LeaseBook(paused)
    fold(book, acquire([1, 2, 3]), release([2]))
    fold(book, Delay(QUEUE, 1, DRAWN, [9], [T0 + 10], False, None, [payload()]))
    assert due(book, T0 + LEASE_MS) == []
    # What ends meanwhile does not come back.
    fold(book, ack([3]), at=T0 + 5_000)

    paused.queues.clear()

    assert book.next_due_ms == T0
    fires = book.due(T0 + 5_000)
    assert [fire.offset for fire in fires] == [2, 9, 1]
    assert {fire.destination for fire in fires} == {Destination.QUEUE}
    # None of them was late: they were not due before.
    assert {book.wanted_ms(fire.lease) for fire in fires} == {T0 + 5_000}
    assert due(book, T0 + 5_000) == []


def test_other_queues_go_on_and_a_message_that_is_moved_comes_at_its_new_time_only() -> None:
    paused = Paused()
    paused.queues = {"other"}
    book = LeaseBook(paused)
    fold(book, acquire([1]), acquire([2], queue="other"))
    assert due(book, T0 + LEASE_MS) == [(1, Destination.QUEUE)]

    # The next reader of its partition acquires it again, and its earlier lease ends.
    fold(book, acquire([2], queue="other", holder=99), at=T0 + 2 * LEASE_MS)
    paused.queues.clear()

    assert book.next_due_ms == T0 + 3 * LEASE_MS
    assert due(book, T0 + 2 * LEASE_MS) == []
    assert due(book, T0 + 3 * LEASE_MS) == [(2, Destination.QUEUE)]


def test_what_waits_survives_a_new_owner() -> None:
    paused = Paused()
    paused.queues = {QUEUE}
    before = LeaseBook(paused)
    fold(before, acquire([1]), release([1]))
    assert due(before, T0) == []
    table = {key: row for key, row in before.take_changes().items() if row is not None}

    book = LeaseBook(paused)
    book.restore(table.items())

    assert due(book, T0) == []
    paused.queues.clear()
    assert due(book, T0) == [(1, Destination.QUEUE)]


def test_a_message_that_was_read_during_the_pause_comes_at_once_and_was_due_since_then() -> None:
    """Its place in the order is the one in which messages were read."""
    paused = Paused()
    paused.queues = {QUEUE}
    book = LeaseBook(paused)
    fold(book, acquire([5, 6], dues_ms=[0, 0]))
    fold(book, acquire([7, 8], dues_ms=[T0 + 5_000, 0]), at=T0 + 1_000)
    assert due(book, T0 + 1_000) == []
    # The next owner has not seen the pause.
    table = {key: row for key, row in book.take_changes().items() if row is not None}
    book = LeaseBook(paused)
    book.restore(table.items())
    paused.queues.clear()

    fires = book.due(T0 + 2_000)

    assert [fire.offset for fire in fires] == [5, 6, 8]
    assert [book.wanted_ms(fire.lease) for fire in fires] == [T0, T0, T0 + 1_000]
    assert due(book, T0 + 5_000) == [(7, Destination.QUEUE)]


def test_a_released_lease_counts_as_a_delivery_only_while_attempts_are_left() -> None:
    settings = QueueSettings(max_attempts=2)
    assert is_delivery(LeaseRow(QUEUE, 0, 1, T0, T0, State.RELEASED), settings)
    assert not is_delivery(LeaseRow(QUEUE, 0, 2, T0, T0, State.RELEASED), settings)
    assert is_delivery(LeaseRow(QUEUE, 0, 2, T0, T0, State.RELEASED, False), settings)
    assert not is_delivery(LeaseRow(QUEUE, 0, 1, T0, T0, State.DISPATCHED), settings)
