"""Which messages a tracker may have dropped because of their deduplication ids.

A tracker drops a message if it accepted another one with the same id less than a window before. A dropped message does
not extend the window. The markers do not show which window the tracker knew, so this module uses the shortest and the
longest one that the queue has had. If both are equal, the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.tables import columns

PLACE = ("topic", "partition", "offset")
_SCOPE = ("queue", "text", "log_partition")
_DROPPED = columns("queue string, topic string, partition long, offset long")


class Id:
    """The messages with one id, which one tracker reads in the order of its log."""

    def __init__(self) -> None:
        #: When the last message was certainly accepted, and when the last one may have been.
        self._accepted_ms: int | None = None
        self._maybe_accepted_ms: int | None = None

    def may_drop(self, now_ms: int, has_fact: bool, shortest_ms: int, longest_ms: int) -> bool:
        """Take the next message; return whether it may be a duplicate. A fact shows that it was accepted."""
        if has_fact or not _is_within(now_ms, self._maybe_accepted_ms, longest_ms):
            self._accepted_ms = self._maybe_accepted_ms = now_ms
            return False
        if not _is_within(now_ms, self._accepted_ms, shortest_ms):
            self._maybe_accepted_ms = now_ms
        return True


def _is_within(now_ms: int, accepted_ms: int | None, window_ms: int) -> bool:
    return accepted_ms is not None and now_ms - accepted_ms < window_ms


def dropped(delays: DataFrame, facts: DataFrame, shortest_ms: Column, longest_ms: Column) -> DataFrame:
    """Return the queue and the place of each message that may be a duplicate.

    ``delays`` are the DELAYs with an id (``text``), and ``facts`` all facts.
    """
    rows = delays.join(facts.select(*PLACE, F.lit(True).alias("has_fact")).distinct(), list(PLACE), "left")
    rows = rows.select(
        *_SCOPE,
        F.unix_millis("logged_at").alias("now_ms"),
        F.coalesce("has_fact", F.lit(False)).alias("has_fact"),
        shortest_ms.alias("shortest_ms"),
        longest_ms.alias("longest_ms"),
        *PLACE,
        "log_offset",
        "index",
    )
    in_order = rows.repartition("queue", "text").sortWithinPartitions(*_SCOPE, "log_offset", "index")
    return in_order.mapInArrow(_dropped, _DROPPED)


def _dropped(tables: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    scope, id_ = None, Id()
    for table in tables:
        scopes, messages = (
            zip(*[table.column(name).to_pylist() for name in names], strict=True)
            for names in (_SCOPE, ("now_ms", "has_fact", "shortest_ms", "longest_ms"))
        )
        kept = []
        for own, message in zip(scopes, messages, strict=True):
            if own != scope:
                scope, id_ = own, Id()
            kept.append(id_.may_drop(*message))
        yield table.select(_DROPPED.names).filter(pa.array(kept, pa.bool_()))
