"""Which open records are overdue: their tracker was alive, but did not act on them in time."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

#: A row is overdue if its tracker was active this long after it was due.
OVERDUE = "INTERVAL 10 MINUTES"


def overdue() -> Column:
    """Return whether an open record should have been redelivered or dead-lettered long ago."""
    still_open = F.col("open_pos").isNotNull() & ~F.col("closed") & ~F.coalesce("duplicate", F.lit(False))
    # A message of a queue with ordering waits for its consumers, unless one rejected it.
    in_order = F.coalesce(F.col("taken.in_order") & F.col("refused").isNull(), F.lit(False))
    return F.coalesce(still_open & ~in_order & (F.col("due") + F.expr(OVERDUE) < F.col("seen_at")), F.lit(False))
