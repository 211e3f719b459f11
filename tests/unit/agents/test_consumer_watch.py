"""Finding queues that have waiting messages and no consumer, with as few requests as possible."""

from __future__ import annotations

from typing import Any

import pytest

from marq_worker.backlog.consumer_watch import NO_CONSUMER_S, STALLED_S, Unattended, has_no_consumer, is_stalled

STEP_S = 5.0


def look(found: Unattended, waiting: set[str], unattended: set[str], **acquired: int) -> list[str]:
    suspects = sorted(found.look(acquired, waiting, STEP_S))
    found.note(suspects, unattended, STEP_S)
    return suspects


def test_no_request_is_made_for_queues_that_progress_or_are_empty() -> None:
    found = Unattended()

    assert look(found, {"emails"}, set(), emails=10, reports=3) == []
    assert look(found, {"emails"}, set(), emails=11, reports=3) == []
    # The first message came after the last look: it has had no time to be taken.
    assert look(found, {"emails", "reports"}, set(), emails=12, reports=3) == []
    assert look(found, {"emails", "reports"}, set(), emails=13, reports=3) == ["reports"]


def test_a_queue_has_no_consumer_after_a_grace_period() -> None:
    found, looks = Unattended(), 0
    look(found, {"emails"}, {"emails"})

    while not has_no_consumer({"waiting": 1, **found.metrics("emails")}):
        assert look(found, {"emails"}, {"emails"}) == ["emails"]
        looks += 1

    assert looks == NO_CONSUMER_S / STEP_S


@pytest.mark.parametrize(
    ("waiting", "unattended", "acquired"),
    [
        ({"emails"}, set(), 3),
        # Drained, or paused, which is why nothing of it waits here.
        (set(), set(), 3),
        # A client outside the group acquires.
        ({"emails"}, {"emails"}, 4),
    ],
    ids=["a consumer came", "nothing waits", "messages are acquired"],
)
def test_the_time_without_a_consumer_begins_again(waiting: set[str], unattended: set[str], acquired: int) -> None:
    found = Unattended()
    for _ in range(10):
        look(found, {"emails"}, {"emails"}, emails=3)
    assert found.metrics("emails")["no_consumer_seconds"] > NO_CONSUMER_S

    look(found, waiting, unattended, emails=acquired)

    assert found.metrics("emails")["no_consumer_seconds"] == 0


def test_a_queue_that_is_gone_is_forgotten() -> None:
    found = Unattended()
    look(found, {"emails"}, set())
    look(found, set(), set())

    assert found.metrics("emails") == {}


WAITS = {"waiting": 3, "in_flight": 0, "idle_seconds": STALLED_S, "no_consumer_seconds": 0.0}


@pytest.mark.parametrize(
    ("changed", "stalled"),
    [
        ({}, True),
        # A consumer with slow handlers holds all that it may.
        ({"in_flight": 1, "idle_seconds": 3_600.0}, False),
        ({"idle_seconds": STALLED_S - 1}, False),
        ({"waiting": 0}, False),
        ({"no_consumer_seconds": NO_CONSUMER_S}, False),
    ],
)
def test_slow_handlers_are_not_a_stall(changed: dict[str, Any], stalled: bool) -> None:
    assert is_stalled(WAITS | changed) == stalled
