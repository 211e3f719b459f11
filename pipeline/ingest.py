"""From Kafka's topics to tables, each record once.

There are three streams, in this order: markers, messages, dead letters. A tracker writes each fact in one transaction
with the redelivery or dead letter that it reports. So a round that reads the markers to some end, and then the other
topics to their ends, has the record of each fact, unless an open transaction holds the readers of a topic back. The
round's commit records which partitions were held back. *In the opposite order* every running system would seem to lose
messages.

Before it reads a batch, Spark records the batch's offsets; a batch that did not finish is read again, with the same
number and offsets. The rows of a batch count once its commit exists (:mod:`pipeline.lake`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import records
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, TopicAdmin
from pipeline.lake import Commit, Lake
from pipeline.markers import decoded
from pipeline.queue_history import QueueHistory
from pipeline.subscriptions import Subscription
from pipeline.tables import CORRUPT, DEAD_LETTERS, MARKERS, MESSAGES

#: Records per batch, of the markers topic and of the others: a process that dies has to read these again.
MARKERS_LIMIT, RECORDS_LIMIT = 20_000, 2_000_000
ROUNDS = "rounds"
#: {topic: {partition: offset}}, with partitions as text, as in JSON.
Offsets = dict[str, dict[str, int]]

_TABLES = {"markers": MARKERS, "corrupt": CORRUPT, "messages": MESSAGES, "dead_letters": DEAD_LETTERS}
_START_OVER = "Start over with an empty data directory (--data)"


@dataclass(frozen=True)
class Stream:
    """What a stream reads, and how: ``rows`` turns records into rows, ``day_of`` is the time that dates them."""

    name: str
    topics: list[str]
    rows: Callable[[DataFrame], DataFrame]
    limit: int
    day_of: str = "sent_at"

    @property
    def parts(self) -> Mapping[str, str]:
        """The tables that it fills, with their parts of the staged files ("" for all)."""
        if self.name == "markers":
            return {"markers": "corrupt=false", "corrupt": "corrupt=true"}
        return {self.name: ""}


class Ingest:
    """Ingests one namespace; ``say`` is called with each batch."""

    def __init__(
        self,
        spark: SparkSession,
        connection: Connection,
        topics: TopicAdmin,
        lake: Lake,
        *,
        payload: bool = False,
        say: Callable[[str], None] = lambda _: None,
        limits: tuple[int, int] = (MARKERS_LIMIT, RECORDS_LIMIT),
    ) -> None:
        self._spark = spark
        self._connection = connection
        self._topics = topics
        self._lake = lake
        self._payload = payload
        self._say = say
        self._limits = limits
        self._rows: Counter[str] = Counter()
        #: Records of newer versions that operators quarantined: partition, offset and digest.
        self._quarantined: list[str] = []

    def round(self) -> dict[str, int]:
        """Ingest all records up to the current end; return the number of new rows of each table.

        Raises:
            PipelineError: topics are missing, the directory belongs to another namespace, retention removed records
                that were not ingested, a marker has a newer version, or another ingest is running.
        """
        with self._lake.alone("ingest"):
            return self._round()

    def _round(self) -> dict[str, int]:
        names = self._connection.names
        existing = self._topics.existing()
        missing = [topic for topic in (names.messages, names.markers, names.dead_letters) if topic not in existing]
        if missing:
            raise PipelineError(
                f"there is no topic {missing[0]} on {self._connection.bootstrap_servers}: is"
                f" MARQ_PREFIX={names.prefix} right, and was Marq ever used there?"
            )
        self._lake.belong(self._topics.cluster_id(), names.prefix)
        history = self._definitions() if names.queues in existing else QueueHistory()
        self._quarantined = [f"{order.place}/{order.sha256}" for order in history.current.quarantines()]
        subscriptions = self._subscriptions(history, existing)
        own = {subscription.topic for subscription in subscriptions} & {*existing}
        markers_limit, records_limit = self._limits
        markers = Stream("markers", [names.markers], decoded, markers_limit, "logged_at")
        messages = Stream(
            "messages",
            [names.messages, *sorted(own)],
            lambda rows: records.messages(rows, names.messages, payload=self._payload),
            records_limit,
        )
        dead_letters = Stream(
            "dead_letters",
            [names.dead_letters],
            lambda rows: records.dead_letters(rows, payload=self._payload),
            records_limit,
        )
        self._rows = Counter(dict.fromkeys(_TABLES, 0))
        self._ingest(markers)
        # Every record that the markers report is before these ends, whether its readers may read it yet or not.
        written = _named(self._topics.ends(messages.topics + dead_letters.topics, committed=False))
        self._ingest(messages)
        self._ingest(dead_letters)
        self._close([markers, messages, dead_letters], history, subscriptions, written)
        return dict(self._rows)

    def _definitions(self) -> QueueHistory:
        reader = self._spark.read.format("kafka").options(**self._connection.options())
        read = reader.option("subscribe", self._connection.names.queues).load()
        history = QueueHistory()
        written_ms = F.unix_millis("timestamp")
        for *contents, at_ms in read.orderBy("partition", "offset").select("key", "value", written_ms).collect():
            key, value = (None if content is None else bytes(content) for content in contents)
            history.fold(key, value, at_ms)
        return history

    def _subscriptions(self, history: QueueHistory, existing: Collection[str]) -> list[Subscription]:
        """Return all subscriptions, also those of earlier rounds, because compaction removes former settings."""
        last = self._lake.last_commit(ROUNDS) or {"subscriptions": []}
        before = {
            (subscription["queue"], subscription["topic"]): subscription["since"]
            for subscription in last["subscriptions"]
        }
        pairs = {pair for pair in history.pairs if self._connection.names.is_senders_topic(pair[1])} | before.keys()
        new = sorted({topic for _, topic in pairs - before.keys()} & {*existing})
        # Looked up before the markers are read: records that retention removes later may have later ACQUIREs.
        begins = _named(self._topics.begins(new)) if new else {}
        current = history.current
        return [
            Subscription(
                queue,
                topic,
                current.settings(queue).topic == topic,
                before[queue, topic] if (queue, topic) in before else begins.get(topic, {}),
                current.begin(queue),
            )
            for queue, topic in sorted(pairs)
        ]

    def _ingest(self, stream: Stream) -> None:
        # Requested before records are read: if a topic is recreated meanwhile, the next round notices it.
        ids = self._topics.ids(stream.topics)
        begins = _named(self._topics.begins(stream.topics))
        self._check_gaps(stream, ids, begins)
        options = {
            **self._connection.options(),
            "kafka.isolation.level": "read_committed",
            "subscribe": ",".join(stream.topics),
            "startingOffsets": json.dumps(begins),
            "failOnDataLoss": "true",
            "includeHeaders": str(stream.name != "markers").lower(),
            "maxOffsetsPerTrigger": str(stream.limit),
        }
        read = self._spark.readStream.format("kafka").options(**options).load()
        failures: list[Exception] = []

        def take(batch: DataFrame, number: int) -> None:
            try:
                self._take(stream, batch, number, ids, begins)
            except Exception as error:
                # Spark would embed the error's text in other messages.
                failures.append(error)
                raise

        writer = read.writeStream.foreachBatch(take).option("checkpointLocation", self._lake.checkpoint(stream.name))
        try:
            query = writer.queryName(stream.name).trigger(availableNow=True).start()
            query.awaitTermination()
        except PySparkException as error:
            if failures:
                raise failures[0] from None
            self._check_gaps(stream, self._topics.ids(stream.topics), _named(self._topics.begins(stream.topics)))
            raise _explained(error, stream) from error

    def _check_gaps(self, stream: Stream, ids: Mapping[str, str], begins: Offsets) -> None:
        """Check that the topics still have all records after the last commit."""
        last = self._lake.last_commit(stream.name)
        if last is None:
            return
        if not self._lake.exists(f"_checkpoints/{stream.name}/offsets"):
            raise PipelineError(
                f"{self._lake.path}: the checkpoint of {stream.name} is missing, and without it records would be"
                f" ingested twice. {_START_OVER}"
            )
        for topic, id_ in last.get("topic_ids", {}).items():
            if ids.get(topic, id_) != id_:
                raise PipelineError(
                    f"{topic} was recreated after its records had been ingested: its id was {id_} and is {ids[topic]}."
                    f" {_START_OVER}"
                )
        ends = _named(self._topics.ends(stream.topics))
        for topic, partitions in last["end"].items():
            for partition, position in partitions.items():
                begin = begins.get(topic, {}).get(partition)
                if begin is None:
                    continue
                if begin > position:
                    raise PipelineError(
                        f"retention has removed records {position} to {begin - 1} of {topic}/{partition} before they"
                        f" were ingested, so their content is unknown. {_START_OVER}, and run ingest more often than"
                        " the topic's retention"
                    )
                if ends[topic][partition] < position:
                    raise PipelineError(
                        f"{topic}/{partition} ends at {ends[topic][partition]}, and {position} were ingested: the"
                        f" topic was recreated. {_START_OVER}"
                    )

    def _take(self, stream: Stream, batch: DataFrame, number: int, ids: Mapping[str, str], begins: Offsets) -> None:
        before = self._lake.commit(stream.name, number - 1) if number else None
        # Spark recorded the end of the batch before it passed the batch on.
        planned = self._lake.read_text(f"_checkpoints/{stream.name}/offsets/{number}")
        assert planned is not None
        end: Offsets = json.loads(planned.splitlines()[-1])
        done = self._lake.commit(stream.name, number)
        if done is not None:
            if done["end"] != end:
                raise PipelineError(
                    f"{self._lake.path}: batch {number} of {stream.name} was ingested with another end, so the"
                    f" checkpoint is not the one that belongs to it. {_START_OVER}"
                )
            return  # the process that committed it died before Spark's own commit
        rows = stream.rows(batch).withColumn("date", F.to_date(stream.day_of))
        partition_by = ["date"]
        if "corrupt" in stream.parts:
            rows = rows.withColumn("corrupt", F.col("error").isNotNull())
            partition_by = ["corrupt", "date"]
        stage = self._lake.stage(stream.name, number)
        rows.write.partitionBy(*partition_by).parquet(stage)
        counts = self._counts(stream, number, stage)
        commit = {
            "begin": begins if before is None else _joined(begins, before["end"]),
            "end": end,
            "topic_ids": {**(before or {}).get("topic_ids", {}), **_of_read(ids, end)},
            "rows": counts,
            "payload": self._payload,
        }
        self._lake.publish(stream.name, number, stream.parts, commit)
        self._rows.update(counts)
        shown = ", ".join(f"{count:,} {table}" for table, count in counts.items() if count or table != "corrupt")
        self._say(f"batch {number} of {stream.name}: {shown}")

    def _counts(self, stream: Stream, number: int, stage: str) -> dict[str, int]:
        """Count the staged rows from the files' footers; refuse markers of unknown versions."""
        counts = {}
        for table, part in stream.parts.items():
            if not self._lake.staged(stream.name, number, part):
                counts[table] = 0
                continue
            rows = self._spark.read.schema(_TABLES[table]).parquet(f"{stage}/{part}")
            counts[table] = rows.count()
            if table == "corrupt":
                self._check_versions(rows)
        return counts

    def _check_versions(self, corrupt: DataFrame) -> None:
        """Like the trackers, skip a marker of a newer version only if an operator quarantined its record."""
        record = F.concat_ws("/", "log_partition", "log_offset", F.sha2("raw", 256))
        unknown = F.col("error").startswith("unknown version") & ~record.isin(self._quarantined)
        newer = corrupt.where(unknown).first()
        if newer is not None:
            raise PipelineError(
                f"{self._connection.names.markers}/{newer.log_partition}/{newer.log_offset}: {newer.error}."
                " None of its batch was ingested. Use the pipeline of a newer Marq; if no newer Marq wrote the"
                f" record: marq quarantine {newer.log_partition} {newer.log_offset}"
            )

    def _close(
        self, streams: list[Stream], history: QueueHistory, subscriptions: list[Subscription], written: Offsets
    ) -> None:
        """Commit the round."""
        lasts = {stream.name: self._lake.last_commit(stream.name) for stream in streams}
        begins = _named(self._topics.begins(written))
        end = _joined(begins, *[last["end"] for last in lasts.values() if last is not None])
        held_back = sorted(
            f"{topic}/{partition}"
            for topic, partitions in written.items()
            for partition, position in partitions.items()
            if end[topic].get(partition, 0) < position
        )
        before = self._lake.last_commit(ROUNDS)
        commit = {
            "last": {name: -1 if last is None else last["batch"] for name, last in lasts.items()},
            "end": end,
            "begins": begins,
            "first": {name: self._first(name, last, before) for name, last in lasts.items() if last is not None},
            "held_back": held_back,
            **history.document(before or {}, time.time_ns() // 1_000_000),
            "subscriptions": [subscription.document() for subscription in subscriptions],
        }
        self._lake.publish(ROUNDS, 0 if before is None else before["batch"] + 1, {}, commit)

    def _first(self, stream: str, last: Commit, before: Commit | None) -> Offsets:
        """Return where each partition began at its first ingest; ``before`` is the round before."""
        known: Offsets = {} if before is None else before["first"].get(stream, {})
        if all(partition in known.get(topic, {}) for topic, begins in last["begin"].items() for partition in begins):
            return known
        # All batches: rounds of earlier releases know only the topics of the first one.
        begins = [commit["begin"] for commit in batches(self._lake, stream, -1, last["batch"])]
        return _joined(*reversed(begins))


def _of_read(ids: Mapping[str, str], end: Offsets) -> dict[str, str]:
    """Return the ids of topics with ingested records; an unread topic may be recreated."""
    return {topic: id_ for topic, id_ in ids.items() if any(end.get(topic, {}).values())}


def _joined(*offsets: Offsets) -> Offsets:
    """Merge offsets; the last counts if several have the same partition."""
    joined: Offsets = {}
    for topics in offsets:
        for topic, partitions in topics.items():
            joined.setdefault(topic, {}).update(partitions)
    return joined


def _named(offsets: Mapping[str, Mapping[int, int]]) -> Offsets:
    return {
        topic: {str(partition): offset for partition, offset in partitions.items()}
        for topic, partitions in offsets.items()
    }


def _explained(error: PySparkException, stream: Stream) -> PipelineError:
    text = str(error)
    if "oncurrent" in text:
        return PipelineError(f"another ingest writes {stream.name} into this data directory: stop one of them")
    lines = [line for line in text.splitlines() if line.strip()]
    return PipelineError(f"{stream.name} could not be read: {lines[0] if lines else type(error).__name__}")


def batches(lake: Lake, stream: str, after: int, to: int) -> Iterator[Commit]:
    for number in range(after + 1, to + 1):
        commit = lake.commit(stream, number)
        if commit is None:
            raise PipelineError(f"{lake.path}: batch {number} of {stream} is missing; were files deleted?")
        yield commit
