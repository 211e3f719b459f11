"""Of which worker it is said that it lives, and that it is ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from marq_worker.config.settings import Role
from marq_worker.progress import PartitionProgress
from marq_worker.web.liveness_and_readiness import (
    MAX_LAG_RECORDS,
    MAX_LOOP_LAG_SECONDS,
    Condition,
    document,
    not_live,
    not_ready,
)

WELL = Condition(roles=frozenset(Role), partitions={0: ("owner", "")}, handlers={"background": True})
BEHIND = MAX_LAG_RECORDS + 1


def test_a_worker_that_does_all_of_its_work_lives_and_is_ready() -> None:
    assert not_live(WELL) == not_ready(WELL) == []
    assert document("ready", not_ready(WELL)) == {"ready": True, "reasons": []}


@pytest.mark.parametrize(
    ("wrong", "subject", "found"),
    [
        ({"stopping": True}, "worker", "is stopping"),
        ({"broker_answers": False}, "broker", "does not answer"),
        ({"rebalancing": True}, "group of the trackers", "a rebalance is under way"),
        ({"assigned": False}, "group of the trackers", "has not assigned partitions to this worker yet"),
        ({"partitions": {3: ("recovering", "")}}, "markers partition 3", "recovering"),
        ({"partitions": {3: ("stopped", "marker version 9")}}, "markers partition 3", "stopped: marker version 9"),
        (
            {"handlers": {"background": False}},
            "handlers of group background",
            "their process does not run; the worker's log shows why it ends",
        ),
        ({"unassigned": ["group g"]}, "group g", "no member has a partition, so nothing is read"),
        (
            {"paces": {0: PartitionProgress(0, BEHIND, read_per_second=5, written_per_second=10)}},
            "markers partition 0",
            f"falls behind: {BEHIND} records are not read, 10/s are written, 5/s read",
        ),
    ],
)
def test_what_keeps_a_worker_from_being_ready_is_no_reason_to_restart_it(
    wrong: dict[str, Any], subject: str, found: str
) -> None:
    condition = replace(WELL, **wrong)

    assert document("ready", not_ready(condition)) == {
        "ready": False,
        "reasons": [{"subject": subject, "found": found}],
    }
    assert not_live(condition) == []


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"stalled": ["markers partition 2"]}, "markers partition 2"),
        ({"loop_lag_seconds": MAX_LOOP_LAG_SECONDS + 1}, "event loop"),
        ({"blocked": {"background": MAX_LOOP_LAG_SECONDS + 1}}, "handlers of group background"),
    ],
)
def test_problems_that_a_restart_would_fix_are_not_live_and_not_ready(wrong: dict[str, Any], subject: str) -> None:
    condition = replace(WELL, **wrong)

    assert [reason.subject for reason in not_live(condition)] == [subject]
    assert [reason.subject for reason in not_ready(condition)] == [subject]


def test_a_partition_that_is_behind_and_catches_up_is_ready() -> None:
    catching_up = PartitionProgress(0, BEHIND, read_per_second=10, written_per_second=5)

    assert not_ready(replace(WELL, paces={0: catching_up})) == []


def test_a_worker_without_the_role_tracker_needs_no_partitions() -> None:
    condition = Condition(roles={Role.WEB}, assigned=False)

    assert not_ready(condition) == []
