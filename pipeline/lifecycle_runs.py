"""One run of ``lifecycle``: adds newly ingested data to the rows that the last run carried forward.

The table has two sides. Messages that have ended are *closed*: each run adds a directory of them. All others, and those
that ended just now, are in the *open* directory, which each run reads and replaces. A commit names the directories that
count, so readers see each message once.

A later event of a closed message (its dead letter is redriven after weeks, a marker was late) reopens it: the run reads
all of its history, and rewrites the directories that contained it without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, DateType, StructField, StructType

from marq.wire.names import Names
from pipeline import incarnations
from pipeline.cut import Cut
from pipeline.deliveries import purges, reads
from pipeline.errors import PipelineError
from pipeline.lake import MAINTAIN, ROUNDS, Commit, Lake, batch_place
from pipeline.lifecycle import LIFECYCLE, acked_at_once, came_from_elsewhere, lifecycle, records_of
from pipeline.record_parts import (
    HAS_ID,
    KEY,
    PARTS,
    PLACE,
    added_up,
    of_dead_letters,
    of_duplicates,
    of_markers,
    of_messages,
)
from pipeline.subscriptions import Mark, PurgeEnd, Subscription, Subscriptions
from pipeline.tables import DAYS, LIFECYCLE_TABLE, MARKERS, MESSAGES, STREAMS

TABLE = LIFECYCLE_TABLE
_CLOSED, _OPEN = f"{TABLE}/side=closed", f"{TABLE}/side=open"
#: A message that was redelivered or dead-lettered is closed after this time without news.
GRACE = "INTERVAL 10 MINUTES"
#: An idle tracker writes no TICKs, so a pause between two TICKs of one tracker is not an outage. A longer pause than
#: this between those of different trackers is.
OUTAGE_MS = 600_000
#: Markers partition, its last TICK, end of the last outage before it, and the last tracker's holder; times in ms.
Activity = tuple[int, int, int, str]

#: The state before the first run; ``removed``: how many messages were removed, and the time before which all had ended.
NOTHING: Commit = {
    "batch": -1,
    "round": -1,
    "last": dict.fromkeys(STREAMS, -1),
    "marks": [],
    "purges": [],
    "subscriptions": [],
    "begins": {},
    "clocks": [],
    "keyed": False,
    "closed": [],
    "open": None,
    "places": [],
    "garbage": [],
    "removed": {"messages": 0, "before_ms": None},
}
#: What of a removed history is still needed: what queues had read and purged, and when topics were recreated.
_KEPT = ("marks", "purges", "begins")
#: An additional column of open messages.
_CARRIED = "parts"
_OPEN_PARTS = StructType([StructField(_CARRIED, ArrayType(PARTS))])
#: The rows of closed messages, and those of a run, as staged.
_ROWS = StructType([*LIFECYCLE.fields, StructField("date", DateType())])
_STAGED = StructType([*_ROWS.fields, *_OPEN_PARTS.fields, StructField("closed", BooleanType())])
#: Raise it if the computation of parts or columns changes, but not their names.
RULES = 4
#: The part of a commit that says what its table was computed from.
BASIS = {
    "schema": _ROWS.jsonValue(),
    "basis": {"parts": PARTS.jsonValue(), "rules": RULES},
}
#: Columns that identify a message.
_MESSAGE = ("id", "queue")


class Run:
    """A run; ``say`` is called with each step."""

    def __init__(self, spark: SparkSession, lake: Lake, say: Callable[[str], None] = lambda _: None) -> None:
        self._spark = spark
        self._lake = lake
        self._say = say
        round_ = lake.last_commit(ROUNDS)
        if round_ is None:
            raise PipelineError(f"{lake.path} is empty: run `python -m pipeline ingest` first")
        self._round = round_
        self._names = Names(lake.about()["prefix"])
        #: The last commit, and the commit that this run adds to.
        self._former: Commit = NOTHING
        self._before: Commit = NOTHING

    def take(self) -> int:
        """Update the table to the last round of ``ingest``; return the number of messages."""
        with self._lake.alone(TABLE):
            if self._lake.finish():
                self._say("finished a job maintain that was interrupted")
            # Another run may have finished since this one was created.
            self._former = self._before = self._lake.last_commit(TABLE) or NOTHING
            if self._former is not NOTHING and not _is_current(self._former):
                # Rows and parts of another release may lack what this one computes its columns from.
                self._say("computing all messages again, because an earlier release wrote the table")
                self._before = NOTHING | self._kept()
            if self._before["round"] < self._round["batch"]:
                self._take()
        return self._lake.read(TABLE).count()

    def _take(self) -> None:
        new, subscriptions, cut, progress = self._begun(judged=True)
        stage = self._lake.stage(TABLE, self._former["batch"] + 1)
        self._say("computing each message")
        carried = self._carried()
        others = [*self._missed(subscriptions, progress["marks"]), *self._duplicates(new["markers"], subscriptions)]
        parts = added_up(*parts_of(new, subscriptions, carried), *carried, *others)
        self._save(lifecycle(parts, cut), f"{stage}/told", progress["clocks"])
        replaced = self._reopen(stage, cut, subscriptions, progress["clocks"])
        self._publish("told" if replaced is None else "again", replaced or {}, progress)

    def _begun(self, *, judged: bool) -> tuple[dict[str, DataFrame], Subscriptions, Cut, Commit]:
        """Return the new rows of each stream, what they are computed with, and what the commit says of the progress.

        ``judged``: differences matter, and so do clocks and the order of keys.
        """
        before, round_, names = self._before, self._round, self._names
        self._begins = before["begins"]
        new = self._ingested(before["last"])
        marks, ended = self._marks_and_purges(new["markers"])
        known = [Subscription.read(document) for document in round_["subscriptions"]]
        subscriptions = Subscriptions(self._spark, names, known, marks)
        progress: Commit = {
            "round": round_["batch"],
            "last": round_["last"],
            "marks": marks,
            "purges": ended,
            "subscriptions": subscriptions.document(),
            "begins": self._begins,
        }
        clocks = None
        if judged:
            progress["clocks"] = activity(new["markers"], before["clocks"])
            progress["keyed"] = before["keyed"] or not new["markers"].where(F.col("line").isNotNull()).isEmpty()
            rows = self._spark.createDataFrame(
                progress["clocks"], "log_partition int, seen_ms long, since_ms long, holder string"
            )
            times = {"seen_at": F.timestamp_millis("seen_ms"), "alive_since": F.timestamp_millis("since_ms")}
            clocks = rows.select("log_partition", *[time.alias(name) for name, time in times.items()])
        reading = subscriptions.reading(marks, self._partitions(), ended)
        cut = Cut(names, round_, reading, clocks, progress.get("keyed", False))
        return new, subscriptions, cut, progress

    def _kept(self) -> Commit:
        """Return what the last run knows from markers that ``maintain`` may have removed since."""
        removed = (self._lake.last_commit(MAINTAIN) or {}).get("removed", False)
        return {name: self._former[name] for name in _KEPT} if removed else {}

    def _ingested(self, after: Mapping[str, int]) -> dict[str, DataFrame]:
        """Return the rows of each stream after some batches."""
        last, names = self._round["last"], self._round["names"]
        for stream in STREAMS:
            self._say(f"{last[stream] - after[stream]:,} new batches of {stream.replace('_', ' ')}")
        tables = {name: self._lake.table(name, schema, last[name], after[name]) for name, schema in STREAMS.items()}
        tables["markers"] = tables["markers"].withColumn("topic", incarnations.named(names))
        self._begins = incarnations.begins(tables["markers"], names, self._begins)
        return {name: incarnations.with_ids(table, DAYS[name], self._begins) for name, table in tables.items()}

    def _carried(self) -> list[DataFrame]:
        if self._before["open"] is None:
            return []
        return [self._lake.files(_OPEN_PARTS, [self._before["open"]]).select(F.inline(_CARRIED))]

    def _missed(self, subscriptions: Subscriptions, marks: list[Mark]) -> list[DataFrame]:
        """Return the records that earlier runs skipped for a queue, or read before it named their topic."""
        before = self._before
        missed = subscriptions.missed(before["subscriptions"], before["marks"], marks, self._partitions())
        if missed is None:
            return []
        records = self._lake.table("messages", MESSAGES, before["last"]["messages"])
        rows = records.join(F.broadcast(missed), ["topic", "partition"])
        rows = rows.where((F.col("offset") > F.col("after")) & (F.col("offset") <= F.col("upto")))
        return [of_messages(rows.withColumn("queue", F.col("subscription")))]

    def _duplicates(self, new: DataFrame, subscriptions: Subscriptions) -> list[DataFrame]:
        """Return the parts that mark duplicates among new markers; an earlier run may have read the first of an id."""
        chosen = new.where(HAS_ID)
        if chosen.isEmpty():
            return []
        shortest, longest = (self._round[f"{prefix}deduplication_windows"] for prefix in ("shortest_", ""))
        markers = self._lake.table("markers", MARKERS, self._round["last"]["markers"])
        marked = of_duplicates(markers, shortest, longest, subscriptions)
        return [marked.join(F.broadcast(chosen.select(*PLACE).distinct()), list(PLACE), "left_semi")]

    def _partitions(self) -> dict[str, list[int]]:
        """Return the partitions of each topic."""
        first, now = self._round["first"]["messages"], self._round["begins"]
        return {
            topic: sorted({int(partition) for partition in (*first.get(topic, ()), *now.get(topic, ()))})
            for topic in {*first, *now}
        }

    def _marks_and_purges(self, markers: DataFrame) -> tuple[list[Mark], list[PurgeEnd]]:
        """Return what each queue has read of each partition, and its last purge there."""
        runs_of: dict[tuple[str, str, int], list[list[int]]] = {}
        for queue, topic, partition, runs in self._before["marks"]:
            runs_of[queue, topic, partition] = [list(run) for run in runs]
        ended: list[PurgeEnd] = [*map(tuple, self._before["purges"])]
        # One query for both, because a round with few rows takes as long as its queries are many.
        last = purges(markers).select("queue", "topic", "partition", F.array(F.array("offset", "at_ms")), F.lit(True))
        for *place, runs, is_purge in reads(markers).withColumn("is_purge", F.lit(False)).union(last).collect():
            if is_purge:
                ended.append((*place, *runs[0]))
            else:
                runs_of.setdefault(tuple(place), []).extend(runs)
        marks = [(*place, _merged(runs)) for place, runs in sorted(runs_of.items())]
        return marks, [*{end[:3]: end for end in sorted(ended)}.values()]

    def _reopen(
        self, stage: str, cut: Cut, subscriptions: Subscriptions, clocks: list[Activity]
    ) -> dict[str, str] | None:
        """Recompute closed messages with news, and rows about records that earlier runs skipped.

        Returns, for each directory that contained such messages, where its other messages are staged; None if there is
        nothing to recompute.
        """
        if self._before["batch"] < 0:
            # The first run has read everything.
            return None
        # Without messages there are no files to infer the schema from.
        new = self._spark.read.schema(_STAGED).parquet(f"{stage}/told")
        strange = new.where(~F.col("known") | came_from_elsewhere()).select(*_MESSAGE, "deliveries")
        closed = self._lake.files(LIFECYCLE, self._before["closed"]).select(
            *_MESSAGE, "deliveries", F.input_file_name().alias("file")
        )
        places = _places(strange, subscriptions)
        again = _matching(closed, strange, subscriptions)
        reopened = again.select(*_MESSAGE, "file").collect()
        if reopened:
            self._say(f"{len({row.id for row in reopened}):,} messages are opened again")
        elif not self._read_before(places):
            return None
        wanted = _places(again, subscriptions).unionByName(places).select(*KEY).distinct()
        told = self._ingested(NOTHING["last"])
        everything = [*parts_of(told, subscriptions), *self._duplicates(told["markers"], subscriptions)]
        parts = [part.join(F.broadcast(wanted), list(KEY), "left_semi") for part in everything]
        rows = lifecycle(added_up(*parts), cut)
        others = _of(new, strange, "left_anti")
        self._save(rows, f"{stage}/again", clocks)
        others.write.mode("append").partitionBy("closed", "date").parquet(f"{stage}/again")
        gone = self._spark.createDataFrame([(row.id, row.queue) for row in reopened], "id string, queue string")
        replaced = {}
        for index, place in enumerate(self._before["closed"]):
            if any(f"/{place}/" in row.file for row in reopened):
                former = self._spark.read.schema(_ROWS).parquet(f"{self._lake.path}/{place}")
                left = _of(former, gone, "left_anti")
                left.write.partitionBy("date").parquet(f"{stage}/former-{index}")
                replaced[place] = f"former-{index}"
        return replaced

    def _read_before(self, places: DataFrame) -> bool:
        """Return whether earlier runs have read any of these places that belong to subscriptions."""
        places = places.where(F.col("subscription") != "")
        if places.isEmpty():
            return False
        records = self._lake.table("messages", MESSAGES, self._before["last"]["messages"])
        return not records.join(F.broadcast(places), list(PLACE), "left_semi").isEmpty()

    def _save(self, rows: DataFrame, place: str, clocks: list[Activity]) -> None:
        newest = F.timestamp_millis(F.lit(max((seen_ms for _, seen_ms, *_ in clocks), default=0)))
        quiet = F.col("last_at") + F.expr(GRACE) < newest
        closed = ~F.col("open") & (F.size("pending") == 0) & (acked_at_once() | quiet)
        marked = rows.withColumn("closed", F.coalesce(closed, F.lit(False))).withColumn("date", F.to_date("sent_at"))
        marked = marked.withColumn(_CARRIED, F.when(~F.col("closed"), F.col(_CARRIED)))
        marked.write.partitionBy("closed", "date").parquet(place)

    def _publish(self, part: str, replaced: Mapping[str, str], progress: Commit) -> None:
        number = self._former["batch"] + 1
        staged = {**_former(replaced.values()), _CLOSED: f"{part}/closed=true", _OPEN: f"{part}/closed=false"}
        staged = {table: place for table, place in staged.items() if self._lake.staged(TABLE, number, place)}
        at = {table: batch_place(table, number) for table in staged}
        closed = [place for place in self._before["closed"] if place not in replaced]
        closed += [place for table, place in at.items() if table != _OPEN]
        commit = {**progress, "closed": closed, "open": at.get(_OPEN), "removed": self._former["removed"]}
        _publish(self._lake, self._former, staged, commit)


def _is_current(commit: Commit) -> bool:
    """Return whether this release wrote a commit."""
    return all(commit.get(name) == value for name, value in BASIS.items())


def last_run(lake: Lake) -> Commit:
    """Return the commit of the last run; raises PipelineError if there is none, or if an earlier release wrote it."""
    commit = lake.last_commit(TABLE)
    if commit is None or not _is_current(commit):
        reason = "has no table 'lifecycle' yet" if commit is None else "has a table 'lifecycle' of an earlier release"
        raise PipelineError(f"{lake.path} {reason}: run `python -m pipeline lifecycle` first")
    return commit


def rewrite_closed(
    lake: Lake, former: Commit, replaced: Sequence[tuple[Sequence[str], str | None]], removed: Commit
) -> None:
    """Commit a table with other directories of closed messages.

    ``replaced`` has directories and the staged directory that takes their place; None if no row is left. The last run
    wrote ``former``, and this commit follows it. ``removed`` describes all messages that were ever removed.
    """
    staged = _former(name for _, name in replaced if name is not None)
    gone = {place for places, _ in replaced for place in places}
    closed = [place for place in former["closed"] if place not in gone]
    closed += [batch_place(table, former["batch"] + 1) for table in staged]
    kept = {name: value for name, value in former.items() if name != "batch"}
    _publish(lake, former, staged, {**kept, "closed": closed, "removed": removed})


def _former(names: Iterable[str]) -> dict[str, str]:
    """Return staged directories of rows that were closed before, by the part of the table that they become."""
    return {f"{TABLE}/side={name}": name for name in names}


def _publish(lake: Lake, former: Commit, staged: Mapping[str, str], commit: Commit) -> None:
    """Publish the commit that follows ``former``, and delete what that one had replaced."""
    places = [*commit["closed"], *([commit["open"]] if commit["open"] else [])]
    # Readers of the former commit may use these until the next run.
    garbage = [place for place in former["places"] if place not in places]
    lake.publish(TABLE, former["batch"] + 1, staged, {**commit, **BASIS, "places": places, "garbage": garbage})
    for place in former["garbage"]:
        lake.delete(place)


def parts_of(
    tables: Mapping[str, DataFrame], subscriptions: Subscriptions, carried: Sequence[DataFrame] = ()
) -> list[DataFrame]:
    markers = tables["markers"]
    return [
        of_markers(subscriptions.of_markers(markers, subscriptions.holders(markers, carried))),
        of_messages(subscriptions.of_messages(tables["messages"])),
        of_dead_letters(tables["dead_letters"], subscriptions),
    ]


def activity(markers: DataFrame, before: Iterable[list[Any]]) -> list[Activity]:
    """Return the activity in each markers partition after these markers; ``before`` is the activity before them."""
    known: dict[int, Activity] = {row[0]: (row[0], row[1], row[2], row[3]) for row in before}
    ticks = markers.where(F.col("kind") == "TICK").withColumn("ms", F.unix_millis("logged_at"))
    in_order = Window.partitionBy("log_partition").orderBy("ms", "log_offset")
    other = F.col("holder") != F.lag("holder").over(in_order)
    returns = other & (F.col("ms") - F.lag("ms").over(in_order) > OUTAGE_MS)
    rows = ticks.withColumn("alive_ms", F.when(returns, F.col("ms"))).groupBy("log_partition")
    merged = rows.agg(
        F.min(F.struct("ms", "log_offset", "holder")).alias("first"),
        F.max(F.struct("ms", "log_offset", "holder")).alias("last"),
        F.max("alive_ms").alias("alive_ms"),
    )
    for partition, first, last, alive_ms in merged.collect():
        _, seen_ms, since_ms, holder = known.get(partition, (partition, 0, first.ms, ""))
        if holder != first.holder and first.ms - seen_ms > OUTAGE_MS:
            since_ms = first.ms
        if alive_ms is not None:
            since_ms = alive_ms
        known[partition] = (partition, max(seen_ms, last.ms), since_ms, last.holder)
    return [known[partition] for partition in sorted(known)]


def _merged(runs: Iterable[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return merged


def _places(rows: DataFrame, subscriptions: Subscriptions) -> DataFrame:
    """Return the records of some messages: their keys, and the ids and queues of the messages."""
    subscription = subscriptions.of(F.col("queue"), F.col("topic"))
    return records_of(rows, *_MESSAGE).withColumn("subscription", subscription)


def _matching(closed: DataFrame, strange: DataFrame, subscriptions: Subscriptions) -> DataFrame:
    """Return closed messages with the id or with a record of a message that is not known."""
    records, places = _places(closed, subscriptions).alias("closed"), _places(strange, subscriptions).alias("strange")
    same_place = reduce(and_, [F.col(f"closed.{name}") == F.col(f"strange.{name}") for name in PLACE])
    # An ACK that may be of several queues, and whose holder is not known yet, may be of any of them.
    ours = F.col("strange.subscription").isin("", F.col("closed.subscription"))
    by_record = records.join(F.broadcast(places), same_place & ours, "left_semi").select(*_MESSAGE)
    messages = by_record.union(strange.select(*_MESSAGE)).distinct()
    return _of(closed, messages, "left_semi")


def _of(rows: DataFrame, messages: DataFrame, how: str) -> DataFrame:
    """Join rows with messages; the queue may be unknown."""
    others = F.broadcast(messages.select(F.col("id").alias("other_id"), F.col("queue").alias("other_queue")))
    return rows.join(others, (F.col("id") == F.col("other_id")) & F.col("queue").eqNullSafe(F.col("other_queue")), how)
