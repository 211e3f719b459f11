"""One run of ``lifecycle``: adds newly ingested data to the rows that the last run carried forward.

The table has two sides. Messages that have ended are *closed*: each run adds a directory of them. All others, and those
that ended just now, are in the *open* directory, which each run reads and replaces. A commit names the directories that
count, so readers see each message once.

A later event of a closed message (its dead letter is redriven after weeks, a marker was late) reopens it: the run reads
all of its history, and rewrites the directories that contained it without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructField, StructType

from marq.wire.names import Names
from pipeline.deliveries import MARKS, Cut, reads
from pipeline.errors import PipelineError
from pipeline.ingest import ROUNDS, batches
from pipeline.lake import Commit, Lake
from pipeline.lifecycle import LIFECYCLE, lifecycle
from pipeline.parts import KEY, PARTS, added_up, of_dead_letters, of_markers, of_messages
from pipeline.tables import DEAD_LETTERS, MARKERS, MESSAGES

TABLE = "lifecycle"
_CLOSED, _OPEN = f"{TABLE}/side=closed", f"{TABLE}/side=open"
#: A message that was redelivered or dead-lettered is closed after this time without news.
GRACE = "INTERVAL 10 MINUTES"

_STREAMS = {"markers": MARKERS, "messages": MESSAGES, "dead_letters": DEAD_LETTERS}
#: Queue, topic, partition, and the runs of offsets that the queue has read there.
Mark = tuple[str, str, int, list[list[int]]]
#: The state before the first run.
_NOTHING: Commit = {
    "batch": -1,
    "round": -1,
    "last": dict.fromkeys(_STREAMS, -1),
    "marks": [],
    "clocks": [],
    "closed": [],
    "open": None,
    "garbage": [],
}
#: An additional column of open messages.
_CARRIED = "parts"


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
        self._before: Commit = _NOTHING
        self._number = 0

    def take(self) -> dict[str, int]:
        """Update the table to the last round of ``ingest``; return the number of messages."""
        with self._lake.alone(TABLE):
            return self._take()

    def _take(self) -> dict[str, int]:
        # Another run may have finished since this one was created.
        self._before = self._lake.last_commit(TABLE) or _NOTHING
        self._number = self._before["batch"] + 1
        if self._before["round"] >= self._round["batch"]:
            return self._rows()
        new = self._ingested(self._before["last"])
        marks, clocks = self._marks(new["markers"]), self._clocks(new["markers"])
        cut = self._cut(marks, clocks)
        stage = self._lake.stage(TABLE, self._number)
        self._say("computing each message")
        parts = added_up(*_told(new), *self._carried())
        self._save(lifecycle(parts, cut), f"{stage}/told", clocks)
        replaced = self._reopen(stage, cut, clocks)
        return self._publish("told" if replaced is None else "again", replaced or {}, marks, clocks)

    def _ingested(self, after: Mapping[str, int]) -> dict[str, DataFrame]:
        """Return the rows of each stream after some batches."""
        tables = {}
        for stream, schema in _STREAMS.items():
            commits = list(batches(self._lake, stream, after[stream], self._round["last"][stream]))
            self._say(f"{sum(commit['rows'][stream] for commit in commits):,} {stream.replace('_', ' ')}")
            tables[stream] = self._lake.table(stream, schema, commits)
        return tables

    def _carried(self) -> list[DataFrame]:
        if self._before["open"] is None:
            return []
        rows = self._spark.read.parquet(f"{self._lake.path}/{self._before['open']}")
        return [rows.select(F.explode(_CARRIED).alias("part")).select("part.*").select(*PARTS.names)]

    def _marks(self, markers: DataFrame) -> list[Mark]:
        """Return what each queue has read of each partition."""
        runs_of: dict[tuple[str, str, int], list[list[int]]] = {}
        for queue, topic, partition, runs in [*reads(markers).collect(), *self._before["marks"]]:
            runs_of.setdefault((queue, topic, partition), []).extend(list(run) for run in runs)
        return [(*place, _merged(runs)) for place, runs in sorted(runs_of.items())]

    def _clocks(self, markers: DataFrame) -> list[list[int]]:
        """Return the last activity of the tracker of each partition of the markers topic, in ms."""
        ticks = markers.where(F.col("kind") == "TICK").withColumn("ms", F.unix_millis("logged_at"))
        newest = ticks.groupBy("log_partition").agg(F.max("ms").alias("ms"))
        clocks = {row.log_partition: row.ms for row in newest.collect()}
        for partition, seen_ms in self._before["clocks"]:
            clocks[partition] = max(seen_ms, clocks.get(partition, seen_ms))
        return [[partition, seen_ms] for partition, seen_ms in sorted(clocks.items())]

    def _cut(self, marks: list[Mark], clocks: list[list[int]]) -> Cut:
        names = Names(self._lake.about()["prefix"])
        first = self._round["first"]
        seen = self._spark.createDataFrame(clocks, "log_partition int, seen_ms long")
        return Cut(
            marks=self._spark.createDataFrame(marks, MARKS),
            clocks=seen.select("log_partition", F.timestamp_millis("seen_ms").alias("seen_at")),
            first=first.get("messages", {}),
            begins=self._round["begins"],
            held_back=tuple(self._round["held_back"]),
            without_dead_letters=tuple(self._round["without_dead_letters"]),
            dead_letters_topic=names.dead_letters,
            truncated=any(first.get("markers", {}).get(names.markers, {}).values()),
        )

    def _reopen(self, stage: str, cut: Cut, clocks: list[list[int]]) -> dict[str, str] | None:
        """Recompute closed messages with news.

        Returns, for each directory that contained them, where its other messages are staged; None if there are none.
        """
        if not self._before["closed"]:
            return None
        new = self._spark.read.parquet(f"{stage}/told")
        strange = new.where(~F.col("known")).select("id", "deliveries")
        closed = self._lake.files(LIFECYCLE, self._before["closed"]).select(
            "id", "deliveries", F.input_file_name().alias("file")
        )
        places = _places(strange).distinct()
        again = _matching(closed, strange)
        reopened = again.select("id", "file").collect()
        if not reopened:
            return None
        self._say(f"{len({row.id for row in reopened}):,} messages are opened again")
        wanted = _places(again.select("id", "deliveries")).unionByName(places).distinct()
        everything = self._ingested(_NOTHING["last"])
        parts = [part.join(F.broadcast(wanted), list(KEY), "left_semi") for part in _told(everything)]
        rows = lifecycle(added_up(*parts), cut)
        others = new.join(F.broadcast(strange.select("id")), "id", "left_anti")
        self._save(rows, f"{stage}/again", clocks)
        others.write.mode("append").partitionBy("closed", "date").parquet(f"{stage}/again")
        ids = self._spark.createDataFrame([[row.id] for row in reopened], "id string")
        replaced = {}
        for index, place in enumerate(self._before["closed"]):
            if any(f"/{place}/" in row.file for row in reopened):
                left = self._spark.read.parquet(f"{self._lake.path}/{place}").join(F.broadcast(ids), "id", "left_anti")
                left.write.partitionBy("date").parquet(f"{stage}/former-{index}")
                replaced[place] = f"former-{index}"
        return replaced

    def _save(self, rows: DataFrame, place: str, clocks: list[list[int]]) -> None:
        newest = F.timestamp_millis(F.lit(max((seen_ms for _, seen_ms in clocks), default=0)))
        quiet = F.col("last_at") + F.expr(GRACE) < newest
        # Only a copy of an aborted transaction can follow an ack.
        plain = F.col("acked") & (F.size("deliveries") == 1) & (F.col("dead_letters") == 0)
        closed = ~F.col("open") & (F.size("pending") == 0) & (plain | quiet)
        marked = rows.withColumn("closed", F.coalesce(closed, F.lit(False))).withColumn("date", F.to_date("sent_at"))
        marked = marked.withColumn(_CARRIED, F.when(~F.col("closed"), F.col(_CARRIED)))
        marked.write.partitionBy("closed", "date").parquet(place)

    def _publish(
        self, part: str, replaced: Mapping[str, str], marks: list[Mark], clocks: list[list[int]]
    ) -> dict[str, int]:
        staged = {_CLOSED: f"{part}/closed=true", _OPEN: f"{part}/closed=false"}
        staged |= {f"{TABLE}/side={name}": name for name in replaced.values()}
        at = {table: f"{table}/batch={self._number:09}" for table in staged}
        closed = [place for place in self._before["closed"] if place not in replaced]
        closed += [at[f"{TABLE}/side={name}"] for name in replaced.values()]
        here = {table: self._lake.staged(TABLE, self._number, place) for table, place in staged.items()}
        closed += [at[_CLOSED]] * here[_CLOSED]
        open_ = at[_OPEN] if here[_OPEN] else None
        commit = {
            "round": self._round["batch"],
            "last": self._round["last"],
            "marks": marks,
            "clocks": clocks,
            "closed": closed,
            "open": open_,
            "places": [*closed, *([open_] if open_ else [])],
            "schema": StructType([*LIFECYCLE.fields, StructField("date", DateType())]).jsonValue(),
            # Readers of the former commit have until the next run.
            "garbage": [*replaced, *([self._before["open"]] if self._before["open"] else [])],
        }
        self._lake.publish(TABLE, self._number, staged, commit)
        for place in self._before["garbage"]:
            self._lake.delete(place)
        return self._rows()

    def _rows(self) -> dict[str, int]:
        return {"messages": self._lake.read(TABLE).count()}


def _told(tables: Mapping[str, DataFrame]) -> list[DataFrame]:
    return [of_markers(tables["markers"]), of_messages(tables["messages"]), of_dead_letters(tables["dead_letters"])]


def _merged(runs: Iterable[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return merged


def _places(rows: DataFrame, *columns: str) -> DataFrame:
    """Return the records of some messages: topic, partition, offset, and other columns of the messages."""
    records = rows.select(*columns, F.explode("deliveries").alias("delivery"))
    return records.select(*columns, *[f"delivery.{name}" for name in KEY])


def _matching(closed: DataFrame, strange: DataFrame) -> DataFrame:
    """Return closed messages with the id or with a record of a message that is not known."""
    by_record = _places(closed, "id").join(F.broadcast(_places(strange)), list(KEY), "left_semi").select("id")
    ids = by_record.union(strange.select("id")).distinct()
    return closed.join(F.broadcast(ids), "id", "left_semi")
