"""Settings of queues that the lifecycle needs, also after compaction of the queues topic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import SparkSession

from marq.wire.names import Names
from pipeline.ingest import ROUNDS
from pipeline.kafka import Connection
from pipeline.lake import Lake
from pipeline.queue_history import QueueHistory
from tests.pipeline.namespace import Namespace, ingest

pytestmark = pytest.mark.timeout(900)


def folded(*records: tuple[str, str]) -> QueueHistory:
    history = QueueHistory()
    for key, document in records:
        history.fold(key.encode(), document.encode())
    return history


def test_the_longest_backoff_is_that_of_any_time() -> None:
    document = folded(
        ("file:a", '{"backoff": {"base": 1, "max": 1200}}'),
        ("file:a", '{"backoff": {"base": 1, "max": 10}}'),
        ("defaults", '{"backoff": [900]}'),
        ("file:b", '{"backoff": [5, 10000000, 1]}'),
        ("change:b", '{"backoff": [1], "paused": true}'),
    ).document()

    assert document["backoffs"] == {"*": 900_000, "a": 1_200_000, "b": 10_000_000_000}
    assert document["paused"] == {"*": False, "a": False, "b": True}


def test_a_queue_that_is_not_defined_any_more_has_the_settings_of_all_others_too() -> None:
    before = folded(("file:a", '{"deduplication_window": 400}')).document()
    assert before["deduplication_windows"] == {"*": 300_000, "a": 400_000}

    after = folded(("defaults", '{"deduplication_window": 600}')).document(before)

    assert after["deduplication_windows"] == {"*": 600_000, "a": 600_000}


def test_a_queue_had_the_settings_of_all_others_before_its_first_definition() -> None:
    defaults = ("defaults", '{"backoff": [7000], "deduplication_window": 9000}')
    longest = {"*": 9_000_000, "x": 9_000_000}
    assert folded(defaults, ("defaults", "{}"), ("file:x", "{}")).document()["deduplication_windows"] == longest

    # Compaction removed the former defaults.
    compacted = folded(("defaults", "{}"), ("file:x", "{}")).document(folded(defaults).document())

    assert compacted["deduplication_windows"] == longest
    assert compacted["backoffs"] == {"*": 7_000_000, "x": 7_000_000}


def test_the_shortest_window_is_that_of_any_time_and_unknown_if_an_earlier_release_began() -> None:
    after = folded(("file:a", '{"deduplication_window": 400}'), ("file:b", '{"deduplication_window": 100}'))

    for before, shortest in ({}, 300_000), ({"shortest_deduplication_windows": {"*": 9}}, 9), ({"paused": {}}, 0):
        windows = after.document(before)["shortest_deduplication_windows"]
        assert windows == {"*": shortest, "a": shortest, "b": min(shortest, 100_000)}


def test_a_queue_counts_as_paused_for_one_more_round() -> None:
    paused = folded(("file:a", '{"paused": true}'), ("defaults", '{"paused": true}')).document()
    assert paused["paused"] == {"*": True, "a": True}

    resumed = folded(("file:a", "{}"), ("file:b", "{}")).document(paused)
    later = folded(("file:a", "{}"), ("file:b", "{}")).document(resumed)

    assert resumed["paused"] == {"*": True, "a": True, "b": True}
    assert later["paused"] == {"*": False, "a": False, "b": False}


def test_a_record_that_is_nested_too_deeply_is_ignored_like_any_invalid_one() -> None:
    document = folded(("file:a", "[" * 200_000), ("file:a", '{"backoff": [7000]}')).document()

    assert document["backoffs"] == {"*": 600_000, "a": 7_000_000}


def test_former_settings_count_after_compaction_has_removed_them(
    spark: SparkSession, connection: Connection, servers: str, names: Names, data: Path
) -> None:
    made, lake = Namespace(servers, names).make(), Lake(spark, str(data))
    former = {"dead_letter": False, "deduplication_window": 9_000, "backoff": [7_000]}
    made.write(names.queues, json.dumps(former).encode(), key=b"file:emails")
    made.write(names.queues, b'{"paused": true}', key=b"file:emails")
    ingest(spark, connection, lake)
    [deleted] = made.admin.delete_records([TopicPartition(names.queues, 0, 2)]).values()
    deleted.result(30)
    made.write(names.queues, b"{}", key=b"file:emails")

    ingest(spark, connection, lake)

    found = lake.last_commit(ROUNDS)
    assert found["without_dead_letters"] == ["emails"]
    assert found["deduplication_windows"]["emails"] == 9_000_000
    assert found["shortest_deduplication_windows"]["emails"] == 300_000
    assert found["backoffs"] == {"*": 600_000, "emails": 7_000_000}
    assert found["paused"] == {"*": False, "emails": True}
    assert found["paused_now"] == {"*": False, "emails": False}
