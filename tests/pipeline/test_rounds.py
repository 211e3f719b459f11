"""What the commit of a round of ``ingest`` keeps for the lifecycle."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source
from marq.wire.names import Names
from pipeline.ingest import Ingest, _share
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

    assert [(subscription.queue, subscription.start) for subscription in subscriptions] == [("a", None), ("b", start)]


def test_a_batch_has_the_same_part_of_each_partition_and_at_least_one_record() -> None:
    ranges = {"a": {"0": (10, 110), "1": (0, 1)}, "b": {"0": (0, 900)}}

    assert _share(ranges, 100) == {"a": {"0": (10, 19), "1": (0, 1)}, "b": {"0": (0, 89)}}
    assert _share(ranges, 2_000) == ranges
