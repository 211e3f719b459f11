"""One row for each message, across its redeliveries: records of a queue with the same id are one message.

A dead letter that is redriven to another queue becomes a message of that queue, with the same id.

A message's state and its differences (:mod:`pipeline.audit_differences`) follow from the ends of its records.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from pipeline.audit_differences import differences_of_message
from pipeline.cut import Cut
from pipeline.deliveries import DELIVERY, deliveries
from pipeline.record_parts import PARTS, PLACE
from pipeline.tables import columns

_TEXTS = ArrayType(StringType())
LIFECYCLE = StructType(
    [
        *columns(
            "id string, queue string, sent_at timestamp, due_at timestamp, state string, open boolean,"
            " ended_at timestamp, last_at timestamp, attempts int, size int, redeliveries int, redrives int,"
            " dead_letters int, acked boolean, known boolean, reason string"
        ).fields,
        StructField("deliveries", ArrayType(DELIVERY)),
        StructField("differences", _TEXTS),
        StructField("pending", _TEXTS),
    ]
)

#: Open states; a message has the first that one of its records has.
OPEN = ("leased", "released", "rejected", "delayed", "waiting")


def lifecycle(parts: DataFrame, cut: Cut) -> DataFrame:
    """Return the rows of :data:`LIFECYCLE`, each with its parts in an array (``parts``)."""
    rows = deliveries(parts, cut)
    record = F.struct(*[name for name in rows.columns if name not in ("id", "queue")]).alias("record")
    # Repartitioned first, like parts: almost every message has one record. Sorted by hash, because ids begin alike.
    records = rows.select("id", "queue", record).repartition("id")
    grouped = records.groupBy(F.xxhash64("id").alias("hash"), "id", "queue")
    # One aggregate, because Spark merges every aggregate once more, even if all rows of a group are in one partition.
    messages = grouped.agg(F.sort_array(F.collect_list("record")).alias("records"))
    return _rows(messages, cut)


_ENDED = (
    "lost", "expired_unread", "no_queue", "abandoned", "cancelled", "withdrawn", "deduplicated", "message_expired",
)  # fmt: skip
_MOST = ("attempts", "size", "reason", "acked", "last_at", "seen_at", "overdue", "before_first")
_COUNTS = (
    "dead_letters", "died", "redeliveries", "redrives", "copy_facts", "copy_fact_attempts", "copies", "copy_attempts",
)  # fmt: skip


def records_of(messages: DataFrame, *columns: str) -> DataFrame:
    """Return some columns of messages, and the place of each of their records."""
    records = messages.select(*columns, F.explode("deliveries").alias("delivery"))
    return records.select(*columns, *[f"delivery.{name}" for name in PLACE])


def acked_at_once() -> Column:
    """Return whether a message was acked at its only delivery; only a copy of an aborted transaction can follow."""
    return F.col("acked") & (F.size("deliveries") == 1) & (F.col("dead_letters") == 0)


def came_from_elsewhere() -> Column:
    """Return whether a message was redriven from another queue; also true if its first record was read earlier."""

    def is_first(delivery: Column) -> Column:
        return F.concat_ws("/", *[delivery[name] for name in PLACE]) == F.col("id")

    return (F.col("redrives") > 0) & ~F.exists("deliveries", is_first)


def _least(name: str) -> Column:
    return F.array_min(f"records.{name}")


def _most(name: str) -> Column:
    return F.array_max(f"records.{name}")


def _sum(name: str) -> Column:
    counts = F.col(f"records.{name}")
    sum_ = F.aggregate(counts, F.lit(0).cast("long"), lambda sum_, count: sum_ + F.coalesce(count, F.lit(0)))
    return F.when(F.size("records") == 1, counts[0].cast("long")).otherwise(sum_)


def _texts(own: str, others: list[Column]) -> Column:
    """Return the texts that are not null; almost every row has none, and Spark interprets functions of arrays."""
    texts = F.array_compact(F.concat(f"records.{own}", F.array(*others)))
    return F.when(F.coalesce(_most(own), *others).isNotNull(), texts).otherwise(F.array().cast(_TEXTS))


def _rows(messages: DataFrame, cut: Cut) -> DataFrame:
    held_back = F.lit(bool(cut.round_["held_back"]))
    rows = messages.select(
        "id",
        "queue",
        "records",
        F.coalesce(_most("root_at"), F.when(~_most("untimed"), _least("sent_at"))).alias("sent_at"),
        _most("wait_until").alias("due_at"),
        _most("delivery.ended_at").alias("last_end"),
        # Only the first record of a message that came from another queue is elsewhere.
        (_most("known") | (_most("delivery.redriven") & ~_most("root"))).alias("known"),
        _least("requests_only").alias("requests_only"),
        *[_most(name).alias(name) for name in _MOST],
        *[_sum(name).alias(name) for name in _COUNTS],
        *[F.array_contains("records.state", name).alias(f"is_{name}") for name in (*OPEN, *_ENDED)],
    )
    rows = rows.withColumns(
        {
            "lacks_copy": F.col("copy_facts") > F.col("copies"),
            "open_state": F.coalesce(*[F.when(F.col(f"is_{name}"), F.lit(name)) for name in OPEN]),
        }
    )
    state = (
        F.when(F.col("acked"), "acked")
        .when(F.col("open_state").isNotNull(), F.col("open_state"))
        .when(F.col("lacks_copy"), F.when(held_back, "on_the_way").otherwise("lost"))
        .when(F.col("died") > 0, "dead")
        .when(F.col("is_message_expired"), "message_expired")
        .when(F.col("is_abandoned"), "abandoned")
        .when(F.col("is_cancelled") | F.col("is_withdrawn"), "cancelled")
        .when(F.col("is_deduplicated"), "deduplicated")
        .when(F.col("is_lost"), "lost")
        .when(F.col("is_expired_unread"), "expired_unread")
        .when(F.col("is_no_queue"), "no_queue")
        .otherwise("strange")
    )
    open_ = F.col("open_state").isNotNull() | (F.col("state") == "on_the_way")
    rows = rows.withColumn("state", state).withColumn("open", open_)
    wrong, pending = differences_of_message(cut, held_back)
    rows = rows.withColumns(
        {
            "differences": _texts("differences", wrong),
            "pending": _texts("pending", pending),
            "ended_at": F.when(~F.col("open"), F.col("last_end")),
            "deliveries": F.col("records.delivery"),
        }
    )
    columns = [F.col(field.name).cast(field.dataType) for field in LIFECYCLE.fields]
    return rows.select(*columns, F.col("records.parts").cast(ArrayType(PARTS)).alias("parts"))
