"""Worlds under faults, told as tables: of a whole one nothing is wrong, and what is taken away is found by its id."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row as TableRow
from pyspark.sql import SparkSession

from pipeline import audit, lifecycle_runs
from pipeline.audit import judged
from pipeline.lifecycle_runs import TABLE, Run
from tests.pipeline.directory import Directory, Tables
from tests.pipeline.worlds import SPREAD, Worlds

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]
SEEDS = range(36)
Row = dict[str, Any]
#: Queue and id.
Message = tuple[str, str]
#: Messages that differ without a row, and the row.
Lost = Iterator[tuple[list[Message], Row]]
#: What the audit says of messages behind one whose end has been taken away, in a queue with ordering.
OVERTOOK = "delivered before an earlier message with its key was finished: "


@pytest.fixture(scope="module")
def worlds(spark: SparkSession) -> tuple[Worlds, Tables]:
    """Runs under faults in which nothing was lost."""
    found = Worlds.of(*SEEDS)
    return found, found.tables(spark)


def verdict(spark: SparkSession, path: Path, worlds: Worlds, tables: Tables) -> Row:
    return audit.verdict(judged(worlds.directory(spark, path).lifecycle(tables)), drained=True)


def test_of_runs_under_faults_in_which_nothing_is_lost_nothing_is_wrong(
    spark: SparkSession, tmp_path: Path, worlds: tuple[Worlds, Tables]
) -> None:
    found = verdict(spark, tmp_path, *worlds)

    assert found["wrong"] == []
    assert found["right"]
    assert len(found["queues"]) > len(SEEDS)
    roots = {row["queue"] for row in worlds[1].messages.to_pylist() if row["queue"] is not None}
    assert roots <= found["queues"].keys()


class Loss:
    """What is taken away: of each world at most one marker, message or dead letter; with the messages that it is of."""

    def __init__(self, worlds: Worlds, tables: Tables) -> None:
        self.keeps_none = worlds.without_dead_letters
        self.markers = tables.markers.to_pylist()
        self.messages = tables.messages.to_pylist()
        self.letters = tables.dead_letters.to_pylist()
        self.ids = {place(row): row["id"] or place(row) for row in [*self.messages, *self.letters]}
        self.ids |= {place(row): row["id"] for row in self.markers if row["id"]}
        #: Queues that have a record as a message, and the kinds of markers about each queue's delivery of it.
        self.queues: dict[str, set[str]] = {}
        for row in self.markers:
            if row["kind"] in OPENING:
                self.queues.setdefault(place(row), set()).add(row["queue"])
        self.kinds: dict[tuple[str, str], list[str]] = {}
        for row in self.markers:
            if row["topic"] is not None:
                self.kinds.setdefault((self.queue(row), place(row)), []).append(row["kind"])
        self.acks = Counter(self.message(row) for row in self.markers if row["kind"] == "ACK")

    def queue(self, row: Row) -> str:
        """Return the queue of a marker's message; an ACK that names none is about a record of one queue."""
        if row["queue"] or row["kind"] != "ACK":
            return row["queue"]
        [queue] = self.queues[place(row)]
        return queue

    def message(self, row: Row) -> Message:
        return self.queue(row), self.ids.get(place(row), place(row))

    def of_marker(self, kind: str) -> Lost:
        """Markers without which something must be wrong; another one would say the same of the record."""
        for row in self.markers:
            if row["kind"] != kind:
                continue
            message, said = self.message(row), self.kinds[self.queue(row), place(row)]
            if kind == "ACK" and self.acks[message] > 1:
                continue  # the message was acked, as another delivery
            if said.count(kind) > 1 or (kind == "ACK" and FACTS & {*said}) or (kind in FACTS and "ACK" in said):
                continue
            yield [message], row

    def of_message(self, *, copy: bool) -> Lost:
        for row in self.messages:
            if (row["id"] is not None) == copy and place(row) in self.queues:
                yield [(queue, self.ids[place(row)]) for queue in sorted(self.queues[place(row)])], row

    def of_dead_letter(self) -> Lost:
        for row in self.letters:
            if row["queue"] not in self.keeps_none:
                yield [(row["queue"], self.ids[place(row)])], row


OPENING = ("ACQUIRE", "DELAY")
FACTS = {"REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED", "ABANDONED"}
#: Without RENEW, RELEASE, REJECT, RESCHEDULE, CANCEL, ANSWERED and TICK what is left is a run that may have been so.
KINDS = ("ACQUIRE", "ACK", "DELAY", "REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED")


def place(row: Row) -> str:
    return f"{row['topic']}/{row['partition']}/{row['offset']}"


def world_of(row: Row) -> int:
    return int(row.get("log_partition", row["partition"])) // SPREAD


def without(table: pa.Table, keys: tuple[str, ...], rows: list[Row]) -> pa.Table:
    gone = {tuple(row[key] for key in keys) for row in rows}
    mask = [tuple(row[key] for key in keys) not in gone for row in table.select(keys).to_pylist()]
    return table.filter(pa.array(mask))


def test_one_marker_message_or_dead_letter_that_is_taken_away_is_found_by_its_id(
    spark: SparkSession, tmp_path: Path, worlds: tuple[Worlds, Tables]
) -> None:
    loss, free, lot = Loss(*worlds), set(SEEDS), random.Random(7)
    gone: dict[str, list[Row]] = {"markers": [], "messages": [], "dead_letters": []}
    expected: dict[Message, str] = {}
    kinds: list[tuple[str, str, Callable[[], Lost]]] = [
        ("record of several queues", "messages", lambda: (lost for lost in loss.of_message(copy=False) if lost[0][1:])),
        ("dead letter", "dead_letters", loss.of_dead_letter),
        *[(kind, "markers", lambda kind=kind: loss.of_marker(kind)) for kind in reversed(KINDS)],
        ("first delivery", "messages", lambda: loss.of_message(copy=False)),
        ("copy", "messages", lambda: loss.of_message(copy=True)),
    ]
    for kind, table, candidates in kinds * 3:
        found = [(messages, row) for messages, row in candidates() if world_of(row) in free]
        if not found:
            continue
        messages, row = lot.choice(found)
        free.discard(world_of(row))
        gone[table].append(row)
        expected |= dict.fromkeys(messages, kind)
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
    never_ended = {(row["queue"], OVERTOOK + place(row)) for row in gone["markers"]}
    wrong = {(row["queue"], row["id"]): row for row in left["wrong"]}
    for (queue, id_), row in [*wrong.items()]:
        overtook = row["why"] and {(queue, why) for why in row["why"]} <= never_ended
        if overtook and (queue, id_) not in expected:
            del wrong[queue, id_]
    assert {message: expected.get(message, row) for message, row in wrong.items()} == expected


def rounds(tables: Tables, lots: random.Random, count: int) -> list[Tables]:
    """Cut tables at random, as ingest does: it has read what facts and ACQUIREs tell of, and perhaps more."""
    markers = tables.markers.sort_by("logged_at")
    ends = [*sorted(lots.randint(0, markers.num_rows) for _ in range(count - 1)), markers.num_rows]
    found, before = [], (0, set(), set())
    for end in ends:
        told = markers.slice(0, end).to_pylist()
        more = 1.0 if end == markers.num_rows else lots.choice([0.0, 0.2])
        messages = _read(tables.messages, told, lots, more) | before[1]
        letters = _read(tables.dead_letters, told, lots, more) | before[2]
        found.append(
            Tables(
                markers.slice(before[0], end - before[0]),
                tables.messages.take(pa.array(sorted(messages - before[1]), pa.int64())),
                tables.dead_letters.take(pa.array(sorted(letters - before[2]), pa.int64())),
            )
        )
        before = (end, messages, letters)
    return found


def _read(table: pa.Table, told: list[dict[str, Any]], lots: random.Random, more: float) -> set[int]:
    """Indices of rows up to the last one of each partition that markers tell of, and a share of what is behind."""
    acquired = {(row["topic"], row["partition"], row["offset"]) for row in told}
    copies = {row["attempt"] for row in told if row["kind"] in ("REDELIVERED", "DELIVERED")}
    rows, ends = table.to_pylist(), dict[tuple[str, int], int]()
    for row in rows:
        place = row["topic"], row["partition"]
        origin = row.get("origin_topic"), row.get("origin_partition"), row.get("origin_offset")
        needed = (*place, row["offset"]) in acquired or origin in acquired or (row["id"] and row["attempt"] in copies)
        if needed or lots.random() < more:
            ends[place] = max(row["offset"], ends.get(place, 0))
    return {index for index, row in enumerate(rows) if row["offset"] <= ends.get((row["topic"], row["partition"]), -1)}


def rows_of(directory: Directory) -> dict[Message, TableRow]:
    rows = directory.lake.read(TABLE).drop("side", "batch").collect()
    messages = {(row.queue, row.id): row for row in rows}
    assert len(messages) == len(rows)
    return messages


def test_however_a_story_is_cut_into_rounds_its_end_is_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds.of(*range(200, 212))
    whole = worlds.tables(spark)
    # So short that messages are closed in the middle of their stories, and opened again.
    monkeypatch.setattr(lifecycle_runs, "GRACE", "INTERVAL 20 MILLISECONDS")
    said: list[str] = []
    ends = []
    for name, pieces in (("whole", 1), ("cut", 3)):
        directory = worlds.directory(spark, tmp_path / name)
        for tables in rounds(whole, random.Random(5), pieces):
            directory.bring(tables)
            Run(spark, directory.lake, said.append).take()
        ends.append(rows_of(directory))

    assert any("opened again" in line for line in said)
    assert ends[1].keys() == ends[0].keys()
    assert {message: row for message, row in ends[1].items() if row != ends[0][message]} == {}
