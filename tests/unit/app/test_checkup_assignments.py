"""What is judged of groups that have members and no partitions."""

from __future__ import annotations

from collections import Counter

import pytest

from app.checkup.assignments import judge_assignments, queues_unassigned, unassigned
from app.checkup.findings import Level
from app.checkup.reading import Reader
from marq.core.definitions import Definitions
from marq.core.names import Names
from marq.inspector import Waiting

NAMES = Names("shop")
EMAILS = NAMES.group("emails")
IDLE, BUSY, EMPTY = Reader(EMAILS, 2, assigned=False), Reader(EMAILS, 2), Reader(EMAILS, 0, assigned=False)


@pytest.mark.parametrize(("first", "second"), [(IDLE, BUSY), (BUSY, IDLE), (EMPTY, EMPTY), (BUSY, BUSY)])
def test_a_rebalance_and_a_group_without_members_are_not_reported(first: Reader, second: Reader) -> None:
    assert unassigned([first], [second]) == []


def test_a_group_without_partitions_is_a_problem_and_says_how_many_messages_wait() -> None:
    groups, definitions = unassigned([IDLE], [IDLE]), Definitions()
    queues = queues_unassigned(NAMES, definitions, groups)

    [finding] = judge_assignments(NAMES, definitions, groups, Waiting(Counter(emails=1_500), complete=False))

    assert queues == ["emails"]
    assert (finding.level, finding.subject) == (Level.PROBLEM, f"group {EMAILS}")
    assert finding.found == (
        "none of its members (2) has a partition, so nothing is read; messages waiting: 1,500 or more"
    )
