"""The transition table is complete, and the lease book does what it says for every state and marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest

from marq.core.leases import LeaseBook
from marq.core.storage.rows import HELD, WAITING, State
from marq.core.transitions import DUE, ENDED, HOLDER_ONLY, NEW, TRANSITIONS, Absent, Marker
from marq.settings.queue import QueueSettings
from marq.wire.markers import Acquire, Batch, Cause, Delay, Kind
from tests.unit.core.batches import (
    LETTERS,
    OTHER,
    SOURCE,
    ack,
    acquire,
    cancel,
    delay,
    discard,
    fact,
    payload,
    redrive,
    reject,
    release,
    renew,
    reschedule,
    spend,
)

T0 = 1_700_000_000_000
LATER_MS = T0 + 60_000


def _early(offsets: Sequence[int]) -> Acquire:
    return Acquire("emails", OTHER, SOURCE, offsets, 1_000, 0, [payload()] * len(offsets), [LATER_MS] * len(offsets))


def _delay(offsets: Sequence[int]) -> Delay:
    # Written by a sender that may repeat itself.
    return delay(offsets, [60_000] * len(offsets), from_offset=offsets[0], source=SOURCE._replace(topic="~drawn"))


#: A batch of each marker for some offsets, by the messages' holder if only that one counts.
BATCHES: dict[Marker, Callable[[Sequence[int]], Batch]] = {
    Marker.ACQUIRE: lambda offsets: acquire(offsets, holder=OTHER, from_offset=0),
    Marker.ACQUIRE_EARLY: _early,
    Marker.DELAY: _delay,
    Marker.DISCARD: discard,
    Marker.RENEW: renew,
    Marker.DISPATCH: spend,
    Marker.RELEASE: release,
    Marker.RELEASE_UNCOUNTED: lambda offsets: release(offsets, counted=False),
    Marker.REJECT: reject,
    Marker.RESCHEDULE: lambda offsets: reschedule(offsets, 5_000, source=SOURCE),
    Marker.CANCEL: lambda offsets: cancel(offsets, source=SOURCE),
    Marker.ACK: lambda offsets: ack(offsets, holder=OTHER),
    Marker.FACT: lambda offsets: fact(offsets, Kind.REDELIVERED, Cause.EXPIRED),
}

#: The markers that bring a record of the messages topic into each state.
PATHS: dict[State | Absent, list[Batch]] = {
    NEW: [],
    ENDED: [acquire([5]), ack([5])],
    State.LEASED: [acquire([5])],
    State.RELEASED: [acquire([5]), release([5], 5_000)],
    State.REJECTED: [acquire([5]), reject([5])],
    State.DELAYED: [_early([5])],
    State.CANCELLED: [_early([5]), cancel([5], source=SOURCE)],
    State.DISPATCHED: [acquire([5]), spend([5])],
}
#: Messages of these sources are not records, so other markers open them.
OWN_SOURCES = {Marker.DELAY: _delay([5]).source, Marker.DISCARD: LETTERS}


class Log:
    """A book, and the state in which it has message 5."""

    def __init__(self, *batches: Batch) -> None:
        self.book = LeaseBook(lambda queue: QueueSettings())
        for batch in batches:
            self.fold(batch)

    def fold(self, batch: Batch) -> None:
        self.book.fold(batch, T0, self.book.applied + 1)

    def state(self) -> State | None:
        return next((lease.state for _, _, lease in self.book.open_leases()), None)


def test_the_table_has_every_marker_and_every_state() -> None:
    assert set(TRANSITIONS) == set(Marker) == set(BATCHES)
    assert set(DUE) == set(State)
    states = {*State, *Absent}
    for marker, moves in TRANSITIONS.items():
        assert moves.keys() <= states, marker
        assert set(moves.values()) <= states - {NEW}, marker
    assert {to for moves in TRANSITIONS.values() for to in moves.values()} == states - {NEW}
    assert set(State) == {state for state in State if TRANSITIONS[Marker.ACK][state] is ENDED}


def test_the_groups_of_states_are_those_of_the_table() -> None:
    assert set(HELD) == set(TRANSITIONS[Marker.RELEASE_UNCOUNTED])
    assert set(WAITING) == set(TRANSITIONS[Marker.RESCHEDULE])


def test_no_marker_opens_an_ended_message() -> None:
    assert all(ENDED not in moves for moves in TRANSITIONS.values())


@pytest.mark.parametrize("marker", [marker for marker in Marker if marker not in OWN_SOURCES])
@pytest.mark.parametrize("state", PATHS)
def test_the_book_does_what_the_table_says(state: State | Absent, marker: Marker) -> None:
    log = Log(*PATHS[state])
    assert log.state() is (None if isinstance(state, Absent) else state)
    log.fold(BATCHES[marker]([5]))
    expected = TRANSITIONS[marker].get(state, state)
    assert log.state() is (None if isinstance(expected, Absent) else expected)


@pytest.mark.parametrize("marker", sorted(HOLDER_ONLY))
@pytest.mark.parametrize("state", TRANSITIONS[Marker.RELEASE_UNCOUNTED])
def test_only_the_holder_moves_a_message_in_flight(state: State, marker: Marker) -> None:
    log = Log(*PATHS[state])
    [(_, _, before)] = log.book.open_leases()
    batch = BATCHES[marker]([5])
    log.fold(type(batch)(batch.queue, OTHER, *_columns(batch)))
    [(_, _, after)] = log.book.open_leases()
    assert after is before


def _columns(batch: Batch) -> list[object]:
    """All fields of a batch behind its holder."""
    return [getattr(batch, field.name) for field in fields(batch)[2:]]


def test_a_delay_opens_a_message_once() -> None:
    log = Log(_delay([5]))
    assert log.state() is TRANSITIONS[Marker.DELAY][NEW]
    log.fold(reschedule([5], 5_000, source=OWN_SOURCES[Marker.DELAY]))
    [(_, _, before)] = log.book.open_leases()
    log.fold(_delay([5]))
    [(_, _, after)] = log.book.open_leases()
    assert after is before
    log.fold(cancel([5], source=OWN_SOURCES[Marker.DELAY]))
    log.fold(_delay([5]))
    assert log.state() is State.CANCELLED


def test_a_discard_ends_a_dead_letter_that_was_not_redriven() -> None:
    log = Log(discard([5]), redrive([5]))
    assert log.state() is None
    log = Log(redrive([5]), discard([5]))
    assert log.state() is State.DELAYED
