"""The differences that the audit reports: content that the topics should have by docs/protocol.md, but do not.

Some concern a record, the others a message with all of its records. A difference that the next ``ingest`` may still
resolve is *pending*.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from pipeline.cut import Cut
from pipeline.record_parts import by_queue

#: A row is overdue if its tracker was alive for this long while it was due and its queue was not paused.
_OVERDUE = "INTERVAL 10 MINUTES"
#: A copy that was sent less than this before the end of the markers may be ahead of its fact.
_AHEAD = "INTERVAL 30 SECONDS"
_NO_RECORD = "acquired, but the record does not exist"

# --- of a message -----------------------------------------------------------------------------------------------------


def differences_of_message(cut: Cut, held_back: Column) -> tuple[list[Column], list[Column]]:
    """Return differences, and pending ones, which the next round may resolve; null if there is none."""
    without = cut.round_["without_dead_letters"]
    keeps = F.lit("*" not in without) & ~F.col("queue").isin(*without)
    # Messages are read after the markers, so those sent shortly before the end may be ahead of their markers.
    ahead = F.coalesce(F.col("last_at") + F.expr(_AHEAD) > F.col("seen_at"), F.lit(True))
    earlier = F.coalesce(F.col("before_first"), F.lit(False)) | F.lit(cut.truncated)
    other = (F.col("copy_facts") == F.col("copies")) & (F.col("copy_fact_attempts") != F.col("copy_attempts"))
    tests = {
        "a redelivery is missing for a fact": (F.col("lacks_copy"), held_back),
        "a redelivery without a fact": ((F.col("copies") > F.col("copy_facts")) & ~earlier, ahead),
        "attempts of redeliveries and facts differ": (other & ~earlier, F.lit(False)),
        "a dead letter is missing for a fact": (keeps & (F.col("died") > F.col("dead_letters")), held_back),
        "a dead letter without a fact": ((F.col("dead_letters") > F.col("died")) & ~earlier, ahead),
        "overdue and not sent": (F.col("overdue"), F.lit(False)),
        "the first record is missing": (
            ~F.col("known")
            & ~F.col("requests_only")
            & ~earlier
            & F.array_max("records.differences").isNull()
            & F.array_max("records.pending").isNull(),
            held_back,
        ),
    }
    wrong = [F.when(test & ~excuse, F.lit(text)) for text, (test, excuse) in tests.items()]
    return wrong, [F.when(test & excuse, F.lit(text)) for text, (test, excuse) in tests.items()]


# --- of a record ------------------------------------------------------------------------------------------------------


def differences_of_record(held_back: Column) -> Column:
    """Return the first difference of a record, or null."""
    return F.coalesce(_contradiction(held_back), F.when(~F.col("undecided"), _overtook()))


def pending_of_record(held_back: Column) -> Column:
    """Return the first pending difference of a record, or null."""
    # Consumers may read past an open transaction, and ingest does not.
    return F.when(_absent() & held_back, F.concat_ws(": ", F.lit(_NO_RECORD), F.col("place"))).when(
        F.col("undecided"), _overtook()
    )


def overdue(cut: Cut) -> Column:
    """Return whether an open record should have been redelivered or dead-lettered long ago."""
    still_open = F.col("open_pos").isNotNull() & ~F.col("closed") & ~F.coalesce("parts.duplicate", F.lit(False))
    # Trackers do not redeliver ordered messages and those of paused queues, but they dead-letter them.
    dead_lettered = F.col("refused").isNotNull() | F.col("exhausted")
    waits = F.coalesce("taken.in_order", F.lit(False)) & ~dead_lettered
    paused = F.when(~dead_lettered, F.timestamp_millis(by_queue(cut.round_["paused_at"])))
    # A RELEASE without a delay waits for the backoff of its queue.
    longest = F.timestamp_millis(F.unix_millis("given_back.at") + by_queue(cut.round_["backoffs"]))
    due = F.coalesce("due", longest)
    possible_from = F.when(due.isNotNull(), F.greatest(due, "alive_since", paused))
    return F.coalesce(still_open & ~waits & (possible_from + F.expr(_OVERDUE) < F.col("seen_at")), F.lit(False))


def is_purged() -> Column:
    """Return whether its queue was purged before any consumer had acquired it."""
    purged = F.col("open_pos").isNull() & (F.col("offset") < F.col("purge_end"))
    # It hides no record that an ACQUIRE claims to contain.
    return F.coalesce(purged & ~within(), F.lit(False))


def passed_over() -> Column:
    """Return whether its queue read it or later records, but did not acquire it."""
    behind = (F.col("offset") < _last_run()[0]) & (F.col("offset") >= F.col("begin_offset"))
    return within() | F.coalesce(behind, F.lit(False))


def lost() -> Column:
    """Return whether its queue passed it over, and compaction did not remove it."""
    return passed_over() & ~F.col("compacted")


def ingested() -> Column:
    """Return whether ``ingest`` has read its place: it is neither before the first offset nor in a gap."""
    offset = F.col("offset")
    in_gap = F.exists("gaps", lambda gap: (offset >= gap[0]) & (offset < gap[1]))
    return (offset >= F.col("first_offset")) & ~in_gap


def within() -> Column:
    """Return whether its place is in a run of offsets that its queue read."""
    in_run = F.exists("runs", lambda run: F.col("offset").between(run[0], run[1]))
    # Spark interprets exists; a record that waits is behind all runs, of which there may be many.
    return F.coalesce(F.when(F.col("offset") <= _last_run()[1], in_run), F.lit(False))


def _last_run() -> Column:
    return F.element_at("runs", -1)


def _contradiction(held_back: Column) -> Column:
    """Return what contradicts the protocol: one text, or null."""
    unread, record = F.col("open_pos").isNull(), F.col("parts.record")
    known = F.coalesce(ingested(), F.lit(True))
    ended = F.col("parts.acked").isNotNull() | F.col("parts.fact").isNotNull() | F.col("parts.death").isNotNull()
    text = (
        F.when(F.col("parts.records") > 1, "ingested twice")
        .when(F.col("parts.facts") > 1, "two facts")
        .when(unread & ended & known, "finished, but never acquired or delayed")
        .when(
            unread
            & record.isNotNull()
            & F.col("queue").isNotNull()
            & passed_over()
            & ~F.col("compacted")
            & ~is_purged(),
            "passed over",
        )
        .when(_absent() & ~held_back, _NO_RECORD)
    )
    return F.when(text.isNotNull(), F.concat_ws(": ", text, F.col("place")))


def _overtook() -> Column:
    earlier = F.concat_ws("/", "topic", "partition", "overtaken")
    return F.concat(F.lit("delivered before an earlier message with its key was finished: "), earlier)


def _absent() -> Column:
    """Return whether a record was acquired but does not exist, and is not a copy of an aborted transaction."""
    sent = ~F.col("copy") & ~F.col("drawn") & ~F.col("redriven") & ingested() & ~F.col("compacted")
    return F.coalesce(F.col("open_pos").isNotNull() & F.col("parts.record").isNull() & sent, F.lit(False))
