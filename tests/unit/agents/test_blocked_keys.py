"""Which keys of a queue with ordering are blocked, and how they are listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from marq.core.storage.gauges import gauges_of
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire.markers import BLOCKED_MS, Payload, Source
from marq_worker.redaction import HIDDEN, Redaction
from marq_worker.web.blocked_keys import MAX_KEYS, blocked_keys, merged_keys
from marq_worker.web.message_listing import read_choice

MESSAGES, OWN = Source("marq.messages", 1), Source("shop.orders@aaaaaaaaaaaa", 0)
ORDERED = QueueSettings(ordering="key")
NOW_MS = 1_000_000


def lease(
    attempt: int = 1, state: State = State.WAITING_IN_ORDER, *, counted: bool = True, queue: str = "orders"
) -> LeaseRow:
    return LeaseRow(queue, 7, attempt, NOW_MS + 4_000, NOW_MS - 1_000, state, counted, "ValueError: no")


def payload(key: bytes | None = None, ordering_key: bytes | None = None) -> Payload:
    headers = () if ordering_key is None else (("marq-ordering-key", ordering_key),)
    return Payload(500, 1, key, headers, b"v")


def owners(leases: Mapping[Source, Mapping[int, LeaseRow]], payloads: Mapping[int, Payload]) -> Any:
    """One worker's partitions; the offsets of messages differ in all sources."""
    book = SimpleNamespace(leases_by_source=lambda: [(source, list(some.items())) for source, some in leases.items()])
    tracker = SimpleNamespace(book=book, estimate_ms=lambda _: NOW_MS)
    engine = SimpleNamespace(payload=lambda _queue, _source, number: payloads.get(number))
    return SimpleNamespace(owned={0: SimpleNamespace(tracker=tracker, engine=engine)})


async def listed(
    leases: Mapping[Source, Mapping[int, LeaseRow]], payloads: Mapping[int, Payload], **options: Any
) -> Any:
    settings, redaction = options.get("settings", ORDERED), options.get("redaction", Redaction())
    return await blocked_keys(owners(leases, payloads), "orders", settings, redaction)


async def test_the_key_with_the_most_attempts_comes_first() -> None:
    leases = {MESSAGES: {4: lease(2), 6: lease(3), 9: lease(1)}}
    payloads = {4: payload(ordering_key=b"a"), 6: payload(ordering_key=b"\xffb"), 9: payload()}

    keys = await listed(leases, payloads)

    assert [(row["key"], row["attempt"], row["place"]) for row in keys] == [
        ("\N{REPLACEMENT CHARACTER}b", 3, "marq.messages/1/6"),
        ("a", 2, "marq.messages/1/4"),
        (None, 1, "marq.messages/1/9"),
    ]
    assert (keys[0]["error"], keys[0]["due_in_seconds"], keys[0]["holder"]) == ("ValueError: no", 4.0, 0)


async def test_messages_that_wait_for_no_attempt_block_nothing() -> None:
    leases = {
        MESSAGES: {
            1: lease(state=State.LEASED_IN_ORDER),
            2: lease(state=State.RELEASED),
            3: lease(counted=False),
            4: lease(queue="emails"),
            5: lease(),
        }
    }
    gauges = gauges_of([list(leases[MESSAGES].values())])

    assert [row["place"] for row in await listed(leases, {})] == ["marq.messages/1/5"]
    assert await listed(leases, {}, settings=QueueSettings()) == []
    assert (gauges["orders"].blocked, gauges["orders"].released) == (1, 3)


async def test_in_its_own_topic_the_key_is_the_record_key() -> None:
    settings = QueueSettings(ordering="key", topic="shop.orders")
    payloads = {1: payload(b"customer"), 2: payload(b"orders", b"former")}

    keys = await listed({OWN: {1: lease(2)}, MESSAGES: {2: lease(1)}}, payloads, settings=settings)

    assert [row["key"] for row in keys] == ["customer", "former"]


async def test_a_key_can_be_hidden() -> None:
    redaction = Redaction(["marq-ordering-key"])

    keys = await listed({MESSAGES: {1: lease(), 2: lease()}}, {1: payload(ordering_key=b"a")}, redaction=redaction)

    assert [row["key"] for row in keys] == [HIDDEN, None]


def test_keys_of_several_workers_are_merged_and_a_worker_of_an_older_version_has_none() -> None:
    def key(attempt: int, number: int) -> dict[str, Any]:
        return {"attempt": attempt, "since": "2026-11-24", "place": f"marq.messages/0/{number:03}"}

    many = [key(1, number) for number in range(MAX_KEYS)]
    merged = merged_keys([{"blocked_keys": many}, {}, {"blocked_keys": [key(3, 7)]}])

    assert merged[0]["attempt"] == 3
    assert len(merged) == MAX_KEYS


async def test_a_message_that_would_be_a_dead_letter_waits_for_an_operator() -> None:
    stopped = replace(lease(2), due_ms=NOW_MS + BLOCKED_MS)

    keys = await listed({MESSAGES: {1: stopped, 2: lease(1)}}, {})

    assert [row["waits_for_operator"] for row in keys] == [True, False]


@pytest.mark.parametrize(
    ("listed_as", "state", "chosen"),
    [
        ("delayed", State.WAITING_IN_ORDER, True),
        ("in_flight", State.LEASED, True),
        ("in_flight", State.LEASED_IN_ORDER, False),
        ("in_flight", State.DISPATCHED, False),
    ],
)
def test_actions_on_all_messages_leave_out_those_that_no_operator_can_release(
    listed_as: str, state: State, chosen: bool
) -> None:
    shown = read_choice("orders", {"state": listed_as})
    places = read_choice("orders", {"state": listed_as, "only": "places"})

    assert (shown.fits(lease(state=state), NOW_MS), places.fits(lease(state=state), NOW_MS)) == (True, chosen)
