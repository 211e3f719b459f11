"""Live windows: what ``stats`` says about each minute of the last 7 days, computed after each round of ``ingest``.

A run costs in proportion to the news. It computes the rows of the lifecycle for those messages that new records are
about, compares their events (:func:`pipeline.statistics.events`) with those of their former rows, and computes only the
minutes whose events differ. So the ack of an old message changes its minute, and a late marker that of an earlier one.

There are two tables, in directories of which the newest commit names those that count:

* *state*: the last row of each message that may change, with the parts that it was computed from. A row replaces those
  in older directories.
* *events*: how often each event of each minute occurred, as differences that add up.

Most runs only add a directory to each table. Once there are several that are at most twice as large as the new one, the
run merges them with it. So there are few directories, and each row is rewritten only a few times.

The files for the dashboard (:mod:`marq.wire.live_windows`) wait for nothing but the events: directories are merged
after them, and the commit is last. A run that was killed leaves the tables as they were, so the next one writes the
minutes that have changed since the last commit, from the same records and newer ones.

The windows differ from ``stats`` in three cases. A message whose first record is not in the data has no events, because
the state forgets messages that have ended: one that a consumer reads again would count twice. A message without news
for 30 days is forgotten, too. And a record that a queue no longer reads (:mod:`pipeline.subscriptions`) remains sent.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructField, StructType

from marq.wire.live_windows import (
    HOUR_S,
    KEEP_S,
    MAX_QUEUES,
    MINUTE_S,
    STATUS_FILE,
    VERSION,
    WINDOWS_FOLDER,
    hour_file,
    windows_folder,
)
from pipeline.cut import Cut
from pipeline.errors import PipelineError
from pipeline.lake import MAINTAIN, Commit, Lake, batch_place
from pipeline.lifecycle import LIFECYCLE, acked_at_once, lifecycle
from pipeline.lifecycle_runs import NOTHING, RULES, Run, parts_of
from pipeline.record_parts import KEY, PARTS, added_up, message_id
from pipeline.spans import DAY_MS, MINUTE_MS, SECOND_MS
from pipeline.statistics import EVENTS, MEASURED, UNKNOWN_QUEUE, events, summary
from pipeline.tables import LIVE_TABLE, columns

TABLE = LIVE_TABLE
_STATE, _EVENTS = f"{TABLE}/side=state", f"{TABLE}/side=events"
#: ``number`` orders the rows of a message; a row without parts marks a message that no longer exists.
_SCHEMA = StructType([*LIFECYCLE.fields, StructField("parts", ArrayType(PARTS)), *columns("number long").fields])
_COUNTS = columns("queue string, minute long, kind string, number long, events long")
#: How many directories of similar size are merged at once, and from how many rows on a new directory is merged as soon
#: as it is written, because each run reads the state of all messages that it has not forgotten.
MERGED_AT_ONCE, LARGE_ROWS = 8, 100_000
#: Larger directories of events are not merged, and deleted as a whole once they are old.
MAX_MERGED_EVENTS = 2_000_000
#: Without news for this long, a message is forgotten: one that was acked at its first delivery, one that ended in any
#: other way, a dead letter (which may be redriven), and an open message.
_PLAIN_MS, _ENDED_MS, _DEAD_MS, _OPEN_MS = MINUTE_MS, 10 * MINUTE_MS, KEEP_S * SECOND_MS, 30 * DAY_MS
#: Tables with another basis are computed again. It changes with the columns and rules, of the lifecycle, too.
_BASIS = {"schema": _SCHEMA.jsonValue(), "lifecycle": RULES, "rules": 1}
#: Before the first run. ``state`` and ``events`` have directories: place, rows and, of events, the newest minute.
_FIRST: Commit = NOTHING | {"state": [], "events": [], "totals": {}, "kept": [], "begin_s": None, "day": 0}


class LiveWindows(Run):
    """A run, which adds the new rounds of ``ingest`` to the windows."""

    def __init__(self, spark: SparkSession, lake: Lake, *, max_queues: int = MAX_QUEUES) -> None:
        super().__init__(spark, lake)
        self._max_queues = max_queues

    def update(self, now_ms: int) -> int:
        """Update the windows, which are then known up to ``now_ms``; return how many minutes of queues changed.

        Raises:
            PipelineError: another process is updating them, or ``maintain`` exchanges batches.
        """
        with self._lake.alone(TABLE):
            commit = self._lake.last_commit(TABLE)
            if commit is None or commit["basis"] != _BASIS or commit["round"] < self._round["batch"]:
                return self._compute(commit or _FIRST, now_ms)
            self._write_status(commit, now_ms)
        return 0

    def _write_status(self, commit: Commit, now_ms: int) -> None:
        left_out = len(commit["totals"]) - len(commit["kept"])
        status = {"version": VERSION, "computed_ms": now_ms, "begin_s": commit["begin_s"]}
        self._lake.write_text(STATUS_FILE, json.dumps({**status, "queues_left_out": left_out}))

    def _compute(self, last: Commit, now_ms: int) -> int:
        exchange = self._lake.last_commit(MAINTAIN)
        if exchange is not None and exchange["open"]:
            raise PipelineError(
                f"{self._lake.path}: maintain has not finished exchanging batches, so rows may be missing: wait for it,"
                " or run `python -m pipeline maintain` again if it was interrupted"
            )
        for place in last["garbage"]:
            self._lake.delete(place)
        # Rows and parts of another release may lack what this one computes its columns from.
        before = self._before = last if last.get("basis", _BASIS) == _BASIS else _FIRST
        self._number = last["batch"] + 1
        self._stage = self._lake.stage(TABLE, self._number)
        # Clocks and the order of keys matter for differences, which nothing here reads.
        new, subscriptions, cut, progress = self._begun(judged=False)
        state = self._table(_SCHEMA, before["state"])
        carried = [state.select(F.inline("parts"))]
        parts = added_up(*parts_of(new, subscriptions, carried), *self._missed(subscriptions, progress["marks"]))
        parts.persist()
        # A purge changes messages that no new record is about.
        purged = [*map(list, progress["purges"])] != [*map(list, before["purges"])]
        former = _newest(state if purged else _about(state, parts)).persist()
        try:
            self._stage_rows(former, parts, cut)
            queues = self._stage_events(former, now_ms)
        finally:
            parts.unpersist()
            former.unpersist()
        if self._lake.last_commit(MAINTAIN) != exchange:
            raise PipelineError(
                f"{self._lake.path}: maintain exchanged batches while the windows were computed, so rows may be missing"
            )
        totals = self._totals(queues, now_ms)
        windows = self._windows(queues, totals["totals"], totals["kept"])
        self._write_windows(windows)
        self._write_status(totals, now_ms)
        # The windows are published; only the commit waits for this.
        states, state_part = self._merge_state()
        counts, counts_part = self._merge_events(queues, now_ms)
        named = [place for place, *_ in (*states, *counts)]
        commit = {
            "basis": _BASIS,
            **progress,
            **totals,
            "state": states,
            "events": counts,
            "garbage": [place for name in ("state", "events") for place, *_ in last[name] if place not in named],
        }
        staged = {_STATE: state_part, _EVENTS: counts_part}
        # An empty directory would never be deleted.
        staged = {table: part for table, part in staged.items() if batch_place(table, self._number) in named}
        self._lake.publish(TABLE, self._number, staged, commit)
        # Only now: a run that was killed before its commit may keep other queues the next time.
        if before["day"] != totals["day"]:
            self._clean(totals["kept"], (now_ms // SECOND_MS - KEEP_S) // HOUR_S)
        for queue in {*before["kept"]} - {*totals["kept"]}:
            self._lake.delete(windows_folder(queue))
        return len(windows)

    def _stage_rows(self, former: DataFrame, parts: DataFrame, cut: Cut) -> None:
        """Stage the new rows of all messages that have news."""
        told = former.select(F.inline("parts"))
        rows = lifecycle(added_up(parts, told), cut).withColumn("number", F.lit(2 * self._number + 1).cast("long"))
        # The identity of a message changes when its id or its queue becomes known.
        gone = former.select("id", "queue").withColumn("number", F.lit(2 * self._number))
        everything = rows.unionByName(gone, allowMissingColumns=True)
        everything.select(*_SCHEMA.names).write.parquet(f"{self._stage}/state")

    def _stage_events(self, former: DataFrame, now_ms: int) -> list[Row]:
        """Stage by how much the number of each event differs from before; return this for each queue."""
        rows = self._staged("state", _SCHEMA).where(F.col("number") % 2 == 1)
        differences = _counted(rows, 1).unionByName(_counted(former, -1)).where(_in_time(now_ms))
        _added(differences).where("events != 0").write.parquet(f"{self._stage}/events")
        by_queue = self._staged("events", _COUNTS).groupBy("queue")
        return by_queue.agg(
            F.sum(F.greatest("events", F.lit(0))).alias("events"),
            F.count(F.lit(1)).alias("rows"),
            F.min("minute").alias("first"),
            F.max("minute").alias("last"),
        ).collect()

    def _totals(self, queues: Sequence[Row], now_ms: int) -> Commit:
        """Return what the commit says about the events of queues."""
        before, day = self._before, now_ms // DAY_MS
        # What is busy now should count more than what was busy months ago.
        share = 1 if day == before["day"] else 2
        totals = Counter({queue: count // share for queue, count in before["totals"].items()})
        totals.update({row.queue: row.events for row in queues if row.queue})
        begins = [row["first"] * MINUTE_S for row in queues]
        begins += [] if before["begin_s"] is None else [before["begin_s"]]
        kept = busiest(totals, before["kept"], self._max_queues) if queues else before["kept"]
        return {"day": day, "totals": dict(totals), "kept": kept, "begin_s": min(begins, default=None)}

    def _windows(self, queues: Sequence[Row], totals: Mapping[str, int], kept: Sequence[str]) -> list[Row]:
        """Return the minutes whose events differ."""
        if not queues:
            return []
        before = self._before
        new, stored = self._staged("events", _COUNTS), self._table(_COUNTS, before["events"])
        changed = new.select("queue", "minute")
        entering = [queue for queue in kept if queue in before["totals"] and queue not in before["kept"]]
        if entering:
            changed = changed.unionByName(stored.where(F.col("queue").isin(entering)).select("queue", "minute"))
        changed = changed.where(F.col("queue").isin("", *kept)).distinct()
        counts = _added(new.unionByName(stored).join(changed, ["queue", "minute"], "left_semi"))
        # A minute may have lost all of its events, but still has a line.
        counts = counts.withColumn("kind", F.when(F.col("events") > 0, F.col("kind")))
        event = F.explode(F.sequence(F.lit(1), F.greatest("events", F.lit(1)))).alias("event")
        rows = summary(counts.select("queue", F.col("minute").alias("window"), "kind", "number", event))
        return rows.withColumnRenamed("window", "minute").collect()

    def _write_windows(self, windows: Sequence[Row]) -> None:
        by_file: dict[str, list[Row]] = {}
        for row in windows:
            name = f"{windows_folder(row.queue)}/{hour_file(row.minute * MINUTE_S // HOUR_S)}"
            by_file.setdefault(name, []).append(row)
        for name, changes in by_file.items():
            by_time = {json.loads(line)["at"]: line for line in (self._lake.read_text(name) or "").splitlines()}
            for row in changes:
                at = row.minute * MINUTE_S
                counts = {column: row[column] for column in EVENTS if row[column]}
                times = {column: row[column] for column in MEASURED if row[column] is not None}
                # In ASCII: any producer may write a key with a character that ends a line, such as U+2028.
                by_time[at] = json.dumps({"at": at, "queue": row.queue, **counts, **times})
            self._lake.write_text(name, "".join(f"{by_time[at]}\n" for at in sorted(by_time)))

    def _merge_state(self) -> tuple[list[Any], str]:
        """Return the directories of the state, and where the new one is staged; merge it with former ones if due."""
        part, directories = "state", self._before["state"]
        size = self._staged(part, _SCHEMA).agg(F.count(F.lit(1)), F.unix_millis(F.max("last_at")))
        [(count, newest_ms)] = size.collect()
        merged = _merged(directories, count)
        # The first directory has the whole history.
        if merged or not directories:
            directories, chosen = _divided(directories, merged)
            whole = _newest(self._staged(part, _SCHEMA).unionByName(self._table(_SCHEMA, chosen)))
            if not directories:
                # No older row could count again.
                whole = whole.where(_may_change(newest_ms or 0))
            part = "merged-state"
            whole.write.parquet(f"{self._stage}/{part}")
            count = self._staged(part, _SCHEMA).count()
        return [*directories, *([[batch_place(_STATE, self._number), count]] if count else [])], part

    def _merge_events(self, queues: Sequence[Row], now_ms: int) -> tuple[list[Any], str]:
        """Do the same for the events."""
        part = "events"
        directories = [directory for directory in self._before[part] if directory[2] >= _first_minute(now_ms)]
        if not queues:
            return directories, part
        count, newest = sum(row["rows"] for row in queues), max(row["last"] for row in queues)
        merged = _merged(directories, count, MAX_MERGED_EVENTS)
        if merged:
            directories, chosen = _divided(directories, merged)
            whole = self._staged(part, _COUNTS).unionByName(self._table(_COUNTS, chosen)).where(_in_time(now_ms))
            part = "merged-events"
            _added(whole).where("events != 0").write.parquet(f"{self._stage}/{part}")
            count = self._staged(part, _COUNTS).count()
            newest = max(newest, *[minute for *_, minute in chosen])
        return [*directories, [batch_place(_EVENTS, self._number), count, newest]], part

    def _clean(self, kept: Collection[str], first_hour: int) -> None:
        """Delete files of old hours, and those of queues that are not among the busiest any more."""
        folders = {windows_folder(queue) for queue in ("", *kept)}
        for folder in (f"{WINDOWS_FOLDER}/{name}" for name in self._lake.names(WINDOWS_FOLDER)):
            if folder not in folders:
                self._lake.delete(folder)
                continue
            for name in self._lake.names(folder):
                if name < hour_file(first_hour):
                    self._lake.delete(f"{folder}/{name}")

    def _table(self, schema: StructType, directories: Sequence[Sequence[Any]]) -> DataFrame:
        # Without the columns that Spark makes of the names of directories.
        return self._lake.files(schema, [place for place, *_ in directories]).select(*schema.names)

    def _staged(self, name: str, schema: StructType) -> DataFrame:
        return self._spark.read.schema(schema).parquet(f"{self._stage}/{name}")


def busiest(totals: Mapping[str, int], kept: Collection[str], most: int) -> list[str]:
    """Return the queues with the most events; another one takes the place of a kept one if it has twice as many."""
    return sorted(totals, key=lambda queue: (-totals[queue] * (2 if queue in kept else 1), queue))[:most]


def _about(state: DataFrame, parts: DataFrame) -> DataFrame:
    """Return the rows of messages that have one of these records."""
    named = parts.select(message_id().alias("id"), "queue")
    records = state.select("id", "queue", F.explode("parts").alias("part"))
    records = records.select("id", "queue", *[F.col(f"part.{name}") for name in KEY])
    known = records.join(parts.select(*KEY), list(KEY), "left_semi").select("id", "queue")
    messages = known.unionByName(named).select(_message()).distinct()
    return state.withColumn("message", _message()).join(messages, "message", "left_semi").drop("message")


def _newest(rows: DataFrame) -> DataFrame:
    """Return the row of each message that counts."""
    in_order = Window.partitionBy(_message()).orderBy(F.desc("number"))
    return rows.withColumn("rank", F.row_number().over(in_order)).where("rank = 1").drop("rank")


def _message() -> Column:
    """Return the identity of a message; its queue may be unknown."""
    return F.concat_ws("\n", "id", "queue").alias("message")


def _may_change(newest_ms: int) -> Column:
    """Return whether a message may still have news."""
    keep_ms = (
        F.when(F.col("open"), _OPEN_MS).when(F.col("state") == "dead", _DEAD_MS).when(acked_at_once(), _PLAIN_MS)
    ).otherwise(_ENDED_MS)
    return F.col("parts").isNotNull() & (F.unix_millis("last_at") + keep_ms >= newest_ms)


def _counted(lifecycle: DataFrame, number: int) -> DataFrame:
    """Return the events of messages, each counted ``number`` times, of each queue and of all (an empty name)."""
    known = lifecycle.where("known").withColumn("queue", F.coalesce("queue", F.lit(UNKNOWN_QUEUE)))
    # Sizes are not part of windows.
    value = F.when(F.col("kind") != "sent", F.col("number"))
    queue = F.explode(F.array("queue", F.lit(""))).alias("queue")
    minute = F.floor(F.col("at_ms") / MINUTE_MS).alias("minute")
    count = F.lit(number).cast("long").alias("events")
    return events(known).select(queue, minute, "kind", value.alias("number"), count)


def _in_time(now_ms: int) -> Column:
    return F.col("minute").between(_first_minute(now_ms), (now_ms + DAY_MS) // MINUTE_MS)


def _first_minute(now_ms: int) -> int:
    return (now_ms - KEEP_S * SECOND_MS) // MINUTE_MS


def _added(counts: DataFrame) -> DataFrame:
    return counts.groupBy("queue", "minute", "kind", "number").agg(F.sum("events").alias("events"))


def _divided(directories: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Return all but the last ``count`` directories, and these."""
    at = len(directories) - count
    return [*directories[:at]], [*directories[at:]]


def _merged(directories: Sequence[Sequence[Any]], rows: int, most: float = math.inf) -> int:
    """Return how many of the last directories to merge with a new one of this many rows: none if there are only few."""
    is_large = rows >= LARGE_ROWS
    count = 0
    for _, size, *_ in reversed(directories):
        if size > min(2 * rows, most):
            break
        rows += size
        count += 1
    return count if is_large or count + 1 >= MERGED_AT_ONCE else 0
