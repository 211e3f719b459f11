"""Messages that their tracker should have redelivered or dead-lettered long ago."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from marq.wire.markers import BLOCKED_MS
from tests.pipeline.directory import Directory
from tests.pipeline.stories import DRAWN, MESSAGES_TOPIC, Log, at

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

OVERDUE = ["overdue and not sent"]


class Releases(Log):
    def acquired(self, queue: str, offset: int, **said: Any) -> str:
        """Send a message that a consumer acquires at second 2."""
        id_ = self.record(offset, 1)
        self.messages[-1]["queue"] = queue
        self.say("ACQUIRE", offset, 2, queue=queue, **said)
        return id_

    def released(self, queue: str, offset: int, *, in_order: bool = False, **said: Any) -> str:
        """Send a message that a consumer acquires and releases at second 3, by default without a delay."""
        id_ = self.acquired(queue, offset, in_order=in_order)
        self.say("RELEASE", offset, 3, queue=queue, counted=True, **said)
        return id_


def told(spark: SparkSession, path: Path, log: Log, **settings: Any) -> dict[str, Row]:
    """Return the rows of messages whose tracker was active from second 0 to 3,000, and idle in between."""
    for now in (0, 3_000):
        log.say("TICK", None, now, None, queue=None)
    directory = Directory(spark, path, {MESSAGES_TOPIC: {"0": 0}}, **settings)
    return {row.id: row for row in directory.lifecycle(log.tables()).collect()}


def test_a_message_is_overdue_after_the_longest_backoff_of_its_queue(spark: SparkSession, tmp_path: Path) -> None:
    log = Releases()
    overdue, later = log.released("q", 0), log.released("slow", 1)
    last, again = log.released("q", 2, in_order=True, cause="LAST"), log.released("q", 3, in_order=True)
    dead = log.released("q", 4, in_order=True, cause="LAST")
    log.letter(0, 4, dead, 3.4)
    log.say("DEAD_LETTERED", 4, 3.5, attempt=1, cause="RELEASED", holder="f" * 16)

    rows = told(spark, tmp_path, log, backoffs={"*": 600_000, "slow": 10_000_000_000})

    differences = {id_: row.differences for id_, row in rows.items()}
    assert differences == {overdue: OVERDUE, later: [], last: OVERDUE, again: [], dead: []}
    assert rows[dead].deliveries[0].late_ms == 500


def ms(seconds: float) -> int:
    return int(at(seconds).timestamp() * 1000)


def test_no_redelivery_is_overdue_during_a_pause_of_its_queue_and_soon_after_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    log = Releases()
    ids = [log.released("paused", 0), log.acquired("paused", 1), log.acquired("q", 2), log.acquired("paused", 3)]
    log.say("REJECT", 3, 3, queue="paused", text="bad")
    ids += [log.acquired("resumed", 4), log.acquired("earlier", 5)]

    paused_at = {"*": 0, "paused": ms(3_001), "resumed": ms(2_500), "earlier": ms(2_300)}
    rows = told(spark, tmp_path, log, paused_at=paused_at)

    # Its tracker dead-letters messages during a pause, too.
    assert [rows[id_].differences for id_ in ids] == [[], [], OVERDUE, OVERDUE, [], OVERDUE]


def test_no_message_is_overdue_until_its_tracker_has_had_time_after_an_outage(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}})

    def differences(*ticks: tuple[str, float], log: Log | None = None) -> list[str]:
        log = log or Log()
        for holder, now in ticks:
            log.say("TICK", None, now, None, queue=None, holder=holder)
            log.markers[-1]["log_offset"] = int(now)
        [row] = directory.lifecycle(log.tables()).collect()
        return list(row.differences)

    log = Releases()
    log.acquired("q", 0)

    assert differences(("a", 1), ("b", 3_000), ("b", 3_100), log=log) == []
    # Another worker takes its partition over at once.
    assert differences(("b", 3_500), ("c", 3_590)) == []
    assert differences(("c", 3_610)) == OVERDUE
    assert differences(("d", 7_000)) == []


def test_a_reschedule_that_is_too_late_does_not_move_a_message(spark: SparkSession, tmp_path: Path) -> None:
    log, later = Releases(), at(100_000)
    leased = log.acquired("q", 0)
    log.say("RESCHEDULE", 0, 2.5, due_at=later)
    log.say("RELEASE", 0, 3, delay_ms=1_000, counted=True)
    log.say("DELAY", 0, 1, DRAWN, due_at=at(10))
    log.say("DELIVERED", 0, 10.5, DRAWN, attempt=1, cause="DUE", holder="f" * 16)
    log.say("RESCHEDULE", 0, 11, DRAWN, due_at=later)
    log.record(1, 10.4, copy_of=f"{DRAWN}/0/0", attempt=1)

    rows = told(spark, tmp_path, log)

    assert rows[leased].differences == OVERDUE
    assert rows[f"{DRAWN}/0/0"].deliveries[0].late_ms == 500


def test_a_message_that_was_also_moved_in_time_is_not_late_because_of_a_reschedule_that_is_too_late(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A sender that debounces moves its message again and again."""
    log = Releases()
    log.say("DELAY", 0, 1, DRAWN, due_at=at(5))
    log.say("RESCHEDULE", 0, 4, DRAWN, due_at=at(900))
    log.say("DELIVERED", 0, 900.5, DRAWN, attempt=1, cause="DUE", holder="f" * 16)
    log.say("RESCHEDULE", 0, 901, DRAWN, due_at=at(100_000))
    log.record(1, 900.4, copy_of=f"{DRAWN}/0/0", attempt=1)

    [delivery, _] = told(spark, tmp_path, log)[f"{DRAWN}/0/0"].deliveries

    assert (delivery.late_ms, delivery.due_at) == (None, delivery.ended_at)


def test_a_blocking_message_whose_record_is_gone_is_not_early(spark: SparkSession, tmp_path: Path) -> None:
    log = Releases()
    id_ = log.released("q", 0, in_order=True, delay_ms=BLOCKED_MS)
    log.say("RESUME", 50, 4)
    log.say("REDELIVERED", 0, 4.5, attempt=2, cause="RELEASED", holder="f" * 16)
    log.record(100, 4.4, copy_of=id_, attempt=2)
    log.say("ACQUIRE", 100, 5, attempt=2, id=id_)
    log.say("ACK", 100, 6)

    row = told(spark, tmp_path, log)[id_]

    assert (row.state, row.differences) == ("acked", [])
    assert [delivery.late_ms for delivery in row.deliveries] == [0, None]
