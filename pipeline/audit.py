"""The account of a lifecycle: of each queue, what was sent and what became of it.

The equation that must hold, message by message and so in sum::

    sent + acked_and_dead = acked + dead + open + delayed + cancelled + abandoned + expired_unread + lost

``lost`` must be 0, and no message may have a difference (:mod:`pipeline.lifecycle`). What consumers did is not in the
topics: that a lease ran out does not say whether its message was processed. So ``duplicates`` counts the deliveries
that nobody asked for, each of which may have doubled work; where handlers say what they have finished (the table
``handled``), it counts what was finished or died more than once, exactly.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.lifecycle import OPEN

#: Figures of a queue; each is a sum over its messages.
FIGURES = (
    "sent", "acked", "dead", "acked_and_dead", "open", "delayed", "cancelled", "abandoned", "expired_unread", "lost",
    "redelivered", "redriven", "duplicates", "differences", "pending", "unknown",
)  # fmt: skip

#: Causes of duplicates by their numbers in docs/guarantees.md, as far as the topics show them.
CAUSES = {
    "ended while held": "1, 2: the lease ran out, and its consumer has said nothing",
    "acked late": "3: the ack came after the lease had run out",
    "acked behind the copy": "4: the ack came between copy and fact",
    "acquired again": "5, 8, 9, 13: the record was acquired more than once",
    "aborted copy": "6: a copy of a transaction that was aborted",
}


def chosen(lifecycle: DataFrame, queue: str | None, since: str | None, until: str | None) -> DataFrame:
    """Return the messages of a queue, sent in a time range: from ``since`` on, before ``until``."""
    rows = lifecycle if queue is None else lifecycle.where(F.col("queue") == queue)
    rows = rows if since is None else rows.where(F.col("sent_at") >= F.to_timestamp(F.lit(since)))
    return rows if until is None else rows.where(F.col("sent_at") < F.to_timestamp(F.lit(until)))


def judged(messages: DataFrame, handled: DataFrame | None = None) -> DataFrame:
    """Return a row for each message, with a 0 or 1, or a number, for each of :data:`FIGURES`, and ``causes``.

    ``handled``: what handlers say they have finished: topic, partition and offset of each.
    """
    known = F.col("known")
    still_dead = F.col("state") == "dead"
    acked_dead = F.col("acked") & (F.col("dead_letters") > F.col("redrives"))
    rows = messages if handled is None else messages.join(_finished(messages, handled), "id", "left")
    duplicates = _surplus() if handled is None else _ends() - 1
    figures = {
        "sent": known,
        "acked": known & F.col("acked"),
        "dead": known & (still_dead | acked_dead),
        "acked_and_dead": known & acked_dead,
        "open": known & F.col("state").isin(*[state for state in OPEN if state != "delayed"], "on_the_way"),
        "delayed": known & (F.col("state") == "delayed"),
        **{name: known & (F.col("state") == name) for name in ("cancelled", "abandoned", "expired_unread", "lost")},
        "redelivered": F.col("redeliveries"),
        "redriven": F.col("redrives"),
        "duplicates": F.greatest(F.lit(0), duplicates),
        "differences": F.size("differences") > 0,
        "pending": F.size("pending") > 0,
        "unknown": ~known & (F.col("state") != "nobody"),
    }
    numbers = {name: F.coalesce(value.cast("long"), F.lit(0)) for name, value in figures.items()}
    told = (
        "id",
        "state",
        # Of one that is acked, too: a copy of it may be leased.
        F.coalesce("open", F.lit(False)).alias("unfinished"),
        F.col("differences").alias("why"),
        F.col("pending").alias("may_be"),
    )
    return rows.select("queue", "sent_at", *told, _causes().alias("causes"), *[v.alias(n) for n, v in numbers.items()])


def wrong(*, drained: bool) -> Column:
    """Whether a judged message is not as it must be; ``drained``: it must have come to its end, too."""
    found = (F.col("differences") > 0) | (F.col("lost") > 0)
    return found | F.col("unfinished") | (F.col("pending") > 0) if drained else found


def account(judged: DataFrame) -> DataFrame:
    """Return a row for each queue, with the sums of :data:`FIGURES`."""
    return judged.groupBy("queue").agg(*[F.sum(name).alias(name) for name in FIGURES]).orderBy("queue")


def causes(judged: DataFrame) -> DataFrame:
    """Return how often each cause was found on messages that have duplicates: cause, count."""
    found = judged.where(F.col("duplicates") > 0).select(F.explode("causes").alias("cause"))
    return found.groupBy("cause").count().orderBy("cause")


def balanced(figures: dict[str, int]) -> bool:
    """Whether the equation holds."""
    ends = ("acked", "dead", "open", "delayed", "cancelled", "abandoned", "expired_unread", "lost")
    return figures["sent"] + figures["acked_and_dead"] == sum(figures[name] for name in ends)


def _handed_out() -> Column:
    return F.filter("deliveries", lambda each: each["handed_out"])


def _surplus() -> Column:
    """Deliveries that nobody asked for: not the first one, no redrive, and not behind a release."""

    def asks(each: Column) -> Column:
        # What is released for the last time becomes a dead letter: no copy follows.
        return ((each["outcome"] == "released") & each["copied"]) | (
            (each["outcome"] == "delivered") & each["redriven"]
        )

    return F.size(_handed_out()) - 1 - F.size(F.filter("deliveries", asks))


def _ends() -> Column:
    # A dead letter that was sent back was no end.
    return F.coalesce(F.col("finished"), F.lit(0)) + F.greatest(F.lit(0), F.col("dead_letters") - F.col("redrives"))


def _finished(messages: DataFrame, handled: DataFrame) -> DataFrame:
    places = ("topic", "partition", "offset")
    records = messages.select("id", F.explode("deliveries").alias("delivery"))
    records = records.select("id", *[F.col(f"delivery.{name}") for name in places])
    return handled.select(*places).join(records, list(places)).groupBy("id").agg(F.count("*").alias("finished"))


def _causes() -> Column:
    """The causes that a message's deliveries show."""

    def cause(each: Column) -> Column:
        ended = each["ended_at"]
        return (
            F.when(~each["committed"] & ~each["redriven"] & each["handed_out"], "aborted copy")
            .when((each["outcome"] == "expired") & (each["acked_at"] >= ended), "acked late")
            .when(each["outcome"] == "expired", "ended while held")
            .when(each["acquisitions"] > 1, "acquired again")
        )

    behind = F.when((F.col("redeliveries") == 0) & (F.size("deliveries") > 1) & F.col("acked"), "acked behind the copy")
    return F.array_compact(F.concat(F.transform("deliveries", cause), F.array(behind)))
