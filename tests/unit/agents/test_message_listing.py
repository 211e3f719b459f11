"""Which open messages an address asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.lease_book import LeaseBook
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire.errors import ConfigError
from marq.wire.markers import Acquire, Payload, Source
from marq_worker.commands.state import _leases_since
from marq_worker.redaction import Redaction
from marq_worker.web.message_listing import (
    MAX_PLACES,
    Choice,
    described_schedules,
    open_message,
    read_choice,
    sources_of,
)
from tests.unit.core.schedule_life import PARTITIONS, Life, times

NOW_MS = 1_000_000_000


def lease(attempt: int = 1, since_ms: int = NOW_MS, text: str = "", state: State = State.LEASED) -> LeaseRow:
    return LeaseRow("emails", 7, attempt, NOW_MS + 30_000, since_ms, state, text=text)


def fits(choice: Choice, *leases: LeaseRow) -> list[bool]:
    return [choice.fits(row, NOW_MS) for row in leases]


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

    assert {state for state, row in leases.items() if in_flight.fits(row, NOW_MS)} == {
        State.LEASED,
        State.DISPATCHED,
        State.LEASED_IN_ORDER,
    }
    assert {state for state, row in leases.items() if delayed.fits(row, NOW_MS)} == {
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


# --- schedules --------------------------------------------------------------------------------------------------------


def listed(life: Life) -> dict[str, Any]:
    owner = SimpleNamespace(
        state="owner",
        engine=SimpleNamespace(planner=life.planner, payload=life.payload),
        tracker=life.tracker,
        times=SimpleNamespace(problems={}),
    )
    [schedule] = described_schedules([owner])  # type: ignore[list-item]
    return schedule


def test_a_schedule_is_listed_with_its_last_runs_and_their_messages() -> None:
    # given
    life = Life()
    life.define()
    life.until(times(1, 1)[0])

    # when
    schedule = listed(life)

    # then: the latest first, each with the id of its message
    topic, partition = life.layers.current["s"].source(PARTITIONS)
    ids = [f"{topic}/{partition}/{time_s}" for time_s in reversed(times(0, 2))]
    assert [run["id"] for run in schedule["runs"]] == ids
    assert [run["time"] for run in schedule["runs"]] == ["2023-11-14T22:15:00+00:00", "2023-11-14T22:14:00+00:00"]
    assert (schedule["last"], schedule["last_id"]) == (schedule["runs"][0]["time"], ids[0])

    # and: a time before a change has a message of another definition, whose id this one does not know
    life.define(value="new")
    life.work()
    schedule = listed(life)
    assert (schedule["last"], schedule["last_id"], schedule["runs"]) == ("2023-11-14T22:15:00+00:00", None, [])


# --- queues' own topics, which may be created again -------------------------------------------------------------------


def owners(book: LeaseBook) -> Any:
    tracker = SimpleNamespace(book=book, estimate_ms=lambda _: NOW_MS)
    engine = SimpleNamespace(payload=lambda *_: None)
    return SimpleNamespace(owned={0: SimpleNamespace(tracker=tracker, engine=engine)})


def with_messages(topic: str, *offsets: int) -> LeaseBook:
    book = LeaseBook(lambda _: QueueSettings())
    payload = Payload(1, 1, None, (), b"v")
    source = Source(topic, 3)
    book.fold(Acquire("emails", 7, source, offsets, 30_000, offsets[0], [payload] * len(offsets)), NOW_MS, 0)
    return book


async def test_open_messages_of_an_own_topic_belong_to_the_partition_that_kafka_knows() -> None:
    [source] = await sources_of(owners(with_messages("orders@aaaaaaaaaaaa", 4, 5)), "emails")

    assert (source["topic"], source["partition"], source["first_open"], source["in_flight"]) == ("orders", 3, 4, 2)


def test_the_oldest_lease_of_an_own_topic_belongs_to_the_partition_that_kafka_knows() -> None:
    owned: Any = SimpleNamespace(tracker=SimpleNamespace(book=with_messages("orders@aaaaaaaaaaaa", 4)))

    assert _leases_since(owned) == {("emails", Source("orders", 3)): NOW_MS}


@pytest.mark.parametrize("asked", ["orders", "orders@aaaaaaaaaaaa"])
def test_an_open_message_is_found_by_its_id_and_by_its_place(asked: str) -> None:
    known = owners(with_messages("orders@aaaaaaaaaaaa", 4))

    message = open_message(known, "emails", Source(asked, 3), 4, Redaction())

    assert message is not None
    assert message["place"] == "orders@aaaaaaaaaaaa/3/4"
    assert open_message(known, "emails", Source("orders@bbbbbbbbbbbb", 3), 4, Redaction()) is None
