"""Loads: the messages of rows, and rejected rows. test_kills.py kills loads."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from marq.wire import marker_codec
from marq.wire.markers import Delay
from marq.wire.names import ATTEMPT_HEADER, ID_HEADER, KEY_HEADER, Names
from pipeline import inputs, load_rows
from pipeline.errors import PipelineError
from pipeline.load_rows import Fields
from pipeline.load_stage import LoadStage
from pipeline.writing import MarkersTopic
from tests.pipeline.conftest import Command
from tests.pipeline.namespace import Namespace
from tests.worker.harness import Namespace as Written
from tests.worker.harness import eventually, header

# Spark, a worker and a Kafka start in it.
pytestmark = pytest.mark.timeout(1_200)

#: The limit of a messages topic with small records.
LIMIT_BYTES = 1_224
CSV = """id,name,wait
1,one,0.5
2,,3
3,three,-1
4,four,soon
5
6,six,
7,"a ""quoted"" one",1e30
8,eight,0,more
9,XXX,1
""".replace("XXX", "x" * 200)
JSON = (
    '{"id": 1, "at": "2030-01-31T08:00:00+01:00", "of": {"a": [1,  2]}}\n{"id": 2\n[3]\n\n{"id":4,"at":"2030-01-31"}\n'
)


def checked(spark: SparkSession, path: Path, form: str, fields: Fields) -> list[Any]:
    rows = inputs.read(spark, str(path), form)
    return load_rows.checked(rows, fields, "q", LIMIT_BYTES).collect()


def test_csv_rows_that_can_not_be_messages_are_set_aside(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(CSV)

    found = checked(spark, path, "csv", Fields("name", None, "id", (("n", "name"), ("i", "id")), "wait", None))

    good = [(row["value"], row["key"], row["time_ms"], len(row["headers"])) for row in found if row["reason"] is None]
    assert good == [(b"one", b"1", 500, 2), (b"six", b"6", 0, 2)]
    bad = [(row["reason"], json.loads(row["original"])) for row in found if row["reason"] is not None]
    assert bad == [
        (load_rows.NO_VALUE, {"id": "2", "name": None, "wait": "3"}),
        (load_rows.NEGATIVE, {"id": "3", "name": "three", "wait": "-1"}),
        (load_rows.NO_TIME, {"id": "4", "name": "four", "wait": "soon"}),
        (load_rows.NO_LINE, {"_corrupt_record": "5"}),
        (load_rows.NO_TIME, {"id": "7", "name": 'a "quoted" one', "wait": "1e30"}),
        (load_rows.NO_LINE, {"_corrupt_record": "8,eight,0,more"}),
        ("too large: more than 200 bytes with key and headers", {"id": "9", "name": "x" * 200, "wait": "1"}),
    ]
    for fields, said in [
        (Fields(value="nmae"), "--value: there is no column 'nmae'; the columns are: id, name, wait"),
        (Fields(headers=(("marq-id", "id"),)), "names beginning with 'marq-' are reserved"),
    ]:
        with pytest.raises(PipelineError) as raised:
            checked(spark, path, "csv", fields)
        assert said in str(raised.value)


def test_a_json_line_is_sent_unchanged(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(JSON)

    found = checked(spark, path, "json", Fields(at="at"))

    assert [(row["value"], row["time_ms"]) for row in found if row["reason"] is None] == [
        (b'{"id": 1, "at": "2030-01-31T08:00:00+01:00", "of": {"a": [1,  2]}}', 1_896_073_200_000)
    ]
    assert [(row["reason"], row["original"]) for row in found if row["reason"] is not None] == [
        (load_rows.NO_LINE, '{"_corrupt_record":"{\\"id\\": 2"}'),
        (load_rows.NO_LINE, '{"_corrupt_record":"[3]"}'),
        (load_rows.NO_TIME, '{"id":4,"at":"2030-01-31"}'),
    ]


def test_numbers_of_a_source_have_no_gaps_and_every_marker_claims_itself_only(spark: SparkSession) -> None:
    rows = spark.range(2_750).select(
        F.col("id").cast("string").cast("binary").alias("value"), F.lit(None).cast("binary").alias("key"),
        F.array().cast("array<struct<key:string,value:binary>>").alias("headers"),
        F.lit(0).cast("long").alias("time_ms"), F.col("id").alias("row"),
    )  # fmt: skip
    markers = MarkersTopic("marq.markers", 3, 4_096)
    stage = LoadStage("mine", "q", "cluster/marq", {"at": None}, None, "07", 1_000, 3, 2_750, 9_890, {})

    records = load_rows.markers(load_rows.placed(rows, 3), stage, markers, 2).collect()

    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    values = Counter[bytes]()
    for record in records:
        assert len(record["value"]) <= markers.room_bytes
        batch = marker_codec.decode(bytes(record["value"]))
        assert isinstance(batch, Delay)
        assert (batch.from_offset, batch.relative) == (batch.offsets[0], True)
        taken[batch.source.partition] += batch.offsets
        values.update([payload.value for payload in batch.payloads])
    assert {len(numbers) for numbers in taken.values()} == {1_000, 750}
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in taken.values())
    assert values == dict.fromkeys([b"%d" % number for number in range(2_750)], 1)


async def delivered(written: Written, queue: str) -> Counter[bytes]:
    """Return how often each value reached a queue."""
    records = await written.records(written.names.messages)
    return Counter(record.value for record in records if record.key == queue.encode())


@pytest.mark.verify
async def test_times_keys_headers_and_rows_set_aside(
    spark: SparkSession, written: Written, installed: object, command: Command, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,shop,wait\n1,north,0\n2,south,2.5\n3,north,-1\n")
    words = f"load {path} t --format csv --key id --header shop=shop --delay wait --json"

    assert command(f"{words} --dry-run").json["rows"] == 2
    assert not any((data / "loads").glob("*"))
    began_s = time.time()
    said = command(words).json

    assert (said["sent"], said["bad"]) == (2, {"negative delay": 1})
    assert pq.read_table(said["bad_path"].removeprefix("file:")).to_pylist() == [
        {"original": '{"id":"3","shop":"north","wait":"-1"}', "reason": "negative delay"}
    ]
    await eventually(lambda: delivered(written, "t"), lambda counts: len(counts) == 2)
    records = [record for record in await written.records(written.names.messages) if record.key == b"t"]
    first, second = sorted(records, key=lambda record: record.value)
    assert (json.loads(first.value), header(first)["shop"]) == ({"id": "1", "shop": "north", "wait": "0"}, b"north")
    assert (header(second)[KEY_HEADER], header(second)[ATTEMPT_HEADER]) == (b"2", b"1")
    assert header(second)[ID_HEADER].decode().startswith(f"{said['source']}/")
    assert second.timestamp / 1000 >= began_s + 2.5
    # The same command is the same load.
    assert command(words).json["sent"] == 0


@pytest.fixture
def loadable(servers: str, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topics that a load needs, without a worker."""
    Namespace(servers, names).make(names.messages, names.markers)
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", servers)
    monkeypatch.setenv("MARQ_PREFIX", names.prefix)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.csv q --format csv", "nowhere.csv: there is no such file or directory"),
        ("nowhere q --format table", "nowhere: there is no such table"),
        ("{file} q --format parquet", "can't be read as parquet"),
        ("{file} q --format csv --name ../x", "--name ../x: expected 1 to 100 characters"),
        ("{file} q --format csv --header shop", "--header shop: expected NAME=COL"),
        ("{file} q --format csv --rate 0", "--rate 0: expected rows a second"),
    ],
)
def test_a_refused_load_is_one_sentence(
    spark: SparkSession, loadable: None, command: Command, tmp_path: Path, words: str, said: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id\n1\n")

    assert said in command(f"load {words.replace('{file}', str(path))}").refusal
