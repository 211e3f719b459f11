"""The rows of `marq queues`: the states of the dashboard, and only queues that exist."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from marq.kafka.inspector import Waiting
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq_worker.backlog.consumer_watch import NO_CONSUMER_S, has_no_consumer
from marq_worker.commands.open_messages import OpenReport
from marq_worker.commands.queues import _state, described
from marq_worker.commands.terminal import Alarm
from marq_worker.web.dashboard.queries import DashboardQueries
from marq_worker.web.dashboard.rows_and_alarms import queue_rows
from marq_worker.web.partition_statistics import empty_metrics
from tests.unit.app.definitions import in_file

UNREAD = {"waiting": 3, "no_consumer_seconds": NO_CONSUMER_S, "idle_seconds": NO_CONSUMER_S}


def row_of(told: OpenReport, known: Definitions, waiting: int = 0, lonely: tuple[str, ...] = ()) -> dict[str, Any]:
    counted = Waiting(counts=Counter(emails=waiting))
    [row] = described(known, told, counted, {}, ["emails"], lonely)["queues"]
    return dict(row)


@pytest.mark.parametrize(
    ("metrics", "settings", "more", "state"),
    [
        ({}, {}, {}, "idle"),
        ({"waiting": 2}, {}, {}, "waiting"),
        ({"in_flight": 1, "waiting": 2}, {}, {}, "busy"),
        ({"acked_per_second": 0.5}, {}, {}, "busy"),
        (UNREAD, {}, {}, "no consumer"),
        ({**UNREAD, "no_consumer_seconds": NO_CONSUMER_S - 1}, {}, {}, "waiting"),
        # A client outside the group acquires.
        ({**UNREAD, "idle_seconds": 1.0}, {}, {}, "waiting"),
        ({**UNREAD, "waiting": 0}, {}, {}, "idle"),
        (UNREAD, {"paused": True}, {}, "paused"),
        (UNREAD, {"paused": "2999-01-01T00:00:00Z"}, {}, "paused"),
        ({"in_flight": 1}, {}, {"breaker": "half-open"}, "breaker open"),
        (UNREAD, {}, {"removed": True}, "handler removed"),
    ],
)
def test_the_command_and_the_dashboard_say_the_same_state(
    metrics: dict[str, Any], settings: dict[str, Any], more: dict[str, Any], state: str
) -> None:
    metrics = {**empty_metrics(), "waiting": 0, "arrived_per_second": 0.0, **metrics}
    breakers = {"emails": {"state": more.get("breaker", "closed")}}
    removed = {"emails": {"handler": "tasks:send", "seconds": 60.0}} if "removed" in more else {}
    statistics = {
        "queues": {"emails": metrics},
        "workers": [{"handlers": [{"breakers": breakers}]}],
        "backlog": {"counted": True},
        "removed_handlers": removed,
    }
    opened = frozenset({"emails"}) if "breaker" in more else frozenset()

    [shown] = queue_rows(statistics, ["emails"], {"emails": settings})
    row = row_of(
        OpenReport({"emails": metrics}, removed_handlers=removed, open_breakers=opened),
        in_file(emails=settings),
        int(metrics["waiting"]),
        ("emails",) if has_no_consumer(metrics) else (),
    )

    assert shown["state"] == row["state"] == state
    until = " until 2999-01-01 00:00:00 UTC" if isinstance(settings.get("paused"), str) else ""
    assert _state(row) == state + until
    assert isinstance(_state(row), Alarm) is (state in ("no consumer", "breaker open", "handler removed"))


@pytest.mark.parametrize(
    ("metrics", "dead", "consumed", "complete", "listed"),
    [
        ({"acked": 60}, {}, [], True, False),
        ({"acked": 60}, {}, ["typo"], True, True),
        ({"in_flight": 1}, {}, [], True, True),
        ({"waiting_for_delivery": 1}, {}, [], True, True),
        ({}, {"typo": 1}, [], True, True),
        ({"acked": 60}, {}, [], False, True),
    ],
    ids=["empty", "with a consumer", "in flight", "delayed", "dead letters", "not all workers answered"],
)
async def test_an_unknown_queue_is_listed_only_while_it_has_messages_by_the_command_and_on_the_dashboard(
    metrics: dict[str, Any], dead: dict[str, int], consumed: list[str], complete: bool, listed: bool
) -> None:
    told = OpenReport({"typo": metrics}, complete=complete)
    statistics = {
        "complete": complete,
        "queues": {"typo": {**empty_metrics(), "waiting": 0, **metrics}},
        "workers": [],
        "backlog": {"counted": True, "complete": True},
    }
    client = ClientSettings.read("kafka:9092", {}, owner="test")
    namespace = DashboardQueries(Mock(), Mock(), client, lambda: in_file(emails={}), Mock())
    namespace._groups.names = AsyncMock(return_value=[client.names.group(queue) for queue in consumed])  # type: ignore[method-assign]

    document = described(in_file(emails={}), told, Waiting(), dead, ["emails", "typo"], (), consumed)
    known = await namespace.known(statistics)
    rows = queue_rows(statistics, ["emails"], {}, dead, known)

    expected = ["emails", *(["typo"] if listed else [])]
    assert [row["queue"] for row in document["queues"]] == expected
    assert [row["queue"] for row in rows] == expected


@pytest.mark.parametrize("broker_answers", [True, False])
async def test_the_dashboard_lists_all_queues_while_it_does_not_know_which_are_unknown(broker_answers: bool) -> None:
    statistics = {
        "complete": True,
        "queues": {"typo": {**empty_metrics(), "waiting": 0}},
        "workers": [],
        "backlog": {"counted": broker_answers, "complete": not broker_answers},
    }
    client = ClientSettings.read("kafka:9092", {}, owner="test")
    namespace = DashboardQueries(Mock(), Mock(), client, lambda: in_file(emails={}), Mock())
    namespace._groups.names = AsyncMock(return_value=[] if broker_answers else None)  # type: ignore[method-assign]

    rows = queue_rows(statistics, ["emails"], {}, {}, await namespace.known(statistics))

    assert [row["queue"] for row in rows] == ["emails", "typo"]
