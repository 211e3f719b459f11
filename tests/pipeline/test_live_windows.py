"""Live windows: the same records give the same rows as `stats`, whenever they arrive."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from marq.wire.live_windows import STATUS_FILE, WINDOWS_FOLDER
from pipeline import live_windows
from pipeline.errors import PipelineError
from pipeline.lake import Lake
from pipeline.lifecycle_runs import Run
from pipeline.live_windows import LiveWindows, _merged, busiest
from pipeline.maintenance import Maintenance
from pipeline.statistics import EVENTS, MEASURED, statistics
from pipeline.tables import DEAD_LETTERS, MARKERS, MESSAGES
from pipeline.windows import Windows, span
from tests.pipeline.directory import Directory, Tables, arrow
from tests.pipeline.stories import BEGIN, Log, at, directory_for, told
from tests.pipeline.test_worlds import rounds as cut
from tests.pipeline.worlds import Worlds

MINUTE_MS = 60_000
NOW_MS = int(BEGIN.timestamp() * 1000) + 60 * MINUTE_MS
pytestmark = pytest.mark.timeout(900)

Rows = dict[tuple[str, int], dict[str, Any]]


def written(data: Path) -> Rows:
    """Return the windows in the files, by queue and time."""
    lines = [
        json.loads(line)
        for file in sorted((data / WINDOWS_FOLDER).glob("*/*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    rows = {(line.pop("queue"), line.pop("at")): line for line in lines}
    assert len(rows) == len(lines), "a minute is in one line"
    return {key: row for key, row in rows.items() if row}


def computed(directory: Directory) -> Rows:
    """Return the windows that `stats` would compute."""
    Run(directory.spark, directory.lake).take()
    lifecycle = directory.lake.read("lifecycle")
    known = span(lifecycle).first()
    windows = Windows.cut(known.begin_ms, known.last_ms + 1, MINUTE_MS).whole()
    found: Rows = {}
    for row in statistics(lifecycle, windows).where(F.col("scope") == "window").collect():
        counts = {name: row[name] for name in EVENTS if row[name]}
        times = {name: row[name] for name in MEASURED if row[name] is not None}
        if counts or times:
            found[row.queue, int(row.starts_at.timestamp())] = counts | times
    return found


def rounds(log: Log, *ends: float) -> Iterator[Tables]:
    """Return the log in rounds that end at these seconds, as ``ingest`` reads it: other topics later than markers."""
    begin = BEGIN - timedelta(days=1)
    for end in (*map(at, ends), BEGIN + timedelta(days=1)):
        later = timedelta(seconds=0.5)
        yield Tables(
            arrow([row for row in log.markers if begin <= row["logged_at"] < end], MARKERS),
            arrow([row for row in log.messages if begin <= row["sent_at"] - later < end], MESSAGES),
            arrow([row for row in log.letters if begin <= row["sent_at"] - later < end], DEAD_LETTERS),
        )
        begin = end


def of_queues(windows: Rows) -> Rows:
    return {key: row for key, row in windows.items() if key[0]}


class KilledAt(Lake):
    """A data directory whose process is killed before or after it writes the first file with a name like this."""

    def __init__(self, spark: SparkSession, path: str, prefix: str, before: bool) -> None:
        super().__init__(spark, path)
        self._prefix = prefix
        self._before = before

    def write_text(self, name: str, text: str) -> None:
        is_here = name.startswith(self._prefix)
        if not (is_here and self._before):
            super().write_text(name, text)
        if is_here:
            raise KeyboardInterrupt


#: One file of windows is written; all are; the tables are in their places without a commit; the commit is written.
STEPS = ((WINDOWS_FOLDER, False), (STATUS_FILE, False), ("_commits/live", True), ("_commits/live", False))
#: Ends of rounds: messages are waiting, leased, dead or acked, and some acked ones are forgotten.
ENDS = (1.6, 3.2, 33.1, 200)


@pytest.fixture(scope="module")
def in_rounds(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """The stories in several rounds, with a run after each that merges directories; runs of the third are killed."""
    found = directory_for(spark, tmp_path_factory.mktemp("rounds"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_windows, "MERGED_AT_ONCE", 2)
        for number, tables in enumerate(rounds(told()[0], *ENDS)):
            found.bring(tables)
            for step in STEPS if number == 2 else ():
                killed_at(found, *step)
            LiveWindows(spark, found.lake).update(NOW_MS)
    return found


def killed_at(directory: Directory, prefix: str, before: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        LiveWindows(directory.spark, KilledAt(directory.spark, str(directory.path), prefix, before)).update(NOW_MS)


def test_the_same_records_give_the_same_rows_as_stats_in_one_run(spark: SparkSession, tmp_path: Path) -> None:
    whole = directory_for(spark, tmp_path)
    whole.bring(told()[0].tables())

    LiveWindows(spark, whole.lake).update(NOW_MS)

    assert of_queues(written(tmp_path)) == computed(whole)


@pytest.mark.verify
def test_windows_do_not_wait_until_tables_are_merged(spark: SparkSession, tmp_path: Path) -> None:
    whole = directory_for(spark, tmp_path)
    whole.bring(told()[0].tables())

    killed_at(whole, STATUS_FILE, False)
    published = of_queues(written(tmp_path))
    merged = [*tmp_path.glob("live/side=*"), *tmp_path.glob("_staging/live-*/merged-*")]
    LiveWindows(spark, whole.lake).update(NOW_MS)

    assert merged == []
    assert published == of_queues(written(tmp_path)) != {}


@pytest.mark.verify
def test_the_same_records_give_the_same_rows_as_stats_in_several_runs_with_crashes(in_rounds: Directory) -> None:
    assert of_queues(written(in_rounds.path)) == computed(in_rounds)


@pytest.mark.verify
def test_worlds_under_faults_that_are_cut_into_rounds_give_the_same_rows_as_stats(
    spark: SparkSession, tmp_path: Path
) -> None:
    worlds = Worlds.of(*range(200, 212))
    found = worlds.directory(spark, tmp_path)
    whole = worlds.tables(spark)
    newest = max(row["logged_at"] for row in whole.markers.to_pylist())
    for tables in cut(whole, random.Random(5), 3):
        found.bring(tables)
        LiveWindows(spark, found.lake).update(int(newest.timestamp() * 1000))

    assert of_queues(written(tmp_path)) == computed(found)


@pytest.mark.verify
def test_all_queues_together_are_the_sums_of_the_queues(in_rounds: Directory) -> None:
    windows = written(in_rounds.path)
    together: dict[int, Counter[str]] = {}
    for (queue, at_s), row in windows.items():
        if queue:
            together.setdefault(at_s, Counter()).update({name: row.get(name, 0) for name in EVENTS})

    assert together == {
        at_s: Counter({name: row.get(name, 0) for name in EVENTS})
        for (queue, at_s), row in windows.items()
        if not queue
    }


@pytest.mark.verify
def test_a_run_without_news_computes_no_window_and_says_until_when_they_are_known(in_rounds: Directory) -> None:
    before = in_rounds.lake.last_commit("live")
    files = {file: file.stat().st_mtime_ns for file in (in_rounds.path / WINDOWS_FOLDER).glob("*/*")}

    assert LiveWindows(in_rounds.spark, in_rounds.lake).update(NOW_MS + 5_000) == 0

    assert in_rounds.lake.last_commit("live") == before
    assert files == {file: file.stat().st_mtime_ns for file in (in_rounds.path / WINDOWS_FOLDER).glob("*/*")}
    status = json.loads((in_rounds.path / STATUS_FILE).read_text())
    begin_s = int(BEGIN.timestamp())
    assert status == {"version": 1, "computed_ms": NOW_MS + 5_000, "begin_s": begin_s, "queues_left_out": 0}


@pytest.mark.verify
def test_directories_that_no_commit_names_are_deleted_by_the_next_run(in_rounds: Directory) -> None:
    commit = in_rounds.lake.last_commit("live")
    named = {place for name in ("state", "events") for place, *_ in commit[name]} | {*commit["garbage"]}

    assert {str(path.relative_to(in_rounds.path)) for path in in_rounds.path.glob("live/side=*/batch=*")} == named


@pytest.mark.verify
@pytest.mark.parametrize(
    ("deleted", "lacks"),
    [
        ("*", r"_commits/markers was deleted .* batch 4, because markers/batch=000000004 exists"),
        ("messages", r"_commits/messages .* batch 4, because the last commit of \w+ names it"),
        ("rounds", r"_commits/rounds .* batch 4, because the last commit of (live|lifecycle) names it"),
        ("markers/*4.json", r"_commits/markers .* batch 4, because the last commit of \w+ names it"),
    ],
)
def test_ingest_refuses_a_directory_without_its_commits(
    in_rounds: Directory, tmp_path: Path, deleted: str, lacks: str
) -> None:
    copy = tmp_path / "data"
    shutil.copytree(in_rounds.path, copy)
    lake = Lake(in_rounds.spark, str(copy))
    lake.check_commits()

    for path in (copy / "_commits").glob(deleted):
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    with pytest.raises(PipelineError, match=f"{copy}/{lacks}"):
        lake.check_commits()


@pytest.mark.verify
def test_a_queue_that_gets_among_the_busiest_has_all_of_its_windows(spark: SparkSession, tmp_path: Path) -> None:
    log = Log()
    for offset, (queue, seconds) in enumerate([("a", 1), ("a", 2), ("b", 3), *[("b", 70)] * 5]):
        log.record(offset, seconds)
        log.messages[-1]["queue"] = queue
    two = directory_for(spark, tmp_path)
    kept = []
    for tables in rounds(log, 60):
        two.bring(tables)
        LiveWindows(spark, two.lake, max_queues=1).update(NOW_MS)
        kept.append(of_queues(written(tmp_path)))

    minute = int(BEGIN.timestamp())
    assert kept == [
        {("a", minute): {"sent": 2}},
        {("b", minute): {"sent": 1}, ("b", minute + 60): {"sent": 5}},
    ]
    assert json.loads((tmp_path / STATUS_FILE).read_text())["queues_left_out"] == 1


@pytest.mark.verify
def test_the_minutes_of_a_queue_whose_name_has_a_line_separator_are_a_line_each(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Any producer may write such a key. The second run reads what the first one wrote."""
    log, queue = Log(), "a\u2028b"
    for offset, seconds in enumerate((1, 61)):
        log.record(offset, seconds)
        log.messages[-1]["queue"] = queue
    two = directory_for(spark, tmp_path)
    for tables in rounds(log, 60):
        two.bring(tables)
        LiveWindows(spark, two.lake).update(NOW_MS)

    minute = int(BEGIN.timestamp())
    assert of_queues(written(tmp_path)) == {(queue, minute): {"sent": 1}, (queue, minute + 60): {"sent": 1}}


@pytest.mark.verify
def test_maintain_leaves_batches_that_the_windows_have_not_counted(spark: SparkSession, tmp_path: Path) -> None:
    three = directory_for(spark, tmp_path)
    first, *others = rounds(told()[0], 3.2, 33.1)
    three.bring(first)
    LiveWindows(spark, three.lake).update(NOW_MS)
    for tables in others:
        three.bring(tables)
    Run(spark, three.lake).take()

    def merged() -> int:
        return Maintenance(spark, three.lake, 2**30).run(dry_run=True).usage["markers"].directories

    assert merged() == 0
    LiveWindows(spark, three.lake).update(NOW_MS)
    assert merged() == 3


@pytest.mark.verify
@pytest.mark.parametrize("interrupted", [True, False], ids=["interrupted", "meanwhile"])
def test_windows_wait_for_the_batches_that_maintain_exchanges(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    directory = directory_for(spark, tmp_path)
    for tables in rounds(told()[0], 3.2):
        directory.bring(tables)
    Run(spark, directory.lake).take()
    maintenance = Maintenance(spark, directory.lake, 2**30)
    with monkeypatch.context() as patch:
        if interrupted:
            # The first batch of markers has left its place, and the merged one is not in its place yet.
            renames = iter((Lake.rename, None))
            patch.setattr(Lake, "rename", lambda *arguments: next(renames)(*arguments))  # type: ignore[misc]
            with pytest.raises(TypeError):
                maintenance.run()
        else:
            stage = LiveWindows._stage_events
            patch.setattr(LiveWindows, "_stage_events", lambda *arguments: maintenance.run() and stage(*arguments))

        with pytest.raises(PipelineError, match=r"maintain (has not finished|exchanged)"):
            LiveWindows(spark, directory.lake).update(NOW_MS)

    maintenance.run()
    LiveWindows(spark, directory.lake).update(NOW_MS)

    assert of_queues(written(tmp_path)) == computed(directory)


def test_a_directory_is_merged_with_those_that_are_at_most_twice_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_windows, "MERGED_AT_ONCE", 2)
    assert _merged([["a", 100], ["b", 10], ["c", 3]], 2) == 2
    assert _merged([["a", 100], ["b", 10], ["c", 3]], 1) == 0
    assert _merged([["a", 100, 5], ["b", 10, 5]], 60, most=50) == 1
    assert _merged([], 5) == 0


def test_directories_are_merged_once_they_are_several_or_the_new_one_is_large() -> None:
    assert _merged([["a", 1_000], *[["b", 10]] * 6], 10) == 0
    assert _merged([["a", 1_000], *[["b", 10]] * 7], 10) == 7
    assert _merged([["a", 100]], live_windows.LARGE_ROWS) == 1


def test_a_queue_keeps_its_place_among_the_busiest_until_another_has_twice_as_many_events() -> None:
    assert busiest({"a": 10, "b": 15, "c": 5}, [], 2) == ["b", "a"]
    assert busiest({"a": 10, "b": 15, "c": 5}, ["a", "c"], 2) == ["a", "b"]
    assert busiest({"a": 10, "b": 19}, ["a"], 1) == ["a"]
    assert busiest({"a": 10, "b": 21}, ["a"], 1) == ["b"]
