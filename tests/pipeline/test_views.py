"""pipeline/views.sql, read by DuckDB."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from pyspark.sql import SparkSession

from marq.dead_letters.error_kinds import error_kind
from marq.wire.names import ERROR_HEADER
from pipeline.lifecycle_runs import TABLE
from pipeline.statistics import EVENTS
from pipeline.tables import DEAD_LETTERS, MARKERS, MESSAGES
from tests.pipeline.directory import Directory, Tables, arrow
from tests.pipeline.processes import ROOT
from tests.pipeline.stories import DRAWN, LETTERS_TOPIC, MESSAGES_TOPIC, at

VIEWS = (ROOT / "pipeline" / "views.sql").read_text()
TABLES = ("markers", "messages", "dead_letters", "lifecycle", "audit", "stats")
#: Columns that Spark makes of the names of directories.
FOLDERS = {"side", "batch", "date"}
COMPUTED = (
    "deliveries", "per_minute", "queue_times", "failures", "failure_kinds", "repeats", "duplicates", "late_deliveries",
    "open_messages",
)  # fmt: skip
pytestmark = pytest.mark.timeout(900)

Rows = list[tuple[Any, ...]]


def opened(data: Path | str) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views of a data directory."""
    connection = duckdb.connect()
    connection.execute("SET VARIABLE data = $data", {"data": str(data)})
    connection.execute(VIEWS)
    return connection


@pytest.fixture(scope="module")
def views(audited: Directory) -> Iterator[duckdb.DuckDBPyConnection]:
    """The views of the stories."""
    with opened(audited.path) as connection:
        yield connection


def rows(connection: duckdb.DuckDBPyConnection, query: str) -> Rows:
    return connection.execute(query).fetchall()


def place(offset: int) -> str:
    return f"{MESSAGES_TOPIC}/0/{offset}"


def named(found: Rows) -> dict[str, Any]:
    """Return rows by their first column; of rows with two columns, the second one."""
    return {row[0]: row[1] if len(row) == 2 else row[1:] for row in found}


def types(connection: duckdb.DuckDBPyConnection, view: str) -> Rows:
    return rows(connection, f"SELECT column_name, column_type FROM (DESCRIBE {view})")


def test_the_script_makes_the_views_that_it_lists(views: duckdb.DuckDBPyConnection) -> None:
    names = {name for (name,) in rows(views, "SELECT view_name FROM duckdb_views() WHERE NOT internal")}
    listed = VIEWS.partition("SET TimeZone")[0]

    assert names == {*TABLES, *COMPUTED}
    assert all(f"--     {name} " in listed for name in COMPUTED)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_rows_that_spark_reads(
    views: duckdb.DuckDBPyConnection, audited: Directory, table: str
) -> None:
    lake = audited.lake
    schemas = {"markers": MARKERS, "messages": MESSAGES, "dead_letters": DEAD_LETTERS}
    expected = lake.table(table, schemas[table], 0) if table in schemas else lake.read(table)

    assert [name for name, _ in types(views, table)] == [name for name in expected.columns if name not in FOLDERS]
    assert rows(views, f"SELECT count(*) FROM {table}") == [(expected.count(),)]
    assert expected.count() > 0


@pytest.mark.parametrize("view", [*TABLES, *COMPUTED])
def test_times_have_a_zone(views: duckdb.DuckDBPyConnection, view: str) -> None:
    by_name = dict(types(views, view))
    times = [kind for name, kind in by_name.items() if name.endswith("_at") or name == "minute"]

    assert set(times) == (set() if view == "queue_times" else {"TIMESTAMP WITH TIME ZONE"})
    assert not re.search("TIMESTAMP(?! WITH TIME ZONE)", str(by_name))
    assert rows(views, f"SELECT count(*) FROM {view}")[0][0] > 0


def test_times_are_those_of_the_topics(views: duckdb.DuckDBPyConnection) -> None:
    [(sent_at, acquired_at)] = rows(views, f"SELECT sent_at, acquired_at FROM deliveries WHERE id = '{place(0)}'")

    assert (sent_at, acquired_at) == (at(1), at(2))
    assert sent_at.utcoffset().total_seconds() == 0


def test_minutes_have_the_counts_and_times_of_the_job_stats(views: duckdb.DuckDBPyConnection) -> None:
    columns = [*EVENTS, *[f"{name}_p{share}_ms" for name in ("wait", "run") for share in (50, 95, 99)]]
    chosen = ", ".join(columns)
    any_event = " + ".join(EVENTS)

    found = rows(views, f"SELECT queue, minute, {chosen} FROM per_minute ORDER BY ALL")

    stats = "stats WHERE scope = 'window'"
    assert found == rows(views, f"SELECT queue, starts_at, {chosen} FROM {stats} AND {any_event} > 0 ORDER BY ALL")
    assert len(found) == 5
    totals = ", ".join(column for column in columns if column.endswith("_ms"))
    assert rows(views, f"SELECT queue, {totals} FROM queue_times") == rows(
        views, f"SELECT queue, {totals} FROM stats WHERE scope = 'total'"
    )


def test_failures_have_the_kind_of_their_error(views: duckdb.DuckDBPyConnection) -> None:
    found = rows(views, "SELECT outcome, kind, failures, messages, dead FROM failure_kinds ORDER BY ALL")

    assert found == [
        ("abandoned", "abandoned", 1, 1, 0),
        ("expired", "expired", 5, 4, 1),
        ("message_expired", "boom N", 1, 1, 1),
        ("message_expired", "message_expired", 1, 1, 0),
        ("rejected", "bad", 4, 4, 2),
        ("released", "boom N", 4, 4, 2),
    ]


@pytest.mark.parametrize(
    "error",
    [
        "boom",
        "  TimeoutError: no answer after 30.5 s\nTraceback",
        "row 12 of 1.2.3",
        "id 3f2504e0-4f89-11d3-9a0c-0305",
        "deadbeef is no number",
        "effaced00 FACADE12",
        "abcdefab-9 and abcdefabcdef1",
        "x1234567 1234567x",
        "é9",
        "N " * 150,
    ],
)
def test_kinds_are_those_of_the_online_dead_letters(error: str, views: duckdb.DuckDBPyConnection) -> None:
    record: Any = SimpleNamespace(headers=[(ERROR_HEADER, error.encode())])

    assert views.execute("SELECT error_kind($error)", {"error": error}).fetchall() == [(error_kind(record),)]


def test_repeats_name_the_reasons(views: duckdb.DuckDBPyConnection) -> None:
    found = named(rows(views, "SELECT id, deliveries, reasons FROM repeats"))

    assert found[place(1)] == (2, ["released: boom N"])
    assert found[place(2)] == (2, ["expired"])
    assert found[place(10)] == (3, ["expired", "acked"])
    assert found[place(13)] == (2, ["rejected: bad", "redriven"])
    assert found[place(20)] == (3, ["earlier attempts", "expired in place"])
    assert not {place(0), place(15), f"{DRAWN}/0/0"} & found.keys()


def test_duplicates_are_those_of_the_audit(views: duckdb.DuckDBPyConnection) -> None:
    found = named(rows(views, "SELECT id, duplicates, causes FROM duplicates"))

    assert found[place(10)] == (2, ["ended while held", "aborted copy"])
    assert found[place(6)] == (1, ["acked late"])
    assert sum(count for count, _ in found.values()) == 8


def test_late_deliveries(views: duckdb.DuckDBPyConnection) -> None:
    found = named(rows(views, "SELECT id, kind, late_ms FROM late_deliveries WHERE late_ms < 1000"))

    assert found == {
        place(1): ("redelivery", 500),
        place(13): ("redrive", 500),
        place(15): ("delayed", 500),
        f"{DRAWN}/0/0": ("delayed", 500),
    }


def test_open_messages(views: duckdb.DuckDBPyConnection) -> None:
    found = named(rows(views, "SELECT id, state, age_ms, overdue_ms > 0, last_error FROM open_messages"))

    assert found[place(23)] == ("rejected", 1_089_000, True, "bad")
    assert found[f"{DRAWN}/0/3"] == ("delayed", 1_089_000, False, None)
    assert len(found) == 10


def test_a_directory_without_results_of_jobs_names_the_job(spark: SparkSession, tmp_path: Path) -> None:
    Directory(spark, tmp_path).bring(Tables(arrow([], MARKERS), arrow([], MESSAGES), arrow([], DEAD_LETTERS)))

    with opened(tmp_path) as connection:
        assert [rows(connection, f"FROM {name}") for name in ("markers", "messages", "dead_letters")] == [[], [], []]
        for table, view in (("lifecycle", "open_messages"), ("audit", "duplicates"), ("stats", "stats")):
            with pytest.raises(duckdb.InvalidInputException, match=f"run `python -m pipeline {table}`"):
                connection.execute(f"FROM {view}").fetchall()


def test_missing_tables_have_the_same_columns(
    views: duckdb.DuckDBPyConnection, spark: SparkSession, tmp_path: Path
) -> None:
    Directory(spark, tmp_path)

    with opened(tmp_path) as connection:
        for table in TABLES:
            assert types(connection, table) == types(views, table)


def test_only_committed_files_count(audited: Directory) -> None:
    """A batch without a commit, and a directory that the last lifecycle replaced, are no part of the tables."""
    lake = audited.lake
    source = lake.table("markers", MARKERS, 0)
    copies = [f"{lake.path}/markers/batch=000000001", f"{lake.path}/lifecycle/side=closed/batch=000000009"]
    for copy, frame in zip(copies, (source, lake.read(TABLE)), strict=True):
        frame.write.parquet(copy)
    try:
        with opened(f"{audited.path}/") as connection:
            found = rows(connection, "SELECT (SELECT count(*) FROM markers), (SELECT count(*) FROM lifecycle)")
    finally:
        for copy in copies:
            lake.delete(copy.removeprefix(f"{lake.path}/"))

    assert found == [(source.count(), 36)]


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        (None, "is not a data directory: it has no about.json"),
        ({"format": 9}, "has format 9, and views.sql needs 3"),
    ],
)
def test_other_directories_are_refused(tmp_path: Path, about: dict[str, int] | None, sentence: str) -> None:
    if about is not None:
        (tmp_path / "about.json").write_text(json.dumps(about))

    with pytest.raises(duckdb.InvalidInputException, match=sentence):
        opened(tmp_path)


def test_a_directory_whose_name_is_a_pattern_is_refused(tmp_path: Path) -> None:
    """Its tables would have no rows."""
    data = tmp_path / "data [old]"
    data.mkdir()
    (data / "about.json").write_text(json.dumps({"format": 3}))

    with pytest.raises(duckdb.InvalidInputException, match=r"expected a path without \*\?\[\]\{\}"):
        opened(data)


def test_the_directory_is_required() -> None:
    with duckdb.connect() as connection, pytest.raises(duckdb.InvalidInputException, match="SET VARIABLE data"):
        connection.execute(VIEWS)


def test_dead_letters_name_their_origin(views: duckdb.DuckDBPyConnection) -> None:
    found = rows(views, "SELECT topic, origin_topic, origin_offset FROM dead_letters WHERE id = 'marq.messages/0/3'")

    assert found == [(LETTERS_TOPIC, MESSAGES_TOPIC, 3)]
