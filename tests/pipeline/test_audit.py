"""The audit finds exactly what is missing: by its id, and nothing else."""

from __future__ import annotations

import argparse
import json
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from pipeline.audit import FIGURES, balanced, judged
from pipeline.errors import PipelineError
from pipeline.jobs import audit as job
from pipeline.lake import Lake
from pipeline.runs import TABLE, Run
from tests.pipeline.directory import Directory, Tables
from tests.pipeline.test_lifecycle import MESSAGES_TOPIC, told
from tests.pipeline.worlds import Worlds

pytestmark = pytest.mark.timeout(900)
SEEDS = range(36)
Row = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(spark: SparkSession) -> tuple[Worlds, Tables]:
    """Runs under faults in which nothing was lost."""
    found = Worlds()
    for seed in SEEDS:
        found.add(seed)
    return found, found.tables(spark)


def verdict(spark: SparkSession, path: Path, worlds: Worlds, tables: Tables) -> Row:
    directory = Directory(
        spark, path, first=worlds.first, begins=worlds.begins, without_dead_letters=sorted(worlds.without_dead_letters)
    )
    directory.bring(tables)
    Run(spark, directory.lake).take()
    return job.verdict(judged(directory.lake.read(TABLE)), drained=True)


def test_of_runs_under_faults_in_which_nothing_is_lost_nothing_is_wrong(
    spark: SparkSession, tmp_path: Path, worlds: tuple[Worlds, Tables]
) -> None:
    found = verdict(spark, tmp_path, *worlds)

    assert found["wrong"] == []
    assert found["right"]
    assert len(found["queues"]) > len(SEEDS)
    roots = {row["queue"] for row in worlds[1].messages.to_pylist()}
    assert roots <= found["queues"].keys()


class Loss:
    """What is taken away: of each world at most one marker, message or dead letter."""

    def __init__(self, worlds: Worlds, tables: Tables) -> None:
        self.keeps_none = worlds.without_dead_letters
        self.markers = tables.markers.to_pylist()
        self.messages = tables.messages.to_pylist()
        self.letters = tables.dead_letters.to_pylist()
        self.ids = {place(row): row["id"] or place(row) for row in [*self.messages, *self.letters]}
        self.ids |= {place(row): row["id"] for row in self.markers if row["id"]}
        self.acks = Counter(self.ids.get(place(row)) for row in self.markers if row["kind"] == "ACK")
        self.kinds: dict[str, list[str]] = {}
        for row in self.markers:
            if row["topic"] is not None:
                self.kinds.setdefault(place(row), []).append(row["kind"])

    def of_marker(self, kind: str) -> Iterator[tuple[str, Row]]:
        """Markers without which something must be wrong; another one would say the same of the record."""
        for row in self.markers:
            if row["kind"] != kind:
                continue
            said = self.kinds[place(row)]
            if kind == "ACK" and self.acks[self.ids[place(row)]] > 1:
                continue  # the message was acked, as another delivery
            if said.count(kind) > 1 or (kind == "ACK" and FACTS & {*said}) or (kind in FACTS and "ACK" in said):
                continue
            yield self.ids.get(place(row), place(row)), row

    def of_message(self, *, copy: bool) -> Iterator[tuple[str, Row]]:
        for row in self.messages:
            if (row["id"] is not None) == copy and row["queue"] is not None and place(row) in self.kinds:
                yield self.ids[place(row)], row

    def of_dead_letter(self) -> Iterator[tuple[str, Row]]:
        yield from ((self.ids[place(row)], row) for row in self.letters if row["queue"] not in self.keeps_none)


FACTS = {"REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED", "ABANDONED"}
#: Without RENEW, RELEASE, REJECT, RESCHEDULE, CANCEL, ANSWERED and TICK what is left is a run that may have been so.
KINDS = ("ACQUIRE", "ACK", "DELAY", "REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED")


def place(row: Row) -> str:
    return f"{row['topic']}/{row['partition']}/{row['offset']}"


def world_of(row: Row) -> int:
    return int(row["queue"].rpartition(" ")[2])


def without(table: pa.Table, keys: tuple[str, ...], rows: list[Row]) -> pa.Table:
    gone = {tuple(row[key] for key in keys) for row in rows}
    mask = [tuple(row[key] for key in keys) not in gone for row in table.select(keys).to_pylist()]
    return table.filter(pa.array(mask))


def test_one_marker_message_or_dead_letter_that_is_taken_away_is_found_by_its_id(
    spark: SparkSession, tmp_path: Path, worlds: tuple[Worlds, Tables]
) -> None:
    loss, free, lot = Loss(*worlds), set(SEEDS), random.Random(7)
    gone: dict[str, list[Row]] = {"markers": [], "messages": [], "dead_letters": []}
    expected: dict[str, str] = {}
    kinds: list[tuple[str, str, Callable[[], Iterator[tuple[str, Row]]]]] = [
        ("dead letter", "dead_letters", loss.of_dead_letter),
        *[(kind, "markers", lambda kind=kind: loss.of_marker(kind)) for kind in reversed(KINDS)],
        ("first delivery", "messages", lambda: loss.of_message(copy=False)),
        ("copy", "messages", lambda: loss.of_message(copy=True)),
    ]
    for kind, table, candidates in kinds * 3:
        found = [(id_, row) for id_, row in candidates() if world_of(row) in free]
        if not found:
            continue
        id_, row = lot.choice(found)
        free.discard(world_of(row))
        gone[table].append(row)
        expected[id_] = kind
    assert {*expected.values()} == {kind for kind, _, _ in kinds}
    places = ("topic", "partition", "offset")

    left = verdict(
        spark,
        tmp_path,
        worlds[0],
        Tables(
            without(worlds[1].markers, ("log_partition", "log_offset", "index"), gone["markers"]),
            without(worlds[1].messages, places, gone["messages"]),
            without(worlds[1].dead_letters, places, gone["dead_letters"]),
        ),
    )

    assert not left["right"]
    assert {each["id"]: expected.get(each["id"], each) for each in left["wrong"]} == expected


# --- the job ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one message of each fate; the last one that is lost, and one whose fact is overdue."""
    path = tmp_path_factory.mktemp("stories")
    Directory(spark, path, {MESSAGES_TOPIC: {"0": -1}}, {MESSAGES_TOPIC: {"0": 0}}).bring(told()[0].tables())
    return path


def audit(data: Path, words: str) -> int:
    parser = argparse.ArgumentParser()
    job.arguments(parser)
    parser.add_argument("--data")
    return job.run(parser.parse_args([*shlex.split(words), "--data", str(data)]))


def test_its_verdict_is_one_json_object_whose_equation_holds(stories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(stories, "--json") == 1

    found = json.loads(capsys.readouterr().out)
    assert balanced(found)
    assert {name for name in FIGURES if found[name]} >= {
        "sent", "acked", "dead", "acked_and_dead", "open", "delayed", "cancelled", "abandoned", "expired_unread",
        "lost", "redelivered", "redriven", "duplicates", "differences",
    }  # fmt: skip
    assert [each["id"] for each in found["wrong"]] == [f"{MESSAGES_TOPIC}/0/17", f"~{'5' * 32}/0/2"]
    assert found["duplicates_by"] == "deliveries"
    wrong = Lake(SparkSession.active(), str(stories)).read("audit").where("differences > 0")
    assert wrong.count() == 2


def test_only_what_was_asked_for_is_judged(stories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(stories, "--json --to 2026-01-05T00:00:01") == 0  # before that nothing was sent
    assert json.loads(capsys.readouterr().out)["sent"] == 0
    assert audit(stories, "--queue q --from 2026-01-05T00:00:01 --to 2026-01-06") == 1

    printed = capsys.readouterr().out
    assert f"WRONG {MESSAGES_TOPIC}/0/17 of q: lost; passed over" in printed
    assert "NOT AS IT MUST BE: 25 sent" in printed


def test_what_handlers_say_counts_duplicates_exactly(
    stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The copies of message 1 and 6 are done by handlers, and message 6 before, too; message 13 died before it was done.
    done = [101, 6, 106, 113, 999]
    lines = [json.dumps({"topic": MESSAGES_TOPIC, "partition": 0, "offset": offset}) for offset in done]
    (tmp_path / "handled.jsonl").write_text("\n".join(lines))

    audit(stories, f"--json --handled {tmp_path}/handled.jsonl")

    found = json.loads(capsys.readouterr().out)
    assert (found["duplicates"], found["duplicates_by"]) == (1, "handlers")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--queue nobody", "queue 'nobody': nothing of it was ingested"),
        ("--queue q --to 2026-01-05", "queue 'q': nothing of it was ingested in that time"),
        ("--from yesterday-ish", "'yesterday-ish' is no time: expected ISO 8601"),
        ("--to 2026-13-01", "'2026-13-01' is no time: expected ISO 8601"),
        ("--handled /nowhere", "--handled /nowhere: can't be read as Parquet or JSON lines"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_sentence(stories: Path, words: str, sentence: str) -> None:
    with pytest.raises(PipelineError, match=sentence) as refusal:
        audit(stories, words)

    assert "\n" not in str(refusal.value)


def test_a_directory_without_anything_says_what_to_run(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="has nothing yet: run `python -m pipeline ingest` first"):
        audit(tmp_path, "")
