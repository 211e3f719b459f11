"""The input of a plan: the target load, and the average message of each queue, measured or set by options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from pipeline.errors import PipelineError
from pipeline.spans import DAY_MS, MINUTE_MS
from pipeline.statistics import delayed, received

#: A message that is open for longer than a worker's flush interval (MARQ_FLUSH_INTERVAL) leaves a row.
FLUSH_MS = 1_000
#: Consumers renew a lease every third of its duration (docs/guarantees.md).
RENEWALS_PER_LEASE = 3
DEFAULT_LEASE_MS = 30_000.0


@dataclass(frozen=True)
class Target:
    """The load to plan for: messages per second of each queue, and retention."""

    rates: Mapping[str, float]
    retention_ms: float = 7 * DAY_MS
    markers_retention_ms: float = 7 * DAY_MS
    replication: int = 3
    #: Delayed messages at any time; None: as many as the measured delays cause.
    delayed: float | None = None
    #: A factor on all rates from which processes and partitions follow.
    headroom: float = 2.0

    def __post_init__(self) -> None:
        if self.replication < 1:
            raise PipelineError(f"--replication {self.replication}: expected 1 or more replicas of each partition")
        if not (math.isfinite(self.headroom) and self.headroom >= 1):
            raise PipelineError(f"--headroom {self.headroom:g}: expected a factor of 1 or more, such as 2")
        if self.delayed is not None and self.delayed < 0:
            raise PipelineError(f"--delayed {self.delayed:g}: expected 0 or more delayed messages")


@dataclass(frozen=True)
class Profile:
    """One queue; means over its messages, or over its deliveries where a comment says so."""

    queue: str
    #: Messages a second: over the time span of all queues, and in the busiest minute.
    rate_mean: float = 0.0
    rate_peak: float = 0.0
    #: Size of the values.
    size_bytes: float = 0.0
    deliveries: float = 1.0
    #: Per delivery: from its ACQUIRE until it was settled, and until its row was closed (backoff included).
    run_ms: float = 0.0
    run_p99_ms: float = 0.0
    hold_ms: float = 0.0
    lease_ms: float = DEFAULT_LEASE_MS
    renewals: float = 0.0
    #: Share of the deliveries that left a row in the lease table.
    rows_share: float = 0.0
    #: Share of the messages that their sender or queue delayed, the mean delay, and the share of dead letters.
    delayed_share: float = 0.0
    delay_ms: float = 0.0
    dead_share: float = 0.0

    def changed(self, **options: float | None) -> Profile:
        """Return the profile with new size_bytes, run_ms, lease_ms or deliveries, unless they are None.

        A longer run keeps its row open for as much longer.
        """
        values: dict[str, Any] = {name: float(value) for name, value in options.items() if value is not None}
        if (run_ms := values.get("run_ms")) is not None:
            values["run_p99_ms"] = run_ms
            values["hold_ms"] = max(run_ms, self.hold_ms + run_ms - self.run_ms)
            values["rows_share"] = max(self.rows_share, float(run_ms >= FLUSH_MS))
        profile = replace(self, **values)
        if not {"run_ms", "lease_ms"} & values.keys():
            return profile
        return replace(profile, renewals=float(profile.run_ms * RENEWALS_PER_LEASE // profile.lease_ms))

    @classmethod
    def measured(cls, row: Row) -> Profile:
        """Return the profile of a row of :func:`profiles`; what never occurred keeps its default."""
        values = {name: float(value) for name, value in row.asDict().items() if name != "queue" and value}
        return cls(row["queue"], **values)


def profiles(lifecycle: DataFrame) -> DataFrame:
    """Return one row for each queue, with the columns of :class:`Profile`."""
    known = lifecycle.where(F.col("queue").isNotNull() & F.col("sent_at").isNotNull())
    sent_ms = F.unix_millis("sent_at")
    seconds = F.greatest((F.max(sent_ms) - F.min(sent_ms)) / 1000, F.lit(1.0))
    minutes = known.groupBy("queue", F.floor(sent_ms / MINUTE_MS).alias("minute")).count()
    peaks = minutes.groupBy("queue").agg((F.max("count") / (MINUTE_MS / 1000)).alias("rate_peak"))
    joined = _messages(known).join(_deliveries(known), "queue", "left").join(peaks, "queue")
    rows = joined.crossJoin(known.agg(seconds.alias("seconds"))).withColumns(
        {
            "rate_mean": F.col("messages") / F.col("seconds"),
            "deliveries": F.col("received") / F.col("received_messages"),
        }
    )
    return rows.select(*[field.name for field in fields(Profile)])


def _messages(known: DataFrame) -> DataFrame:
    due = F.array_min(F.transform("deliveries", lambda delivery: F.when(delayed(delivery), delivery.due_at)))
    return known.groupBy("queue").agg(
        F.count(F.lit(1)).alias("messages"),
        F.avg("size").alias("size_bytes"),
        F.count_if(F.exists("deliveries", received)).alias("received_messages"),
        F.avg(F.exists("deliveries", delayed).cast("int")).alias("delayed_share"),
        F.avg(F.unix_millis(due) - F.unix_millis("sent_at")).alias("delay_ms"),
        F.avg((F.col("dead_letters") > 0).cast("int")).alias("dead_share"),
    )


def _deliveries(known: DataFrame) -> DataFrame:
    hold_ms = F.unix_millis("ended_at") - F.unix_millis("acquired_at")
    return (
        known.select("queue", F.inline("deliveries"))
        .where(received())
        .groupBy("queue")
        .agg(
            F.count(F.lit(1)).alias("received"),
            F.avg("run_ms").alias("run_ms"),
            F.percentile_approx("run_ms", 0.99).alias("run_p99_ms"),
            F.avg(hold_ms).alias("hold_ms"),
            F.max("lease_ms").alias("lease_ms"),
            F.avg("renewals").alias("renewals"),
            F.avg((F.coalesce(hold_ms, F.lit(FLUSH_MS)) >= FLUSH_MS).cast("int")).alias("rows_share"),
        )
    )
