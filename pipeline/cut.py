"""Where the tables of a run end, which limits what can be concluded about a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame

from pipeline.kafka import Offsets


@dataclass(frozen=True)
class Cut:
    """``reading``: what each queue reads (:data:`pipeline.subscriptions.READING`).

    ``clocks``: the last activity of each tracker (log_partition, seen_at), and since when it was alive (alive_since);
    None if overdue messages do not matter.
    ``first`` and ``begins``: the first offset of each partition at its first ingest, and now. ``held_back``: partitions
    whose readers an open transaction holds back.
    """

    reading: DataFrame
    clocks: DataFrame | None
    first: Offsets
    begins: Offsets
    held_back: tuple[str, ...]
    #: Queues whose last deliveries may leave no dead letter; "*" stands for all.
    without_dead_letters: tuple[str, ...]
    #: The longest backoff that each queue has had, in ms, and when it was last paused; "*" stands for all others.
    backoffs: Mapping[str, int]
    paused_at: Mapping[str, int]
    dead_letters_topic: str
    #: True if markers were removed before they were ingested.
    truncated: bool
    #: Records that retention removed before they were ingested: topic, partition, the first offset, and the next one.
    gaps: Sequence[tuple[str, int, int, int]] = ()
    #: Compacted topics, whose records may have been removed before they were ingested or received.
    compacted: tuple[str, ...] = ()
    #: True if messages have ordering keys.
    keyed: bool = False
    #: Queues whose messages keep their places without order; "*": all that have never had ordering, unlike the others.
    without_order: tuple[str, ...] = ()
    with_order: tuple[str, ...] = ()
