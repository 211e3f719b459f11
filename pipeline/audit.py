"""The audit of a lifecycle: for each queue, the messages that were sent and how they ended.

This equation must hold for each message, and therefore in total::

    sent + acked_and_dead =
        acked + dead + open + delayed + cancelled + deduplicated + abandoned + message_expired + expired_unread + lost

``lost`` must be 0, and no message may have a difference (:mod:`pipeline.audit_differences`). The topics do not show
what consumers did: an expired lease does not tell whether the message was processed. So ``duplicates`` counts
deliveries that were not requested, each of which may have repeated work. If handlers report the deliveries that they
finished (the table ``handled``), it counts exactly the messages that were finished or dead-lettered more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.lifecycle import OPEN, came_from_elsewhere, records_of
from pipeline.record_parts import PLACE

#: Counts of a queue; each is a sum over its messages.
COUNTS = (
    "sent", "acked", "dead", "acked_and_dead", "open", "delayed", "cancelled", "deduplicated", "abandoned",
    "message_expired", "expired_unread", "lost", "redelivered", "redriven", "duplicates", "differences", "pending",
    "unknown", "untimed",
)  # fmt: skip

#: Counts of messages in a state of this name.
_STATES = ("delayed", "cancelled", "deduplicated", "abandoned", "message_expired", "expired_unread", "lost")

#: Ids of wrong messages in a verdict.
MAX_IDS = 100_000

#: Causes of duplicates that the topics show, with their numbers in docs/guarantees.md.
CAUSES = {
    "ended while held": "1, 2: the lease expired without a word from its consumer",
    "acked late": "3: the ack came after the lease had expired",
    "acked behind the copy": "4: the ack came between redelivery and fact",
    "acquired again": "5, 8, 9, 13: the record was acquired more than once",
    "aborted copy": "6: a redelivery of a transaction that was aborted",
    "unknown": "unknown: the topics do not show it",
}


def chosen(lifecycle: DataFrame, queue: str | None, begin_ms: int | None, end_ms: int | None) -> DataFrame:
    """Return the messages of a queue that were sent in a time range; the end is excluded."""
    rows = lifecycle if queue is None else lifecycle.where(F.col("queue") == queue)
    return between(rows, "sent_at", begin_ms, end_ms)


def between(rows: DataFrame, column: str, begin_ms: int | None, end_ms: int | None) -> DataFrame:
    """Return the rows with a time in a range; the end is excluded."""
    ms = F.unix_millis(column)
    rows = rows if begin_ms is None else rows.where(ms >= begin_ms)
    return rows if end_ms is None else rows.where(ms < end_ms)


def judged(messages: DataFrame, handled: DataFrame | None = None) -> DataFrame:
    """Return a row for each message, with a number for each of :data:`COUNTS`, and ``causes``.

    ``handled`` has topic, partition and offset of each delivery that a handler finished, and may have its queue.
    """
    known, state = F.col("known"), F.col("state")
    acked_dead = F.col("acked") & (F.col("dead_letters") > F.col("redrives"))
    rows = messages if handled is None else _with_finished(messages, handled)
    duplicates = _surplus() if handled is None else _ends() - 1
    values = {
        "sent": known,
        "acked": known & F.col("acked"),
        "dead": known & ((state == "dead") | acked_dead),
        "acked_and_dead": known & acked_dead,
        "open": known & state.isin(*[name for name in OPEN if name != "delayed"], "on_the_way"),
        **{name: known & (state == name) for name in _STATES},
        "redelivered": F.col("redeliveries"),
        "redriven": F.col("redrives"),
        "duplicates": F.col("duplicates"),
        "differences": F.size("differences") > 0,
        "pending": F.size("pending") > 0,
        "unknown": ~known & (state != "no_queue"),
        "untimed": known & F.col("sent_at").isNull(),
    }
    rows = rows.withColumn("duplicates", F.coalesce(F.greatest(F.lit(0), duplicates), F.lit(0)))
    return rows.select(
        "queue",
        "sent_at",
        "id",
        "state",
        # Also true of an acked message if a redelivery of it is still leased.
        F.coalesce("open", F.lit(False)).alias("unfinished"),
        F.col("differences").alias("why"),
        F.col("pending").alias("may_be"),
        _causes().alias("causes"),
        *[F.coalesce(value.cast("long"), F.lit(0)).alias(name) for name, value in values.items()],
    )


def wrong(*, drained: bool) -> Column:
    """Return whether a judged message is wrong; ``drained``: it must also have ended."""
    differs = (F.col("differences") > 0) | (F.col("lost") > 0)
    return differs | F.col("unfinished") | (F.col("pending") > 0) if drained else differs


def remarkable(rows: DataFrame, *, drained: bool) -> DataFrame:
    """Return the judged messages that are wrong or have duplicates."""
    return rows.where(wrong(drained=drained) | (F.col("duplicates") > 0))


def verdict(rows: DataFrame, *, corrupt: Sequence[str] = (), drained: bool = False) -> dict[str, Any]:
    """Return the result as a JSON object: counts of all queues and of each, causes, and ids of wrong messages.

    ``corrupt``: the places of records of the markers topic that are not markers, which no operator has quarantined.
    """
    by_queue = {row["queue"] or "": {name: row[name] for name in COUNTS} for row in account(rows).collect()}
    few = remarkable(rows, drained=drained)
    different = few.where(wrong(drained=drained))
    count = different.count()
    return {
        **{name: sum(counts[name] for counts in by_queue.values()) for name in COUNTS},
        "causes": {row["cause"]: row["count"] for row in causes(few).collect()},
        "queues": by_queue,
        "wrong": [
            {"id": row.id, "queue": row.queue, "state": row.state, "why": [*row.why, *row.may_be]}
            for row in different.orderBy("id").limit(MAX_IDS).collect()
        ],
        "wrong_count": count,
        "corrupt_markers": [*corrupt],
        "right": not count and not corrupt and all(balanced(counts) for counts in by_queue.values()),
    }


def account(judged: DataFrame) -> DataFrame:
    """Return a row for each queue, with the sums of :data:`COUNTS`."""
    return judged.groupBy("queue").agg(*[F.sum(name).alias(name) for name in COUNTS]).orderBy("queue")


def causes(judged: DataFrame) -> DataFrame:
    """Return the number of duplicates by cause: cause, count."""
    rows = judged.select(F.explode("causes").alias("cause"))
    return rows.groupBy("cause").count().orderBy("cause")


def balanced(counts: dict[str, int]) -> bool:
    """Return whether the equation holds."""
    ends = ("acked", "dead", "open", *_STATES)
    return counts["sent"] + counts["acked_and_dead"] == sum(counts[name] for name in ends)


def _surplus() -> Column:
    """Return the number of deliveries besides the first one, redrives, and those that follow a release."""

    def surplus(delivery: Column) -> Column:
        # After the last attempt, a release leads to a dead letter instead of a redelivery.
        released = (delivery["outcome"] == "released") & delivery["copied"]
        explains = released | ((delivery["outcome"] == "delivered") & delivery["redriven"])
        times = F.when(delivery["handed_out"], 1).otherwise(0) + delivery["expirations"]
        return times - F.when(explains, 1).otherwise(0)

    sum_ = F.aggregate("deliveries", F.lit(0).cast("long"), lambda sum_, delivery: sum_ + surplus(delivery))
    # Spark interprets functions of arrays, and almost every message has one delivery.
    total = F.when(F.size("deliveries") == 1, surplus(F.col("deliveries")[0])).otherwise(sum_)
    return total - 1 + F.when(came_from_elsewhere(), 1).otherwise(0)


def _ends() -> Column:
    # A redriven dead letter is not an end.
    return F.coalesce(F.col("finished"), F.lit(0)) + F.greatest(F.lit(0), F.col("dead_letters") - F.col("redrives"))


def _with_finished(messages: DataFrame, handled: DataFrame) -> DataFrame:
    """Add how many deliveries of each message handlers finished."""
    on = [*PLACE, *(["queue"] if "queue" in handled.columns else [])]
    records = records_of(messages, "id", "queue")
    finished = handled.select(*on).join(records, on).groupBy("id", "queue").agg(F.count("*").alias("finished"))
    return messages.join(finished, ["id", "queue"], "left")


def _causes() -> Column:
    """Return one cause for each of a message's ``duplicates``, as far as its deliveries show them."""

    def of_delivery(delivery: Column) -> Column:
        # The last expiry leads to a dead letter, and repeats nothing.
        repeated = (delivery["outcome"] == "expired") & delivery["copied"]
        cause = (
            F.when(~delivery["committed"] & ~delivery["redriven"] & delivery["handed_out"], "aborted copy")
            .when(repeated & (delivery["acked_at"] >= delivery["ended_at"]), "acked late")
            .when(repeated, "ended while held")
            .when((delivery["expirations"] == 0) & (delivery["acquisitions"] > 1), "acquired again")
        )
        in_place = F.array_repeat(F.lit("ended while held"), delivery["expirations"].cast("int"))
        return F.concat(in_place, F.array(cause))

    behind = F.when((F.col("redeliveries") == 0) & (F.size("deliveries") > 1) & F.col("acked"), "acked behind the copy")
    shown = F.array_compact(F.concat(F.flatten(F.transform("deliveries", of_delivery)), F.array(behind)))
    count = F.col("duplicates").cast("int")
    causes = F.slice(F.concat(shown, F.array_repeat(F.lit("unknown"), count)), F.lit(1), count)
    return F.when(count > 0, causes).otherwise(F.array().cast("array<string>"))
