"""Whether the messages of an ordering key ended in their order, as the audit tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.directory import Directory
from tests.pipeline.stories import MESSAGES_TOPIC, Log, at

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

FACT = {"holder": "f" * 16}


class Lines(Log):
    """Messages of lines; a line is a number."""

    def sent(self, line: int | None, *offsets: int) -> list[str]:
        """Send messages that a consumer acquires at once."""
        places = [self.record(offset, 1) for offset in offsets]
        for offset in offsets:
            self.acquired(offset, line)
        return places

    def acquired(self, offset: int, line: int | None, **said: Any) -> None:
        self.say("ACQUIRE", offset, 2, in_order=True, line=line, **said)


def told(directory: Directory, log: Log) -> dict[str, tuple[list[str], list[str]]]:
    """Ingest a log; return the differences and the pending ones of each message that has some."""
    log.say("TICK", None, 2_000, None, queue=None)
    rows = directory.lifecycle(log.tables()).collect()
    return {row.id: (row.differences, row.pending) for row in rows if row.differences or row.pending}


@pytest.fixture
def directory(spark: SparkSession, tmp_path: Path) -> Directory:
    return Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}})


def before(place: str) -> str:
    return f"delivered before an earlier message with its key was finished: {place}"


def test_a_message_that_was_finished_before_an_earlier_one_of_its_key_is_a_difference(directory: Directory) -> None:
    log = Lines()
    late, early = log.sent(1, 0, 1)
    log.say("ACK", 1, 3)
    log.say("ACK", 0, 4)
    late_too, failed = log.sent(2, 2, 3)
    log.say("RELEASE", 3, 3, counted=True, text="boom")
    log.say("ACK", 2, 4)
    log.acquired(3, 2, attempt=2)
    log.say("ACK", 3, 5)

    assert told(directory, log) == {early: ([before(late)], []), failed: ([before(late_too)], [])}


def test_each_end_lets_the_next_message_follow(directory: Directory) -> None:
    log = Lines()
    places = log.sent(1, 0, 1, 2, 3, 4)
    log.say("RELEASE", 0, 3, counted=True, text="boom")
    log.acquired(0, 1, attempt=2)
    log.say("ACK", 0, 4)
    log.say("REJECT", 1, 5, text="bad")
    log.say("RELEASE", 2, 6, cause="LAST", counted=True, text="boom")
    # Trackers tell of both later.
    log.say("ACK", 3, 7)
    log.say("ACK", 4, 8)
    for offset, cause in (1, "REJECTED"), (2, "RELEASED"):
        log.letter(offset, offset, places[offset], 8.5)
        log.say("DEAD_LETTERED", offset, 9, attempt=1, cause=cause, **FACT)

    assert told(directory, log) == {}


def test_other_keys_no_key_and_other_queues_have_no_order_among_each_other(directory: Directory) -> None:
    log = Lines()
    for line, offset in (1, 0), (2, 1), (None, 2), (None, 3):
        log.sent(line, offset)
    for offset in (3, 1, 2, 0):
        log.say("ACK", offset, 4)

    assert told(directory, log) == {}


def test_a_message_whose_record_was_gone_may_come_after_later_ones(directory: Directory) -> None:
    log = Lines()
    gone, _ = log.sent(1, 0, 1)
    log.say("ACK", 1, 3)
    log.say("REDELIVERED", 0, 4, attempt=1, cause="RELEASED", **FACT)
    log.record(9, 4, copy_of=gone, attempt=1)
    log.acquired(9, 1, id=gone)
    log.say("ACK", 9, 5)

    assert told(directory, log) == {}


def test_a_message_whose_record_was_gone_may_also_end_after_later_ones(directory: Directory) -> None:
    log = Lines()
    gone, _ = log.sent(1, 0, 1)
    log.say("ACK", 1, 3)
    log.letter(0, 0, gone, 32)
    log.say("DEAD_LETTERED", 0, 33, attempt=1, cause="EXPIRED", **FACT)

    assert told(directory, log) == {}


def test_a_message_that_was_acquired_with_a_due_time_is_outside_its_line(directory: Directory) -> None:
    log = Lines()
    for offset in range(3):
        log.record(offset, 1)
    # Too large for a marker; a later time, which is still to come.
    log.acquired(0, 1, due_at=at(2))
    log.acquired(1, 1, due_at=at(5_000))
    log.acquired(2, 1)
    log.say("ACK", 2, 3)
    log.letter(0, 0, f"{MESSAGES_TOPIC}/0/0", 8.5)
    log.say("DEAD_LETTERED", 0, 9, attempt=1, cause="TOO_LARGE", **FACT)

    assert told(directory, log) == {}


def test_what_an_open_message_makes_of_a_later_one_is_pending_until_it_ends(directory: Directory) -> None:
    first = Lines()
    opened, early = first.sent(1, 0, 1)
    first.say("ACK", 1, 3)
    assert told(directory, first) == {early: ([], [before(opened)])}
    second = Lines(after=first)
    second.say("ACK", 0, 3_000)

    assert told(directory, second) == {early: ([before(opened)], [])}


def test_a_cancel_or_reject_without_effect_ends_no_message(directory: Directory) -> None:
    log = Lines()
    leased, early = log.sent(1, 0, 1)
    log.say("CANCEL", 0, 3)
    log.say("ACK", 1, 4)
    log.say("ACK", 0, 5)
    taken, early_too = log.sent(2, 2, 3)
    log.acquired(2, 2, attempt=2, holder="b" * 16)
    log.say("REJECT", 2, 3, text="bad")
    log.say("ACK", 3, 4)
    log.say("ACK", 2, 5, holder="b" * 16)
    # The fact of this one is still to come.
    log.sent(3, 4, 5)
    log.say("REJECT", 4, 3, text="bad")
    log.say("ACK", 5, 4)

    assert told(directory, log) == {early: ([before(leased)], []), early_too: ([before(taken)], [])}
