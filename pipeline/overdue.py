"""Which open records are overdue: their tracker was alive, but did not act on them in time."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from pipeline.record_parts import by_queue

#: A row is overdue if its tracker was active this long after it was due.
OVERDUE = "INTERVAL 10 MINUTES"


def overdue(backoffs: Mapping[str, int], paused: Mapping[str, bool]) -> Column:
    """Return whether an open record should have been redelivered or dead-lettered long ago.

    ``backoffs`` has the longest backoff of each queue in ms, and ``paused`` whether it is paused; "*" stands for all
    other queues.
    """
    still_open = F.col("open_pos").isNotNull() & ~F.col("closed") & ~F.coalesce("duplicate", F.lit(False))
    # Trackers do not redeliver ordered messages and those of paused queues, but they dead-letter them.
    not_sent = F.coalesce("taken.in_order", F.lit(False)) | by_queue(paused)
    waits = not_sent & F.col("refused").isNull() & ~F.col("exhausted")
    # A RELEASE without a delay waits for the backoff of its queue.
    longest = F.timestamp_millis(F.unix_millis("given_back.at") + by_queue(backoffs))
    due = F.coalesce("due", longest)
    return F.coalesce(still_open & ~waits & (due + F.expr(OVERDUE) < F.col("seen_at")), F.lit(False))
