"""The tables contain each record of the topics once."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset
import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from marq.settings.definitions import quarantine_key
from marq.settings.skipped_records import SkippedRecords
from marq.wire.marker_codec import encode
from marq.wire.markers import Source
from marq.wire.names import Names
from marq.wire.quarantines import Quarantine, digest
from marq_worker.broker import EmbeddedBroker
from pipeline.errors import PipelineError
from pipeline.ingest import Ingest, _share
from pipeline.kafka import Connection, TopicAdmin
from pipeline.lake import ROUNDS, Lake
from pipeline.subscriptions import Subscription
from pipeline.tables import CORRUPT, STREAMS
from tests.client.waiting import wait_until
from tests.pipeline.conftest import Command
from tests.pipeline.namespace import Namespace, Place, ingest
from tests.pipeline.processes import Killed
from tests.unit.core.batches import ack, acquire, release

pytestmark = pytest.mark.timeout(900)
IN_2024 = datetime(2024, 1, 1)  # noqa: DTZ001 - Spark's rows have UTC without saying so
#: Within the retention of a new topic.
NOW_MS = time.time_ns() // 1_000_000


@pytest.fixture
def made(servers: str, names: Names) -> Namespace:
    """All topics, unused."""
    return Namespace(servers, names).make()


@pytest.fixture
def lake(spark: SparkSession, data: Path) -> Lake:
    return Lake(spark, str(data))


def table(lake: Lake, name: str) -> DataFrame:
    """Return a table according to its commits."""
    last = lake.last_commit("markers" if name == "corrupt" else name)
    return lake.table(name, {**STREAMS, "corrupt": CORRUPT}[name], -1 if last is None else last["batch"])


def by_place(lake: Lake, name: str = "messages") -> dict[Place, Row]:
    return {(row.topic, row.partition, row.offset): row for row in table(lake, name).collect()}


class Ingested(NamedTuple):
    """One round of records of each kind."""

    counts: dict[str, int]
    lake: Lake
    #: Expected columns by the places of the records.
    messages: dict[Place, dict[str, Any]]
    dead_letters: dict[Place, tuple[str | None, int | None, int | None]]


@pytest.fixture(scope="module")
def ingested(spark: SparkSession, broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Ingested:
    connection = Connection(broker.bootstrap_servers, Names(f"t{uuid.uuid4().hex[:12]}"))
    made = Namespace(broker.bootstrap_servers, connection.names).make()
    lake = Lake(spark, str(tmp_path_factory.mktemp("ingested")))
    messages, dead_letters = messages_of(made), dead_letters_of(made)
    for value in GARBAGE:
        made.write(made.names.markers, value, key=b"k")
    made.mark(acquire([0]), ack([0]))
    return Ingested(ingest(spark, connection, lake), lake, messages, dead_letters)


GARBAGE = [b"", b"garbage", encode(ack([1]))[:-1], None]


def messages_of(made: Namespace) -> dict[Place, dict[str, Any]]:
    def of(*headers: tuple[str, bytes | None], key: bytes | None = b"emails", value: bytes | None = b"v") -> Place:
        return made.write(made.names.messages, value, key=key, headers=[*headers, ("tenant", b"x")])

    return {
        of(): {"queue": "emails", "size": 1, "id": None, "attempt": None, "first_sent_at": None},
        of(value=None): {"size": None},
        of(value=b""): {"size": 0},
        of(key=None): {"queue": None},
        of(key=b"\xff"): {"queue": None},
        of(key=b""): {"queue": None},
        of(key="é".encode() * 100): {"queue": "é" * 100},
        of(key=b"q" * 201): {"queue": None},
        of(("marq-id", b"a/0/1"), ("marq-attempt", b"2")): {"id": "a/0/1", "attempt": 2},
        of(("marq-attempt", b"2"), ("marq-attempt", b"3")): {"attempt": 3},
        of(("marq-attempt", b"2"), ("marq-attempt", None)): {"attempt": 2},
        of(("marq-attempt", b"2"), ("marq-attempt", b"two")): {"attempt": None},
        of(("marq-attempt", b"0" * 19 + b"7")): {"attempt": 7},
        of(("marq-attempt", b"0" * 20 + b"7")): {"attempt": None},
        of(("marq-attempt", b"7\n")): {"attempt": None},
        of(("marq-attempt", b"0")): {"attempt": None},
        of(("marq-attempt", b"4294967295")): {"attempt": 2**31 - 1},
        of(("marq-attempt", b"4294967296")): {"attempt": None},
        of(("marq-id", b"")): {"id": None},
        of(("marq-id", b"\xff")): {"id": "\ufffd"},
        of(("marq-error", b"a\xffb")): {"error": "a\ufffdb"},
        of(("marq-first-sent", b"1704067200000")): {"first_sent_at": IN_2024},
        of(("marq-first-sent", b"99999999999999999999")): {"first_sent_at": None},
        of(("marq-deliver-at", b"253402300799999")): {"deliver_at": datetime(9999, 12, 31, 23, 59, 59, 999000)},  # noqa: DTZ001
        of(("marq-deliver-at", b"253402300800000")): {"deliver_at": None},
        # A dead letter that another program has copied is a new message.
        of(("marq-id", b"a/0/1"), ("marq-attempt", b"2"), ("marq-dead-lettered-at", b"1")): {
            "id": None,
            "attempt": None,
        },
    }


def dead_letters_of(made: Namespace) -> dict[Place, tuple[str | None, int | None, int | None]]:
    def of(origin: bytes | None, *headers: tuple[str, bytes], key: bytes = b"emails") -> Place:
        return made.write(made.names.dead_letters, key=key, headers=[("marq-origin", origin), *headers])

    drawn = "~" + "0" * 32
    died = (("marq-reason", b"bad"), ("marq-dead-lettered-at", b"1704067200000"), ("marq-attempt", b"5"))
    of(None, ("marq-settled", b"redriven"), key=b"")
    return {
        of(b"a/b/3/17", *died): ("a/b", 3, 17),
        of(f"{drawn}/4294967295/9223372036854775807".encode(), ("marq-attempt", b"0")): (drawn, 2**32 - 1, 2**63 - 1),
        of(b"a/0/9223372036854775808"): ("a", 0, None),
        of(b"nowhere"): (None, None, None),
        of(None): (None, None, None),
    }


def test_headers_count_as_the_protocol_says(ingested: Ingested) -> None:
    found, expected = by_place(ingested.lake), ingested.messages

    assert found.keys() == expected.keys()
    assert {place: {name: found[place][name] for name in said} for place, said in expected.items()} == expected


def test_dead_letters_come_with_their_origin_and_without_notes(ingested: Ingested) -> None:
    found = by_place(ingested.lake, "dead_letters")

    origins = {p: (r.origin_topic, r.origin_partition, r.origin_offset) for p, r in found.items()}
    assert origins == ingested.dead_letters
    first, never_delivered, *_ = (found[place] for place in ingested.dead_letters)
    assert never_delivered.attempt == 0
    assert (first.queue, first.reason, first.dead_lettered_at, first.attempt) == ("emails", "bad", IN_2024, 5)


def test_corrupt_markers_are_counted_and_set_aside(ingested: Ingested) -> None:
    assert ingested.counts == {"markers": 2, "corrupt": 4, "messages": 26, "dead_letters": 5}
    found = table(ingested.lake, "corrupt").orderBy("log_offset").collect()
    assert [None if row.raw is None else bytes(row.raw) for row in found] == GARBAGE
    assert all(row.error for row in found)
    path = Path(ingested.lake.path.removeprefix("file:"), "corrupt")
    assert pyarrow.dataset.dataset(path, partitioning="hive").count_rows() == 4


@pytest.mark.verify
def test_topics_that_queues_name_are_read_and_a_second_round_brings_what_is_new(
    spark: SparkSession, environment: dict[str, str], lake: Lake, made: Namespace, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def found() -> list[Subscription]:
        documents = lake.last_commit(ROUNDS)["subscriptions"]
        return [replace(Subscription.read(document), incarnation="") for document in documents]

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    own = f"{made.names.prefix}.own"
    made.make(own)
    made.write(made.names.messages, key=b"emails")
    made.mark(acquire([0]))
    done = command("ingest")
    assert done.code == 0
    assert done.out.startswith("ingested 1 markers, 0 corrupt, 1 messages, 0 dead_letters in ")
    for queue in ("reports", "former"):
        made.write(made.names.queues, json.dumps({"topic": own}).encode(), key=f"file:{queue}".encode())
    made.write(made.names.queues, None, key=b"file:former")
    made.write(made.names.queues, b"{", key=b"file:reports")
    made.write(made.names.queues, json.dumps({"topic": made.names.messages}).encode(), key=b"file:wrong")
    start = SkippedRecords(1_000, {Source(own, 1): 7})
    made.write(made.names.queues, json.dumps(start.document()).encode(), key=b"start:reports")
    made.write(made.names.queues, None, key=b"change:none")
    made.write(made.names.messages, key=b"emails", partition=1)
    made.write(own, None)
    made.write(own, key=b"emails", partition=1)
    made.mark(ack([0]), partition=1)

    done = command("ingest --payload")

    assert done.out.startswith("ingested 1 markers, 0 corrupt, 3 messages, 0 dead_letters in ")
    queues = sorted((row.topic == own, row.queue) for row in by_place(lake).values())
    assert queues == [(False, "emails"), (False, "emails"), (True, None), (True, None)]
    since = {"0": 0, "1": 0}
    assert found() == [
        Subscription("former", own, current=False, since=since),
        Subscription("reports", own, current=True, since=since, start=start),
    ]
    assert [row.kind for row in table(lake, "markers").orderBy("log_partition").collect()] == ["ACQUIRE", "ACK"]
    # Records that are gone are not those of a queue that names the topic later.
    made.write(made.names.queues, json.dumps({"topic": own}).encode(), key=b"change:late")
    made.delete_records(own, 1, partition=1)
    assert command("ingest").out.startswith("ingested 0 markers, 0 corrupt, 0 messages, 0 dead_letters in ")
    assert [(subscription.queue, subscription.since) for subscription in found()] == [
        ("former", since), ("late", {"0": 0, "1": 1}), ("reports", since),
    ]  # fmt: skip


@pytest.mark.verify
def test_aborted_records_are_absent_and_held_back_partitions_are_recorded(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace
) -> None:
    names = made.names
    with made.transaction(commit=False) as producer:
        made.write(names.messages, key=b"emails", headers=[("marq-attempt", b"2")], producer=producer)
        made.mark(ack([0]), producer=producer)
    with made.transaction(commit=True) as producer:
        kept = made.write(names.messages, key=b"emails", producer=producer)
        made.mark(release([0]), producer=producer)
        assert not any(ingest(spark, connection, lake).values())
        assert lake.last_commit(ROUNDS)["held_back"] == [f"{names.messages}/0"]

    counts = ingest(spark, connection, lake)

    assert (counts["messages"], counts["markers"]) == (1, 1)
    assert list(by_place(lake)) == [kept]
    assert [row.kind for row in table(lake, "markers").collect()] == ["RELEASE"]
    assert lake.last_commit(ROUNDS)["held_back"] == []


@pytest.mark.verify
def test_a_newer_version_stops_ingest_and_nothing_of_its_batch_counts(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace, data: Path
) -> None:
    made.mark(acquire([0]))
    newer = b"\x02" + encode(acquire([1]))[1:]
    made.write(made.names.markers, newer)
    sentence = rf"{made.names.markers}/0/1: unknown version: marker version 2, .* [Uu]se the pipeline of a newer Marq"

    for _ in range(2):
        with pytest.raises(PipelineError, match=sentence):
            ingest(spark, connection, lake)

        assert table(lake, "markers").count() == 0
        assert not (data / "markers").exists()
    with pytest.raises(PipelineError, match="run `python -m pipeline lifecycle` first"):
        lake.read("lifecycle")

    # A request for this record makes ingest skip it, as trackers do; a request for another content does not.
    order = Quarantine(0, 1, digest(b"another"), "ann", "now")
    made.write(made.names.queues, json.dumps(order.document()).encode(), key=quarantine_key(order))
    with pytest.raises(PipelineError, match=sentence):
        ingest(spark, connection, lake)
    order = replace(order, sha256=digest(newer))
    made.write(made.names.queues, json.dumps(order.document()).encode(), key=quarantine_key(order))
    counts = ingest(spark, connection, lake)
    assert (counts["markers"], counts["corrupt"]) == (1, 1)


def test_other_readers_see_times_in_utc_also_those_of_the_year_9999(ingested: Ingested) -> None:
    path = Path(ingested.lake.path.removeprefix("file:"), "messages")

    times = pyarrow.dataset.dataset(path, partitioning="hive").to_table(columns=["sent_at", "deliver_at"])

    assert {field.type for field in times.schema} == {pa.timestamp("us", tz="UTC")}
    assert max(filter(None, times["deliver_at"].to_pylist())) == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


@pytest.mark.verify
def test_after_a_death_at_any_step_the_next_round_leaves_each_record_once(
    spark: SparkSession, connection: Connection, made: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.mark(*[acquire([number]) for number in range(6)])
    made.write(made.names.markers, b"garbage")
    made.send(6)
    lake = Lake(spark, str(tmp_path / "data"))
    steps = ("stage", "rename", "write_text", "delete")
    lots = random.Random(3)
    deaths = Counter[str]()

    for step in steps:
        dying = dies_at(lots.randint(1, 3), getattr(lake, step), lambda step=step: deaths.update([step]))
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(lake, step, dying)
            ingest(spark, connection, lake, limits=(3, 4))
    ingest(spark, connection, lake, limits=(3, 4))

    assert deaths.total() >= 3
    assert_each_record_once(lake, tmp_path / "data", {"markers": 6, "corrupt": 1, "messages": 6})


def dies_at(call: int, whole: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that works like another one until a call."""
    calls = itertools.count(1)

    def dying(*arguments: Any) -> Any:
        if next(calls) == call:
            tell()
            raise Killed
        return whole(*arguments)

    return dying


def assert_each_record_once(lake: Lake, data: Path, counts: dict[str, int]) -> None:
    """For readers of the commits, and for readers that only list directories."""
    keys = {"markers": ("log_partition", "log_offset", "index"), "corrupt": ("log_partition", "log_offset")}
    for name, count in counts.items():
        key = keys.get(name, ("topic", "partition", "offset"))
        by_commits = sorted(tuple(row[column] for column in key) for row in table(lake, name).collect())
        plain = pyarrow.dataset.dataset(data / name, partitioning="hive").to_table(columns=list(key)).to_pylist()
        assert len({*by_commits}) == len(by_commits) == count
        assert sorted(tuple(row[column] for column in key) for row in plain) == by_commits
        assert all(file.stat().st_size for file in (data / name).rglob("*.parquet"))


def test_a_batch_has_the_same_part_of_each_partition_and_at_least_one_record() -> None:
    ranges = {"a": {"0": (10, 110), "1": (0, 1)}, "b": {"0": (0, 900)}}

    assert _share(ranges, 100) == {"a": {"0": (10, 19), "1": (0, 1)}, "b": {"0": (0, 89)}}
    assert _share(ranges, 2_000) == ranges


@pytest.mark.verify
def test_unsuitable_topics_and_directories_are_refused_in_one_sentence(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace, tmp_path: Path, servers: str
) -> None:
    names = made.names
    for _ in range(5):
        made.write(names.messages, key=b"emails")
    ingest(spark, connection, lake)

    def refused(sentence: str, *, to: Connection = connection, path: Path | str | None = None) -> None:
        with pytest.raises(PipelineError, match=sentence) as refusal:
            ingest(spark, to, lake if path is None else Lake(spark, str(path)))
        assert "\n" not in str(refusal.value)

    nobody = Connection(servers, Names("nobody"))
    refused(r"there is no topic nobody\.", to=nobody)
    with lake.alone("ingest"):
        refused("another ingest is running in .*: wait for it, or stop it")
    about = tmp_path / "data" / "about.json"
    written = about.read_text()
    about.with_name(".about.json.crc").unlink()
    for changed, sentence in (
        ({"prefix": "another"}, "has the data of 'another' on cluster .*, not of"),
        ({"cluster": "elsewhere"}, "on cluster elsewhere, not of"),
        ({"format": 4}, "has format 4, and this pipeline needs format 3: use a pipeline of its format"),
        ({"format": 2}, "has format 2, and this pipeline needs format 3: use a pipeline of its format, or start over"),
        ({"cluster": None}, "about.json was not written by ingest"),
    ):
        about.write_text(json.dumps({**json.loads(written), **changed}))
        refused(sentence, path=tmp_path / "data")
    about.write_text(written)
    commits = tmp_path / "data" / "_commits"
    commits.rename(tmp_path / "commits")
    (tmp_path / "data" / "messages" / "batch=000000001").mkdir()
    refused(f"{commits}/messages was deleted or is incomplete")
    shutil.rmtree(tmp_path / "data" / "messages" / "batch=000000001")
    (tmp_path / "commits").rename(commits)
    (tmp_path / "file").write_text("x")
    refused("expected a directory, got a file", path=tmp_path / "file")
    refused("expected a path without", path=tmp_path / "[a]")
    refused("no such file system", path="s3a://bucket/x")

    recreate(made, names.messages)
    refused(f"{names.messages} was recreated after its records had been ingested: its id was .* and is ")
    # Without ids, a topic that is shorter than before is still noticed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopicAdmin, "ids", lambda *_: {})
        refused(f"{names.messages}/0 ends at 0, and 5 were ingested: the topic was recreated")


def recreate(made: Namespace, topic: str) -> None:
    delete(made, topic)
    made.make(topic)


def delete(made: Namespace, topic: str) -> None:
    [gone] = made.admin.delete_topics([topic]).values()
    gone.result(30)
    wait_until(lambda: topic not in made.admin.list_topics(timeout=30).topics)


@pytest.mark.verify
def test_one_topic_or_record_does_not_stop_the_others(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace
) -> None:
    """Topics that begin above 0, are deleted or recreated, times in ns, and gaps: each round reads all others."""
    names = made.names
    own, gone, odd = (f"{names.prefix}.{name}" for name in ("own", "gone", "odd"))
    made.write(names.messages, key=b"emails")
    ingest(spark, connection, lake)

    # An existing topic, whose first records retention has removed, and one that accepts every timestamp.
    made.make(own, gone)
    made.make(odd, config={"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"})
    for topic, key in ((own, b"file:own"), (gone, b"file:gone"), (odd, b"file:odd")):
        made.write(names.queues, json.dumps({"topic": topic}).encode(), key=key)
        for _ in range(3):
            made.write(topic, timestamp_ms=NOW_MS)
    made.delete_records(own, 2)
    microseconds = made.write(odd, b"us", key=b"k", headers=[("a", b"b")], timestamp_ms=NOW_MS * 1_000)
    nanoseconds = made.write(odd, b"nanos", key=b"k", headers=[("marq-attempt", b"3")], timestamp_ms=NOW_MS * 10**6)
    after = made.write(odd, timestamp_ms=NOW_MS)

    assert ingest(spark, connection, lake)["messages"] == 1 + 3 + 6
    found = by_place(lake)
    assert [offset for topic, _, offset in sorted(found) if topic == own] == [2]
    odd_rows = [found[place] for place in (microseconds, nanoseconds, after)]
    assert [(row.sent_at is None, row.size, row.attempt) for row in odd_rows] == [
        (True, 2, None), (True, 5, None), (False, 5, None),
    ]  # fmt: skip

    # One topic is deleted with its queue, one is recreated, and retention outruns ingest in another.
    made.write(names.queues, None, key=b"file:gone")
    delete(made, gone)
    recreate(made, own)
    again = made.write(own, b"again", timestamp_ms=NOW_MS)
    for _ in range(3):
        made.write(names.messages, key=b"emails")
    made.delete_records(names.messages, 3)
    made.delete_records(odd, 6)
    said: list[str] = []

    assert ingest(spark, connection, lake, say=said.append)["messages"] == 2

    gap = f"retention removed records 1 to 2 of {names.messages}/0 before they were ingested: run ingest more often"
    assert any(text.startswith(gap) for text in said)
    [topic] = {topic for topic, *_ in by_place(lake).keys() - found.keys()} - {names.messages}
    assert topic.startswith(f"{own}@")
    assert by_place(lake)[topic, 0, again[2]].size == 5
    round_ = lake.last_commit(ROUNDS)
    assert round_ is not None
    assert round_["gaps"]["messages"] == [[names.messages, 0, 1, 3]]
    known = {(each["queue"], each["topic"]): each["current"] for each in round_["subscriptions"]}
    assert known == {("own", own): False, ("own", topic): True, ("gone", gone): False, ("odd", odd): True}
    # A round without anything new commits nothing, and needs no job of Spark.
    idle = Ingest(spark, connection, TopicAdmin(spark, connection), lake)
    idle.round()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(spark), "read", None)
        assert not any(idle.round().values())
    assert lake.last_commit(ROUNDS) == round_
    # A directory with a commit for each batch would take longer to list each day.
    assert [len(lake.names(f"_commits/{stream}")) for stream in ("messages", ROUNDS)] == [2, 2]


@pytest.mark.verify
def test_a_topic_that_is_deleted_during_a_round_does_not_stop_the_others(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace
) -> None:
    own = f"{made.names.prefix}.own"
    made.make(own)
    made.write(made.names.queues, json.dumps({"topic": own}).encode(), key=b"file:reports")
    made.write(own)
    made.write(made.names.messages, key=b"emails")
    made.mark(acquire([0]))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("batch 0 of markers"):
            delete(made, own)

    counts = ingest(spark, connection, lake, say=say)

    assert counts == {"markers": 1, "corrupt": 0, "messages": 1, "dead_letters": 0}
    assert said == ["batch 0 of markers: 1 markers", "batch 0 of messages: 1 messages"]


@pytest.mark.verify
def test_a_topic_that_is_recreated_before_its_records_are_ingested_keeps_its_name(
    spark: SparkSession, connection: Connection, lake: Lake, made: Namespace
) -> None:
    own = f"{made.names.prefix}.own"
    made.make(own)
    made.write(made.names.queues, json.dumps({"topic": own}).encode(), key=b"file:reports")
    for _ in range(3):
        made.write(own)
    made.delete_records(own, 3)
    other = made.write(made.names.messages, key=b"emails")
    ingest(spark, connection, lake)
    recreate(made, own)
    place = made.write(own)

    assert ingest(spark, connection, lake)["messages"] == 1

    assert by_place(lake).keys() == {other, place}
