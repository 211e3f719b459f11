"""Statistics of each queue by time window, computed from the table ``lifecycle``. Pure DataFrame functions.

**Where events count.** Each event counts in the window in which it happened: a message that was sent at 10:00 and acked
at 10:05 is one of ``sent`` at 10:00 and one of ``acked`` at 10:05. A window includes its begin and excludes its end.
Wait times count when the message was acquired, run times when it was settled, lateness when the tracker sent the
message, attempts when the message ended.

**Open and delayed** are states at the end of a window, and no message is both: ``delayed`` is delayed by its sender or
queue and not delivered yet; ``open`` is any other message that has not ended. The age of the oldest open message counts
from its first availability. A redriven dead letter counts as open from its sending on, not as dead.

**Keys.** The keys with the most messages sent within the range have rows of their own, with their totals. A message
counts for its present queue, and one without a known key for none.

**Percentiles** are Spark's ``percentile_approx`` with an accuracy of 10,000: each is a value that occurred, and its
rank is off by at most one in 10,000. Exact percentiles would keep every distinct value of a group in memory.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from marq.settings.limits import key_header
from marq.wire.names import ORDERING_KEY_HEADER
from pipeline.windows import Windows

#: Accuracy of percentile_approx.
ACCURACY = 10_000
#: Higher attempts are counted together.
MAX_ATTEMPTS = 20
#: The queue of messages whose queue is unknown.
UNKNOWN_QUEUE = "(unknown)"

#: Counted events, in the order of the columns.
EVENTS = (
    "sent", "delivered", "acked", "released", "rejected", "expired", "dead", "cancelled", "abandoned",
    "message_expired",
)  # fmt: skip
WINDOW, TOTAL, KEY = "window", "total", "key"
#: Keys of a queue that have rows.
MAX_KEYS = 20

_NEVER_MS = 2**62
#: The number of the window that stands for the whole range.
_TOTAL_NUMBER = -1
#: States of messages that count when they end, outcomes of deliveries that their consumer decided, and those after
#: which the tracker sends the message.
_ENDED = ("dead", "cancelled", "abandoned", "message_expired")
_SETTLED = ("acked", "released", "rejected")
_SENT_AGAIN = ("released", "expired", "delivered")
#: Prefix of columns, the events whose number is measured, and the percentiles; the maximum comes with each.
_MEASURES = (
    ("wait", ("delivered",), (50, 95, 99)),
    ("run", _SETTLED, (50, 95, 99)),
    ("late_redelivery", ("late_redelivery",), (50, 99)),
    ("late_delivery", ("late_delivery",), (50, 99)),
)
MEASURED = [f"{name}_{part}_ms" for name, _, shares in _MEASURES for part in (*(f"p{s}" for s in shares), "max")]


def statistics(lifecycle: DataFrame, windows: Windows, keys: DataFrame | None = None) -> DataFrame:
    """Return one row for each queue and window, one with the totals of each queue, and one of each of its busiest keys.

    ``lifecycle`` has the messages of the queues to measure; those from before the range count while they are open.
    ``keys`` has the ``key`` of each message ``id``, as :func:`message_keys` returns it.
    """
    known = lifecycle.withColumn("queue", F.coalesce("queue", F.lit(UNKNOWN_QUEUE)))
    rows = _statistics(known, windows).withColumn("key", F.lit(None).cast("string"))
    if keys is None:
        return rows
    keyed = known.join(keys, "id").withColumn("queue", F.struct("queue", "key"))
    sent = keyed.where(windows.contains(F.unix_millis("sent_at"))).groupBy("queue").count()
    busiest_first = Window.partitionBy("queue.queue").orderBy(F.desc("count"), "queue.key")
    busiest = sent.withColumn("rank", F.row_number().over(busiest_first)).where(F.col("rank") <= MAX_KEYS)
    # Each key is measured like a queue.
    totals = _statistics(keyed.join(F.broadcast(busiest.select("queue")), "queue"), windows).where(
        F.col("scope") == TOTAL
    )
    of_keys = totals.withColumns({"key": F.col("queue.key"), "queue": F.col("queue.queue"), "scope": F.lit(KEY)})
    return rows.unionByName(of_keys)


def message_keys(messages: DataFrame, key: str) -> DataFrame:
    """Return the key of each message that has one: ``id`` and ``key``.

    ``messages`` has the columns of ``ingest --payload``. ``key`` says what a message's key is, as the setting of queues
    does: "ordering", or "header:NAME".
    """
    name = key_header(key)
    values = F.filter("headers", lambda header: header["key"] == name)
    value = F.try_element_at(values, F.lit(-1))["value"]
    if name == ORDERING_KEY_HEADER:
        # In a queue's own topic, the ordering key is the record's.
        value = F.when(F.col("queue").isNull(), F.col("key")).otherwise(value)
    text = F.nullif(F.make_valid_utf8(value.cast("string")), F.lit(""))
    id_ = F.coalesce("id", F.concat_ws("/", "topic", "partition", "offset"))
    rows = messages.select(id_.alias("id"), text.alias("key")).where(F.col("key").isNotNull())
    # Redeliveries have the key of the first record.
    return rows.groupBy("id").agg(F.max("key").alias("key"))


def _statistics(known: DataFrame, windows: Windows) -> DataFrame:
    happened = events(known).where(windows.contains(F.col("at_ms")))
    window = windows.index(F.col("at_ms"))
    placed = happened.select("queue", "kind", "number", F.explode(_and_total(window)).alias("window"))
    parts = [_standing(known, windows), summary(placed), _attempts(known, windows)]
    joined = reduce(lambda left, right: left.join(right, ["queue", "window"], "left"), parts)
    return _columns(joined, windows)


def events(lifecycle: DataFrame) -> DataFrame:
    """Return one row for each event: ``queue``, ``kind``, ``at_ms``, and its ``number`` (ms or bytes)."""
    state, outcome = F.col("state"), F.col("outcome")
    # As in the audit, a message that was acknowledged after its dead letter is both.
    dead = (state == "acked") & (F.col("dead_letters") > F.col("redrives"))
    acks = F.transform("deliveries", lambda delivery: delivery.acked_at)
    has_ack = F.exists("deliveries", lambda delivery: delivery.outcome == "acked")
    late_ack = F.when((state == "acked") & ~F.coalesce(has_ack, F.lit(False)), F.array_max(acks))
    of_messages = lifecycle.select(
        "queue",
        _exploded(
            _event(F.lit("sent"), F.col("sent_at"), F.col("size")),
            _event(state, F.when(state.isin(*_ENDED), F.col("ended_at")), F.lit(None)),
            _event(F.lit("dead"), F.when(dead, F.col("ended_at")), F.lit(None)),
            _event(F.lit("acked"), late_ack, F.lit(None)),
        ),
    )
    settled_at = F.when(outcome.isin(*_SETTLED), F.coalesce("settled_at", "ended_at")).when(
        outcome == "expired", F.coalesce("ended_at", "due_at")
    )
    late = F.when(outcome == "delivered", "late_delivery").otherwise("late_redelivery")
    late_at = F.when(outcome.isin(*_SENT_AGAIN) & F.col("late_ms").isNotNull(), F.col("ended_at"))
    # Plain columns of exploded rows: Spark interprets functions of array elements, which takes twice as long.
    of_deliveries = lifecycle.select("queue", F.inline("deliveries")).select(
        "queue",
        _exploded(
            _event(F.lit("delivered"), F.when(received(), F.col("acquired_at")), F.col("wait_ms")),
            _event(outcome, settled_at, F.col("run_ms")),
            _event(late, late_at, F.col("late_ms")),
        ),
    )
    rows = of_messages.unionByName(of_deliveries).select("queue", "event.*")
    return rows.where(F.col("at_ms").isNotNull())


def _and_total(window: Column) -> Column:
    return F.array(window, F.lit(_TOTAL_NUMBER).cast("long"))


def _event(kind: Column, at: Column, number: Column) -> Column:
    return F.struct(kind.alias("kind"), F.unix_millis(at).alias("at_ms"), number.cast("long").alias("number"))


def _exploded(*rows: Column) -> Column:
    return F.explode(F.array(*rows)).alias("event")


def received(delivery: Column | None = None) -> Column:
    """Whether a consumer received it, unlike a delivery that only waited for its time; of a struct, or of columns."""
    names = ("holder", "acquired_at", "topic")
    holder, acquired_at, topic = (F.col(name) if delivery is None else delivery[name] for name in names)
    return holder.isNotNull() & acquired_at.isNotNull() & ~topic.startswith("~")


def delayed(delivery: Column) -> Column:
    """Whether it is the time before the first delivery of a message that its sender or its queue delayed."""
    redriven = F.coalesce(delivery.redriven, F.lit(False))
    return ~received(delivery) & ~redriven & delivery.due_at.isNotNull()


def summary(placed: DataFrame) -> DataFrame:
    """Return counts and percentiles of each queue and window."""
    kind, number = F.col("kind"), F.col("number")
    counts = [F.count(F.when(kind == name, 1)).alias(name) for name in EVENTS]
    measured, columns = [], []
    for name, kinds, shares in _MEASURES:
        values = F.when(kind.isin(*kinds), number)
        measured.append(F.percentile_approx(values, [share / 100 for share in shares], ACCURACY).alias(name))
        measured.append(F.max(values).alias(f"{name}_max_ms"))
        columns += [F.col(name)[at].alias(f"{name}_p{share}_ms") for at, share in enumerate(shares)]
        columns.append(F.col(f"{name}_max_ms"))
    sizes = F.when(kind == "sent", number)
    measured.append(F.avg(sizes).alias("size_mean_bytes"))
    measured.append(F.percentile_approx(sizes, 0.99, ACCURACY).alias("size_p99_bytes"))
    rows = placed.groupBy("queue", "window").agg(*counts, *measured)
    return rows.select("queue", "window", *EVENTS, *columns, "size_mean_bytes", "size_p99_bytes")


def _attempts(lifecycle: DataFrame, windows: Windows) -> DataFrame:
    """Return how many messages ended in each window at each attempt, and the highest attempt."""
    ended_ms = F.unix_millis(F.col("ended_at"))
    counted = F.col("state").isin("acked", "dead") & F.col("attempts").isNotNull() & windows.contains(ended_ms)
    window = F.explode(_and_total(windows.index(ended_ms))).alias("window")
    attempts = (
        lifecycle.where(counted)
        .select("queue", window, "attempts")
        .groupBy("queue", "window", F.least("attempts", F.lit(MAX_ATTEMPTS)).alias("attempt"))
        .agg(F.count(F.lit(1)).alias("messages"), F.max("attempts").alias("most"))
    )
    pairs = F.array_sort(F.collect_list(F.struct("attempt", "messages")))
    return attempts.groupBy("queue", "window").agg(
        F.map_from_entries(pairs).alias("attempts"), F.max("most").cast("int").alias("attempts_max")
    )


def _standing(lifecycle: DataFrame, windows: Windows) -> DataFrame:
    """Return how many messages are open and delayed at the end of each window, and the age of the oldest open one.

    The totals have the state at the end of the last window.
    """
    lives = _lives(lifecycle)
    numbers = F.sequence(F.lit(0).cast("long"), F.lit(windows.count - 1).cast("long"))
    grid = lifecycle.select("queue").distinct().select("queue", F.explode(numbers).alias("window"))
    sent, out, ended = (windows.index(F.col(name)) for name in ("sent_ms", "out_ms", "ended_ms"))
    steps = F.array(_change(sent, 0, 1), _change(out, 1, -1), _change(ended, -1, 0))
    changes = lives.select("queue", F.explode(steps).alias("change")).select("queue", "change.*")
    added = changes.groupBy("queue", "window").agg(F.sum("open").alias("open"), F.sum("delayed").alias("delayed"))
    so_far = Window.partitionBy("queue").orderBy("window")
    ages = _oldest(lives.select("queue", "out_ms", out.alias("opened"), ended.alias("closed")))
    end_ms = F.least((F.col("window") + F.lit(windows.first + 1)) * windows.length_ms, F.lit(windows.end_ms))
    states = (
        grid.join(added, ["queue", "window"], "left")
        .join(ages, ["queue", "window"], "left")
        .select(
            "queue",
            "window",
            *[F.coalesce(F.sum(name).over(so_far), F.lit(0)).alias(name) for name in ("open", "delayed")],
            (end_ms - F.col("oldest_ms")).alias("oldest_open_ms"),
        )
    )
    window = F.col("window")
    both = F.when(window == windows.count - 1, _and_total(window)).otherwise(F.array(window))
    return states.withColumn("window", F.explode(both))


def _change(window: Column, opened: int, delayed: int) -> Column:
    counts = {"open": opened, "delayed": delayed}
    return F.struct(window.alias("window"), *[F.lit(count).cast("long").alias(name) for name, count in counts.items()])


def _lives(lifecycle: DataFrame) -> DataFrame:
    """Return when each message was sent, when its delay was over (``out_ms``), and when it ended."""
    available = F.array_min(F.transform("deliveries", lambda d: F.when(received(d), d.available_at)))
    delivered = F.array_max(
        F.transform("deliveries", lambda d: F.when(delayed(d) & (d.outcome == "delivered"), d.ended_at))
    )
    sent = F.unix_millis(F.coalesce(F.col("sent_at"), available))
    # A message that ended at an unknown time counts as never open, rather than open forever.
    ended = F.when(F.col("open"), F.lit(_NEVER_MS)).otherwise(F.coalesce(F.unix_millis(F.col("ended_at")), sent))
    out = (
        F.when(~F.coalesce(F.exists("deliveries", delayed), F.lit(False)), sent)
        .when(delivered.isNull() & (F.col("state") == "delayed"), F.lit(_NEVER_MS))
        .otherwise(F.unix_millis(F.coalesce(delivered, available, F.col("ended_at"), F.col("due_at"))))
    )
    lives = lifecycle.select("queue", sent.alias("sent_ms"), out.alias("out_ms"), ended.alias("ended_ms"))
    # No message is out before it was sent, or ends before it was out.
    out = F.greatest("sent_ms", F.least("out_ms", "ended_ms"))
    lives = lives.where(F.col("sent_ms").isNotNull()).withColumn("out_ms", out)
    return lives.withColumn("ended_ms", F.greatest("out_ms", "ended_ms"))


def _oldest(lives: DataFrame) -> DataFrame:
    """Return the oldest open message at the end of each window.

    In the order in which messages became available, one matters only if it outlives all before it, and then from the
    window in which the last of these ended. So each window belongs to one message, independent of the backlog.
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


def _columns(rows: DataFrame, windows: Windows) -> DataFrame:
    is_total = F.col("window") == _TOTAL_NUMBER
    first = F.when(is_total, F.lit(0)).otherwise(F.col("window")) + windows.first
    last = F.when(is_total, F.lit(windows.count - 1)).otherwise(F.col("window")) + windows.first
    begin = F.greatest(first * windows.length_ms, F.lit(windows.begin_ms))
    end = F.least((last + 1) * windows.length_ms, F.lit(windows.end_ms))
    seconds = ((end - begin) / 1000).cast("double")
    counted = {name: F.coalesce(F.col(name), F.lit(0).cast("long")) for name in EVENTS}
    return rows.select(
        "queue",
        F.when(is_total, TOTAL).otherwise(WINDOW).alias("scope"),
        F.timestamp_millis(begin.cast("long")).alias("starts_at"),
        F.timestamp_millis(end.cast("long")).alias("ends_at"),
        seconds.alias("seconds"),
        *(column.alias(name) for name, column in counted.items()),
        *((column / seconds).alias(f"{name}_per_second") for name, column in counted.items()),
        *MEASURED,
        F.coalesce("attempts", F.create_map().cast("map<int,bigint>")).alias("attempts"),
        *("attempts_max", "open", "delayed", "oldest_open_ms", "size_mean_bytes", "size_p99_bytes"),
    )
