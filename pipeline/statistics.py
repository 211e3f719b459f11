"""What happened in each queue, by windows of time: a function of the table ``lifecycle``.

**Where things count.** Each event counts in the window in which it happened, not in that of its message's sending: a
message that was sent at 10:00 and acked at 10:05 is one of ``sent`` at 10:00 and one of ``acked`` at 10:05. A window
has its begin, and not its end. Wait times count when the message was acquired, run times when it was settled, lateness
when the tracker sent the copy, attempts when the message ended.

**Open and delayed** are states at the end of a window, and no message is both: ``delayed`` is one that its sender (or
its queue) delayed and that is not out yet; ``open`` is any other that has not ended. The age of the oldest open message
counts from when it was out. A dead letter that was sent back counts as open from its sending on, not as dead.

**Percentiles** are Spark's ``percentile_approx`` with an accuracy of 10,000: the value returned is one that occurred,
and its rank is wrong by one in 10,000 at most. Exact ones keep every distinct value of a group in memory, which is too
much for the totals of millions of messages.

Nothing is read or written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.errors import PipelineError
from pipeline.spans import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, show_moment, show_ms

#: Accuracy of percentile_approx: the rank is wrong by 1 in so many at most.
ACCURACY = 10_000
#: Windows by default: the shortest of these lengths that makes so many at most.
DEFAULT_WINDOWS = 120
LENGTHS_MS = (
    SECOND_MS, 2 * SECOND_MS, 5 * SECOND_MS, 10 * SECOND_MS, 30 * SECOND_MS,
    MINUTE_MS, 2 * MINUTE_MS, 5 * MINUTE_MS, 10 * MINUTE_MS, 30 * MINUTE_MS,
    HOUR_MS, 2 * HOUR_MS, 6 * HOUR_MS, 12 * HOUR_MS, DAY_MS, 7 * DAY_MS, 30 * DAY_MS,
)  # fmt: skip
#: More windows than that are a mistake in --window, and no plot shows them.
MAX_WINDOWS = 10_000
#: Attempts from this one on are counted together.
MAX_ATTEMPTS = 20
#: The name of messages whose queue nobody knows.
UNKNOWN_QUEUE = "(unknown)"

#: What is counted, in the order of the columns.
EVENTS = ("sent", "delivered", "acked", "released", "rejected", "expired", "dead", "cancelled", "abandoned")
WINDOW, TOTAL = "window", "total"

_NEVER_MS = 2**62
#: Stands for the whole range among the numbers of windows.
_TOTAL_NUMBER = -1
#: States of messages that are counted when they end, outcomes of deliveries by their holder, and those that the tracker
#: followed by a copy.
_ENDED = ("dead", "cancelled", "abandoned")
_SETTLED = ("acked", "released", "rejected")
_COPIED = ("released", "expired", "delivered")
#: Prefix of columns, the kind of event whose number is meant, and what is told of it.
_MEASURES = (
    ("wait", ("delivered",), (0.5, 0.95, 0.99)),
    ("run", _SETTLED, (0.5, 0.95, 0.99)),
    ("late_redelivery", ("late_redelivery",), (0.5, 0.99)),
    ("late_delivery", ("late_delivery",), (0.5, 0.99)),
)


@dataclass(frozen=True)
class Windows:
    """A range of time, cut into windows at whole multiples of their length since 1970; all in ms."""

    begin_ms: int
    end_ms: int
    length_ms: int

    @classmethod
    def cut(cls, begin_ms: int, end_ms: int, length_ms: int | None = None) -> Windows:
        """Return the windows of a range, by default of a length that makes a readable plot.

        Raises:
            PipelineError: the range is empty, or there would be too many windows.
        """
        if begin_ms >= end_ms:
            raise PipelineError(
                f"--from {show_moment(begin_ms)} is not before --to {show_moment(end_ms)}: expected a range of time"
            )
        length = length_ms or _fitting(end_ms - begin_ms, DEFAULT_WINDOWS)
        windows = cls(begin_ms, end_ms, length)
        if windows.count > MAX_WINDOWS:
            fitting = _fitting(end_ms - begin_ms, MAX_WINDOWS)
            raise PipelineError(
                f"--window {show_ms(length)} makes {windows.count:,} windows from {show_moment(begin_ms)} to"
                f" {show_moment(end_ms)}, expected at most {MAX_WINDOWS:,}; take {show_ms(fitting)} or a shorter range"
            )
        return windows

    def whole(self, *, begin: bool = True, end: bool = True) -> Windows:
        """Return the same windows, the first one (``begin``) and the last one (``end``) of full length."""
        first, last = self.first, self.first + self.count
        return Windows(
            first * self.length_ms if begin else self.begin_ms,
            last * self.length_ms if end else self.end_ms,
            self.length_ms,
        )

    @property
    def first(self) -> int:
        """Which multiple of the length begins the first window."""
        return self.begin_ms // self.length_ms

    @property
    def count(self) -> int:
        return -(-self.end_ms // self.length_ms) - self.first

    def index(self, at_ms: Column) -> Column:
        """Return the window of a moment, from 0: the first one for what was before, ``count`` for what is after."""
        found = F.floor(at_ms / F.lit(self.length_ms)) - F.lit(self.first)
        inside = F.greatest(F.lit(0).cast("long"), found.cast("long"))
        return F.when(at_ms >= F.lit(self.end_ms), F.lit(self.count).cast("long")).otherwise(inside)

    def contains(self, at_ms: Column) -> Column:
        return (at_ms >= F.lit(self.begin_ms)) & (at_ms < F.lit(self.end_ms))


def _fitting(span_ms: int, most: int) -> int:
    return next((length for length in LENGTHS_MS if span_ms <= length * most), -(-span_ms // (most * DAY_MS)) * DAY_MS)


def span(lifecycle: DataFrame) -> DataFrame:
    """Return one row: ``begin_ms`` and ``last_ms``, of the first and the last thing that is known to have happened."""
    of_message = F.array("sent_at", "ended_at")
    of_deliveries = F.transform("deliveries", lambda each: F.array(each.acquired_at, each.settled_at, each.ended_at))
    # A null would make all that it is joined with null.
    seen = F.concat(of_message, F.coalesce(F.flatten(of_deliveries), F.slice(of_message, 1, 0)))
    times = lifecycle.select(F.array_min(seen).alias("first"), F.array_max(seen).alias("last"))
    return times.select(
        F.unix_millis(F.min("first")).alias("begin_ms"), F.unix_millis(F.max("last")).alias("last_ms")
    )  # fmt: skip


def statistics(lifecycle: DataFrame, windows: Windows) -> DataFrame:
    """Return one row for each queue and window, and one with the totals of each queue.

    Args:
        lifecycle: messages of the queues that are wanted; those of before the range count as open ones.
        windows: the range and its windows.
    """
    known = lifecycle.withColumn("queue", F.coalesce("queue", F.lit(UNKNOWN_QUEUE)))
    happened = events(known).where(windows.contains(F.col("at_ms")))
    window = windows.index(F.col("at_ms"))
    placed = happened.select("queue", "kind", "number", F.explode(_and_total(window)).alias("window"))
    parts = [_standing(known, windows), _summary(placed), _distribution(_attempts(known, windows))]
    joined = reduce(lambda left, right: left.join(right, ["queue", "window"], "left"), parts)
    return _finished(joined, windows)


def events(lifecycle: DataFrame) -> DataFrame:
    """Return one row for each thing that happened: ``queue``, ``kind``, ``at_ms``, and its ``number`` (ms or bytes)."""
    state, outcome = F.col("state"), F.col("outcome")
    of_messages = lifecycle.select(
        "queue",
        _exploded(
            _event(F.lit("sent"), F.col("sent_at"), F.col("size")),
            _event(state, F.when(state.isin(*_ENDED), F.col("ended_at")), F.lit(None)),
        ),
    )
    settled_at = F.when(outcome.isin(*_SETTLED), F.coalesce("settled_at", "ended_at")).when(
        outcome == "expired", F.coalesce("ended_at", "due_at")
    )
    late = F.when(outcome == "delivered", "late_delivery").otherwise("late_redelivery")
    late_at = F.when(outcome.isin(*_COPIED) & F.col("late_ms").isNotNull(), F.col("ended_at"))
    # Plain columns of exploded rows: a function for each element of an array is interpreted, which takes twice as long.
    of_deliveries = lifecycle.select("queue", F.inline("deliveries")).select(
        "queue",
        _exploded(
            _event(F.lit("delivered"), F.when(handed_out(), F.col("acquired_at")), F.col("wait_ms")),
            _event(outcome, settled_at, F.col("run_ms")),
            _event(late, late_at, F.col("late_ms")),
        ),
    )
    rows = of_messages.unionByName(of_deliveries).select("queue", "event.*")
    return rows.where(F.col("at_ms").isNotNull())


def _and_total(window: Column) -> Column:
    """Return a window and the whole range, as what happened counts in both."""
    return F.array(window, F.lit(_TOTAL_NUMBER).cast("long"))


def _event(kind: Column, at: Column, number: Column) -> Column:
    return F.struct(kind.alias("kind"), F.unix_millis(at).alias("at_ms"), number.cast("long").alias("number"))


def _exploded(*rows: Column) -> Column:
    return F.explode(F.array(*rows)).alias("event")


def handed_out(delivery: Column | None = None) -> Column:
    """Whether somebody had it, which is not so of what only waited for its time; of a struct, or of columns."""
    holder, acquired_at, topic = (
        F.col(name) if delivery is None else delivery[name] for name in ("holder", "acquired_at", "topic")
    )
    return holder.isNotNull() & acquired_at.isNotNull() & ~topic.startswith("~")


def _summary(placed: DataFrame) -> DataFrame:
    """Return counts and percentiles of each queue and window."""
    keys = ("queue", "window")
    kind, number = F.col("kind"), F.col("number")
    counts = [F.count(F.when(kind == name, 1)).alias(name) for name in EVENTS]
    measured = []
    for name, kinds, shares in _MEASURES:
        values = F.when(kind.isin(*kinds), number)
        measured += [
            F.percentile_approx(values, list(shares), ACCURACY).alias(name),
            F.max(values).alias(f"{name}_max_ms"),
        ]
    sizes = F.when(kind == "sent", number)
    found = placed.groupBy(*keys).agg(
        *counts,
        *measured,
        F.avg(sizes).alias("size_mean_bytes"),
        F.percentile_approx(sizes, 0.99, ACCURACY).alias("size_p99_bytes"),
    )
    return found.select(*keys, *EVENTS, *_percentile_columns(), "size_mean_bytes", "size_p99_bytes")


def _percentile_columns() -> list[Column]:
    columns = []
    for name, _, shares in _MEASURES:
        columns += [F.col(name)[at].alias(f"{name}_p{share * 100:g}_ms") for at, share in enumerate(shares)]
        columns.append(F.col(f"{name}_max_ms"))
    return columns


def _attempts(lifecycle: DataFrame, windows: Windows) -> DataFrame:
    """Return how many messages ended in each window at each attempt, and the highest one."""
    ended_ms = F.unix_millis(F.col("ended_at"))
    wanted = F.col("state").isin("acked", "dead") & F.col("attempts").isNotNull()
    ended = lifecycle.where(wanted & windows.contains(ended_ms))
    return (
        ended.select(
            "queue",
            F.explode(_and_total(windows.index(ended_ms))).alias("window"),
            "attempts",
        )
        .groupBy("queue", "window", F.least("attempts", F.lit(MAX_ATTEMPTS)).alias("attempt"))
        .agg(F.count(F.lit(1)).alias("messages"), F.max("attempts").alias("most"))
    )


def _distribution(attempts: DataFrame) -> DataFrame:
    pairs = F.array_sort(F.collect_list(F.struct("attempt", "messages")))
    return attempts.groupBy("queue", "window").agg(
        F.map_from_entries(pairs).alias("attempts"), F.max("most").cast("int").alias("attempts_max")
    )


def _standing(lifecycle: DataFrame, windows: Windows) -> DataFrame:
    """Return of each queue and window how many messages are open and delayed at its end, and the age of the oldest.

    What is so at the end of the last window is so at the end of all.
    """
    lives = _lives(lifecycle)
    numbers = F.sequence(F.lit(0).cast("long"), F.lit(windows.count - 1).cast("long"))
    grid = lifecycle.select("queue").distinct().select("queue", F.explode(numbers).alias("window"))
    opened, closed = windows.index(F.col("out_ms")), windows.index(F.col("ended_ms"))
    changes = lives.select(
        "queue",
        F.explode(
            F.array(
                _change(windows.index(F.col("sent_ms")), 0, 1),
                _change(opened, 1, -1),
                _change(closed, -1, 0),
            )
        ).alias("change"),
    ).select("queue", "change.*")
    added = changes.groupBy("queue", "window").agg(F.sum("open").alias("open"), F.sum("delayed").alias("delayed"))
    so_far = Window.partitionBy("queue").orderBy("window")
    ages = _oldest(lives.select("queue", "out_ms", opened.alias("opened"), closed.alias("closed")))
    end_ms = F.least((F.col("window") + F.lit(windows.first + 1)) * windows.length_ms, F.lit(windows.end_ms))
    states = (
        grid.join(added, ["queue", "window"], "left")
        .join(ages, ["queue", "window"], "left")
        .select(
            "queue",
            "window",
            F.coalesce(F.sum("open").over(so_far), F.lit(0)).alias("open"),
            F.coalesce(F.sum("delayed").over(so_far), F.lit(0)).alias("delayed"),
            (end_ms - F.col("oldest_ms")).alias("oldest_open_ms"),
        )
    )
    window = F.col("window")
    both = F.when(window == windows.count - 1, _and_total(window)).otherwise(F.array(window))
    return states.withColumn("window", F.explode(both))


def _change(window: Column, opened: int, delayed: int) -> Column:
    return F.struct(
        window.alias("window"),
        F.lit(opened).cast("long").alias("open"),
        F.lit(delayed).cast("long").alias("delayed"),
    )


def _lives(lifecycle: DataFrame) -> DataFrame:
    """Return when each message was sent, when it was out (when its delay was over), and when it ended."""
    available = F.array_min(F.transform("deliveries", lambda each: F.when(handed_out(each), each.available_at)))
    delivered = F.array_max(
        F.transform("deliveries", lambda each: F.when(delayed(each) & (each.outcome == "delivered"), each.ended_at))
    )
    sent = F.unix_millis(F.coalesce(F.col("sent_at"), available))
    # What has ended at a time that nobody knows was never open, rather than open for ever.
    ended = F.when(F.col("open"), F.lit(_NEVER_MS)).otherwise(F.coalesce(F.unix_millis(F.col("ended_at")), sent))
    out = (
        F.when(~F.coalesce(F.exists("deliveries", delayed), F.lit(False)), sent)
        .when(delivered.isNull() & (F.col("state") == "delayed"), F.lit(_NEVER_MS))
        .otherwise(F.unix_millis(F.coalesce(delivered, available, F.col("ended_at"), F.col("due_at"))))
    )
    found = lifecycle.select("queue", sent.alias("sent_ms"), out.alias("out_ms"), ended.alias("ended_ms"))
    # None is out before it was sent, nor ended before it was out.
    out = F.greatest("sent_ms", F.least("out_ms", "ended_ms"))
    return (
        found.where(F.col("sent_ms").isNotNull())
        .withColumn("out_ms", out)
        .withColumn("ended_ms", F.greatest("out_ms", "ended_ms"))
    )


def delayed(delivery: Column) -> Column:
    """Whether it is the time before the first delivery of a message that its sender or its queue delayed."""
    redriven = F.coalesce(delivery.redriven, F.lit(False))
    return ~handed_out(delivery) & ~redriven & delivery.due_at.isNotNull()


def _oldest(lives: DataFrame) -> DataFrame:
    """Return of each window the oldest message that is open at its end.

    Of messages in the order in which they were out, one matters only where it outlives all before it, and then from the
    window on in which the last of these ended. So each window belongs to one message, whatever the backlog was.
    """
    groups = (
        lives.where(F.col("opened") < F.col("closed"))
        .groupBy("queue", "opened", "closed")
        .agg(F.min("out_ms").alias("oldest_ms"))
    )
    in_order = Window.partitionBy("queue").orderBy("oldest_ms", F.desc("closed"))
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    outlived = groups.withColumn("covered", F.coalesce(F.max("closed").over(before), F.lit(0).cast("long")))
    kept = outlived.where(F.col("closed") > F.col("covered"))
    windows = F.sequence(F.greatest("opened", "covered"), F.col("closed") - 1)
    return kept.select("queue", "oldest_ms", F.explode(windows).alias("window"))


def _finished(rows: DataFrame, windows: Windows) -> DataFrame:
    """Return the columns of the table."""
    is_total = F.col("window") == _TOTAL_NUMBER
    first = F.when(is_total, F.lit(0)).otherwise(F.col("window")) + windows.first
    last = F.when(is_total, F.lit(windows.count - 1)).otherwise(F.col("window")) + windows.first
    begin = F.greatest(first * windows.length_ms, F.lit(windows.begin_ms))
    end = F.least((last + 1) * windows.length_ms, F.lit(windows.end_ms))
    seconds = ((end - begin) / 1000).cast("double")
    counted = {name: F.coalesce(F.col(name), F.lit(0).cast("long")) for name in EVENTS}
    measured = [
        F.col(f"{name}_{share}_ms")
        for name, _, shares in _MEASURES
        for share in (*(f"p{share * 100:g}" for share in shares), "max")
    ]
    return rows.select(
        "queue",
        F.when(is_total, TOTAL).otherwise(WINDOW).alias("scope"),
        F.timestamp_millis(begin.cast("long")).alias("starts_at"),
        F.timestamp_millis(end.cast("long")).alias("ends_at"),
        seconds.alias("seconds"),
        *(column.alias(name) for name, column in counted.items()),
        *((column / seconds).alias(f"{name}_per_second") for name, column in counted.items()),
        *measured,
        F.coalesce("attempts", F.create_map().cast("map<int,bigint>")).alias("attempts"),
        "attempts_max",
        "open",
        "delayed",
        "oldest_open_ms",
        "size_mean_bytes",
        "size_p99_bytes",
    )
