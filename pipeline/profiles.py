"""What each queue's messages are like on the average: what a plan starts from.

Measured from the table ``lifecycle``; or given, where nothing was measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from pipeline.spans import MINUTE_MS
from pipeline.statistics import delayed, handed_out

#: A message that is open for longer than a worker's flush interval (MARQ_FLUSH_INTERVAL) leaves a row.
FLUSH_MS = 1_000
#: A holder renews every third of its lease (docs/guarantees.md).
RENEWALS_PER_LEASE = 3
DEFAULT_LEASE_MS = 30_000


@dataclass(frozen=True)
class Profile:
    """One queue; means over its messages or, where it says so, over its deliveries."""

    queue: str
    #: Messages a second: from the first to the last one of all queues, and in the busiest minute.
    rate_mean: float
    rate_peak: float
    #: Of the values.
    size_bytes: float
    #: Deliveries of a message.
    deliveries: float
    #: Of a delivery: from its ACQUIRE until it was settled, and until its row was closed (backoff included).
    run_ms: float
    run_p99_ms: float
    hold_ms: float
    lease_ms: float
    renewals: float
    #: Which share of the deliveries left a row in the lease table.
    rows_share: float
    #: Of messages: which share was delayed by its sender or queue, for how long; which share is dead.
    delayed_share: float
    delay_ms: float
    dead_share: float

    @classmethod
    def given(cls, queue: str, size_bytes: float, run_ms: float, lease_ms: float, deliveries: float) -> Profile:
        """Return a profile of what somebody expects; what is left out is 0."""
        renewals = float(run_ms * RENEWALS_PER_LEASE // lease_ms)
        rows = float(run_ms >= FLUSH_MS)
        return cls(queue, 0, 0, size_bytes, deliveries, run_ms, run_ms, run_ms, lease_ms, renewals, rows, 0, 0, 0)

    def changed(
        self, size_bytes: float | None, run_ms: float | None, lease_ms: float | None, deliveries: float | None
    ) -> Profile:
        """Return it with other figures where some are given; the row of a delivery lives as much longer as its run."""
        found = self
        if run_ms is not None:
            hold = max(run_ms, found.hold_ms + run_ms - found.run_ms)
            rows = max(found.rows_share, float(run_ms >= FLUSH_MS))
            found = replace(found, run_ms=run_ms, run_p99_ms=run_ms, hold_ms=hold, rows_share=rows)
        if lease_ms is not None:
            found = replace(found, lease_ms=lease_ms)
        if run_ms is not None or lease_ms is not None:
            found = replace(found, renewals=float(found.run_ms * RENEWALS_PER_LEASE // found.lease_ms))
        return replace(
            found,
            size_bytes=found.size_bytes if size_bytes is None else size_bytes,
            deliveries=found.deliveries if deliveries is None else deliveries,
        )

    @classmethod
    def measured(cls, row: Row) -> Profile:
        """Return the profile of a row of :func:`profiles`; what was never seen is 0."""
        found = {name: row[name] for name in cls.__dataclass_fields__}
        numbers = {name: float(value or 0) for name, value in found.items() if name != "queue"}
        numbers["deliveries"] = numbers["deliveries"] or 1.0
        numbers["lease_ms"] = numbers["lease_ms"] or float(DEFAULT_LEASE_MS)
        return cls(found["queue"], **numbers)


def profiles(lifecycle: DataFrame) -> DataFrame:
    """Return one row for each queue, with the columns of :class:`Profile`."""
    known = lifecycle.where(F.col("queue").isNotNull() & F.col("sent_at").isNotNull())
    of_messages, of_deliveries, peaks = _messages(known), _deliveries(known), _peaks(known)
    joined = of_messages.join(of_deliveries, "queue", "left").join(peaks, "queue")
    whole = known.select(F.unix_millis("sent_at").alias("sent_ms"))
    seconds = F.greatest((F.max("sent_ms") - F.min("sent_ms")) / 1000, F.lit(1.0))
    joined = joined.crossJoin(whole.agg(seconds.alias("seconds")))
    return joined.select(
        "queue",
        (F.col("messages") / F.col("seconds")).alias("rate_mean"),
        (F.col("busiest") / (MINUTE_MS / 1000)).alias("rate_peak"),
        "size_bytes",
        (F.col("handed_out") / F.col("delivered_messages")).alias("deliveries"),
        "run_ms",
        "run_p99_ms",
        "hold_ms",
        "lease_ms",
        "renewals",
        "rows_share",
        "delayed_share",
        "delay_ms",
        "dead_share",
    )


def _messages(known: DataFrame) -> DataFrame:
    had, waited = F.exists("deliveries", handed_out), F.exists("deliveries", delayed)
    due = F.array_min(F.transform("deliveries", lambda each: F.when(delayed(each), each.due_at)))
    delay_ms = F.unix_millis(due) - F.unix_millis("sent_at")
    return known.groupBy("queue").agg(
        F.count(F.lit(1)).alias("messages"),
        F.avg("size").alias("size_bytes"),
        F.count_if(had).alias("delivered_messages"),
        F.avg(waited.cast("int")).alias("delayed_share"),
        F.avg(delay_ms).alias("delay_ms"),
        F.avg((F.col("dead_letters") > 0).cast("int")).alias("dead_share"),
    )


def _deliveries(known: DataFrame) -> DataFrame:
    each = known.select("queue", F.inline("deliveries")).where(handed_out())
    hold_ms = F.unix_millis("ended_at") - F.unix_millis("acquired_at")
    return each.groupBy("queue").agg(
        F.count(F.lit(1)).alias("handed_out"),
        F.avg("run_ms").alias("run_ms"),
        F.percentile_approx("run_ms", 0.99).alias("run_p99_ms"),
        F.avg(hold_ms).alias("hold_ms"),
        F.max("lease_ms").alias("lease_ms"),
        F.avg("renewals").alias("renewals"),
        F.avg((F.coalesce(hold_ms, F.lit(FLUSH_MS)) >= FLUSH_MS).cast("int")).alias("rows_share"),
    )


def _peaks(known: DataFrame) -> DataFrame:
    minutes = F.floor(F.unix_millis("sent_at") / MINUTE_MS)
    counts = known.groupBy("queue", minutes.alias("minute")).agg(F.count(F.lit(1)).alias("messages"))
    return counts.groupBy("queue").agg(F.max("messages").alias("busiest"))
