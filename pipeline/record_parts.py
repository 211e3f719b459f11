"""The facts about each delivered record, as parts that add up in any order.

A row of *parts* has a record's place (topic, partition, offset), its subscription (:mod:`pipeline.subscriptions`), and
a column for each kind of event: the first ACK, the last RENEW, the number of ACQUIREs. Each column has a rule that
merges two of its values (:data:`RULES`), independent of their order. So rows of new markers and rows that an earlier
run carried forward are simply concatenated, and a late marker has the same effect as one in time.

``pos`` is the position of a marker in its partition of the markers topic. All markers of one record are in one such
partition, so ``pos`` tells which of two came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from pipeline.subscriptions import DRAWN, Subscriptions
from pipeline.tables import LAST_MS, columns

PLACE = ("topic", "partition", "offset")
KEY = (*PLACE, "subscription")
#: The condition of a marker that delays a message with a deduplication id.
HAS_ID = "kind = 'DELAY' AND text IS NOT NULL"
#: The columns of the messages with one id, which one tracker reads in the order of its log, and those of duplicates.
_SCOPE = ("queue", "text", "log_partition")
_DROPPED = columns("queue string, topic string, partition long, offset long")

_HELD = "pos long, at timestamp, holder string"
_ACQUIRED = f"{_HELD}, attempt int, lease_ms long, due_at timestamp, in_order boolean"
_PAYLOAD = "id string, record_at timestamp, size int"

_FACTS = ("REDELIVERED", "DEAD_LETTERED", "DELIVERED", "CANCELLED", "ABANDONED")
#: The columns of parts: rule, type (several fields are a struct), and the kinds of markers that it counts or keeps.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "queue": ("max", "string"),
    "log_partition": ("max", "int"),
    "last_at": ("max", "timestamp"),
    # The record itself, from its topic.
    "records": ("sum", "long"),
    "record": ("max", "at timestamp, id string, attempt int, first_sent_at timestamp, deliver_at timestamp, size int"),
    # Its markers.
    "acquisitions": ("sum", "long", "ACQUIRE"),
    "acquired": ("min", f"{_ACQUIRED}, {_PAYLOAD}, line long", "ACQUIRE"),
    "acquired_last": ("max", _ACQUIRED, "ACQUIRE"),
    "delayed": ("min", f"pos long, at timestamp, due_at timestamp, attempt int, {_PAYLOAD}", "DELAY"),
    "duplicate": ("max", "boolean"),
    "moves": ("sum", "long", "RESCHEDULE"),
    "moved": ("max", "pos long, due_at timestamp, queue string", "RESCHEDULE"),
    "renewals": ("sum", "long", "RENEW"),
    # The RENEW for the longest time, and the last one that may have made the lease shorter.
    "renewed": ("max", "until timestamp, pos long, holder string", "RENEW"),
    "renewed_exactly": ("max", "pos long, until timestamp, holder string", "RENEW"),
    "spent": ("max", f"{_HELD}, lease_ms long", "DISPATCH"),
    # Those that count the attempt.
    "releases": ("sum", "long", "RELEASE"),
    "released": ("max", f"{_HELD}, delay_ms long, counted boolean, text string", "RELEASE"),
    "rejected": ("max", f"{_HELD}, text string", "REJECT"),
    "cancelled": ("max", "pos long, at timestamp, queue string", "CANCEL"),
    "acks": ("sum", "long", "ACK"),
    "acked": ("min", _HELD, "ACK"),
    # The first marker that certainly ended it if it was open, and the first request that ended it if it was in time.
    "ended": ("min", "long"),
    "end_requested": ("min", "long"),
    # The tracker's facts.
    "facts": ("sum", "long", *_FACTS),
    "fact": ("min", "pos long, at timestamp, kind string, attempt int, cause string", *_FACTS),
    # Its dead letter.
    "deaths": ("sum", "long"),
    "death": ("min", "at timestamp, reason string, topic string, partition int, offset long, id string"),
}
RULES = {name: rule for name, (rule, *_) in _COLUMNS.items()}
PARTS = StructType(
    [
        *columns("topic string, partition long, offset long, subscription string").fields,
        *[
            StructField(name, columns(kind)) if " " in kind else columns(f"{name} {kind}")[name]
            for name, (_, kind, *_) in _COLUMNS.items()
        ],
    ]
)

#: Kinds of markers that say nothing about a record's deliveries.
ABOUT_NO_RECORD = ("TICK", "ANSWERED", "DISCARD", "RESUME", "RESUMED", "PURGE")
#: Kinds of markers after which the next message of a line may be delivered, and of requests that may be too late.
_ENDS, _REQUESTS = ("ACK", "DEAD_LETTERED", "CANCELLED", "ABANDONED"), ("REJECT", "CANCEL")


def of_markers(markers: DataFrame) -> DataFrame:
    """Return the parts in markers, which have a column ``subscription``."""
    about_records = markers.where(~F.col("kind").isin(*ABOUT_NO_RECORD))
    # A batch has at most 2^16 markers.
    pos = F.col("log_offset") * 65_536 + F.col("index")
    until = later_by(F.col("logged_at"), F.col("lease_ms"))
    rows = about_records.withColumn("pos", pos).withColumn("until", until).withColumnRenamed("logged_at", "at")
    kind = F.col("kind")
    columns = {
        # An ACK may name no queue, and other markers of clients a wrong one; ``subscription`` is the right one.
        "queue": F.when(kind.isin("ACQUIRE", "DELAY", *_FACTS), F.col("queue")).otherwise(
            F.nullif("subscription", F.lit(""))
        ),
        "log_partition": F.col("log_partition"),
        "last_at": F.col("at"),
        "ended": F.when(kind.isin(*_ENDS) | ((kind == "RELEASE") & (F.col("cause") == "LAST")), F.col("pos")),
        "end_requested": F.when(kind.isin(*_REQUESTS), F.col("pos")),
        **{name: F.when(kind.isin(*kinds), _value(name)) for name, (_, _, *kinds) in _COLUMNS.items() if kinds},
    }
    columns["releases"] = F.when(F.col("counted"), columns["releases"])
    exactly = F.col("cause") == "EXACTLY"
    columns["renewed"] = F.when(exactly, None).otherwise(columns["renewed"])
    columns["renewed_exactly"] = F.when(exactly, columns["renewed_exactly"])
    return _row(rows, columns)


def of_duplicates(
    markers: DataFrame, shortest: Mapping[str, int], longest: Mapping[str, int], subscriptions: Subscriptions
) -> DataFrame:
    """Return the parts that mark duplicates: messages that their tracker may have dropped.

    A tracker drops a message if it accepted another one with the same id less than a window before. A dropped message
    does not extend the window. The markers do not show which window the tracker knew. ``shortest`` and ``longest`` are
    the windows that queues have had, in ms, "*" those of all others. If both are equal, the result is exact. Otherwise
    a message that the tracker accepted may be marked; its fact shows that it was accepted.
    """
    facts = markers.where(F.col("kind").isin(*_FACTS) & F.col("topic").startswith(DRAWN))
    rows = markers.where(HAS_ID).join(
        facts.select(*PLACE, F.lit(True).alias("has_fact")).distinct(), list(PLACE), "left"
    )
    rows = rows.select(
        *_SCOPE,
        F.unix_millis("logged_at").alias("now_ms"),
        F.coalesce("has_fact", F.lit(False)).alias("has_fact"),
        by_queue(shortest).alias("shortest_ms"),
        by_queue(longest).alias("longest_ms"),
        *PLACE,
        "log_offset",
        "index",
    )
    in_order = rows.repartition("queue", "text").sortWithinPartitions(*_SCOPE, "log_offset", "index")
    rows = in_order.mapInArrow(_dropped, _DROPPED)
    subscription = subscriptions.of(F.col("queue"), F.col("topic"))
    columns = {"queue": F.col("queue"), "duplicate": F.lit(True)}
    return _row(rows.withColumn("subscription", subscription), columns)


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


def later_by(at: Column, by_ms: Column) -> Column:
    """Return a time some milliseconds later, at most the last one that tables can express."""
    later = F.unix_millis(at) + by_ms
    # F.least ignores nulls.
    return F.timestamp_millis(F.when(later > LAST_MS, LAST_MS).otherwise(later))


def by_queue(values: Mapping[str, int]) -> Column:
    """Return the value of a row's queue; "*" has that of all others."""
    named = F.create_map(*[F.lit(part) for pair in values.items() for part in pair])
    return F.coalesce(named[F.col("queue")], named[F.lit("*")])


def of_messages(messages: DataFrame) -> DataFrame:
    """Return the parts in records, which have a column ``subscription``."""
    rows = messages.withColumnRenamed("sent_at", "at")
    columns = {"queue": F.col("queue"), "last_at": F.col("at"), "records": F.lit(1), "record": _value("record")}
    return _row(rows, columns)


def of_dead_letters(letters: DataFrame, subscriptions: Subscriptions) -> DataFrame:
    """Return the parts in dead letters, for the records that became them."""
    death = F.struct(
        F.coalesce("dead_lettered_at", "sent_at").alias("at"), "reason", "topic", "partition", "offset", "id"
    )
    place = [F.col(f"origin_{name}").alias(name) for name in PLACE]
    subscription = subscriptions.of(F.col("queue"), F.col("origin_topic")).alias("subscription")
    rows = letters.where(F.col("origin_offset").isNotNull()).select(*place, subscription, "queue", death.alias("death"))
    columns = {"queue": F.col("queue"), "last_at": F.col("death.at"), "deaths": F.lit(1), "death": F.col("death")}
    return _row(rows, columns)


def added_up(*frames: DataFrame) -> DataFrame:
    """Merge rows of parts into one row for each record of each subscription."""
    rows = reduce(DataFrame.unionByName, frames)
    # Repartitioned first: partial sums would be wider than the rows, and hardly fewer. Sorted by offset first, because
    # most topics are equal.
    grouped = rows.repartition(*PLACE).groupBy("offset", "partition", "topic", "subscription")
    parts = grouped.agg(*[getattr(F, rule)(name).alias(name) for name, rule in RULES.items()])
    # Never null, whichever topics queues name: the files of a table must have one type, or pyarrow refuses them.
    return parts.withColumn("subscription", F.coalesce("subscription", F.lit("")))


def message_id(prefix: str = "") -> Column:
    """Return the id of the message of a row of parts: that in its parts, else the place of its record.

    ``prefix`` precedes the names of parts, if they are fields of a column.
    """
    ids = [f"{prefix}{name}.id" for name in ("record", "acquired", "delayed", "death")]
    return F.coalesce(*ids, F.concat_ws("/", *PLACE))


def names_of(part: str) -> list[str]:
    """Return the names of the fields of a part that is a struct."""
    kind = PARTS[part].dataType
    assert isinstance(kind, StructType)
    return kind.names


def _value(name: str) -> Column:
    """Return a struct column, or 1 for a column that counts."""
    return F.lit(1) if RULES[name] == "sum" else F.struct(*names_of(name))


def _row(rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    chosen = [
        columns.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name)
        for field in PARTS.fields
        if field.name not in KEY
    ]
    return rows.select(*KEY, *chosen)
