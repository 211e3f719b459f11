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

from pipeline import runs
from pipeline.audit import judged
from pipeline.jobs import audit as job
from pipeline.runs import TABLE, Run
from tests.pipeline.directory import Directory, Tables
from tests.pipeline.worlds import Worlds

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]
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


def rows_of(directory: Directory) -> dict[str, TableRow]:
    rows = directory.lake.read(TABLE).drop("side", "batch").collect()
    assert len({row.id for row in rows}) == len(rows)
    return {row.id: row for row in rows}


def test_however_a_story_is_cut_into_rounds_its_end_is_the_same(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = Worlds()
    for seed in range(200, 212):
        worlds.add(seed)
    whole = worlds.tables(spark)
    # So short that messages are closed in the middle of their stories, and opened again.
    monkeypatch.setattr(runs, "GRACE", "INTERVAL 20 MILLISECONDS")
    said: list[str] = []
    ends = []
    for name, pieces in (("whole", 1), ("cut", 3)):
        directory = Directory(
            spark, tmp_path / name, worlds.first, worlds.begins,
            without_dead_letters=sorted(worlds.without_dead_letters),
        )  # fmt: skip
        for tables in rounds(whole, random.Random(5), pieces):
            directory.bring(tables)
            Run(spark, directory.lake, said.append).take()
        ends.append(rows_of(directory))

    assert any("opened again" in line for line in said)
    assert ends[1].keys() == ends[0].keys()
    assert {id_: row for id_, row in ends[1].items() if row != ends[0][id_]} == {}
