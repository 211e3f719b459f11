"""One row for each message: what becomes of it, story by story."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from pipeline.audit import balanced, judged
from pipeline.jobs.audit import verdict
from pipeline.lifecycle_runs import TABLE, Run
from tests.pipeline.conftest import Command
from tests.pipeline.directory import Directory
from tests.pipeline.stories import DRAWN, LEASE_MS, MESSAGES_TOPIC, Log, at, told

pytestmark = pytest.mark.timeout(900)


def of_row(row: Row, wanted: dict[str, Any]) -> dict[str, Any]:
    """What a row says of what is asked."""
    each = {"outcomes": "outcome", "wait_ms": "wait_ms", "run_ms": "run_ms", "late_ms": "late_ms", "holders": "holder"}
    found = {name: [delivery[of] for delivery in row.deliveries] for name, of in each.items()}
    found |= {"differences": len(row.differences)}
    return {name: found[name] if name in found else row[name] for name in wanted}


def test_each_story_ends_as_the_protocol_says(stories: Directory, command: Command) -> None:
    wanted = told()[1]

    done = command(f"lifecycle --data {stories.path}")

    assert done.code == 0
    assert done.out.startswith(f"lifecycle of {len(wanted)} messages in ")
    table = stories.lake.read(TABLE)
    rows = {row.id: row for row in table.collect()}
    judgements = {row.id: row for row in judged(table).collect()}
    of_judgement = {"causes", "duplicates", "acked_and_dead"}
    found = {}
    for id_, asked in wanted.items():
        plain = {"open": False, "differences": 0, **{n: v for n, v in asked.items() if n not in of_judgement}}
        wanted[id_] = {**plain, **{name: asked[name] for name in asked if name in of_judgement}}
        found[id_] = of_row(rows[id_], plain) | {n: judgements[id_][n] for n in asked if n in of_judgement}
    assert rows.keys() == wanted.keys()
    assert found == wanted
    statistics = verdict(judged(table))
    assert balanced(statistics)
    names = ("sent", "acked", "dead", "acked_and_dead", "open", "delayed", "cancelled", "abandoned", "expired_unread")
    names = (*names, "message_expired")
    assert {name: statistics[name] for name in names} == {
        "sent": 36, "acked": 14, "dead": 7, "acked_and_dead": 1, "open": 8, "delayed": 2, "cancelled": 2,
        "abandoned": 1, "expired_unread": 1, "message_expired": 1,
    }  # fmt: skip
    assert {message["id"] for message in statistics["wrong"]} == {
        f"{MESSAGES_TOPIC}/0/17", f"{MESSAGES_TOPIC}/0/23", f"{DRAWN}/0/2",
    }  # fmt: skip


@pytest.mark.verify
def test_what_consumers_read_behind_an_open_transaction_is_no_difference(spark: SparkSession, tmp_path: Path) -> None:
    log = Log()
    log.say("ACQUIRE", 7, 2)
    log.say("ACK", 7, 3)
    log.say("TICK", None, 2_000, None, queue=None)
    late = Log(after=log)
    id_ = late.record(7, 1)
    late.say("TICK", None, 4_000, None, queue=None)
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}}, held_back=[f"{MESSAGES_TOPIC}/0"])

    [before] = directory.lifecycle(log.tables()).collect()
    directory.held_back = []
    [after] = directory.lifecycle(late.tables()).collect()

    assert (before.id, before.differences) == (id_, [])
    assert before.pending == [f"acquired, but the record does not exist: {id_}"]
    assert (after.id, after.state, after.known, after.differences, after.pending) == (id_, "acked", True, [], [])


@pytest.mark.verify
def test_requests_alone_do_not_show_that_a_message_was_lost(spark: SparkSession, tmp_path: Path) -> None:
    log = Log()
    # An aborted redelivery, whose place a consumer had read, and one whose ACQUIRE is lost.
    log.say("RESCHEDULE", 7, 2, due_at=at(20))
    log.say("CANCEL", 7, 3)
    log.say("RENEW", 8, 3, lease_ms=LEASE_MS)
    log.say("TICK", None, 2_000, None, queue=None)
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}})

    differences = {row.id: row.differences for row in directory.lifecycle(log.tables()).collect()}

    assert differences == {f"{MESSAGES_TOPIC}/0/7": [], f"{MESSAGES_TOPIC}/0/8": ["the first record is missing"]}


def test_markers_without_messages_make_an_empty_table(spark: SparkSession, tmp_path: Path) -> None:
    log = Log()
    log.say("TICK", None, 0, None, queue=None)
    directory = Directory(spark, tmp_path)
    directory.bring(log.tables())

    assert Run(spark, directory.lake).take() == 0
    assert directory.lake.read(TABLE).collect() == []
