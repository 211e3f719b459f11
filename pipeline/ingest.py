"""From Kafka's topics to tables, each record once.

Three streams, in this order: markers, messages, dead letters. A fact among the markers stands in one transaction with
the copy or dead letter that it tells of; so whoever reads the markers to some end, and after that the other topics to
theirs, has the copy of each fact, unless an open transaction holds a topic's readers back. What is held back is
remembered in the round's commit. *The other way round* each running system would seem to lose what is just on its way.

Within a stream Spark remembers, before it reads a batch, which offsets the batch has; a batch that did not end is read
once more, with the same number and offsets. What a batch writes counts by its commit (:mod:`pipeline.lake`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import records
from pipeline.definitions import Said, said
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, Topics
from pipeline.lake import Commit, Lake
from pipeline.markers import decoded
from pipeline.tables import CORRUPT, DEAD_LETTERS, MARKERS, MESSAGES

#: Records of the markers topic in a batch of ours, and of the other topics: what a process that dies reads again.
MARKERS_LIMIT, RECORDS_LIMIT = 20_000, 2_000_000
ROUNDS = "rounds"
#: {topic: {partition: offset}}, partitions as text, as in JSON.
Offsets = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Stream:
    """One of the streams: what it reads, and the tables that it fills.

    ``rows`` makes rows of records; ``parts`` says which part of the staged files each table is, "" all of them.
    """

    name: str
    topics: list[str]
    rows: Callable[[DataFrame], DataFrame]
    parts: Mapping[str, str]
    partition_by: tuple[str, ...]
    limit: int
    headers: bool = True


class Ingest:
    """Ingests one installation; ``say`` is told of each batch."""

    def __init__(
        self,
        spark: SparkSession,
        connection: Connection,
        topics: Topics,
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
        #: Records of newer versions that operators ordered into quarantine: partition, offset and digest.
        self._ordered: list[str] = []

    def round(self) -> dict[str, int]:
        """Bring everything up to what is now the end; return how many rows each table got.

        Raises:
            PipelineError: topics are missing, the directory is another installation's, retention has removed what was
                not ingested, a marker is of a newer version, another ingest is at work.
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
                f" MARQ_PREFIX={names.prefix} right, and has anybody used Marq there yet?"
            )
        self._lake.belong(self._topics.cluster_id(), names.prefix)
        told = self._definitions() if names.queues in existing else Said()
        self._ordered = [f"{order.place}/{order.sha256}" for order in told.definitions.quarantines()]
        streams = [
            Stream("markers", [names.markers], decoded, _BY_READABILITY, ("corrupt", "date"), self._limits[0], False),
            self._messages(told, existing),
            Stream(
                "dead_letters",
                [names.dead_letters],
                lambda rows: records.dead_letters(rows, payload=self._payload),
                {"dead_letters": ""},
                ("date",),
                self._limits[1],
            ),
        ]
        self._rows = Counter(dict.fromkeys(_READ, 0))
        self._bring(streams[0])
        behind = streams[1].topics + streams[2].topics
        # Each copy of which the markers tell stands before these ends, whether its readers are let to it yet or not.
        written = _named(self._topics.ends(behind, committed=False))
        self._bring(streams[1])
        self._bring(streams[2])
        self._close(streams, told, written)
        return dict(self._rows)

    def _messages(self, told: Said, existing: Iterable[str]) -> Stream:
        own = {topic: queue for topic, queue in told.own_topics.items() if topic in existing}
        return Stream(
            "messages",
            [self._connection.names.messages, *sorted(own)],
            lambda rows: records.messages(rows, own, payload=self._payload),
            {"messages": ""},
            ("date",),
            self._limits[1],
        )

    def _definitions(self) -> Said:
        reader = self._spark.read.format("kafka").options(**self._connection.options())
        read = reader.option("subscribe", self._connection.names.queues).load()
        rows = read.orderBy("partition", "offset").select("key", "value").collect()
        return said((_bytes(row.key), _bytes(row.value)) for row in rows)

    # --- one stream ---------------------------------------------------------------------------------------------------

    def _bring(self, stream: Stream) -> None:
        begins = _named(self._topics.begins(stream.topics))
        self._check_gaps(stream, begins)
        options = {
            **self._connection.options(),
            "kafka.isolation.level": "read_committed",
            "subscribe": ",".join(stream.topics),
            "startingOffsets": json.dumps(begins),
            "failOnDataLoss": "true",
            "includeHeaders": str(stream.headers).lower(),
            "maxOffsetsPerTrigger": str(stream.limit),
        }
        read = self._spark.readStream.format("kafka").options(**options).load()
        failures: list[Exception] = []

        def take(batch: DataFrame, number: int) -> None:
            try:
                self._take(stream, batch, number, begins)
            except Exception as error:
                # Through Spark its text would come back, in the midst of others.
                failures.append(error)
                raise

        writer = read.writeStream.foreachBatch(take).option("checkpointLocation", self._lake.checkpoint(stream.name))
        try:
            query = writer.queryName(stream.name).trigger(availableNow=True).start()
            query.awaitTermination()
        except PySparkException as error:
            if failures:
                raise failures[0] from None
            self._check_gaps(stream, _named(self._topics.begins(stream.topics)))
            raise _explained(error, stream) from error

    def _check_gaps(self, stream: Stream, begins: Offsets) -> None:
        """A batch that is not committed begins where the last commit ends."""
        last = self._lake.last_commit(stream.name)
        if last is None:
            return
        if not self._lake.exists(f"_checkpoints/{stream.name}/offsets"):
            raise PipelineError(
                f"{self._lake.path}: the checkpoint of {stream.name} is gone, and without it records would be ingested"
                " twice. Begin anew with an empty data directory (--data)"
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
                        " were ingested: what was said there is not known. Begin anew with an empty data directory"
                        " (--data), and let ingest run more often than the topic's retention"
                    )
                if ends[topic][partition] < position:
                    raise PipelineError(
                        f"{topic}/{partition} ends at {ends[topic][partition]}, and {position} were ingested: the"
                        " topic was made anew. Begin anew with an empty data directory (--data)"
                    )

    def _take(self, stream: Stream, batch: DataFrame, number: int, begins: Offsets) -> None:
        before = self._lake.commit(stream.name, number - 1) if number else None
        range_ = {
            "begin": begins if before is None else _joined(begins, before["end"]),
            "end": self._planned(stream, number),
        }
        done = self._lake.commit(stream.name, number)
        if done is not None:
            if done["end"] != range_["end"]:
                raise PipelineError(
                    f"{self._lake.path}: batch {number} of {stream.name} was ingested with another end: its checkpoint"
                    " is not the one that belongs to it. Begin anew with an empty data directory (--data)"
                )
            return  # whoever committed it died before Spark knew
        rows = stream.rows(batch)
        stage = self._lake.stage(stream.name, number)
        if "corrupt" in stream.partition_by:
            rows = rows.withColumn("corrupt", F.col("error").isNotNull()).withColumn("date", F.to_date("logged_at"))
        else:
            rows = rows.withColumn("date", F.to_date("sent_at"))
        rows.write.partitionBy(*stream.partition_by).parquet(stage)
        counts = self._counts(stream, number, stage)
        self._lake.publish(stream.name, number, stream.parts, {**range_, "rows": counts, "payload": self._payload})
        self._rows.update(counts)
        told = ", ".join(f"{count:,} {table}" for table, count in counts.items() if count or table != "corrupt")
        self._say(f"batch {number} of {stream.name}: {told}")

    def _planned(self, stream: Stream, number: int) -> Offsets:
        """Where a batch ends: Spark has written it down before it gave us the batch."""
        text = self._lake.read_text(f"_checkpoints/{stream.name}/offsets/{number}")
        assert text is not None
        return json.loads(text.splitlines()[-1])

    def _counts(self, stream: Stream, number: int, stage: str) -> dict[str, int]:
        """Count what is staged, by the files' own footers; refuse markers that this pipeline does not know."""
        counts = {}
        for table, part in stream.parts.items():
            if not self._lake.staged(stream.name, number, part):
                counts[table] = 0
                continue
            found = self._spark.read.schema(_READ[table]).parquet(f"{stage}/{part}")
            counts[table] = found.count()
            if table == "corrupt" and counts[table]:
                # Like the trackers, pass over a newer version only if an operator ordered the record into quarantine.
                record = F.concat_ws("/", "log_partition", "log_offset", F.sha2("raw", 256))
                unknown = F.col("error").startswith("unknown version") & ~record.isin(self._ordered)
                newer = found.where(unknown).first()
                if newer is not None:
                    raise PipelineError(
                        f"{self._connection.names.markers}/{newer.log_partition}/{newer.log_offset}: {newer.error}."
                        " None of its batch was ingested. Use the pipeline of a newer Marq; if no newer Marq wrote the"
                        f" record: faust -A app quarantine {newer.log_partition} {newer.log_offset}"
                    )
        return counts

    # --- the round ----------------------------------------------------------------------------------------------------

    def _close(self, streams: list[Stream], told: Said, written: Offsets) -> None:
        lasts = {stream.name: self._lake.last_commit(stream.name) for stream in streams}
        begins = _named(self._topics.begins(written))
        end = _joined(begins, *[last["end"] for last in lasts.values() if last is not None])
        held_back = sorted(
            f"{topic}/{partition}"
            for topic, partitions in written.items()
            for partition, position in partitions.items()
            if end[topic].get(partition, 0) < position
        )
        round_ = {
            "last": {name: -1 if last is None else last["batch"] for name, last in lasts.items()},
            "end": end,
            "begins": begins,
            "first": {name: first["begin"] for name in lasts if (first := self._lake.commit(name, 0)) is not None},
            "held_back": held_back,
            "without_dead_letters": sorted(told.without_dead_letters),
        }
        before = self._lake.last_commit(ROUNDS)
        number = 0 if before is None else before["batch"] + 1
        self._lake.publish(ROUNDS, number, {}, round_)


#: The markers' staged files are in a directory for what could be read, and one for what could not.
_BY_READABILITY = {"markers": "corrupt=false", "corrupt": "corrupt=true"}
_READ = {
    "markers": MARKERS,
    "corrupt": CORRUPT,
    "messages": MESSAGES,
    "dead_letters": DEAD_LETTERS,
}


def _joined(*offsets: Offsets) -> Offsets:
    """Return offsets of several topics as one; of a partition that is named twice the last."""
    found: Offsets = {}
    for each in offsets:
        for topic, partitions in each.items():
            found.setdefault(topic, {}).update(partitions)
    return found


def _named(offsets: Mapping[str, Mapping[int, int]]) -> Offsets:
    return {topic: {str(each): offset for each, offset in found.items()} for topic, found in offsets.items()}


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _explained(error: PySparkException, stream: Stream) -> PipelineError:
    text = str(error)
    if "oncurrent" in text:
        return PipelineError(f"another ingest writes {stream.name} into this data directory: stop one of them")
    lines = [line for line in text.splitlines() if line.strip()]
    return PipelineError(f"{stream.name} could not be read: {lines[0] if lines else type(error).__name__}")


def batches(lake: Lake, stream: str, after: int, to: int) -> Iterator[Commit]:
    """Return the commits of a stream after one batch, up to another."""
    for number in range(after + 1, to + 1):
        commit = lake.commit(stream, number)
        if commit is None:
            raise PipelineError(f"{lake.path}: batch {number} of {stream} is gone; was something deleted by hand?")
        yield commit
