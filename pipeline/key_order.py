"""The order of messages with an ordering key: a message may finish only after all earlier ones with its key.

A *line* has the records of one key of a queue in one partition, by offset. A consumer delivers a record only when the
ends of all earlier ones of its line are in the log. All markers of a partition are in one markers partition, so their
positions show the order. The markers do not show when a record was delivered, but its ACK, REJECT or counted RELEASE
came later. So every difference is real, but a wrong order that leaves no such trace is not found.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.record_parts import KEY

#: Positions before and after all markers.
_BEFORE_ALL, _NEVER = -1, 2**63 - 1


def overtakes(parts: DataFrame) -> DataFrame:
    """Return the records that overtook an earlier one of their line.

    ``overtaken`` is the earlier one's offset, ``undecided`` whether that one is still open: its end may be in markers
    that are not ingested yet.
    """
    line, released, fact = F.col("acquired.line"), F.col("released"), F.col("fact")
    # Its record was gone when a consumer resumed its partition, so the tracker delivered it again, behind the others,
    # or ended it at some later time.
    ended = F.least("ended", *_requested_ends())
    by_tracker = (ended == fact["pos"]) & fact["cause"].isin("EXPIRED", "RELEASED")
    moved = fact["kind"].isin("REDELIVERED", "DELIVERED") | by_tracker
    # A message with a due time is never delivered from this place: it is too large for a marker, or delayed.
    rows = parts.where(line.isNotNull() & F.col("acquired.due_at").isNull()).select(
        *KEY,
        "queue",
        line.alias("line"),
        F.least("acked.pos", "rejected.pos", F.when(released["counted"], released["pos"])).alias("told_at"),
        F.when(moved, _BEFORE_ALL).otherwise(F.coalesce(ended, F.lit(_NEVER))).alias("ended_at"),
    )
    earlier = Window.partitionBy("queue", "topic", "partition", "line").orderBy("offset")
    last = F.max(F.struct("ended_at", "offset")).over(earlier.rowsBetween(Window.unboundedPreceding, -1))
    overtaking = rows.withColumn("last", last).where(F.col("told_at") < F.col("last.ended_at"))
    return overtaking.select(
        *KEY, F.col("last.offset").alias("overtaken"), (F.col("last.ended_at") == _NEVER).alias("undecided")
    )


def _requested_ends() -> tuple[Column, Column]:
    """Return when a CANCEL or REJECT ended a record: one that a fact confirms, and a REJECT by the last holder."""
    fact, rejected, acquired = F.col("fact"), F.col("rejected"), F.col("acquired_last")
    confirmed = (fact["kind"] == "CANCELLED") | (fact["cause"] == "REJECTED")
    by_holder = (rejected["holder"] == acquired["holder"]) & (rejected["pos"] > acquired["pos"])
    return F.when(confirmed, F.col("end_requested")), F.when(by_holder, rejected["pos"])
