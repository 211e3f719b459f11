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
    records = deliveries(parts, cut)
    has = {name: F.max(F.col("state") == name).alias(f"is_{name}") for name in (*OPEN, *_ENDED)}
    # Repartitioned first, like parts: almost every message has one record. Sorted by hash, because ids begin alike.
    grouped = records.repartition("id").groupBy(F.xxhash64("id").alias("hash"), "id", "queue")
    messages = grouped.agg(
        F.array_sort(F.collect_list(F.struct("began_at", "delivery"))).alias("told"),
        F.collect_list("parts").alias("parts"),
        F.collect_list("differences").alias("own_differences"),
        F.collect_list("pending").alias("own_pending"),
        F.coalesce(F.max("root_at"), F.when(~F.max("untimed"), F.min("sent_at"))).alias("sent_at"),
        F.max("wait_until").alias("due_at"),
        F.max(F.when(F.col("delivery.handed_out"), F.col("delivery.attempt"))).alias("attempts"),
        F.max("size").alias("size"),
        F.max("reason").alias("reason"),
        F.max("delivery.ended_at").alias("last_end"),
        # Only the first record of a message that came from another queue is elsewhere.
        (F.max("known") | (F.max("delivery.redriven") & ~F.max("root"))).alias("known"),
        F.min("requests_only").alias("requests_only"),
        *[F.max(name).alias(name) for name in ("acked", "last_at", "seen_at", "overdue", "before_first")],
        *[F.sum(name).alias(name) for name in _COUNTS],
        *has.values(),
    )
    return _rows(messages, cut)


_ENDED = (
    "lost", "expired_unread", "no_queue", "abandoned", "cancelled", "withdrawn", "deduplicated", "message_expired",
)  # fmt: skip
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


def _texts(own: str, others: list[Column]) -> Column:
    """Return the texts that are not null; almost every row has none, and Spark interprets functions of arrays."""
    texts = F.array_compact(F.concat(own, F.array(*others)))
    return F.when((F.size(own) > 0) | F.coalesce(*others).isNotNull(), texts).otherwise(F.array().cast(_TEXTS))


def _rows(messages: DataFrame, cut: Cut) -> DataFrame:
    held_back = F.lit(bool(cut.round_["held_back"]))
    rows = messages.withColumns(
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
            "differences": _texts("own_differences", wrong),
            "pending": _texts("own_pending", pending),
            "ended_at": F.when(~F.col("open"), F.col("last_end")),
            "deliveries": F.transform("told", lambda record: record["delivery"]),
        }
    )
    columns = [F.col(field.name).cast(field.dataType) for field in LIFECYCLE.fields]
    return rows.select(*columns, F.col("parts").cast(ArrayType(PARTS)))
