"""The end of each record, computed from its parts: its delivery, and the columns that its message needs.

A record is *opened* by the first ACQUIRE or DELAY that names it, and *closed* by the first ACK or fact after that;
later markers change nothing (docs/protocol.md, The tracker's state machine).
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from marq.wire.names import WITHOUT_RECORDS
from pipeline.audit_differences import (
    differences_of_record,
    ingested,
    is_purged,
    lost,
    overdue,
    passed_over,
    pending_of_record,
    within,
)
from pipeline.cut import Cut
from pipeline.key_order import overtakes
from pipeline.record_parts import KEY, PARTS, PLACE, later_by, message_id, names_of
from pipeline.subscriptions import DRAWN, skipped
from pipeline.tables import columns

#: The elements of a message's ``deliveries``.
DELIVERY = columns(
    "topic string, partition long, offset long, attempt int, available_at timestamp, holder string,"
    " acquired_at timestamp, lease_ms long, renewals long, acquisitions long, outcome string,"
    " settled_at timestamp, due_at timestamp, ended_at timestamp, error string, wait_ms long, run_ms long,"
    " late_ms long, acked_at timestamp, handed_out boolean, redriven boolean, committed boolean,"
    " copied boolean, expirations long"
)

#: Causes of facts that are also outcomes of records that a tracker ended; all others are deliveries.
_OUTCOMES = (
    "EXPIRED", "RELEASED", "REJECTED", "TOO_LARGE", "GONE", "CANCELLED", "WITHDRAWN", "MESSAGE_EXPIRED",
)  # fmt: skip
_COPIES = ("REDELIVERED", "DELIVERED")


def reads(markers: DataFrame) -> DataFrame:
    """Return the offsets that each queue has read: queue, topic, partition, and runs, pairs of the first and the last.

    Each ACQUIRE names the first and the last offset of its read.
    """
    place = ("queue", "topic", "partition")
    acquires = markers.where(F.col("kind") == "ACQUIRE").groupBy(*place, "log_partition", "log_offset")
    batches = acquires.agg(F.min("from_offset").alias("first"), F.max("offset").alias("last"))
    in_order = Window.partitionBy(*place).orderBy("first", "last")
    before = F.max("last").over(in_order.rowsBetween(Window.unboundedPreceding, -1))
    runs = batches.withColumn("begins", F.coalesce(F.col("first") > before + 1, F.lit(True)).cast("int"))
    runs = runs.withColumn("number", F.sum("begins").over(in_order))
    whole = runs.groupBy(*place, "number").agg(F.array(F.min("first"), F.max("last")).alias("run")).drop("number")
    return whole.groupBy(*place).agg(F.collect_list("run").alias("runs"))


def purges(markers: DataFrame) -> DataFrame:
    """Return the offset before which each queue was purged: queue, topic, partition, end, and the time in ms."""
    # Messages that are not records were opened by a DELAY, so facts tell which of them were purged.
    rows = markers.where((F.col("kind") == "PURGE") & (F.col("topic") != WITHOUT_RECORDS))
    last = F.max(F.struct("offset", F.unix_millis("logged_at").alias("at_ms"))).alias("last")
    return rows.groupBy("queue", "topic", "partition").agg(last).select("queue", "topic", "partition", "last.*")


def deliveries(parts: DataFrame, cut: Cut) -> DataFrame:
    """Return one row for each record: the ``id`` and ``queue`` of its message, and columns for its state.

    The first of these are its time and its ``delivery``, so rows that are sorted are in the order of deliveries.
    """
    # One column, because Spark copies each column in each of the following steps.
    rows = parts.select(*KEY, "queue", "log_partition", F.struct(*PARTS.names).alias("parts"))
    rows = rows.join(F.broadcast(cut.reading), ["queue", "topic", "partition"], "left")
    if cut.clocks is None:
        rows = rows.withColumns({name: F.lit(None).cast("timestamp") for name in ("seen_at", "alive_since")})
    else:
        rows = rows.join(F.broadcast(cut.clocks), "log_partition", "left")
    rows = rows.join(F.broadcast(_bounds(parts.sparkSession, cut)), ["topic", "partition"], "left")
    rows = rows.withColumn("compacted", F.col("topic").isin(*cut.round_["compacted"]))
    if cut.keyed:
        without_order = cut.round_["without_order"]
        in_order = parts.where(~F.col("queue").isin(*without_order))
        if "*" in without_order:
            in_order = in_order.where(F.col("queue").isin(*cut.round_["with_order"]))
        rows = rows.join(F.broadcast(overtakes(in_order)), list(KEY), "left")
    else:
        # The join would compute the parts twice.
        rows = rows.withColumns({"overtaken": F.lit(None).cast("long"), "undecided": F.lit(None).cast("boolean")})
    return _judged(_ended(_held(_opened(rows, cut))), cut)


def _bounds(spark: SparkSession, cut: Cut) -> DataFrame:
    """Return the first offset of each partition, at its first ingest and now; each stands for the other if unknown.

    ``gaps`` are the records that retention removed before they were ingested: the first offset, and the next one.
    """
    gaps: dict[tuple[str, int], list[list[int]]] = {}
    for topic, partition, *gap in cut.round_["gaps"]["messages"]:
        gaps.setdefault((topic, partition), []).append(gap)
    firsts, begins = cut.round_["first"]["messages"], cut.round_["begins"]
    rows = []
    for topic in firsts.keys() | begins.keys():
        first, begin = firsts.get(topic, {}), begins.get(topic, {})
        both = ({**begin, **first}, {**first, **begin})
        rows += [
            (topic, int(partition), *[offsets[partition] for offsets in both], gaps.get((topic, int(partition)), []))
            for partition in both[0]
        ]
    columns = "topic string, partition long, first_offset bigint, begin_offset bigint, gaps array<array<bigint>>"
    return spark.createDataFrame(rows, columns)


def _opened(rows: DataFrame, cut: Cut) -> DataFrame:
    """Add columns that follow from the order of a record's markers."""
    rows = rows.withColumns(
        {
            "place": F.concat_ws("/", *PLACE),
            "id": message_id("parts."),
            "drawn": F.col("topic").startswith(DRAWN),
            "redriven": (F.col("topic") == cut.names.dead_letters) & F.col("parts.delayed").isNotNull(),
            "open_pos": F.least("parts.acquired.pos", "parts.delayed.pos"),
        }
    )
    ack_pos = F.when(F.col("parts.acked.pos") > F.col("open_pos"), F.col("parts.acked.pos"))
    fact_pos = F.when(F.col("parts.fact.pos") > F.col("open_pos"), F.col("parts.fact.pos"))
    rows = rows.withColumns(
        {
            "copy": F.col("id") != F.col("place"),
            "close_pos": F.least(ack_pos, fact_pos),
            "by_ack": ack_pos.isNotNull() & (fact_pos.isNull() | (ack_pos < fact_pos)),
        }
    )
    return rows.withColumns(
        {
            "closed": F.col("close_pos").isNotNull(),
            "end": F.when(F.col("close_pos").isNotNull() & ~F.col("by_ack"), F.col("parts.fact")),
        }
    )


def _held(rows: DataFrame) -> DataFrame:
    """Add the consumer that leased it, until when, and that consumer's markers."""
    last, first = F.col("parts.acquired_last"), F.col("parts.acquired")
    # An ACQUIRE after the end has no effect.
    in_time = ~F.col("closed") | (last["pos"] < F.col("close_pos"))
    rows = rows.withColumn(
        "taken", F.when(in_time, last).otherwise(F.struct(*[first[name] for name in names_of("acquired_last")]))
    )
    taken = F.col("taken")

    def by_holder(name: str) -> Column:
        marker = F.col(f"parts.{name}")
        valid = (marker["pos"] > taken["pos"]) & (marker["holder"] == taken["holder"])
        return F.when(valid & (~F.col("closed") | (marker["pos"] < F.col("close_pos"))), marker)

    return rows.withColumns(
        {
            "handed_out": F.col("parts.acquired").isNotNull() & F.col("parts.acquired.due_at").isNull(),
            "wait_until": F.coalesce(F.col("parts.acquired.due_at"), F.col("parts.delayed.due_at")),
            "kept": by_holder("renewed"),
            "kept_exactly": by_holder("renewed_exactly"),
            "dispatched": by_holder("spent"),
            "given_back": by_holder("released"),
            "refused": by_holder("rejected"),
        }
    )


def _ended(rows: DataFrame) -> DataFrame:
    """Add outcome and times."""
    taken, back, refused, kept, end = (F.col(name) for name in ("taken", "given_back", "refused", "kept", "end"))
    outcome = (
        F.when(F.col("closed") & F.col("by_ack"), "acked")
        .when(end["kind"] == "ABANDONED", "abandoned")
        .when(end.isNotNull(), F.when(end["cause"].isin(*_OUTCOMES), F.lower(end["cause"])).otherwise("delivered"))
    )
    waits = F.col("wait_until").isNotNull()
    # A CANCEL or RESCHEDULE of a leased message is too late, as is a RESCHEDULE of a closed one.
    waits_from = F.coalesce(back["pos"], F.col("open_pos"))
    cancelled = _rightly_named("cancelled") & (F.col("parts.cancelled.pos") > waits_from)
    in_time = (F.col("parts.moved.pos") > waits_from) & (
        ~F.col("closed") | (F.col("parts.moved.pos") < F.col("close_pos"))
    )
    moved = F.when(_rightly_named("moved") & in_time, F.col("parts.moved.due_at"))
    # Parts have only the last RESCHEDULE. If that was too late, an earlier one may have moved the message in time.
    unknown = (waits | back.isNotNull()) & (F.col("parts.moves") > 1) & (F.col("parts.moved.pos") > F.col("close_pos"))
    unknown = F.coalesce(unknown, F.lit(False))
    ended_at = F.when(F.col("by_ack"), F.col("parts.acked.at")).otherwise(end["at"])
    moved = F.when(unknown, ended_at).otherwise(moved)
    # The RELEASE after the last attempt in order: its dead letter is due at once.
    exhausted = F.coalesce(F.col("parts.ended") == back["pos"], F.lit(False))
    later = later_by(back["at"], F.when(exhausted, 0).otherwise(back["delay_ms"]))
    # The tracker ignores the delay after the last attempt, and that of a blocking message without its record.
    undelayed = (end["kind"] == "DEAD_LETTERED") | (end["cause"] == "RELEASED")
    later = F.when(later > F.when(undelayed, end["at"]), end["at"]).otherwise(later)
    waiting_due = F.coalesce(F.when(cancelled, F.col("parts.cancelled.at")), moved, "wait_until", later)
    # RENEW and DISPATCH never shorten the lease that an ACQUIRE begins, except a later RENEW that sets its end exactly.
    begun = [later_by(marker["at"], marker["lease_ms"]) for marker in (taken, F.col("dispatched"))]
    exact = F.col("kept_exactly")
    is_exact = exact.isNotNull() & (kept.isNull() | (kept["pos"] < exact["pos"]))
    lease_due = F.when(is_exact, exact["until"]).otherwise(F.greatest(*begun, kept["until"]))
    due = F.when(waits | back.isNotNull(), waiting_due).otherwise(lease_due)
    rows = rows.withColumns({"outcome": outcome, "due": due, "due_unknown": unknown, "exhausted": exhausted})
    settled = (
        F.when(F.col("outcome") == "acked", F.col("parts.acked.at"))
        .when(back.isNotNull(), back["at"])
        .when(refused.isNotNull(), refused["at"])
    )
    sent = F.coalesce("parts.record.at", "parts.acquired.record_at")
    return rows.withColumns(
        {
            "settled_at": settled,
            "available_at": F.when(F.col("handed_out"), sent).otherwise(F.coalesce("wait_until", sent)),
            "ended_at": F.coalesce(ended_at, _purged_at()),
        }
    )


def _judged(rows: DataFrame, cut: Cut) -> DataFrame:
    """Return the columns that messages are computed from."""
    taken, end, handed_out = F.col("taken"), F.col("end"), F.col("handed_out")
    may_be_late = end["cause"].isin("EXPIRED", "DUE", "RELEASED")
    attempt = F.coalesce(taken["attempt"], "parts.delayed.attempt", "parts.record.attempt", F.lit(1))
    delivery = F.struct(
        *PLACE,
        attempt.alias("attempt"),
        "available_at",
        F.when(handed_out, taken["holder"]).alias("holder"),
        F.when(handed_out, taken["at"]).alias("acquired_at"),
        taken["lease_ms"].alias("lease_ms"),
        F.coalesce("parts.renewals", F.lit(0)).alias("renewals"),
        F.coalesce("parts.acquisitions", F.lit(0)).alias("acquisitions"),
        "outcome",
        "settled_at",
        F.col("due").alias("due_at"),
        "ended_at",
        F.coalesce("given_back.text", "refused.text").alias("error"),
        F.when(handed_out, _millis("available_at", taken["at"])).alias("wait_ms"),
        F.when(handed_out, _millis(taken["at"], "settled_at")).alias("run_ms"),
        F.when(may_be_late & ~F.col("due_unknown"), _millis("due", end["at"])).alias("late_ms"),
        F.col("parts.acked.at").alias("acked_at"),
        "handed_out",
        "redriven",
        F.col("parts.record").isNotNull().alias("committed"),
        F.coalesce(end["kind"].isin(*_COPIES), F.lit(False)).alias("copied"),
        _expirations().alias("expirations"),
    )
    held_back = F.concat_ws("/", "topic", "partition").isin(*cut.round_["held_back"])
    root = ~F.col("copy")
    count = {name: F.coalesce(f"parts.{name}", F.lit(0)) for name in ("records", "deaths")}
    is_copy = F.col("copy") & ~F.col("drawn") & ~F.col("redriven")
    return rows.where(~_skipped()).select(
        "id",
        "queue",
        F.coalesce("parts.acquired.at", "parts.delayed.at", "parts.record.at", "parts.last_at").alias("began_at"),
        delivery.alias("delivery"),
        F.coalesce("parts.last_at", _purged_at()).alias("last_at"),
        "seen_at",
        _state().alias("state"),
        (
            root & (count["records"] > 0)
            | root & F.col("drawn") & F.col("parts.delayed").isNotNull()
            # Compaction may have removed the record since.
            | root & F.col("compacted") & F.col("parts.acquired").isNotNull()
        ).alias("known"),
        root.alias("root"),
        _requests_only().alias("requests_only"),
        (F.col("parts.acked").isNotNull() & F.col("open_pos").isNotNull()).alias("acked"),
        F.when(root, F.coalesce("parts.record.at", "parts.acquired.record_at", "parts.delayed.record_at")).alias(
            "root_at"
        ),
        # A sender may count in microseconds; its redeliveries have other times.
        (root & F.col("parts.record").isNotNull() & F.col("parts.record.at").isNull()).alias("untimed"),
        F.coalesce(
            "parts.record.first_sent_at", "parts.record.at", "parts.acquired.record_at", "parts.delayed.record_at"
        ).alias("sent_at"),
        "wait_until",
        F.when(handed_out, attempt).alias("attempts"),
        F.coalesce("parts.record.size", "parts.acquired.size", "parts.delayed.size").alias("size"),
        F.col("parts.death.reason").alias("reason"),
        count["deaths"].alias("dead_letters"),
        # Counted by the fact: the dead letter exists even if an ack came before its fact.
        _count(F.col("parts.fact.kind") == "DEAD_LETTERED").alias("died"),
        _count(end["kind"] == "REDELIVERED").alias("redeliveries"),
        _count(F.col("redriven")).alias("redrives"),
        # Each copy has a fact with the same attempt, so their counts and sums of attempts are equal.
        _count(F.col("parts.fact.kind").isin(*_COPIES)).alias("copy_facts"),
        F.when(F.col("parts.fact.kind").isin(*_COPIES), F.col("parts.fact.attempt"))
        .otherwise(0)
        .alias("copy_fact_attempts"),
        F.when(is_copy, count["records"]).otherwise(0).alias("copies"),
        F.when(is_copy, count["records"] * F.coalesce("parts.record.attempt", F.lit(1)))
        .otherwise(0)
        .alias("copy_attempts"),
        (~ingested()).alias("before_first"),
        overdue(cut).alias("overdue"),
        differences_of_record(held_back).alias("differences"),
        pending_of_record(held_back).alias("pending"),
        "parts",
    )


def _state() -> Column:
    unread = (
        F.when(F.col("parts.record").isNull(), "strange")
        .when(F.col("queue").isNull(), "no_queue")
        .when(is_purged(), "cancelled")
        .when(lost(), "lost")
        .when(passed_over() | (F.col("offset") < F.col("begin_offset")), "expired_unread")
        .otherwise("waiting")
    )
    return (
        F.when(F.col("open_pos").isNull(), unread)
        # Outcomes that are also names of open states.
        .when(F.col("closed") & F.col("outcome").isin("released", "rejected"), "ended")
        .when(F.col("closed"), F.col("outcome"))
        .when(F.col("parts.duplicate"), "deduplicated")
        .when(F.col("wait_until").isNotNull(), "delayed")
        .when(F.col("refused").isNotNull(), "rejected")
        .when(F.col("given_back").isNotNull(), "released")
        .otherwise("leased")
    )


def _purged_at() -> Column:
    return F.when(is_purged(), F.timestamp_millis("purged_ms"))


def _expirations() -> Column:
    """Return how often an ordered message was delivered again in its place because its lease had expired.

    Each further attempt follows a counted RELEASE or an expired lease. No attempt has followed ``given_back`` yet.
    """
    taken, back = F.col("taken"), F.col("given_back")
    attempts = taken["attempt"] - F.col("parts.acquired.attempt")
    # ``releases`` is null if there was none, and F.greatest ignores nulls.
    requested = F.greatest(F.lit(0), F.col("parts.releases") - F.when(back["counted"], 1).otherwise(0))
    return F.when(taken["in_order"], F.greatest(F.lit(0), attempts - requested)).otherwise(0)


def _skipped() -> Column:
    """Return whether it is a record without a message of its queue."""
    untouched = F.coalesce("open_pos", "parts.acked.pos", "parts.fact.pos").isNull() & F.col("parts.death").isNull()
    # Spark evaluates what appears twice in a condition for each row, unless it is behind a `when`.
    skips = F.when(untouched & F.col("parts.record").isNotNull(), skipped(passed_over(), within()))
    return F.coalesce(skips, F.lit(False))


def _requests_only() -> Column:
    """Return whether only a RESCHEDULE or CANCEL names it.

    Clients may name any place, such as that of a redelivery whose transaction was aborted after a consumer read it.
    """
    events = (
        "parts.record.at",
        "parts.death.at",
        *[f"parts.{name}.at" for name in ("acked", "fact", "acquired", "delayed")],
    )
    by_holder = [f"parts.{name}.holder" for name in ("renewed", "renewed_exactly", "spent", "released", "rejected")]
    return F.coalesce(*events).isNull() & F.coalesce(*by_holder).isNull()


def _rightly_named(name: str) -> Column:
    """Return whether a request is about this message: it names the message's queue, or none, which means all queues."""
    return F.coalesce(F.col(f"parts.{name}.queue").isin(F.lit(""), F.col("queue")), F.lit(False))


def _count(test: Column) -> Column:
    return F.when(test, 1).otherwise(0)


def _millis(since: str | Column, until: str | Column) -> Column:
    """Return a duration: 0 if the clock that wrote the begin is ahead of the other one."""
    ms = F.unix_millis(until) - F.unix_millis(since)
    return F.when(ms < 0, 0).otherwise(ms)
