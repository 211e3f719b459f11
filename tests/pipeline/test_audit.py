"""The job ``audit``; test_worlds.py has what it finds under faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from marq.wire.quarantines import digest
from pipeline.audit import COUNTS, balanced
from pipeline.tables import CORRUPT
from tests.pipeline.conftest import Command
from tests.pipeline.directory import Directory
from tests.pipeline.stories import MESSAGES_TOPIC, Log, at

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def audit(stories: Directory, command: Command) -> Command:
    """Audits the directory of stories: one message is lost, and the fact of one is overdue."""
    return lambda words: command(f"audit {words} --data {stories.path}")


def test_its_verdict_is_one_json_object_whose_equation_holds(audit: Command, stories: Directory) -> None:
    done = audit("--json")

    found = done.json
    assert done.code == 1
    assert balanced(found)
    assert {name for name in COUNTS if found[name]} >= {
        "sent", "acked", "dead", "acked_and_dead", "open", "delayed", "cancelled", "abandoned", "expired_unread",
        "lost", "redelivered", "redriven", "duplicates", "differences",
    }  # fmt: skip
    wrong = [f"{MESSAGES_TOPIC}/0/17", f"{MESSAGES_TOPIC}/0/23", f"~{'5' * 32}/0/2"]
    assert [message["id"] for message in found["wrong"]] == wrong
    assert found["duplicates_by"] == "deliveries"
    assert stories.lake.read("audit").where("differences > 0").count() == 3


def test_queue_and_times_choose_the_messages(audit: Command) -> None:
    before_all = audit("--json --to 2026-01-05T00:00:01")
    assert (before_all.code, before_all.json["sent"]) == (0, 0)

    done = audit("--queue q --from 2026-01-05T00:00:01 --to 2026-01-06")

    assert done.code == 1
    assert f"WRONG {MESSAGES_TOPIC}/0/17 of q: lost; passed over" in done.out
    assert "DIFFERENCES FOUND: 36 sent" in done.out


def test_finished_deliveries_count_duplicates_exactly(audit: Command, tmp_path: Path) -> None:
    # The copies of message 1 and 6 are done by handlers, and message 6 before, too; message 13 died before it was done.
    done = [101, 6, 106, 113, 999]
    lines = [json.dumps({"topic": MESSAGES_TOPIC, "partition": 0, "offset": offset}) for offset in done]
    (tmp_path / "handled.jsonl").write_text("\n".join(lines))

    found = audit(f"--json --handled {tmp_path}/handled.jsonl").json

    assert (found["duplicates"], found["duplicates_by"]) == (1, "handlers")


def test_corrupt_markers_are_wrong_and_records_that_were_not_read_are_named(
    spark: SparkSession, tmp_path: Path, command: Command
) -> None:
    log = Log()
    log.record(0, 1)
    # The other one is redelivered, by a record with a time.
    id_ = log.record(1, 1)
    for message in log.messages:
        message["sent_at"] = None  # a sender that counts in microseconds
    log.say("ACQUIRE", 1, 2)
    log.say("RELEASE", 1, 3, delay_ms=0, counted=True, text="boom")
    log.say("REDELIVERED", 1, 4, holder="f" * 16, attempt=2, cause="RELEASED")
    log.record(2, 4, copy_of=id_, attempt=2)
    directory = Directory(spark, tmp_path, {MESSAGES_TOPIC: {"0": 0}}, gaps=[(MESSAGES_TOPIC, 0, 5, 9)])
    directory.quarantined = [f"0/8/{digest(b'y')}"]
    directory.bring(log.tables())
    rows = [(0, offset, at(offset), "no magic number", raw) for offset, raw in ((7, b"x"), (8, b"y"), (9, b"z"))]
    rows += [(0, offset, at(9), "no magic number", b"z") for offset in range(10, 30)]
    spark.createDataFrame(rows, CORRUPT).write.parquet(f"{directory.lake.path}/corrupt/batch=000000000")

    done = command(f"audit --data {tmp_path}")

    assert done.code == 1
    for line in (
        "WRONG marq.markers/0/7: not a marker, so it is unknown what it said; --from LATER leaves it out",
        "WRONG marq.markers/0/9: not a marker",
        "… and 2 more that are not markers; --json lists them",
        f"NOT AUDITED {MESSAGES_TOPIC}/0: retention removed records 5 to 8 before ingest",
    ):
        assert line in done.out
    found = command(f"audit --json --data {tmp_path}").json
    assert found["corrupt_markers"] == [f"marq.markers/0/{offset}" for offset in (7, *range(9, 30))]
    assert found["untimed"] == 2
    # An operator who has looked at them audits what came later.
    later = command(f"audit --json --from 2026-01-05T00:00:10 --data {tmp_path}")
    assert (later.code, later.json["corrupt_markers"]) == (0, [])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--queue nobody", "queue 'nobody': no message of it was ingested"),
        ("--queue q --to 2026-01-05", "queue 'q': no message of it was ingested in that time"),
        ("--from yesterday-ish", "--from 'yesterday-ish': expected a time such as"),
        ("--handled /nowhere", "--handled /nowhere: can't be read as Parquet or JSON lines"),
    ],
)
def test_invalid_options_are_one_sentence(audit: Command, words: str, sentence: str) -> None:
    assert audit(f"{words} --json").refusal.startswith(sentence)


def test_an_empty_directory_says_what_to_run(spark: SparkSession, command: Command) -> None:
    assert "is empty: run `python -m pipeline ingest` first" in command("audit").refusal
