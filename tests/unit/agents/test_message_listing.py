"""Which open messages an address asks for."""

from __future__ import annotations

import pytest

from marq.core.storage.rows import LeaseRow, State
from marq.wire.errors import ConfigError
from marq_worker.agents.message_listing import MAX_PLACES, Choice, read_choice

NOW_MS = 1_000_000_000


def lease(attempt: int = 1, since_ms: int = NOW_MS, text: str = "", state: State = State.LEASED) -> LeaseRow:
    return LeaseRow("emails", 7, attempt, NOW_MS + 30_000, since_ms, state, text=text)


def fits(choice: Choice, *leases: LeaseRow) -> list[bool]:
    return [choice.fits(each, NOW_MS) for each in leases]


def test_messages_are_chosen_by_their_deliveries_their_age_and_their_error() -> None:
    often = read_choice("emails", {"state": "in_flight", "attempts": "3"})
    old = read_choice("emails", {"state": "in_flight", "minutes": "5"})
    failed = read_choice("emails", {"state": "in_flight", "error": "Timeout"})

    assert fits(often, lease(2), lease(3), lease(4, state=State.DELAYED)) == [False, True, False]
    assert fits(old, lease(since_ms=NOW_MS - 299_999), lease(since_ms=NOW_MS - 300_000)) == [False, True]
    assert fits(failed, lease(text="no"), lease(text="A TIMEOUT of 3 s")) == [False, True]


def test_each_open_message_that_does_not_end_now_is_in_flight_or_delayed() -> None:
    in_flight, delayed = (read_choice("emails", {"state": state}) for state in ("in_flight", "delayed"))
    leases = {state: lease(state=state) for state in State}

    assert {state for state, each in leases.items() if in_flight.fits(each, NOW_MS)} == {
        State.LEASED,
        State.DISPATCHED,
        State.LEASED_IN_ORDER,
    }
    assert {state for state, each in leases.items() if delayed.fits(each, NOW_MS)} == {
        State.DELAYED,
        State.RELEASED,
        State.WAITING_IN_ORDER,
    }


def test_of_places_there_may_be_more_than_of_messages() -> None:
    assert read_choice("emails", {"only": "places", "limit": str(MAX_PLACES)}).limit == MAX_PLACES
    with pytest.raises(ConfigError, match="limit=10000: expected a whole number from 1 to 1000"):
        read_choice("emails", {"limit": str(MAX_PLACES)})


@pytest.mark.parametrize(
    "query",
    [
        {"attempts": "0"},
        {"attempts": "many"},
        {"minutes": "-1"},
        {"minutes": "9" * 30},
        {"minutes": "0" * 5_000},
        {"limit": "0" * 11 + "1" * 9},
    ],
)
def test_other_values_than_numbers_are_rejected(query: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_choice("emails", query)
