"""Subscriptions: queues that name a topic in their settings. Each record of the topic is a message of each such queue.

So a record of such a topic is identified by its place and the queue. Any other record is a message of one queue only,
so its place identifies it. The column ``subscription`` is the queue for the former and empty for the latter.

Each record is a message of the queue, whether it was acquired or not, with these exceptions:

* records before ``since``: retention had removed them when ``ingest`` first read the subscription;
* records before the start of a queue with ``start = "latest"``;
* records that the queue had not read when it stopped naming the topic.

If the queue did not acquire such a record, the record is *skipped*: it has no row in the lifecycle. If the queue names
the topic again, the next run reads the skipped records again (:meth:`Subscriptions.missed`).

A RESCHEDULE or CANCEL that names no queue is about the messages of all queues at its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source
from marq.wire.names import Names, is_synthetic
from pipeline.tables import columns

#: Queue, topic, partition, and the runs of offsets that the queue has read there.
Mark = tuple[str, str, int, list[list[int]]]
#: Queue, topic, partition, the offset before which the queue was purged there, and when that was.
PurgeEnd = tuple[str, str, int, int, int]
#: Queue and topic.
Pair = tuple[str, str]

#: The prefix of synthetic topics, which Kafka's own topics can't have.
DRAWN = "~"
assert is_synthetic(DRAWN)

#: What a queue reads of a partition: its runs, and the limits of unread messages.
READING = StructType(
    [
        *columns("queue string, topic string, partition long").fields,
        StructField("runs", ArrayType(ArrayType(LongType()))),
        *columns(
            "since long, start_end long, start_until_ms long, former boolean, purge_end long, purged_ms long"
        ).fields,
    ]
)
_MISSED = "topic string, partition long, subscription string, after long, upto long"
_ENDLESS = 2**63 - 1
#: Markers by which a client reschedules or cancels messages.
_REQUESTS = ("RESCHEDULE", "CANCEL")


@dataclass(frozen=True)
class Subscription:
    """A queue that names, or once named, a topic."""

    queue: str
    topic: str
    #: Whether the queue names the topic now.
    current: bool = False
    #: Where each partition began when ``ingest`` first saw the subscription; partitions are text, as in JSON.
    since: Mapping[str, int] = field(default_factory=dict)
    start: SkippedRecords | None = None
    #: The id of the topic's incarnation; empty if it is not known.
    incarnation: str = ""

    def document(self) -> dict[str, Any]:
        return {**vars(self), "start": None if self.start is None else self.start.document()}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Subscription:
        start = document["start"]
        return cls(**{**document, "start": None if start is None else SkippedRecords.read(start)})

    def limits(self, partition: int) -> tuple[int | None, int | None, int | None, bool]:
        """Return the columns of :data:`READING` from ``since`` to ``former``."""
        since, place, start = self.since.get(str(partition)), Source(self.topic, partition), self.start
        if start is None:
            return since, None, None, not self.current
        wanted = (place, place.of(self.incarnation) if self.incarnation else None)
        known = [source for source in start.ends if source in wanted]
        # Without an id, the last start is of the incarnation that ``ingest`` reads.
        sources = known or [source for source in start.ends if not self.incarnation and source.log == place]
        source = max(sources, key=start.until_of, default=place)
        return since, start.ends.get(source, 0), start.until_of(source), not self.current


class Subscriptions:
    """All subscriptions of a namespace: those that ``ingest`` found in definitions, and those in markers."""

    def __init__(self, spark: SparkSession, names: Names, known: Iterable[Subscription], marks: Iterable[Mark]) -> None:
        self._spark = spark
        self._names = names
        # Definitions are read before the markers, and may have been compacted.
        told = [Subscription(*mark[:2]) for mark in marks if names.is_senders_topic(mark[1])]
        by_pair = {(subscription.queue, subscription.topic): subscription for subscription in [*told, *known]}
        self._all: dict[Pair, Subscription] = dict(sorted(by_pair.items()))
        #: Topic and queue of each, and the topics of several queues.
        self._pairs = [(topic, queue) for queue, topic in self._all]
        self._shared = sorted(topic for topic, count in Counter(topic for topic, _ in self._pairs).items() if count > 1)

    def document(self) -> list[list[Any]]:
        """Return queue, topic and whether it is current, of each."""
        return [[queue, topic, subscription.current] for (queue, topic), subscription in self._all.items()]

    def of(self, queue: Column, topic: Column) -> Column:
        """Return the subscription of a row."""
        return F.when(named(topic, self._names), F.coalesce(queue, F.lit(""))).otherwise("")

    def of_messages(self, messages: DataFrame) -> DataFrame:
        """Return a row for each queue of each record, with its ``queue`` and ``subscription``."""
        if not self._all:
            return messages.withColumn("subscription", F.lit(""))
        pairs = self._spark.createDataFrame(self._pairs, "topic string, subscription string")
        rows = messages.join(F.broadcast(pairs), "topic", "left")
        queue, subscription = F.coalesce("subscription", "queue"), F.coalesce("subscription", F.lit(""))
        return rows.withColumns({"queue": queue, "subscription": subscription})

    def of_markers(self, markers: DataFrame, holders: DataFrame | None) -> DataFrame:
        """Add ``subscription`` to markers; one that names no queue is an ACK, or a request to all queues of its topic.

        ``holders`` are those of :meth:`holders`: they give the queue of an ACK. A request becomes a row for each queue.
        """
        rows = markers.withColumn("subscription", self.of(F.col("queue"), F.col("topic")))
        if not self._all:
            return rows
        topic, unnamed = F.col("topic"), F.col("queue") == ""
        is_ack, is_request = (F.col("kind") == "ACK") & unnamed, F.col("kind").isin(*_REQUESTS) & unnamed
        # An ACK of a topic of one queue is about that queue's message.
        asked = F.when(is_request | (is_ack & ~topic.isin(self._shared)), topic)
        every = self._spark.createDataFrame(self._pairs, "asked string, each string")
        rows = rows.withColumn("asked", asked).join(F.broadcast(every), "asked", "left")
        queues = [F.col("each")]
        if holders is not None:
            rows = rows.withColumn("mixed", F.when(is_ack, topic))
            rows = rows.join(F.broadcast(holders), ["mixed", "holder"], "left")
            queues.append(F.col("held_for"))
        return rows.withColumn("subscription", F.coalesce(*queues, "subscription")).select(
            *markers.columns, "subscription"
        )

    def holders(self, markers: DataFrame, carried: Sequence[DataFrame]) -> DataFrame | None:
        """Return the queue of each holder in topics of several queues (``mixed``, ``holder``, ``held_for``), or None.

        A holder serves one group, and the queues of a group have different topics. ``carried`` are rows of parts.
        """
        if not self._shared:
            return None
        acquired = markers.where(F.col("kind") == "ACQUIRE").select("topic", "holder", F.col("queue").alias("held_for"))
        for parts in carried:
            for name in ("acquired", "acquired_last"):
                acquired = acquired.union(parts.select("topic", f"{name}.holder", "subscription"))
        rows = acquired.where(F.col("topic").isin(self._shared) & F.col("holder").isNotNull())
        return rows.groupBy(F.col("topic").alias("mixed"), "holder").agg(F.min("held_for").alias("held_for"))

    def reading(
        self, marks: Iterable[Mark], partitions: Mapping[str, Iterable[int]], purges: Iterable[PurgeEnd]
    ) -> DataFrame:
        """Return the rows of :data:`READING`; ``partitions`` are those of each topic."""
        purged = {(queue, topic, partition): (end, at_ms) for queue, topic, partition, end, at_ms in purges}
        runs = {(queue, topic, partition): runs for queue, topic, partition, runs in marks}
        wanted = {
            *runs,
            *purged,
            *((*pair, partition) for pair in self._all for partition in partitions.get(pair[1], ())),
        }
        rows = [
            (
                *place,
                runs.get(place),
                *self._all.get(place[:2], Subscription(*place[:2], current=True)).limits(place[2]),
                *purged.get(place, (None, None)),
            )
            for place in sorted(wanted)
        ]
        return self._spark.createDataFrame(rows, READING)

    def missed(
        self,
        before: Iterable[tuple[str, str, bool]],
        marks_before: Iterable[Mark],
        marks: Iterable[Mark],
        partitions: Mapping[str, Iterable[int]],
    ) -> DataFrame | None:
        """Return which rows of records of earlier runs are missing, or None: the offsets ``after`` … ``upto``.

        ``before`` and ``marks_before`` are those of the last run, which skipped the unread records of queues that it
        did not know, or that did not name the topic.
        """
        current = {(queue, topic): is_current for queue, topic, is_current in before}
        topics = {topic for _, topic in current}
        read_before, read = _ends(marks_before), _ends(marks)
        rows = []
        for (queue, topic), subscription in self._all.items():
            if topic not in topics or current.get((queue, topic)):
                continue
            for partition in partitions.get(topic, ()):
                place = (queue, topic, partition)
                after, upto = read_before.get(place, -1), _ENDLESS if subscription.current else read.get(place, -1)
                if after < upto:
                    rows.append((topic, partition, queue, after, upto))
        return self._spark.createDataFrame(rows, _MISSED) if rows else None


def named(topic: Column, names: Names) -> Column:
    """Return whether queues name, or named, a topic, like :meth:`Names.is_senders_topic`."""
    return ~topic.startswith(DRAWN) & ~topic.isin(names.messages, names.dead_letters)


def _ends(marks: Iterable[Mark]) -> dict[tuple[str, str, int], int]:
    """Return the last offset that each queue has read of each partition."""
    return {(queue, topic, partition): runs[-1][1] for queue, topic, partition, runs in marks}


def skipped(passed_over: Column, within: Column) -> Column:
    """Return whether a record that its queue has not acquired is not its message; for rows with :data:`READING`.

    ``passed_over``: the queue has read later records; ``within``: it has read earlier ones of the same run, too.
    """
    offset = F.col("offset")
    # The same condition as in SkippedRecords.left.
    before_start = (offset < F.col("start_end")) & (F.unix_millis("parts.record.at") <= F.col("start_until_ms"))
    tests = [(offset < F.col("since")) & ~within, before_start & ~within, F.col("former") & ~passed_over]
    # The columns are null if there is no such limit.
    return reduce(or_, [F.coalesce(test, F.lit(False)) for test in tests])
