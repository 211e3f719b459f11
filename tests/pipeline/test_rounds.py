"""What the commit of a round of ``ingest`` keeps for the lifecycle."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source
from marq.wire.names import Names
from pipeline.ingest import Ingest
from pipeline.queue_history import QueueHistory


def test_a_subscription_skips_the_records_before_the_start_of_its_queue_and_no_purged_ones() -> None:
    start, purge = SkippedRecords(1_000, {Source("orders", 0): 3}), SkippedRecords(0, {Source("orders", 1): 2})
    records = {"file:a": {"topic": "orders"}, "file:b": {"topic": "orders"}}
    records |= {"start:b": start.document(), "purge:a": purge.document()}
    history = QueueHistory()
    for key, document in records.items():
        history.fold(key.encode(), json.dumps(document).encode())
    without_kafka: Any = SimpleNamespace(last_commit=lambda _: None, names=Names("marq"))

    subscriptions = Ingest(without_kafka, without_kafka, without_kafka, without_kafka)._subscriptions(history, [])

    assert [(each.queue, each.start) for each in subscriptions] == [("a", None), ("b", start)]


def test_each_partition_began_where_the_first_batch_that_names_it_found_it() -> None:
    begins: list[dict[str, dict[str, int]]] = [
        {"a": {"0": 5}}, {"a": {"0": 9}, "b": {"0": 2}}, {"a": {"0": 12, "1": 0}, "b": {"0": 4}},
    ]  # fmt: skip
    commits = [{"batch": number, "begin": begin} for number, begin in enumerate(begins)]
    lake: Any = SimpleNamespace(commit=lambda _, number: commits[number])
    ingest = Ingest(lake, lake, lake, lake)

    # A round of an earlier release knows the topics of the first batch only.
    first = ingest._first("messages", commits[2], {"first": {"messages": begins[0]}})

    assert first == {"a": {"0": 5, "1": 0}, "b": {"0": 2}}
    commits.clear()
    assert ingest._first("messages", {"begin": begins[2]}, {"first": {"messages": first}}) == first
