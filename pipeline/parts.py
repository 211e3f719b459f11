"""What is known of each record that was delivered: the parts of its story, which add up in any order.

A row of *parts* has a record's place (topic, partition, offset) and, in each of its other columns, what one kind of
event says: the first ACK, the last RENEW, how many ACQUIREs there were. Each column has a rule by which two of its
values become one (:data:`RULES`), and no rule cares for order. So rows of new markers and rows that an earlier run
carried forward are simply put together, and a marker that comes late finds its place.

``pos`` says where a marker stands in its partition of the markers topic. All markers of one record are in one such
partition, so of two of them ``pos`` tells which came first.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from pipeline.tables import columns

KEY = ("topic", "partition", "offset")

_ACQUIRED = "pos long, at timestamp, holder string, attempt int, lease_ms long, due_at timestamp"
_PAYLOAD = "id string, record_at timestamp, size int"

#: The columns of parts, each with its rule; what has several fields is a struct.
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "queue": ("max", "string"),
    "log_partition": ("max", "int"),
    "last_at": ("max", "timestamp"),
    # The record itself, from its topic.
    "records": ("sum", "long"),
    "record": (
        "max",
        "at timestamp, id string, attempt int, first_sent_at timestamp, deliver_at timestamp, size int",
    ),
    # What was said of it.
    "acquisitions": ("sum", "long"),
    "acquired": ("min", f"{_ACQUIRED}, {_PAYLOAD}"),
    "acquired_last": ("max", _ACQUIRED),
    "delayed": ("min", f"pos long, at timestamp, due_at timestamp, attempt int, {_PAYLOAD}"),
    "moved": ("max", "pos long, due_at timestamp"),
    "renewals": ("sum", "long"),
    "renewed": ("max", "pos long, at timestamp, holder string, lease_ms long"),
    "spent": ("min", "pos long, at timestamp, holder string, lease_ms long"),
    "released": ("max", "pos long, at timestamp, holder string, delay_ms long, counted boolean, text string"),
    "rejected": ("max", "pos long, at timestamp, holder string, text string"),
    "cancelled": ("max", "pos long, at timestamp"),
    "acks": ("sum", "long"),
    "acked": ("min", "pos long, at timestamp, holder string"),
    # What the tracker did.
    "facts": ("sum", "long"),
    "fact": ("min", "pos long, at timestamp, kind string, attempt int, cause string"),
    # The dead letter that was made of it.
    "deaths": ("sum", "long"),
    "death": ("min", "at timestamp, reason string, topic string, partition int, offset long, id string"),
}
RULES = {name: rule for name, (rule, _) in _COLUMNS.items()}
PARTS = StructType(
    [
        *columns("topic string, partition long, offset long").fields,
        *[
            StructField(name, columns(kind) if " " in kind else columns(f"x {kind}")["x"].dataType)
            for name, (_, kind) in _COLUMNS.items()
        ],
    ]
)

_FACTS = ("REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED", "ABANDONED")


def of_markers(markers: DataFrame) -> DataFrame:
    """Return the parts that markers tell."""
    about_records = markers.where(~F.col("kind").isin("TICK", "ANSWERED", "DISCARD"))
    # Shifted, because a batch has at most 2^16 markers.
    rows = about_records.withColumn("pos", F.col("log_offset") * 65_536 + F.col("index")).withColumnRenamed(
        "logged_at", "at"
    )
    kind = F.col("kind")
    opening = kind.isin("ACQUIRE", "DELAY")
    said = {
        # Others may name any queue.
        "queue": F.when(opening | kind.isin(*_FACTS), F.col("queue")),
        "log_partition": F.col("log_partition"),
        "last_at": F.col("at"),
        "acquisitions": F.when(kind == "ACQUIRE", 1),
        "acquired": F.when(kind == "ACQUIRE", _struct("acquired")),
        "acquired_last": F.when(kind == "ACQUIRE", _struct("acquired_last")),
        "delayed": F.when(kind == "DELAY", _struct("delayed")),
        "moved": F.when(kind == "RESCHEDULE", _struct("moved")),
        "renewals": F.when(kind == "RENEW", 1),
        "renewed": F.when(kind == "RENEW", _struct("renewed")),
        "spent": F.when(kind == "SPEND", _struct("spent")),
        "released": F.when(kind == "RELEASE", _struct("released")),
        "rejected": F.when(kind == "REJECT", _struct("rejected")),
        "cancelled": F.when(kind == "CANCEL", _struct("cancelled")),
        "acks": F.when(kind == "ACK", 1),
        "acked": F.when(kind == "ACK", _struct("acked")),
        "facts": F.when(kind.isin(*_FACTS), 1),
        "fact": F.when(kind.isin(*_FACTS), _struct("fact")),
    }
    return _row(rows, said)


def of_messages(messages: DataFrame) -> DataFrame:
    """Return the parts that records of messages tell."""
    rows = messages.withColumnRenamed("sent_at", "at")
    return _row(
        rows,
        {"queue": F.col("queue"), "last_at": F.col("at"), "records": F.lit(1), "record": _struct("record")},
    )


def of_dead_letters(letters: DataFrame) -> DataFrame:
    """Return the parts that dead letters tell of the records that they were made of."""
    rows = letters.where(F.col("origin_offset").isNotNull()).select(
        F.col("origin_topic").alias("topic"),
        F.col("origin_partition").alias("partition"),
        F.col("origin_offset").alias("offset"),
        F.struct(F.coalesce("died_at", "sent_at").alias("at"), "reason", "topic", "partition", "offset", "id").alias(
            "death"
        ),
    )
    return _row(rows, {"last_at": F.col("death.at"), "deaths": F.lit(1), "death": F.col("death")})


def added_up(*frames: DataFrame) -> DataFrame:
    """Return one row for each record, of rows of parts."""
    rows = frames[0]
    for frame in frames[1:]:
        rows = rows.unionByName(frame)
    rules = {"min": F.min, "max": F.max, "sum": F.sum}
    # Brought together first: the sums of each part alone would be wider than the rows, and hardly fewer.
    together = rows.repartition(*KEY)
    return together.groupBy(*KEY).agg(*[rules[rule](name).alias(name) for name, rule in RULES.items()])


def _struct(name: str) -> Column:
    return F.struct(*PARTS[name].dataType.names)


def _row(rows: DataFrame, said: Mapping[str, Column]) -> DataFrame:
    chosen = [
        said.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name)
        for field in PARTS.fields
        if field.name not in KEY
    ]
    return rows.select(*KEY, *chosen)
