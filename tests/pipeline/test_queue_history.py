"""Settings of queues that the lifecycle needs, also after compaction of the queues topic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source
from marq.wire.names import Names
from pipeline.ingest import Ingest
from pipeline.kafka import Connection
from pipeline.lake import ROUNDS, Lake
from pipeline.queue_history import QueueHistory
from tests.pipeline.namespace import Namespace, ingest

pytestmark = pytest.mark.timeout(900)


def folded(*records: tuple[str, str]) -> QueueHistory:
    history = QueueHistory()
    for at_ms, (key, document) in enumerate(records):
        history.fold(key.encode(), document.encode(), at_ms)
    return history


def test_the_longest_backoff_is_that_of_any_time() -> None:
    document = folded(
        ("file:a", '{"backoff": {"base": 1, "max": 1200}}'),
        ("file:a", '{"backoff": {"base": 1, "max": 10}}'),
        ("defaults", '{"backoff": [900]}'),
        ("file:b", '{"backoff": [5, 10000000, 1]}'),
        ("change:b", '{"backoff": [1]}'),
    ).document()

    assert document["backoffs"] == {"*": 900_000, "a": 1_200_000, "b": 10_000_000_000}


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


def test_the_shortest_window_is_that_of_any_time() -> None:
    after = folded(("file:a", '{"deduplication_window": 400}'), ("file:b", '{"deduplication_window": 100}'))

    for before, shortest in ({}, 300_000), ({"shortest_deduplication_windows": {"*": 9}}, 9):
        windows = after.document(before)["shortest_deduplication_windows"]
        assert windows == {"*": shortest, "a": shortest, "b": min(shortest, 100_000)}


def test_a_pause_is_seen_although_it_began_and_ended_since_the_last_round() -> None:
    until = json.dumps({"paused": "1970-01-01T00:00:00.007Z"})
    history = folded(
        ("file:a", "{}"), ("file:resumed", '{"paused": true}'), ("file:resumed", "{}"), ("file:timed", until),
        ("file:early", until), ("file:early", "{}"), ("file:paused", '{"paused": true}'), ("file:timed", "{}"),
        ("file:late", until), ("file:late", "{}"),
    )  # fmt: skip

    at_ms = {"*": 0, "a": 0, "resumed": 2, "timed": 7, "early": 5, "paused": 100, "late": 7}
    assert history.document({}, 100)["paused_at"] == at_ms
    assert history.document({"paused_at": {"*": 3, "a": 0, "timed": 50}}, 100)["paused_at"] == {
        **at_ms, "*": 3, "resumed": 3, "timed": 50,
    }  # fmt: skip


def test_the_end_of_a_pause_that_compaction_has_removed_is_that_of_the_last_settings() -> None:
    pause, none = '{"paused": true}', ("file:a", "{}")
    before = folded(
        none, ("file:timed", '{"paused": "1970-01-01T00:00:00.150Z"}'), ("file:resumed", pause), ("file:gone", pause),
        ("file:changed", '{"lease": 9, "paused": true}'), ("file:earlier", pause), ("file:earlier", "{}"),
    ).document({}, 100)  # fmt: skip
    assert before["paused_at"] == {
        "*": 0, "a": 0, "timed": 100, "resumed": 100, "gone": 100, "changed": 100, "earlier": 6,
    }  # fmt: skip
    history = QueueHistory()
    for at_ms, key, settings in (0, *none), (120, "file:resumed", "{}"), (150, "file:changed", '{"lease": 9}'):
        history.fold(key.encode(), settings.encode(), at_ms)
    history.fold(b"file:timed", b'{"paused": "1970-01-01T00:00:00.150Z"}', 1)

    after = history.document(before, 200)

    ended = {"a": 0, "timed": 150, "resumed": 120, "gone": 200, "changed": 150, "earlier": 6}
    assert after["paused_at"] == {"*": 0, **ended}
    # It counts once.
    assert history.document(after, 300)["paused_at"] == {"*": 0, **ended}


def test_a_pause_of_all_queues_that_compaction_has_removed_is_one_of_each() -> None:
    before = folded(("file:a", "{}"), ("defaults", '{"paused": true}')).document({}, 100)
    history = QueueHistory()
    for at_ms, key in (0, b"file:a"), (120, b"defaults"), (130, b"file:b"):
        history.fold(key, b"{}", at_ms)

    assert history.document(before, 200)["paused_at"] == {"*": 120, "a": 120, "b": 130}


def test_a_pause_of_all_queues_is_one_of_each() -> None:
    history = folded(("file:a", "{}"), ("defaults", '{"paused": true}'), ("file:b", '{"paused": false}'))
    assert history.document({}, 100)["paused_at"] == {"*": 100, "a": 100, "b": 2}

    history.fold(b"defaults", b"{}", 10)

    assert history.document({}, 100)["paused_at"] == {"*": 10, "a": 10, "b": 2}


def test_a_record_that_is_nested_too_deeply_is_ignored_like_any_invalid_one() -> None:
    document = folded(("file:a", "[" * 200_000), ("file:a", '{"backoff": [7000]}')).document()

    assert document["backoffs"] == {"*": 600_000, "a": 7_000_000}


def test_a_subscription_skips_the_records_before_the_start_of_its_queue_and_no_purged_ones() -> None:
    start, purge = SkippedRecords(1_000, {Source("orders", 0): 3}), SkippedRecords(0, {Source("orders", 1): 2})
    records = {"file:a": {"topic": "orders"}, "file:b": {"topic": "orders"}}
    records |= {"start:b": start.document(), "purge:a": purge.document()}
    history = folded(*[(key, json.dumps(document)) for key, document in records.items()])
    without_kafka: Any = SimpleNamespace(last_commit=lambda _: None, names=Names("marq"))

    subscriptions = Ingest(without_kafka, without_kafka, without_kafka, without_kafka)._subscriptions(history, [])

    assert [(subscription.queue, subscription.start) for subscription in subscriptions] == [("a", None), ("b", start)]


def test_former_settings_count_after_compaction_has_removed_them(
    spark: SparkSession, connection: Connection, servers: str, names: Names, data: Path
) -> None:
    made, lake = Namespace(servers, names).make(), Lake(spark, str(data))
    former = {"dead_letter": False, "fair": True, "deduplication_window": 9_000, "backoff": [7_000]}
    made.write(names.queues, json.dumps(former).encode(), key=b"file:emails")
    made.write(names.queues, b'{"paused": true}', key=b"file:emails")
    ingest(spark, connection, lake)
    made.delete_records(names.queues, 2)
    made.write(names.queues, b"{}", key=b"file:emails")

    ingest(spark, connection, lake)

    found = lake.last_commit(ROUNDS)
    assert (found["without_dead_letters"], found["without_order"]) == (["emails"], ["emails"])
    assert found["deduplication_windows"]["emails"] == 9_000_000
    assert found["backoffs"] == {"*": 600_000, "emails": 7_000_000}
    assert found["shortest_deduplication_windows"]["emails"] == 300_000
    assert found["paused_at"]["*"] == 0 < found["paused_at"]["emails"]
