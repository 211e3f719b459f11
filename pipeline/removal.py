"""The history of messages that ended long ago, which ``maintain --older`` removes.

The lifecycle of the other messages must stay the same, even if it is computed again from all tables. So the history of
a message is removed as a whole, and stays if anything may still refer to it:

* The message has not ended, differs in the audit, or is a dead letter, which can be redriven.
* Another message with its id (in another queue of its topic) or its deduplication id stays.
* Its record is still in a queue's own topic: another queue that names this topic later would receive it.

Markers that are not about a message stay, too: TICKs show when trackers were alive, and PURGEs what was purged.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from marq.wire.names import Names
from pipeline import incarnations
from pipeline.errors import PipelineError
from pipeline.lake import Commit, Lake, batch_place
from pipeline.lifecycle import LIFECYCLE, records_of
from pipeline.record_parts import ABOUT_NO_RECORD, HAS_ID, PLACE
from pipeline.spans import show_ms
from pipeline.subscriptions import named
from pipeline.tables import LIFECYCLE_TABLE, MARKERS

#: States of messages whose history can be removed.
FINISHED = ("acked", "cancelled", "deduplicated", "abandoned", "message_expired", "expired_unread")
_GONE = tuple(f"gone_{name}" for name in PLACE)


class Removal:
    """What a run of ``maintain`` removes; ``older_ms`` is the age and ``before_ms`` the time that follows from it.

    ``run`` and ``round_`` are the last commits of ``lifecycle`` and ``ingest``.
    """

    def __init__(
        self, spark: SparkSession, lake: Lake, run: Commit, round_: Commit, *, older_ms: int, before_ms: int
    ) -> None:
        for queue, window_ms in sorted(round_["deduplication_windows"].items()):
            if window_ms >= older_ms:
                whose = "other queues" if queue == "*" else f"queue {queue!r}"
                raise PipelineError(
                    f"--older {show_ms(older_ms)}: the deduplication window of {whose} is {show_ms(window_ms)}: give a"
                    " longer age"
                )
        self.before_ms = before_ms
        self._spark = spark
        self._lake = lake
        self._run = run
        self._round = round_
        self._names = Names(lake.about()["prefix"])
        closed = lake.files(LIFECYCLE, run["closed"])
        open_ = lake.files(LIFECYCLE, [run["open"]] if run["open"] else [])
        ids = self._finished(closed, open_).cache()
        stuck = self._with_kept_deduplication_ids(closed.join(ids, "id", "left_semi"))
        self._ids = (ids if stuck is None else ids.join(stuck, "id", "left_anti")).cache()
        self._messages = closed.join(self._ids, "id", "left_semi")
        self._places = _places(self._messages).drop("id").distinct().cache()

    def _finished(self, closed: DataFrame, open_: DataFrame) -> DataFrame:
        """Return the ids all of whose messages have ended before the time, and are not needed any more."""
        test = (
            F.col("state").isin(*FINISHED)
            & F.col("queue").isNotNull()
            & F.col("known")
            & (F.size("differences") == 0)
            & (F.size("pending") == 0)
            & (F.col("dead_letters") <= F.col("redrives"))
            & (F.unix_millis("last_at") < self.before_ms)
        )
        tested = closed.select("id", F.coalesce(test, F.lit(False)).alias("ended"))
        rows = tested.unionByName(open_.select("id", F.lit(False).alias("ended")))
        rows = rows.unionByName(self._readable(closed).withColumn("ended", F.lit(False)))
        return rows.groupBy("id").agg(F.min("ended").alias("all_ended")).where("all_ended").select("id")

    def _readable(self, closed: DataFrame) -> DataFrame:
        """Return the ids of messages with records that queues' own topics still have."""
        topic = F.col("gone_topic")
        begins = [
            (topic, int(partition), offset)
            for topic, partitions in self._round["begins"].items()
            for partition, offset in partitions.items()
        ]
        known = self._spark.createDataFrame(begins, "gone_topic string, gone_partition long, begin long")
        rows = _places(closed).where(named(topic, self._names))
        rows = rows.join(F.broadcast(known), ["gone_topic", "gone_partition"], "left")
        return rows.where(F.col("begin").isNull() | (F.col("gone_offset") >= F.col("begin"))).select("id")

    def _with_kept_deduplication_ids(self, messages: DataFrame) -> DataFrame | None:
        """Return the ids of messages that share their deduplication id with one that stays."""
        delays = self._lake.table("markers", MARKERS, self._round["last"]["markers"]).where(HAS_ID)
        if delays.isEmpty():
            return None
        scope = ["queue", "text"]
        rows = self._keyed("markers", delays).select(*scope, *_GONE)
        places = _places(messages)
        kept = rows.join(places, list(_GONE), "left_anti").select(*scope).distinct()
        return rows.join(kept, scope, "left_semi").join(places, list(_GONE)).select("id").distinct()

    def count(self) -> int:
        """Return the number of messages."""
        return int(self._messages.count())

    def changed(self) -> dict[str, int]:
        """Return the directories of closed messages that change, with the number of rows that each loses."""
        if "batch" not in self._messages.columns:
            return {}
        rows = self._messages.groupBy("side", "batch").count().collect()
        return {batch_place(f"{LIFECYCLE_TABLE}/side={row.side}", int(row.batch)): row["count"] for row in rows}

    def changed_batches(self, table: str, rows: DataFrame) -> dict[int, int]:
        """Return the batches that change, with the number of rows that each loses; ``rows`` have their ``batch``."""
        if "batch" not in rows.columns:
            # Without files, Spark can't derive this column from the names of directories.
            return {}
        gone = self._keyed(table, rows).join(self._places, list(_GONE), "left_semi")
        return {int(row.batch): row["count"] for row in gone.groupBy("batch").count().collect()}

    def without(self, table: str, rows: DataFrame) -> DataFrame:
        """Return the rows of a table of ``ingest`` that stay."""
        return self._keyed(table, rows).join(self._places, list(_GONE), "left_anti").select(*rows.columns)

    def without_messages(self, closed: DataFrame) -> DataFrame:
        return closed.join(self._ids, "id", "left_anti").select(*closed.columns)

    def _keyed(self, table: str, rows: DataFrame) -> DataFrame:
        """Add the place of the record that a row is about; null if it is about none."""
        place = {gone: F.col(name) for gone, name in zip(_GONE, PLACE, strict=True)}
        if table == "markers":
            place["gone_topic"] = incarnations.named(self._round["names"])
            about = ~F.col("kind").isin(*ABOUT_NO_RECORD)
            place = {gone: F.when(about, column) for gone, column in place.items()}
        elif table == "dead_letters":
            place = {gone: F.col(f"origin_{name}") for gone, name in zip(_GONE, PLACE, strict=True)}
            place["gone_topic"] = incarnations.origin("sent_at", self._run["begins"])
        return rows.withColumns(place)


def _places(messages: DataFrame) -> DataFrame:
    """Return the places of all records of messages, with their ids."""
    return records_of(messages, "id").toDF("id", *_GONE)
