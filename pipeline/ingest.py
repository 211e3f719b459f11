"""From Kafka's topics to tables, each record once.

There are three streams, in this order: markers, messages, dead letters. A tracker writes each fact in one transaction
with the redelivery or dead letter that it reports. So a round that reads the markers to some end, and then the other
topics to their ends, has the record of each fact, unless an open transaction holds the readers of a topic back. The
round's commit records which partitions were held back. *In the opposite order* every running system would seem to lose
messages.

A batch begins where the last commit of its stream ends, and its own commit names its end (:mod:`pipeline.lake`). So the
tables and the position in Kafka change together, and a batch that did not finish is read again.

One topic or record does not stop the others. If Spark cannot read a batch, its topics are read one by one:

* Retention has removed records before they were read: the commit has the *gap*, and the topic goes on after it.
* A record has a time that Spark cannot express: Kafka's own client reads it, and its time is null.
* A queue's own topic was recreated: its records get the topic ``NAME@ID`` (:mod:`pipeline.incarnations`).
* A queue's own topic cannot be read for another reason: the commit of the round says why, and the next round tries
  again.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from marq.wire.names import incarnation, log_name
from pipeline import records
from pipeline.errors import PipelineError, sentence
from pipeline.incarnations import renamed
from pipeline.kafka import Connection, MissingTopicError, Offsets, TopicAdmin, committed_records
from pipeline.lake import ROUNDS, Commit, Lake
from pipeline.markers import decoded
from pipeline.queue_history import QueueHistory
from pipeline.subscriptions import Subscription
from pipeline.tables import CORRUPT, DAYS, LAST_MS

#: Records per batch, of the markers topic and of the others: a process that dies has to read these again.
MARKERS_LIMIT, RECORDS_LIMIT = 20_000, 2_000_000
#: Records that Kafka's own client reads at once, from the first one on that Spark cannot read.
APART_LIMIT = 1_000
#: What to read: the first offset and the end of each partition.
Ranges = dict[str, dict[str, tuple[int, int]]]

_START_OVER = "Start over with an empty data directory (--data)"
_RECORDS = (
    "topic string, partition int, offset long, ms long, key binary, value binary,"
    " headers array<struct<key: string, value: binary>>"
)
#: The record whose time Spark cannot express.
_UNREADABLE = re.compile(r"Record at topic (\S+) partition (\d+) offset (\d+) has timestamp")
#: The state of a stream before its first batch.
_NOTHING: Commit = {"batch": -1, "first": {}, "end": {}, "names": {}, "gaps": []}


@dataclass(frozen=True)
class Stream:
    """What a stream reads, and how: ``rows`` turns records into rows."""

    name: str
    topics: list[str]
    rows: Callable[[DataFrame], DataFrame]
    limit: int

    @property
    def parts(self) -> Mapping[str, str]:
        """The tables that it fills, with their parts of the staged files ("" for all)."""
        if self.name == "markers":
            return {"markers": "corrupt=false", "corrupt": "corrupt=true"}
        return {self.name: ""}

    def counts(self) -> list[Column]:
        """Return the number of rows of each table."""
        if self.name == "markers":
            return [F.count_if(~F.col("corrupt")).alias("markers"), F.count_if("corrupt").alias("corrupt")]
        return [F.count(F.lit(1)).alias(self.name)]


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
        #: New rows of each table in the last round, also if it failed later.
        self.rows: Counter[str] = Counter()
        #: Records that operators quarantined: partition, offset and digest.
        self._quarantined: list[str] = []
        #: Topics that could not be read in this round, with the reason.
        self.unread: dict[str, str] = {}
        #: The queues topic up to these ends, so that a round without new definitions does not read it again.
        self._history: tuple[object, QueueHistory] = (None, QueueHistory())

    def round(self) -> dict[str, int]:
        """Ingest all records up to the current end; return the number of new rows of each table.

        Raises:
            PipelineError: topics are missing, the directory lacks commits or belongs to another namespace, one of
                Marq's own topics was recreated, a marker has a newer version, or another ingest is running.
        """
        self.rows = Counter(dict.fromkeys(("markers", "corrupt", "messages", "dead_letters"), 0))
        with self._lake.alone("ingest"), self._topics.connected():
            while True:
                try:
                    self._round()
                    return dict(self.rows)
                except MissingTopicError as error:
                    # A queue's own topic may be deleted while others are read: the round begins again without it.
                    if error.topic in self._topics.existing():
                        raise

    def _round(self) -> None:
        names = self._connection.names
        existing = self._topics.existing()
        missing = [topic for topic in (names.messages, names.markers, names.dead_letters) if topic not in existing]
        if missing:
            raise PipelineError(
                f"there is no topic {missing[0]} on {self._connection.bootstrap_servers}: is"
                f" MARQ_PREFIX={names.prefix} right, and was Marq ever used there?"
            )
        self._lake.belong(self._topics.cluster_id(), names.prefix)
        self._lake.check_commits()
        history = self._definitions() if names.queues in existing else QueueHistory()
        self._quarantined = [f"{order.place}/{order.sha256}" for order in history.current.quarantines()]
        self.unread = {}
        subscriptions = self._subscriptions(history, existing)
        own = {log_name(subscription.topic) for subscription in subscriptions} & {*existing}
        markers_limit, records_limit = self._limits
        markers = Stream("markers", [names.markers], decoded, markers_limit)
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
        self._ingest(markers, markers.topics)
        # Every record that the markers report is before these ends, whether its readers may read it yet or not.
        written = self._topics.ends(messages.topics + dead_letters.topics, committed=False)
        self._ingest(messages, messages.topics)
        self._ingest(dead_letters, dead_letters.topics)
        self._close([markers, messages, dead_letters], history, subscriptions, written)

    def _definitions(self) -> QueueHistory:
        topic = self._connection.names.queues
        ends = self._topics.ids([topic]), self._topics.ends([topic])
        if self._history[0] == ends:
            return self._history[1]
        reader = self._spark.read.format("kafka").options(**self._connection.options())
        read = reader.option("subscribe", topic).load()
        history = QueueHistory()
        written_ms = F.unix_millis("timestamp")
        for *contents, at_ms in read.orderBy("partition", "offset").select("key", "value", written_ms).collect():
            key, value = (None if content is None else bytes(content) for content in contents)
            history.fold(key, value, at_ms)
        self._history = (ends, history)
        return history

    def _subscriptions(self, history: QueueHistory, existing: Collection[str]) -> list[Subscription]:
        """Return all subscriptions, also those of earlier rounds, because compaction removes former settings.

        A queue has one for each incarnation of its topic.
        """
        last = self._lake.last_commit(ROUNDS) or {"subscriptions": []}
        before = {(known.queue, known.topic): known for known in map(Subscription.read, last["subscriptions"])}
        pairs = {pair for pair in history.pairs if self._connection.names.is_senders_topic(pair[1])}
        logs = sorted({*[topic for _, topic in pairs], *[log_name(topic) for _, topic in before]} & {*existing})
        ids = self._topics.ids(logs) if logs else {}
        names = (self._lake.last_commit("messages") or _NOTHING)["names"]
        now = {topic: _name(names, topic, ids.get(topic, "")) for topic in logs}
        pairs |= {(queue, log_name(topic)) for queue, topic in before}
        wanted = sorted({*before, *((queue, now.get(topic, topic)) for queue, topic in pairs)})
        # Looked up before the markers are read: records that retention removes later may have later ACQUIREs.
        new = sorted({log_name(topic) for queue, topic in wanted if (queue, topic) not in before} & now.keys())
        begins = self._topics.begins(new) if new else {}
        current = history.current
        subscriptions = []
        for queue, name in wanted:
            topic = log_name(name)
            is_now = now.get(topic, name) == name
            known = before.get((queue, name), Subscription(queue, name, since=begins.get(topic, {})))
            subscriptions.append(
                replace(
                    known,
                    current=is_now and current.settings(queue).topic == topic,
                    start=current.begin(queue),
                    incarnation=known.incarnation or (ids.get(topic, "") if is_now else ""),
                )
            )
        return subscriptions

    # --- one stream ---------------------------------------------------------------------------------------------------

    def _ingest(self, stream: Stream, topics: Sequence[str]) -> None:
        """Read some topics of a stream to their current ends, in batches."""
        try:
            self._ingest_all(stream, topics)
        except _RecreatedError:
            self._ingest(stream, topics)

    def _ingest_all(self, stream: Stream, topics: Sequence[str]) -> None:
        # The ids come first: a topic that is recreated meanwhile has another one before its batch is committed.
        ids = self._topics.ids(topics)
        begins, ends = self._topics.begins(topics), self._topics.ends(topics)
        while True:
            before = self._lake.last_commit(stream.name) or _NOTHING
            progress = self._begun(before, ids, begins, ends)
            ranges = _left(progress, ids, ends, self.unread)
            if not ranges:
                if progress["gaps"] != before["gaps"]:
                    self._publish(stream, progress, {}, ids, {})
                return
            try:
                self._take(stream, progress, _share(ranges, stream.limit), ids)
            except (PySparkException, Py4JError) as error:
                if isinstance(error, Py4JNetworkError):
                    raise
                if len(ranges) > 1:
                    for topic in ranges:
                        self._ingest(stream, [topic])
                    return
                if not self._overcome(stream, progress, ranges, ids, error):
                    return

    def _overcome(
        self, stream: Stream, progress: Commit, ranges: Ranges, ids: Mapping[str, str], error: Exception
    ) -> bool:
        """Handle an error of Spark with the only topic of these ranges; return whether to read on."""
        [(topic, partitions)] = ranges.items()
        unreadable = _UNREADABLE.search(str(error))
        if unreadable is not None:
            _, partition, offset = unreadable.groups()
            begin, end = partitions[partition]
            if begin < int(offset):
                self._take(stream, progress, {topic: {partition: (begin, int(offset))}}, ids)
            else:
                self._take_apart(stream, progress, topic, partition, range(begin, min(end, begin + APART_LIMIT)), ids)
            return True
        begins = self._topics.begins([topic])[topic]
        gone = any(begins[partition] > begin for partition, (begin, _) in partitions.items())
        if gone or self._topics.ids([topic]).get(topic, "") != ids.get(topic, ""):
            self._ingest(stream, [topic])
            return False
        reason = f"{topic} could not be read: {sentence(error)}"
        if not self._connection.names.is_senders_topic(topic):
            raise PipelineError(f"{stream.name}: {reason}") from error
        self._leave_out(topic, reason)
        return False

    def _leave_out(self, topic: str, reason: str) -> None:
        if topic not in self.unread:
            self._say(reason)
        self.unread[topic] = reason

    def _begun(self, before: Commit, ids: Mapping[str, str], begins: Offsets, ends: Offsets) -> Commit:
        """Return the state of a stream before its next batch: of new partitions, and after gaps."""
        first, end, gaps = deepcopy((before["first"], before["end"], before["gaps"]))
        for topic, partitions in begins.items():
            name = _name(before["names"], topic, ids.get(topic, ""))
            own = self._connection.names.is_senders_topic(topic)
            if name != topic and not own:
                known = [*before["names"][topic]]
                raise PipelineError(
                    f"{topic} was recreated after its records had been ingested: its id was {known[-1]} and is"
                    f" {ids[topic]}. {_START_OVER}"
                )
            # A topic without ingested records may have been recreated since.
            unread = topic in ids and topic not in before["names"]
            for partition, begin in partitions.items():
                position = None if unread else end.get(name, {}).get(partition)
                if position is None:
                    first.setdefault(name, {})[partition] = position = begin
                elif begin > position:
                    gaps.append([name, int(partition), position, begin])
                    self._say(
                        f"retention removed records {position} to {begin - 1} of {topic}/{partition} before they were"
                        " ingested: run ingest more often than the topic's retention"
                    )
                    position = begin
                elif ends[topic][partition] < position:
                    reason = (
                        f"{topic}/{partition} ends at {ends[topic][partition]}, and {position} were ingested: the"
                        " topic was recreated"
                    )
                    if not own:
                        raise PipelineError(f"{reason}. {_START_OVER}")
                    self._leave_out(topic, reason)
                end.setdefault(name, {})[partition] = position
        return {**before, "first": first, "end": end, "gaps": gaps}

    def _take(self, stream: Stream, progress: Commit, ranges: Ranges, ids: Mapping[str, str]) -> None:
        """Read ranges with Spark, and commit them as one batch."""
        headers = str(stream.name != "markers").lower()
        options = {"failOnDataLoss": "true", "includeHeaders": headers}
        read = committed_records(self._spark, self._connection, ranges, **options)
        ends = {topic: {p: end for p, (_, end) in partitions.items()} for topic, partitions in ranges.items()}
        self._commit(stream, progress, read, ends, ids)

    def _take_apart(
        self, stream: Stream, progress: Commit, topic: str, partition: str, offsets: range, ids: Mapping[str, str]
    ) -> None:
        """Read records that Spark cannot read; those with such a time get one that :mod:`pipeline.records` removes."""
        read, end = self._topics.read(topic, int(partition), offsets)
        rows = [
            (topic, int(partition), offset, min(ms, LAST_MS + 1), key, value, headers)
            for offset, ms, key, value, headers in read
        ]
        frame = self._spark.createDataFrame(rows, _RECORDS).withColumn("timestamp", F.timestamp_millis("ms"))
        self._commit(stream, progress, frame, {topic: {partition: end}}, ids)

    def _commit(self, stream: Stream, progress: Commit, read: DataFrame, end: Offsets, ids: Mapping[str, str]) -> None:
        """Write the rows of a batch, and make them count."""
        number = progress["batch"] + 1
        names = {topic: _name(progress["names"], topic, ids.get(topic, "")) for topic in end}
        topic = renamed({topic: name for topic, name in names.items() if name != topic})
        rows = stream.rows(read).withColumns({"topic": topic, "date": F.to_date(DAYS[stream.name])})
        partition_by = ["date"]
        if "corrupt" in stream.parts:
            rows = rows.withColumn("corrupt", F.col("error").isNotNull())
            partition_by = ["corrupt", "date"]
        stage = self._lake.stage(stream.name, number)
        # Counted as they are written: each query more makes the rounds of --follow longer.
        counting = Observation()
        rows.observe(counting, *stream.counts()).write.partitionBy(*partition_by).parquet(stage)
        counts = counting.get
        if counts.get("corrupt"):
            self._check_versions(self._spark.read.schema(CORRUPT).parquet(f"{stage}/{stream.parts['corrupt']}"))
        if self._topics.ids(end) != {topic: ids[topic] for topic in end if topic in ids}:
            raise _RecreatedError
        self._publish(stream, progress, end, ids, stream.parts)
        self.rows.update(counts)
        shown = ", ".join(f"{count:,} {table}" for table, count in counts.items() if count or table != "corrupt")
        self._say(f"batch {number} of {stream.name}: {shown}")

    def _publish(
        self, stream: Stream, progress: Commit, end: Offsets, ids: Mapping[str, str], parts: Mapping[str, str]
    ) -> None:
        ends, names = deepcopy((progress["end"], progress["names"]))
        for topic, partitions in end.items():
            name = _name(names, topic, ids.get(topic, ""))
            ends[name].update(partitions)
            if topic in ids:
                names.setdefault(topic, {})[ids[topic]] = name
        state = {"first": progress["first"], "end": ends, "names": names, "gaps": progress["gaps"]}
        self._lake.publish(stream.name, progress["batch"] + 1, parts, state)

    def _check_versions(self, corrupt: DataFrame) -> None:
        """Like the trackers, skip a marker of a newer version only if an operator quarantined its record."""
        unknown = F.col("error").startswith("unknown version") & ~digest_of_record().isin(self._quarantined)
        newer = corrupt.where(unknown).first()
        if newer is not None:
            raise PipelineError(
                f"{self._connection.names.markers}/{newer.log_partition}/{newer.log_offset}: {newer.error}."
                " None of its batch was ingested. Use the pipeline of a newer Marq; if no newer Marq wrote the"
                f" record: marq quarantine {newer.log_partition} {newer.log_offset}"
            )

    # --- the round ----------------------------------------------------------------------------------------------------

    def _close(
        self, streams: list[Stream], history: QueueHistory, subscriptions: list[Subscription], written: Offsets
    ) -> None:
        """Commit the round, unless it brought nothing new."""
        lasts = {stream.name: self._lake.last_commit(stream.name) or _NOTHING for stream in streams}
        names = lasts["messages"]["names"]
        ids = self._topics.ids(written)
        of_topic = {topic: _name(names, topic, ids.get(topic, "")) for topic in written}
        begins = {of_topic[topic]: offsets for topic, offsets in self._topics.begins(written).items()}
        read = {**lasts["messages"]["end"], **lasts["dead_letters"]["end"]}
        held_back = sorted(
            f"{of_topic[topic]}/{partition}"
            for topic, partitions in written.items()
            for partition, end in partitions.items()
            if read.get(of_topic[topic], {}).get(partition, begins[of_topic[topic]].get(partition, 0)) < end
        )
        before = self._lake.last_commit(ROUNDS)
        commit = {
            "last": {name: last["batch"] for name, last in lasts.items()},
            # The first offset of each partition now, and of each stream's partitions at their first ingest.
            "begins": begins,
            "first": {name: last["first"] for name, last in lasts.items()},
            # Records that retention removed before they were read: topic, partition, the first offset, the next one.
            "gaps": {name: last["gaps"] for name, last in lasts.items()},
            "names": names,
            # Partitions whose readers an open transaction holds back.
            "held_back": held_back,
            "unread": self.unread,
            # Records of these topics may have been removed before they were ingested or received.
            "compacted": [of_topic[topic] for topic in self._topics.compacted(of_topic)],
            "quarantined": self._quarantined,
            **history.document(before or {}, time.time_ns() // 1_000_000),
            "subscriptions": [subscription.document() for subscription in subscriptions],
        }
        # Through JSON, which has lists and texts for tuples and numbers.
        if before is None or any(before.get(name) != value for name, value in json.loads(json.dumps(commit)).items()):
            self._lake.publish(ROUNDS, 0 if before is None else before["batch"] + 1, {}, commit)


class _RecreatedError(Exception):
    """A topic was recreated while its records were read; they are not committed."""


def digest_of_record() -> Column:
    """Return the place and digest of a record of the table ``corrupt``, as in the requests of operators."""
    return F.concat_ws("/", "log_partition", "log_offset", F.sha2("raw", 256))


def _name(names: Mapping[str, Mapping[str, str]], topic: str, id_: str) -> str:
    """Return the name of a topic's incarnation in the tables; ``names`` has those of ingested ones by their ids."""
    known = names.get(topic, {})
    return known.get(id_, incarnation(topic, id_) if known else topic)


def _left(progress: Commit, ids: Mapping[str, str], ends: Offsets, unread: Collection[str]) -> Ranges:
    """Return what is to be read up to these ends."""
    ranges: Ranges = {}
    for topic, partitions in ends.items():
        position = progress["end"][_name(progress["names"], topic, ids.get(topic, ""))]
        for partition, end in partitions.items():
            if topic not in unread and position[partition] < end:
                ranges.setdefault(topic, {})[partition] = (position[partition], end)
    return ranges


def _share(ranges: Ranges, limit: int) -> Ranges:
    """Return the same part of each range, together about ``limit`` records."""
    total = max(limit, sum(end - begin for partitions in ranges.values() for begin, end in partitions.values()))
    return {
        topic: {
            partition: (begin, begin + max(1, (end - begin) * limit // total)) if total > limit else (begin, end)
            for partition, (begin, end) in partitions.items()
        }
        for topic, partitions in ranges.items()
    }
