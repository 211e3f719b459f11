"""Messages that were dropped because their deduplication ids were accepted before: not lost, and not waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.audit import balanced, judged
from pipeline.audit import verdict as audited
from pipeline.record_parts import Id
from tests.pipeline.directory import Directory
from tests.pipeline.stories import DRAWN, Log, at

pytestmark = pytest.mark.timeout(900)
WINDOW_S = 300


def story() -> list[Log]:
    """Two rounds: an accepted message and a duplicate; another duplicate, and two that are none."""
    first = Log()
    second = Log(after=first)
    fact: dict[str, Any] = {"holder": "f" * 16, "attempt": 1, "cause": "DUE"}
    first.say("DELAY", 0, 1, DRAWN, due_at=at(1), text="x")
    first.say("DELIVERED", 0, 2, DRAWN, **fact)
    first.record(0, 2, copy_of=f"{DRAWN}/0/0", attempt=1)
    first.say("ACQUIRE", 0, 3, id=f"{DRAWN}/0/0")
    first.say("ACK", 0, 4)
    first.say("DELAY", 1, 5, DRAWN, due_at=at(5), text="x")
    first.say("TICK", None, 6, None, queue=None)
    second.say("DELAY", 2, 7, DRAWN, due_at=at(7), text="x")
    second.say("DELAY", 3, 8, DRAWN, due_at=at(8), text="y")
    # Within the window of a duplicate, but not of the accepted message.
    second.say("DELAY", 4, 2 + WINDOW_S, DRAWN, due_at=at(2 + WINDOW_S), text="x")
    second.say("TICK", None, 3_000, None, queue=None)
    return [first, second]


@pytest.mark.verify
def test_a_duplicate_is_neither_lost_nor_open_and_others_with_its_id_are(spark: SparkSession, tmp_path: Path) -> None:
    directory = Directory(spark, tmp_path)
    for log in story():
        table = directory.lifecycle(log.tables())

    rows = {row.id: row for row in table.collect()}
    states = {number: rows[f"{DRAWN}/0/{number}"].state for number in range(5)}
    assert states == {0: "acked", 1: "deduplicated", 2: "deduplicated", 3: "delayed", 4: "delayed"}
    found = audited(judged(table))
    [counts] = found["queues"].values()
    assert (counts["sent"], counts["deduplicated"], counts["lost"], counts["differences"]) == (5, 2, 0, 2)
    assert balanced(counts)
    assert {message["id"] for message in found["wrong"]} == {f"{DRAWN}/0/3", f"{DRAWN}/0/4"}


@pytest.mark.parametrize(
    ("windows", "dropped"),
    [
        # A dropped message does not extend the window.
        ((5, 5), [False, True, False, True, False]),
        # The first window may have been the longer one, or the second one.
        ((3, 5), [False, True, True, True, True]),
        ((0, 5), [False, True, True, True, True]),
    ],
)
def test_a_message_may_be_dropped_within_the_window_of_one_that_may_be_accepted(
    windows: tuple[int, int], dropped: list[bool]
) -> None:
    id_ = Id()

    assert [id_.may_drop(now, False, *windows) for now in (0, 4, 8, 12, 16)] == dropped


def test_a_message_with_a_fact_was_accepted_although_an_earlier_one_is_unknown() -> None:
    id_ = Id()

    # The first one was a duplicate of a message before the first ingest.
    assert [id_.may_drop(now, now == 4, 5, 5) for now in (0, 4, 8, 9)] == [False, False, True, False]
