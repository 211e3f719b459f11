"""Merging small files: the rows of the tables stay the same, at every step."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from pipeline.audit import judged, verdict
from pipeline.errors import PipelineError
from pipeline.kafka import Connection
from pipeline.lake import MAINTAIN, Lake
from pipeline.lifecycle_runs import TABLE, Run
from pipeline.maintenance import Maintenance, MaintenanceResult, TableDirectory, merges
from pipeline.spans import DAY_MS
from pipeline.subscriptions import Subscription
from pipeline.tables import DAYS, MARKERS, STREAMS
from tests.pipeline.conftest import Command
from tests.pipeline.directory import Directory, Tables
from tests.pipeline.namespace import Namespace, ingest
from tests.pipeline.processes import Killed, kill_when
from tests.pipeline.stories import DRAWN, MESSAGES_TOPIC, Log, at, directory_for, told
from tests.pipeline.test_ingest import assert_each_record_once, made
from tests.pipeline.test_views import opened
from tests.pipeline.worlds import LOSSES, Worlds
from tests.simulation.world import Plan
from tests.unit.core.batches import acquire

__all__ = ["made"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.verify]
SEEDS = (4,)
ROUNDS = 3
TARGET = 1 << 27
Rows = dict[str, Any]


def rounds(tables: Tables, count: int) -> Iterator[Tables]:
    """Split tables by time, as a running ``ingest`` reads them."""
    times = sorted(tables.markers["logged_at"].to_pylist())
    limits = [times[len(times) * number // count] for number in range(1, count)]
    bounds = [None, *limits, None]
    for begin, end in itertools.pairwise(bounds):
        parts = {}
        for name, column in DAYS.items():
            table: pa.Table = getattr(tables, name)
            if begin is not None:
                table = table.filter(pc.greater_equal(table[column], begin))
            if end is not None:
                table = table.filter(pc.less(table[column], end))
            parts[name] = table
        yield Tables(**parts)


@pytest.fixture(scope="module")
def grown(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """A directory after several rounds, each with a run of the lifecycle; one more round is still to be processed."""
    worlds = Worlds.of(*SEEDS)
    directory = worlds.directory(spark, tmp_path_factory.mktemp("grown"), dated=True)
    *earlier, last = rounds(worlds.tables(spark), ROUNDS + 1)
    for tables in earlier:
        directory.lifecycle(tables)
    directory.bring(last)
    return directory


@pytest.fixture(scope="module")
def expected(spark: SparkSession, grown: Directory) -> Rows:
    return contents(Lake(spark, str(grown.path)))


def copy_of(grown: Directory, path: Path) -> Lake:
    shutil.copytree(grown.path, path)
    return Lake(grown.spark, str(path))


@pytest.fixture
def lake(grown: Directory, tmp_path: Path) -> Lake:
    """A copy of it."""
    return copy_of(grown, tmp_path / "copy")


def folder(lake: Lake) -> Path:
    return Path(lake.path.removeprefix("file:"))


def contents(lake: Lake) -> Rows:
    """Return the rows of each table, by the commits; without the columns of directories."""
    round_ = lake.last_commit("rounds")
    assert round_ is not None
    frames = {name: lake.table(name, schema, round_["last"][name]) for name, schema in STREAMS.items()}
    frames[TABLE] = lake.read(TABLE)
    return {name: sorted(map(repr, frame.drop("side", "batch", "date").collect())) for name, frame in frames.items()}


def listed(lake: Lake) -> dict[str, int]:
    """Return the rows of readers that only list the directories."""
    return {name: pyarrow.dataset.dataset(folder(lake) / name, partitioning="hive").count_rows() for name in STREAMS}


def files(lake: Lake) -> dict[str, int]:
    """Return all files with their sizes, except locks and Hadoop's checksums."""
    here = folder(lake)
    found = {str(path.relative_to(here)): path.stat().st_size for path in here.rglob("*") if path.is_file()}
    return {name: size for name, size in found.items() if "_locks" not in name and not name.endswith(".crc")}


def maintain(spark: SparkSession, lake: Lake, **older: int) -> MaintenanceResult:
    return Maintenance(spark, lake, TARGET).run(**older)


def test_it_merges_the_files_and_keeps_the_rows(lake: Lake, expected: Rows, command: Command) -> None:
    before = listed(lake)
    parquet = [name for name in files(lake) if name.endswith(".parquet")]

    done = command(f"maintain --data {lake.path}")

    assert done.code == 0
    head, markers, *_, last = done.out.splitlines()
    assert head.split("  ")[-1] == "bytes after"
    assert markers.split()[:3] == ["markers", str(ROUNDS), str(ROUNDS)]
    assert markers.split()[-3] == "1"
    assert last.startswith("done in ")
    assert contents(lake) == expected
    assert listed(lake) == before
    # The last round is not processed yet.
    assert lake.names("markers") == [f"batch={number:09}" for number in (ROUNDS - 1, ROUNDS)]
    assert len(lake.last_commit(TABLE)["closed"]) == 1  # type: ignore[index]
    assert len([name for name in files(lake) if name.endswith(".parquet")]) < len(parquet)
    again = command(f"maintain --json --data {lake.path}").json["tables"]
    assert {name: usage["directories"] for name, usage in again.items()} == dict.fromkeys([*STREAMS, TABLE], 0)


def test_later_runs_of_the_lifecycle_find_what_they_find_without_it(
    spark: SparkSession, lake: Lake, grown: Directory, tmp_path: Path
) -> None:
    undisturbed = copy_of(grown, tmp_path / "undisturbed")
    Run(spark, undisturbed).take()

    maintain(spark, lake)
    Run(spark, lake).take()

    assert contents(lake) == contents(undisturbed)
    found = verdict(judged(lake.read(TABLE)), drained=True)
    assert found["right"]
    assert found["sent"] > 10
    # Directories that were replaced last are kept for readers of the former commit, until the next run.
    commit = lake.last_commit(TABLE)
    assert commit is not None
    merged = [place for place in commit["places"] if "merged" in place]
    assert all(lake.exists(place) for place in merged)
    from_scratch = tmp_path / "from-scratch"
    shutil.copytree(folder(lake), from_scratch, ignore=shutil.ignore_patterns(TABLE))
    again = Lake(spark, str(from_scratch))
    Run(spark, again).take()
    assert contents(again) == contents(lake)


def test_a_dry_run_shows_files_and_bytes_and_changes_nothing(lake: Lake, command: Command) -> None:
    before = files(lake)

    done = command(f"maintain --dry-run --json --data {lake.path}")
    text = command(f"maintain --dry-run --data {lake.path}")

    markers = done.json["tables"]["markers"]
    sizes = [
        size
        for name, size in before.items()
        if name.startswith("markers/") and not name.startswith(f"markers/batch={ROUNDS:09}")
    ]
    assert markers == {
        "directories": ROUNDS, "files": ROUNDS, "bytes": sum(sizes), "rows_removed": 0, "files_after": None,
        "bytes_after": None,
    }  # fmt: skip
    assert text.out.splitlines()[-1] == "dry run: nothing was changed"
    assert files(lake) == before


#: Every change of a file system goes through one of these.
CHANGES = ("delete", "rename", "_rename")


def kill_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let a job die before its change with this number."""
    count = 0

    def patched(change: Callable[..., None]) -> Callable[..., None]:
        def run(self: Lake, *arguments: Any) -> None:
            nonlocal count
            if count == step:
                raise Killed
            count += 1
            change(self, *arguments)

        return run

    for name in CHANGES:
        monkeypatch.setattr(Lake, name, patched(getattr(Lake, name)))


def killed_at_each_step(grown: Directory, path: Path, **older: int) -> Iterator[tuple[int, Lake]]:
    """Kill the job before each of its changes; yield the number of each kill, from 1, and the directory after it."""
    for step in range(1_000):
        lake = copy_of(grown, path / str(step))
        with pytest.MonkeyPatch.context() as patch:
            kill_before(patch, step)
            try:
                maintain(grown.spark, lake, **older)
            except Killed:
                pass
            else:
                return
        yield step + 1, lake
        shutil.rmtree(folder(lake))


def test_whenever_it_is_killed_each_record_counts_once(
    spark: SparkSession, grown: Directory, expected: Rows, tmp_path: Path
) -> None:
    """Each job that reads the tables then sees each row once, and a second run ends as the first would have."""
    kills = 0
    open_exchanges = 0
    for kills, lake in killed_at_each_step(grown, tmp_path):
        commit = lake.last_commit(MAINTAIN)
        if commit is not None and commit["open"]:
            open_exchanges += 1
            with pytest.raises(duckdb.InvalidInputException, match="run `python -m pipeline maintain` again"):
                opened(folder(lake))
            assert lake.finish()
        else:
            with opened(folder(lake)) as views:
                found = views.execute("SELECT (SELECT count(*) FROM markers), (SELECT count(*) FROM lifecycle)")
                assert found.fetchall() == [(len(expected["markers"]), len(expected[TABLE]))]
        assert contents(lake) == expected, kills
        assert listed(lake) == {name: len(expected[name]) for name in STREAMS}
        maintain(spark, lake)
        assert contents(lake) == expected, kills
        assert lake.names("_staging") == []
        assert lake.names("markers") == [f"batch={number:09}" for number in (ROUNDS - 1, ROUNDS)]
        assert len(lake.last_commit(TABLE)["closed"]) == 1  # type: ignore[index]

    assert kills > 20
    assert open_exchanges > 5


#: While batches are staged; at the commit of the exchange; while directories of closed messages are staged.
MOMENTS = ("_staging/maintain-*/markers", "_commits/maintain/*.json", "_staging/lifecycle-*")


def test_after_sigkills_of_the_process_a_rerun_gives_what_an_undisturbed_one_gives(
    spark: SparkSession, lake: Lake, expected: Rows, tmp_path: Path
) -> None:
    for moment in MOMENTS:
        kill_when(moment, folder(lake), f"maintain --data {lake.path}", {}, tmp_path)
        lake.finish()
        assert contents(lake) == expected, moment

    maintain(spark, lake)

    assert contents(lake) == expected
    assert listed(lake) == {name: len(expected[name]) for name in STREAMS}
    assert lake.names("_staging") == []
    assert lake.names("markers") == [f"batch={number:09}" for number in (ROUNDS - 1, ROUNDS)]


def test_a_lifecycle_after_a_kill_finishes_the_exchange_first(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def die(self: Lake, source: str, target: str) -> None:
            raise Killed

        patch.setattr(Lake, "rename", die)
        with pytest.raises(Killed):
            maintain(spark, lake)
    with pytest.raises(duckdb.InvalidInputException, match="run `python -m pipeline maintain` again"):
        opened(folder(lake))
    said: list[str] = []

    Run(spark, lake, said.append).take()

    assert said[0] == "finished a job maintain that was interrupted"
    assert lake.names("markers") == [f"batch={number:09}" for number in (ROUNDS - 1, ROUNDS)]


def batch(number: int, size: int, file_count: int = 1, dates: int = 1) -> TableDirectory:
    names = frozenset(f"date={date}" for date in range(dates))
    return TableDirectory(f"markers/batch={number:09}", file_count, size, names)


@pytest.mark.parametrize(
    ("batches", "merged"),
    [
        ([], []),
        ([batch(0, 50)], []),
        ([batch(0, 50), batch(1, 50)], [[0, 1]]),
        ([batch(0, 50), batch(1, 51), batch(2, 10)], [[1, 2]]),
        ([batch(0, 500), batch(1, 1), batch(2, 1), batch(3, 500)], [[1, 2]]),
        ([batch(0, 50, file_count=8)], [[0]]),
        ([batch(0, 50, file_count=2, dates=2)], []),
        ([batch(0, 500, file_count=8)], []),
    ],
)
def test_neighbours_are_merged_up_to_a_size(batches: list[TableDirectory], merged: list[list[int]]) -> None:
    found = merges("markers", batches, target_bytes=100)

    assert [[int(place[-9:]) for place in merge.places] for merge in found] == merged


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--target much", "--target 'much': expected bytes, as in 200 or 4KiB"),
        ("--target 0", "--target 0: expected at least 1 byte"),
        ("--older 1h", "--older '1h': expected at least 1d and at most 100 years"),
        ("--older soon", "--older 'soon': expected a number and a unit"),
        ("", "has no table 'lifecycle' yet: run `python -m pipeline lifecycle` first"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(command: Command, words: str, sentence: str, data: Path) -> None:
    assert sentence in command(f"maintain {words} --data {data}").refusal
    assert list(data.iterdir()) == []


def test_another_file_system_is_refused(spark: SparkSession) -> None:
    elsewhere: Any = type("Elsewhere", (), {"path": "hdfs://two"})()

    with pytest.raises(PipelineError, match="needs a data directory on this machine or on a mounted file system"):
        Maintenance(spark, elsewhere, TARGET)


def test_it_does_not_run_next_to_a_lifecycle(spark: SparkSession, lake: Lake) -> None:
    with lake.alone(TABLE), pytest.raises(PipelineError, match="another lifecycle is running"):
        maintain(spark, lake)


def test_columns_of_only_some_batches_are_kept(spark: SparkSession, lake: Lake) -> None:
    """`ingest --payload` adds columns."""
    table = f"{lake.path}/messages/batch=000000001"
    rows = spark.read.parquet(table).selectExpr("*", "CAST('v' AS BINARY) AS value").cache()
    count = rows.count()
    rows.write.partitionBy("date").parquet(f"{table}-new")
    lake.delete("messages/batch=000000001")
    lake.rename("messages/batch=000000001-new", "messages/batch=000000001")

    maintain(spark, lake)

    found = pyarrow.dataset.dataset(
        folder(lake) / "messages" / f"batch={ROUNDS - 1:09}", partitioning="hive"
    ).to_table()
    assert found["value"].to_pylist().count(b"v") == count > 0
    assert len(found) > count


def test_ingest_and_lifecycle_go_on_after_a_merge(
    spark: SparkSession, connection: Connection, data: Path, made: Namespace, tmp_path: Path
) -> None:
    lake = Lake(spark, str(data))
    for number in range(3):
        made.mark(acquire([number]))
        made.send(4)
        ingest(spark, connection, lake, payload=number > 0)
        Run(spark, lake).take()

    result = maintain(spark, lake)

    assert {name: usage.directories for name, usage in result.usage.items()}["messages"] == 3
    assert [lake.names(name) for name in ("markers", "messages")] == [["batch=000000002"]] * 2
    assert_each_record_once(lake, data, {"markers": 3, "messages": 12})
    made.mark(acquire([3]))
    ingest(spark, connection, lake)
    Run(spark, lake).take()
    assert_each_record_once(lake, data, {"markers": 4, "messages": 12})
    undisturbed = Lake(spark, str(tmp_path / "undisturbed"))
    ingest(spark, connection, undisturbed)
    Run(spark, undisturbed).take()
    states = {message: row.state for message, row in messages(undisturbed).items()}
    assert {message: row.state for message, row in messages(lake).items()} == states
    assert len(states) >= 12


# --- removal of old history -------------------------------------------------------------------------------------------


def of_age(lake: Lake, share: float) -> dict[str, int]:
    """Return the options by which about this share of the messages is old."""
    ends = sorted(row.ms for row in lake.read(TABLE).selectExpr("unix_millis(last_at) ms").where("ms > 0").collect())
    return {"older_ms": DAY_MS, "now_ms": ends[int(len(ends) * share)] + DAY_MS}


def messages(lake: Lake) -> dict[tuple[str, str], Any]:
    rows = lake.read(TABLE).drop("side", "batch", "date").collect()
    return {(row.id, row.queue): row for row in rows}


def computed_again(spark: SparkSession, lake: Lake) -> dict[tuple[str, str], Any]:
    """Return the lifecycle after a release that computes its columns in another way."""
    commit = lake.last_commit(TABLE)
    assert commit is not None
    lake.publish(TABLE, commit["batch"], {}, {**commit, "basis": None})
    said: list[str] = []
    Run(spark, lake, said.append).take()
    assert said[0] == "computing all messages again, because an earlier release wrote the table"
    return messages(lake)


def is_old(row: Any, options: dict[str, int]) -> bool:
    """What docs/pipeline.md says, of messages whose record cannot be read by another queue later."""
    before_ms = options["now_ms"] - options["older_ms"]
    last_ms = row.last_at.replace(tzinfo=UTC).timestamp() * 1000
    return (
        row.state in ("acked", "cancelled", "deduplicated", "abandoned", "expired_unread")
        and not row.open
        and row.dead_letters <= row.redrives
        and last_ms < before_ms
    )


def test_old_messages_leave_all_tables_and_the_others_stay_as_they_are(
    spark: SparkSession, lake: Lake, command: Command
) -> None:
    Run(spark, lake).take()
    options = of_age(lake, 0.6)
    before, rows = messages(lake), contents(lake)

    result = maintain(spark, lake, **options)

    after = messages(lake)
    gone = before.keys() - after.keys()
    assert 3 < len(gone) == result.messages_removed < len(before)
    assert all(is_old(before[message], options) for message in gone)
    assert after == {message: row for message, row in before.items() if message not in gone}
    left = contents(lake)
    for name in ("markers", "messages"):
        removed = result.usage[name].rows_removed
        assert len(left[name]) == len(rows[name]) - removed
        assert removed > 0
        assert set(left[name]) <= set(rows[name])
    places = {
        (delivery.topic, delivery.partition, delivery.offset)
        for message in gone
        for delivery in before[message].deliveries
    }
    kept = lake.table("markers", MARKERS, 10**6).where("kind NOT IN ('TICK', 'ANSWERED', 'DISCARD', 'PURGE')").collect()
    assert not places & {(row.topic, row.partition, row.offset) for row in kept}
    assert listed(lake) == {name: len(left[name]) for name in STREAMS}

    done = command(f"audit --json --data {lake.path}")

    assert (done.code, done.json["sent"]) == (0, len([row for row in after.values() if row.known]))
    assert done.json["removed"] == {"messages": len(gone), "before_ms": options["now_ms"] - DAY_MS}
    assert f"NOT AUDITED {len(gone)} messages that ended before " in command(f"audit --data {lake.path}").out
    assert computed_again(spark, lake) == after
    assert maintain(spark, lake, **options).messages_removed == 0
    commit = lake.last_commit(TABLE)
    assert commit is not None
    assert commit["removed"]["messages"] == len(gone)


def test_a_round_after_a_removal_has_the_same_results(
    spark: SparkSession, lake: Lake, grown: Directory, tmp_path: Path
) -> None:
    undisturbed = copy_of(grown, tmp_path / "undisturbed")
    options = of_age(lake, 0.5)

    before = messages(lake).keys()
    removed = maintain(spark, lake, **options).messages_removed
    gone = before - messages(lake).keys()
    Run(spark, lake).take()
    Run(spark, undisturbed).take()

    expected = {message: row for message, row in messages(undisturbed).items() if message not in gone}
    assert messages(lake) == expected
    assert len(gone) == removed > 0
    assert computed_again(spark, lake) == expected


def test_of_many_worlds_the_others_stay_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """With ordering, deduplication, several queues on a topic, retention, purges and redrives."""
    worlds = Worlds()
    for seed in range(20, 32):
        worlds.add(seed, Plan(without=LOSSES, ids=seed % 2 == 0))
    directory = worlds.directory(spark, tmp_path, dated=True)
    directory.lifecycle(worlds.tables(spark))
    lake = directory.lake
    before = messages(lake)

    for share in (0.3, 0.7):
        removed = maintain(spark, lake, **of_age(lake, share)).messages_removed
        after = messages(lake)
        assert removed == len(before) - len(after) > 10
        assert after == {message: before[message] for message in after}
        assert computed_again(spark, lake) == after
        assert verdict(judged(lake.read(TABLE)), drained=True)["right"]
        before = after


def test_whenever_a_removal_is_killed_a_rerun_removes_the_same(
    spark: SparkSession, grown: Directory, lake: Lake, tmp_path: Path
) -> None:
    options = of_age(lake, 0.6)
    before = messages(lake)
    removed = maintain(spark, lake, **options).messages_removed
    expected = contents(lake)
    kept = messages(lake)
    kills = 0
    for kills, copy in killed_at_each_step(grown, tmp_path, **options):
        # The lifecycle has all of the old messages, or none; each of the others is right.
        assert messages(copy) in (before, kept), kills
        maintain(spark, copy, **options)
        assert contents(copy) == expected, kills
        commit = copy.last_commit(TABLE)
        assert commit is not None
        assert commit["removed"]["messages"] == removed

    assert kills > 20


def test_what_may_still_be_needed_stays(spark: SparkSession, tmp_path: Path) -> None:
    """Of the stories, messages that are open, lost or different stay, and dead letters, which can be redriven."""
    log = told()[0]
    log.say("TICK", None, 5_000, None, queue=None)
    directory = directory_for(spark, tmp_path, dated=True)
    directory.lifecycle(log.tables())
    lake = directory.lake
    before = messages(lake)

    maintain(spark, lake, older_ms=DAY_MS, now_ms=ms(at(10_000)) + DAY_MS)

    after = messages(lake)
    stay = {"lost", "dead", "leased", "released", "rejected", "delayed", "waiting"}
    assert {row.state for row in after.values()} - {"acked"} == stay
    acked_with_dead_letter = (f"{MESSAGES_TOPIC}/0/8", "q")
    assert acked_with_dead_letter in after
    redriven = (f"{MESSAGES_TOPIC}/0/13", "q")
    assert redriven in before.keys() - after.keys()
    assert computed_again(spark, lake) == after


def ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def deduplicated(offsets: dict[int, float]) -> Log:
    """Delayed messages with one deduplication id, delivered and acked, except the second one, which is dropped."""
    log = Log()
    log.say("TICK", None, 0, None, queue=None)
    for offset, seconds in offsets.items():
        log.say("DELAY", offset, seconds, DRAWN, due_at=at(seconds + 1), text="same")
        if offset == 1:
            continue
        id_ = log.record(100 + offset, seconds + 1.4, copy_of=f"{DRAWN}/0/{offset}", attempt=1)
        log.say("DELIVERED", offset, seconds + 1.5, DRAWN, attempt=1, cause="DUE", holder="f" * 16)
        log.say("ACQUIRE", 100 + offset, seconds + 2, id=f"{DRAWN}/0/{offset}")
        log.say("ACK", 100 + offset, seconds + 3)
        assert id_
    log.say("TICK", None, max(offsets.values()) + 5_000, None, queue=None)
    return log


@pytest.mark.parametrize(("before_s", "left"), [(2_500, []), (290, [0, 1, 2])])
def test_messages_with_one_deduplication_id_go_together(
    spark: SparkSession, tmp_path: Path, before_s: int, left: list[int]
) -> None:
    """Without the first one, the second one would count as accepted and overdue."""
    directory = directory_for(spark, tmp_path, dated=True)
    directory.lifecycle(deduplicated({0: 10, 1: 280, 2: 2_000}).tables())
    lake = directory.lake
    assert [row.state for _, row in sorted(messages(lake).items())] == ["acked", "deduplicated", "acked"]

    maintain(spark, lake, older_ms=DAY_MS, now_ms=ms(at(before_s)) + DAY_MS)

    after = messages(lake)
    assert sorted(after) == [(f"{DRAWN}/0/{offset}", "q") for offset in left]
    assert computed_again(spark, lake) == after


@pytest.mark.parametrize(("begin", "gone"), [(0, []), (2, [0, 1])])
def test_messages_whose_record_is_still_in_a_queues_own_topic_stay(
    spark: SparkSession, tmp_path: Path, begin: int, gone: list[int]
) -> None:
    """A queue that names the topic later would receive the records again."""
    log = Log()
    log.say("TICK", None, 0, None, queue=None)
    for offset in range(3):
        log.record(offset, 1)
        log.say("ACQUIRE", offset, 2, "own")
        log.say("ACK", offset, 3, "own")
    log.say("TICK", None, 5_000, None, queue=None)
    for row in log.messages:
        row.update(topic="own", queue=None)
    subscriptions = [Subscription("q", "own", current=True)]
    directory = Directory(
        spark, tmp_path, {"own": {"0": 0}}, {"own": {"0": begin}}, subscriptions=subscriptions, dated=True
    )
    directory.lifecycle(log.tables())
    lake = directory.lake

    maintain(spark, lake, older_ms=DAY_MS, now_ms=ms(at(4_000)) + DAY_MS)

    after = messages(lake)
    assert sorted(after) == [(f"own/0/{offset}", "q") for offset in range(3) if offset not in gone]
    assert computed_again(spark, lake) == after


def test_a_dry_run_of_a_removal_changes_nothing(lake: Lake, command: Command) -> None:
    before = files(lake)

    done = command(f"maintain --older 90d --dry-run --data {lake.path}")

    assert done.code == 0
    assert files(lake) == before
    *_, removed, last = done.out.splitlines()
    assert re.match(r"messages removed: [1-9]\d* that ended before \d{4}-", removed)
    assert last == "dry run: nothing was changed"


def test_an_age_below_a_deduplication_window_is_refused(spark: SparkSession, lake: Lake) -> None:
    round_ = lake.last_commit("rounds")
    assert round_ is not None
    windows = {"*": 300_000, "slow": 2 * DAY_MS}
    lake.publish("rounds", round_["batch"] + 1, {}, {**round_, "deduplication_windows": windows})

    refusal = "--older 1d: the deduplication window of queue 'slow' is 2d: give a longer age"
    with pytest.raises(PipelineError, match=refusal):
        maintain(spark, lake, older_ms=DAY_MS, now_ms=0)
