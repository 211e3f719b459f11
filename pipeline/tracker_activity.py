"""When the trackers of the markers partitions were alive, as their TICKs show it.

An idle tracker writes no TICKs. A pause between two TICKs of one tracker is therefore not an outage, but a long pause
between those of different trackers is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

#: A longer pause between TICKs of different trackers is an outage.
OUTAGE_MS = 600_000

#: Partition, last TICK, end of the last outage before it, and the last tracker's holder; times in ms.
Activity = tuple[int, int, int, str]


def activity(markers: DataFrame, before: Iterable[list[Any]]) -> list[Activity]:
    """Return the activity in each markers partition after these markers; ``before`` is the activity before them."""
    known: dict[int, Activity] = {row[0]: (row[0], row[1], row[2], row[3]) for row in before}
    ticks = markers.where(F.col("kind") == "TICK").withColumn("ms", F.unix_millis("logged_at"))
    in_order = Window.partitionBy("log_partition").orderBy("ms", "log_offset")
    other = F.col("holder") != F.lag("holder").over(in_order)
    returns = other & (F.col("ms") - F.lag("ms").over(in_order) > OUTAGE_MS)
    rows = ticks.withColumn("alive_ms", F.when(returns, F.col("ms"))).groupBy("log_partition")
    merged = rows.agg(
        F.min(F.struct("ms", "log_offset", "holder")).alias("first"),
        F.max(F.struct("ms", "log_offset", "holder")).alias("last"),
        F.max("alive_ms").alias("alive_ms"),
    )
    for partition, first, last, alive_ms in merged.collect():
        _, seen_ms, since_ms, holder = known.get(partition, (partition, 0, first.ms, ""))
        if holder != first.holder and first.ms - seen_ms > OUTAGE_MS:
            since_ms = first.ms
        if alive_ms is not None:
            since_ms = alive_ms
        known[partition] = (partition, max(seen_ms, last.ms), since_ms, last.holder)
    return [known[partition] for partition in sorted(known)]
