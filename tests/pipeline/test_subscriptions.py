"""Topics that several queues name: each record is a message of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source
from marq.wire.names import incarnation
from pipeline.audit import balanced, judged, verdict
from pipeline.lifecycle_runs import TABLE
from pipeline.subscriptions import Subscription
from tests.pipeline.directory import Directory
from tests.pipeline.stories import LETTERS_TOPIC, MESSAGES_TOPIC, Log, at

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

TOPIC = "orders"
A, B = Subscription("a", TOPIC, current=True), Subscription("b", TOPIC, current=True)
HOLDERS = {"a": "a" * 16, "b": "b" * 16}
FACT = {"holder": "f" * 16}


class Orders(Log):
    """Records of a topic that queues name, and what these do with them."""

    def sent(self, offset: int, seconds: float = 1) -> str:
        row = {"topic": TOPIC, "partition": 0, "offset": offset, "sent_at": at(seconds), "size": 5}
        self.messages.append(row)
        return f"{TOPIC}/0/{offset}"

    def copy(self, queue: str, offset: int, seconds: float, of: str, **said: Any) -> None:
        self.record(offset, seconds, copy_of=of, **said)
        self.messages[-1]["queue"] = queue

    def dead(self, queue: str, offset: int, of: int, id_: str, seconds: float) -> None:
        self.letter(offset, of, id_, seconds, topic=TOPIC)
        self.letters[-1]["queue"] = queue

    def of(self, queue: str, kind: str, offset: int, seconds: float, topic: str = TOPIC, **said: Any) -> None:
        self.say(kind, offset, seconds, topic, **{"queue": queue, "holder": HOLDERS.get(queue, "c" * 16), **said})

    def mixed(self, holder: str, offset: int, seconds: float, topic: str = TOPIC) -> None:
        """An ACK of several queues."""
        self.of("", "ACK", offset, seconds, topic, holder=holder)


@pytest.fixture
def directory(spark: SparkSession, tmp_path: Path) -> Directory:
    return Directory(spark, tmp_path, {TOPIC: {"0": 0}}, {TOPIC: {"0": 0}}, subscriptions=[A, B])


def states(directory: Directory, log: Orders, seconds: float = 2_000) -> dict[tuple[str, str], str]:
    """Ingest a log; return the state of each message by queue and id."""
    for now in (0, seconds):
        log.say("TICK", None, now, None, queue=None)
    rows = directory.lifecycle(log.tables()).collect()
    found = {(row.queue, row.id): row.state for row in rows}
    assert len(found) == len(rows)
    return found


def wrong(directory: Directory) -> Sequence[tuple[str, str]]:
    """Return queue and id of each message with a difference."""
    audit = verdict(judged(directory.lake.read(TABLE)))
    assert all(balanced(counts) for counts in audit["queues"].values())
    return [(message["queue"], message["id"]) for message in audit["wrong"]]


def test_each_queue_has_its_own_message_of_a_record(directory: Directory) -> None:
    log = Orders()
    both, failed, kept = (log.sent(offset) for offset in range(3))
    lost, later = log.sent(3), log.sent(4)
    for queue in ("a", "b"):
        log.of(queue, "ACQUIRE", 0, 2)
        log.of(queue, "ACQUIRE", 1, 2)
    log.of("a", "ACK", 0, 3)
    # Redelivered to one queue only, with an attempt and a place of its own.
    log.of("a", "RELEASE", 1, 4, delay_ms=1_000, counted=True, text="boom")
    log.of("b", "ACK", 1, 4)
    log.of("a", "REDELIVERED", 1, 5, attempt=2, cause="RELEASED", **FACT)
    log.copy("a", 0, 5, failed, attempt=2)
    log.of("a", "ACQUIRE", 0, 6, MESSAGES_TOPIC, attempt=2, id=failed)
    log.of("a", "ACK", 0, 7, MESSAGES_TOPIC)
    log.of("b", "RELEASE", 0, 7, delay_ms=10_000_000, counted=True)
    # One queue has passed a record over, the other has not read so far.
    log.of("a", "ACQUIRE", 2, 8)
    log.of("a", "ACK", 2, 9)
    log.of("a", "ACQUIRE", 4, 1_999, from_offset=3)

    assert states(directory, log) == {
        ("a", both): "acked", ("b", both): "released", ("a", failed): "acked", ("b", failed): "acked",
        ("a", kept): "acked", ("b", kept): "waiting", ("a", lost): "lost", ("b", lost): "waiting",
        ("a", later): "leased", ("b", later): "waiting",
    }  # fmt: skip
    assert wrong(directory) == [("a", lost)]
    found = verdict(judged(directory.lake.read(TABLE)))["queues"]
    counts = {queue: [found[queue][name] for name in ("sent", "acked", "open", "lost")] for queue in ("a", "b")}
    assert counts == {"a": [5, 3, 1, 1], "b": [5, 1, 4, 0]}
    # Handlers of each queue finish their own deliveries.
    done = [(TOPIC, 0, 1, "b"), (MESSAGES_TOPIC, 0, 0, "a"), (TOPIC, 0, 0, "b"), (TOPIC, 0, 0, "b")]
    handled = directory.spark.createDataFrame(done, "topic string, partition long, offset long, queue string")
    rows = judged(directory.lake.read(TABLE), handled).where("duplicates > 0").collect()
    assert [(row.queue, row.id, row.duplicates) for row in rows] == [("b", both, 1)]
    attempts = {row.queue: row.attempts for row in directory.lake.read(TABLE).where(f"id = '{failed}'").collect()}
    assert attempts == {"a": 2, "b": 1}


def test_an_ack_of_several_queues_ends_the_message_that_its_holder_acquired(directory: Directory) -> None:
    log = Orders()
    one, two, three = (log.sent(offset) for offset in range(3))
    for queue, offsets in ("b", (0, 1)), ("a", (0, 1, 2)):
        for offset in offsets:
            log.of(queue, "ACQUIRE", offset, 2)
    log.mixed(HOLDERS["b"], 0, 3)
    log.mixed(HOLDERS["a"], 0, 4)
    log.mixed(HOLDERS["a"], 1, 4)
    plain = log.record(8, 4)
    log.of("q", "ACQUIRE", 8, 5, MESSAGES_TOPIC)
    log.mixed("d" * 16, 8, 6, MESSAGES_TOPIC)
    found = states(directory, log)

    assert {(queue, id_) for (queue, id_), state in found.items() if state == "acked"} == {
        ("a", one), ("b", one), ("a", two), ("q", plain),
    }  # fmt: skip
    assert {found["b", two], found["a", three]} == {"leased"}
    # The ACQUIRE of one queue was in the former round.
    later = Orders(after=log)
    later.mixed(HOLDERS["a"], 2, 2_001)
    later.of("b", "ACQUIRE", 2, 2_001)
    found = states(directory, later, 2_002)
    assert (found["a", three], found["b", three]) == ("acked", "leased")
    # A second ACK of a finished message, by a holder that is not in use any more.
    again = Orders(after=later)
    again.mixed(HOLDERS["a"], 0, 2_003)
    assert states(directory, again, 2_004) == found


def test_an_ack_of_several_queues_ends_the_message_of_the_only_queue(directory: Directory) -> None:
    directory.subscriptions = [A]
    log = Orders()
    id_ = log.sent(0)
    log.of("a", "ACQUIRE", 0, 2)
    log.mixed("d" * 16, 0, 3)

    assert states(directory, log) == {("a", id_): "acked"}


def test_dead_letters_of_each_queue_are_redriven_on_their_own(directory: Directory) -> None:
    log = Orders()
    id_ = log.sent(0)
    for number, queue in enumerate(("a", "b")):
        log.of(queue, "ACQUIRE", 0, 2)
        log.of(queue, "REJECT", 0, 3, text="bad")
        log.dead(queue, number, 0, id_, 3.4)
        log.of(queue, "DEAD_LETTERED", 0, 3.5, attempt=1, cause="REJECTED", **FACT)
    assert states(directory, log) == {("a", id_): "dead", ("b", id_): "dead"}

    # Much later: one is redriven to its queue, the other to a third queue, which gets it twice.
    later = Orders(after=log)
    for number, queue in enumerate(("a", "hospital")):
        later.of(queue, "DELAY", number, 2_001, LETTERS_TOPIC, due_at=at(2_001), from_offset=number, id=id_)
        later.copy(queue, number, 2_002, id_, attempt=1)
        later.of(queue, "DELIVERED", number, 2_002, LETTERS_TOPIC, attempt=1, cause="DUE", **FACT)
        later.of(queue, "ACQUIRE", number, 2_003, MESSAGES_TOPIC, id=id_)
    later.of("a", "ACK", 0, 2_004, MESSAGES_TOPIC)
    later.of("hospital", "REDELIVERED", 1, 2_034, MESSAGES_TOPIC, attempt=2, cause="EXPIRED", **FACT)
    later.copy("hospital", 2, 2_034, id_, attempt=2)
    later.of("hospital", "ACQUIRE", 2, 2_035, MESSAGES_TOPIC, attempt=2, id=id_)
    later.of("hospital", "ACK", 2, 2_036, MESSAGES_TOPIC)

    expected = {("a", id_): "acked", ("b", id_): "dead", ("hospital", id_): "acked"}
    assert states(directory, later, 4_000) == expected
    assert wrong(directory) == []
    rows = {row.queue: row for row in judged(directory.lake.read(TABLE)).collect()}
    assert {queue: [row.sent, row.duplicates] for queue, row in rows.items()} == {
        "a": [1, 0], "b": [1, 0], "hospital": [1, 1],
    }  # fmt: skip


def started(end: int) -> SkippedRecords:
    """Return the start of a queue after the records before an offset that were sent before second 100."""
    return SkippedRecords(int(at(100).timestamp() * 1000), {Source(TOPIC, 0): end})


def test_records_from_before_the_start_of_a_queue_are_not_its_messages(directory: Directory) -> None:
    start = started(3)
    directory.subscriptions = [A, replace(B, start=start)]
    log = Orders()
    ids = [log.sent(offset, seconds) for offset, seconds in enumerate((1, 1, 200, 1, 1))]
    for offset in (0, 3, 4):
        log.of("a", "ACQUIRE", offset, 1_990, from_offset=0)
    log.of("b", "ACQUIRE", 3, 1_990)
    log.of("b", "ACK", 3, 1_991)

    found = states(directory, log)

    assert {id_: state for (queue, id_), state in found.items() if queue == "b"} == {
        # It was sent after the start, so its partition has been recreated.
        ids[2]: "lost", ids[3]: "acked", ids[4]: "waiting",
    }  # fmt: skip
    left = [start.left(Source(TOPIC, 0), offset, int(at(s).timestamp() * 1000)) for offset, s in ((0, 1), (2, 200))]
    assert left == [False, True]
    assert wrong(directory) == [("a", ids[1]), ("a", ids[2]), ("b", ids[2])]


def test_a_loss_in_a_topic_that_the_first_ingest_did_not_know_is_found(directory: Directory) -> None:
    directory.first, directory.subscriptions = {}, [A]
    log = Orders()
    ids = [log.sent(offset) for offset in range(5)]
    for first, last in (0, 1), (3, 4):
        log.of("a", "ACQUIRE", last, 1_990, from_offset=first)
        log.of("a", "ACQUIRE", first, 1_990)

    assert states(directory, log)["a", ids[2]] == "lost"
    assert wrong(directory) == [("a", ids[2])]


def test_a_purge_cancels_unread_messages_and_hides_no_loss(directory: Directory) -> None:
    log = Orders()
    ids = [log.sent(offset) for offset in range(6)]
    log.of("a", "ACQUIRE", 0, 1_990)
    log.of("a", "ACQUIRE", 2, 1_991, from_offset=1)

    found = states(directory, log)

    assert [found.get(("a", id_)) for id_ in ids] == ["leased", "lost", "leased", *["waiting"] * 3]
    later = Orders(after=log)
    later.of("a", "PURGE", 5, 2_001)
    later.of("a", "ACK", 0, 2_002)
    found = states(directory, later, 2_003)
    assert [found.get(("a", id_)) for id_ in ids] == ["acked", "lost", "leased", "cancelled", "cancelled", "waiting"]
    assert wrong(directory) == [("a", ids[1])]


def test_a_queue_that_names_a_topic_later_gets_the_records_that_are_left(directory: Directory) -> None:
    directory.subscriptions = [A]
    log = Orders()
    ids = [log.sent(offset) for offset in range(4)]
    for offset in range(4):
        log.of("a", "ACQUIRE", offset, 2)
        log.of("a", "ACK", offset, 3)
    assert {*states(directory, log)} == {("a", id_) for id_ in ids}

    # Retention has removed the first record; the second one was acquired before it was removed, too.
    directory.begins = {TOPIC: {"0": 2}}
    directory.subscriptions = [A, replace(B, since={"0": 2})]
    later = Orders(after=log)
    ids.append(later.sent(4))
    later.of("b", "ACQUIRE", 1, 2_001)
    later.of("b", "ACK", 1, 2_002)
    later.of("b", "ACQUIRE", 2, 2_002)

    found = states(directory, later, 2_003)
    of_b = [found.get(("b", id_)) for id_ in ids]
    assert of_b == [None, "acked", "leased", "waiting", "waiting"]
    assert [found["a", id_] for id_ in ids] == [*["acked"] * 4, "waiting"]
    assert wrong(directory) == []
    # The next round changes nothing.
    assert states(directory, Orders(after=later), 2_004) == found


def test_readers_without_spark_find_the_same_columns_before_and_after_a_queue_names_a_topic(
    directory: Directory,
) -> None:
    directory.subscriptions = []
    log = Orders()
    ids = [log.record(offset, 1) for offset in range(2)]
    for offset in range(2):
        log.say("ACQUIRE", offset, 2)
        log.say("ACK", offset, 3)
    states(directory, log)
    directory.subscriptions = [A]
    later = Orders(after=log)
    ids += [later.sent(offset) for offset in range(2)]
    later.of("a", "ACQUIRE", 0, 2_001)
    later.of("a", "ACK", 0, 2_002)
    states(directory, later, 2_003)
    # A late marker opens a closed message again.
    last = Orders(after=later)
    last.say("ACK", 0, 4_000)
    states(directory, last, 4_001)

    commit = directory.lake.last_commit(TABLE)
    assert commit is not None
    parts = [pyarrow.dataset.dataset(directory.path / place, partitioning="hive") for place in commit["places"]]
    assert sorted(pyarrow.dataset.dataset(parts).to_table()["id"].to_pylist()) == sorted(ids)


def test_a_queue_that_stops_naming_a_topic_leaves_its_unread_records(directory: Directory) -> None:
    log = Orders()
    ids = [log.sent(offset) for offset in range(3)]
    log.of("b", "ACQUIRE", 0, 2)
    log.of("b", "ACK", 0, 3)
    directory.subscriptions = [A, replace(B, current=False)]
    found = states(directory, log)
    assert [found.get(("b", id_)) for id_ in ids] == ["acked", None, None]

    # Its consumer stops a little later, …
    later = Orders(after=log)
    later.of("b", "ACQUIRE", 1, 2_001)
    later.of("b", "ACK", 1, 2_001)
    found = states(directory, later, 2_002)
    assert [found.get(("b", id_)) for id_ in ids] == ["acked", "acked", None]
    # … and then it names the topic again.
    directory.subscriptions = [A, B]
    last = Orders(after=later)
    found = states(directory, last, 2_003)
    assert [found.get(("b", id_)) for id_ in ids] == ["acked", "acked", "waiting"]
    assert wrong(directory) == []


def test_a_queue_of_which_only_markers_tell_has_what_it_acquired(directory: Directory) -> None:
    directory.subscriptions = [A]
    log = Orders()
    ids = [log.sent(offset) for offset in range(2)]
    log.of("b", "ACQUIRE", 0, 2)
    log.mixed(HOLDERS["b"], 0, 3)

    assert states(directory, log) == {("b", ids[0]): "acked", ("a", ids[0]): "waiting", ("a", ids[1]): "waiting"}
    assert wrong(directory) == []


def test_a_cancel_that_names_another_queue_has_no_effect(directory: Directory) -> None:
    log = Orders()
    drawn = "~" + "7" * 32
    log.of("a", "DELAY", 0, 1, drawn, due_at=at(100_000))
    log.of("b", "CANCEL", 0, 2, drawn)
    log.of("b", "RESCHEDULE", 0, 3, drawn, due_at=at(3))

    assert states(directory, log) == {("a", f"{drawn}/0/0"): "delayed"}
    assert wrong(directory) == []


def test_a_request_that_names_no_queue_concerns_the_messages_of_all_queues(directory: Directory) -> None:
    log = Orders()
    waiting, moved = (log.sent(offset) for offset in range(2))
    for queue in ("a", "b"):
        for offset in range(2):
            log.of(queue, "ACQUIRE", offset, 2, due_at=at(10))
    log.of("", "CANCEL", 0, 3)
    log.of("", "RESCHEDULE", 1, 3, due_at=at(100_000))
    for queue in ("a", "b"):
        log.of(queue, "CANCELLED", 0, 4, attempt=1, cause="CANCELLED", **FACT)

    assert states(directory, log) == {
        ("a", waiting): "cancelled", ("b", waiting): "cancelled", ("a", moved): "delayed", ("b", moved): "delayed",
    }  # fmt: skip
    # At its former time it would be overdue.
    assert wrong(directory) == []


@pytest.mark.parametrize(("named", "acked"), [("", False), ("b", True)])
def test_a_request_makes_no_message_of_a_record_that_a_queue_does_not_have(
    directory: Directory, named: str, acked: bool
) -> None:
    directory.subscriptions = [A, replace(B, start=started(1))]
    log = Orders()
    id_ = log.sent(0)
    log.of("a", "ACQUIRE", 0, 1_990)
    if acked:
        log.of("a", "ACK", 0, 1_991)
    expected = {("a", id_): "acked" if acked else "leased"}
    assert states(directory, log) == expected

    # The record was read in the former round.
    later = Orders(after=log)
    later.of(named, "CANCEL", 0, 2_001)

    assert states(directory, later, 2_002) == expected
    assert wrong(directory) == []


def test_a_request_about_a_record_that_does_not_exist_is_strange_in_each_queue_but_no_difference(
    directory: Directory,
) -> None:
    """A client may name any place, such as that of a redelivery whose transaction was aborted."""
    log = Orders()
    log.of("", "CANCEL", 7, 2)
    log.of("b", "CANCEL", 8, 2)

    expected = {("a", f"{TOPIC}/0/7"), ("b", f"{TOPIC}/0/7"), ("b", f"{TOPIC}/0/8")}
    assert states(directory, log) == dict.fromkeys(expected, "strange")
    assert wrong(directory) == []


def test_records_that_compaction_removed_are_neither_lost_nor_unknown(directory: Directory) -> None:
    """Nothing shows whether a queue passed over a record, or compaction removed it before the queue read it."""
    directory.compacted = [TOPIC]
    log = Orders()
    unread, kept = log.sent(1), log.sent(2)
    for offset in (0, 2):  # the record 0 was removed before ingest read it
        log.of("a", "ACQUIRE", offset, 2, from_offset=0)
        log.of("a", "ACK", offset, 3)

    found = states(directory, log)

    removed = f"{TOPIC}/0/0"
    assert {id_: state for (queue, id_), state in found.items() if queue == "a"} == {
        removed: "acked", unread: "expired_unread", kept: "acked",
    }  # fmt: skip
    assert wrong(directory) == []
    counts = verdict(judged(directory.lake.read(TABLE)))["queues"]["a"]
    assert [counts[name] for name in ("sent", "acked", "expired_unread", "unknown")] == [3, 2, 1, 0]


def test_records_in_a_gap_are_no_differences(directory: Directory) -> None:
    directory.gaps = [(TOPIC, 0, 0, 2)]
    log = Orders()
    log.sent(2)
    for offset in range(3):
        log.of("a", "ACQUIRE", offset, 2)
        log.of("a", "ACK", offset, 3)

    found = states(directory, log)

    assert found["a", f"{TOPIC}/0/1"] == "acked"
    assert wrong(directory) == []
    assert verdict(judged(directory.lake.read(TABLE)))["queues"]["a"]["unknown"] == 2


def test_a_recreated_topic_has_messages_of_its_own(directory: Directory) -> None:
    """Markers name the incarnation, and ids of redeliveries and origins of dead letters do not."""
    first, second = "1" * 32, "2" * 32
    again = incarnation(TOPIC, second)
    directory.subscriptions = [A]
    directory.names = {TOPIC: {first: TOPIC}}
    log = Orders()
    id_ = log.sent(0)
    log.of("a", "ACQUIRE", 0, 2, incarnation(TOPIC, first))
    log.of("a", "REJECT", 0, 3, incarnation(TOPIC, first), text="bad")
    log.dead("a", 0, 0, id_, 3.4)
    log.of("a", "DEAD_LETTERED", 0, 3.5, incarnation(TOPIC, first), attempt=1, cause="REJECTED", **FACT)
    assert states(directory, log) == {("a", id_): "dead"}

    directory.names = {TOPIC: {first: TOPIC, second: again}}
    directory.first[again] = directory.begins[again] = {"0": 0}
    directory.subscriptions = [replace(A, current=False), replace(A, topic=again)]
    later = Orders(after=log)
    for offset in (0, 1):
        later.sent(offset, 2_001)
        later.messages[-1]["topic"] = again
        later.of("a", "ACQUIRE", offset, 2_002, again)
    later.of("a", "RELEASE", 0, 2_003, again, delay_ms=0, counted=True, text="boom")
    later.of("a", "REDELIVERED", 0, 2_004, again, attempt=2, cause="RELEASED", **FACT)
    later.copy("a", 7, 2_004, id_, attempt=2)
    later.of("a", "ACQUIRE", 7, 2_005, MESSAGES_TOPIC, attempt=2, id=id_)
    later.of("a", "ACK", 7, 2_006, MESSAGES_TOPIC)
    later.of("a", "REJECT", 1, 2_006, again, text="bad")
    later.dead("a", 1, 1, f"{TOPIC}/0/1", 2_007)
    later.of("a", "DEAD_LETTERED", 1, 2_007, again, attempt=1, cause="REJECTED", **FACT)

    assert states(directory, later, 4_000) == {
        ("a", id_): "dead", ("a", f"{again}/0/0"): "acked", ("a", f"{again}/0/1"): "dead",
    }  # fmt: skip
    assert wrong(directory) == []
