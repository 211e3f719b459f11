"""The transition table is complete, and the lease book does what it says for every state and marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from marq.core.storage.rows import HELD, IN_ORDER, WAITING, State
from marq.core.transitions import DUE, ENDED, HOLDER_ONLY, NEW, TRANSITIONS, Absent, Marker
from marq.wire.markers import BLOCKED_MS, LAST, Acquire, Batch, Cause, Delay, Kind, Purge
from tests.unit.core.batches import (
    FORMER,
    HOLDER,
    LATER,
    LETTERS,
    OTHER,
    SOURCE,
    ack,
    acquire,
    cancel,
    delay,
    discard,
    fact,
    ordered,
    payload,
    reject,
    release,
    renew,
    reschedule,
    resume,
    spend,
)
from tests.unit.core.logs import T0, Log

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
    Marker.ACQUIRE_IN_ORDER: lambda offsets: ordered(offsets, holder=LATER, from_offset=0),
    Marker.DELAY: _delay,
    Marker.DISCARD: discard,
    Marker.RENEW: renew,
    Marker.DISPATCH: spend,
    Marker.RELEASE: release,
    Marker.RELEASE_UNCOUNTED: lambda offsets: release(offsets, counted=False),
    Marker.RELEASE_LAST: lambda offsets: release(offsets, LAST),
    Marker.RESUME: lambda offsets: resume([offsets[-1] + 1]),
    Marker.REJECT: reject,
    Marker.RESCHEDULE: lambda offsets: reschedule(offsets, 5_000, source=SOURCE),
    Marker.CANCEL: lambda offsets: cancel(offsets, source=SOURCE),
    Marker.PURGE: lambda offsets: Purge("emails", OTHER, SOURCE, [offsets[-1] + 1], delayed=True),
    Marker.PURGE_IN_FLIGHT: lambda offsets: Purge("emails", OTHER, SOURCE, [offsets[-1] + 1], True, True),
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
    State.LEASED_IN_ORDER: [ordered([5])],
    State.WAITING_IN_ORDER: [ordered([5]), release([5], BLOCKED_MS, holder=FORMER)],
    State.EXHAUSTED: [ordered([5]), release([5], LAST, holder=FORMER)],
}
#: The gauge in which a message of each state counts.
GAUGES = {
    State.LEASED: "in_flight",
    State.RELEASED: "released",
    State.REJECTED: "rejected",
    State.DELAYED: "delayed",
    State.CANCELLED: "delayed",
    State.DISPATCHED: "in_flight",
    State.LEASED_IN_ORDER: "in_flight",
    State.WAITING_IN_ORDER: "released",
    State.EXHAUSTED: "rejected",
}
#: Messages of these sources are not records, so other markers open them.
OWN_SOURCES = {Marker.DELAY: _delay([5]).source, Marker.DISCARD: LETTERS}


def state_of(log: Log) -> State | None:
    return log.states().get(5)


def test_the_table_has_every_marker_and_every_state() -> None:
    assert set(TRANSITIONS) == set(Marker) == set(BATCHES)
    assert set(DUE) == set(State) - set(IN_ORDER)
    states = {*State, *Absent}
    for marker, moves in TRANSITIONS.items():
        assert moves.keys() <= states, marker
        assert set(moves.values()) <= states - {NEW}, marker
    assert {to for moves in TRANSITIONS.values() for to in moves.values()} == states - {NEW}
    assert set(State) == {state for state in State if TRANSITIONS[Marker.ACK][state] is ENDED}
    assert PATHS.keys() == states


def test_the_groups_of_states_are_those_of_the_table() -> None:
    assert set(HELD) == set(TRANSITIONS[Marker.RELEASE_UNCOUNTED])
    assert set(WAITING) == set(TRANSITIONS[Marker.RESCHEDULE])


def test_only_markers_of_queues_with_ordering_bring_a_message_into_their_states() -> None:
    before = {marker: set(moves.values()) & set(IN_ORDER) for marker, moves in TRANSITIONS.items()}
    from_others = {
        marker: {to for state, to in moves.items() if state not in IN_ORDER} & set(IN_ORDER)
        for marker, moves in TRANSITIONS.items()
    }
    assert {marker for marker, states in from_others.items() if states} == {Marker.ACQUIRE_IN_ORDER}
    assert {state for states in before.values() for state in states} == set(IN_ORDER)


def test_no_marker_opens_an_ended_message() -> None:
    assert all(ENDED not in moves for moves in TRANSITIONS.values())


@pytest.mark.parametrize("marker", [marker for marker in Marker if marker not in OWN_SOURCES])
@pytest.mark.parametrize("state", PATHS)
def test_the_book_does_what_the_table_says(state: State | Absent, marker: Marker) -> None:
    log = Log(*PATHS[state])
    assert state_of(log) is (None if isinstance(state, Absent) else state)
    batch = BATCHES[marker]([5])
    if marker in HOLDER_ONLY:
        lease = log.leases().get(5)
        batch = replace(batch, holder=(lease.holder if lease else 0) or HOLDER)
    log.fold(batch)
    expected = TRANSITIONS[marker].get(state, state)
    assert state_of(log) is (None if isinstance(expected, Absent) else expected)


@pytest.mark.parametrize("marker", sorted(HOLDER_ONLY))
@pytest.mark.parametrize("state", [*TRANSITIONS[Marker.RELEASE_UNCOUNTED], State.WAITING_IN_ORDER])
def test_only_the_holder_moves_a_message_in_flight(state: State, marker: Marker) -> None:
    log = Log(*PATHS[state])
    before = log.leases()[5]
    log.fold(replace(BATCHES[marker]([5]), holder=OTHER))
    assert log.leases()[5] is before


@pytest.mark.parametrize("state", State)
def test_a_message_counts_in_the_gauge_of_its_state(state: State) -> None:
    gauge = Log(*PATHS[state]).book.gauges()["emails"]

    names = {*GAUGES.values()}
    assert {name: getattr(gauge, name) for name in names} == {name: int(name == GAUGES[state]) for name in names}
    assert gauge.oldest_ms == (None if GAUGES[state] == "delayed" else T0)
    assert bool(gauge.blocked) is (state is State.WAITING_IN_ORDER)
