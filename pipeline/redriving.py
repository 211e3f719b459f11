"""Redrives or deletes dead letters in bulk, from the survey to the trackers' last note.

Spark reads the topic once to find the dead letters and once more, step by step, for their contents. The driver keeps
only the place of each, so a million dead letters take a few megabytes. Every written request is durable and takes
effect even if nothing waits for it, and trackers take each place once. So a redrive may be killed at any point and run
again, twice at the same time, and Spark may retry a task.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from marq.wire.dead_letter_notes import Disposition
from pipeline import dead_letters
from pipeline.dead_letters import Requester
from pipeline.errors import PipelineError, sentence
from pipeline.kafka import Connection, TopicAdmin, committed_records
from pipeline.writing import Progress, StepPacer, limit_arrow_batches, markers_of, write

STEP_LETTERS = 25_000
#: With more unanswered requests, the job waits, so that a tracker that is down does not return to a flood of work.
MAX_UNANSWERED = 50_000
SAMPLE_ROWS = 10
REASONS = 20
_SHOWN_CHARACTERS = 200
_POLL_S = 0.2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: States of a dead letter in a redrive.
_NOT_ASKED, _ASKED, _DONE, _BEFORE = range(4)


class Request(NamedTuple):
    """The user's request: ``to`` is the target queue, ``wait_s`` how long to wait for the next note."""

    queue: str
    to: str
    where: str | None = None
    limit: int | None = None
    rate: float | None = None
    delete: bool = False
    wait_s: float = 30.0
    show_values: bool = False


@dataclass
class Result:
    """Counts: ``done`` by this call, ``already_settled`` by others meanwhile, ``removed`` by retention."""

    chosen: int
    requested: int = 0
    done: int = 0
    already_settled: int = 0
    removed: int = 0

    @property
    def unanswered(self) -> int:
        return self.requested - self.done - self.already_settled - self.removed


class Letters:
    """The dead-letter topic, as it is at the start."""

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self.spark = spark
        self.connection = connection
        self.topics = TopicAdmin(spark, connection)
        self.topic = connection.names.dead_letters
        self.begins = self.topics.begins([self.topic])[self.topic]
        self.ends = self.topics.ends([self.topic])[self.topic]

    def records(self, ranges: Mapping[int, range]) -> DataFrame:
        """Return the committed records of these offsets."""
        bounds = {self.topic: {partition: (offsets.start, offsets.stop) for partition, offsets in ranges.items()}}
        # Dead letters that retention removes meanwhile can't be redriven; the others still can.
        options = {"failOnDataLoss": "false", "includeHeaders": "true"}
        return committed_records(self.spark, self.connection, bounds, **options)

    def survey(self, request: Request) -> ChosenDeadLetters:
        """Find the dead letters of a request."""
        records = self.records({p: range(begin, max(begin, self.ends[p])) for p, begin in self.begins.items()})
        rows = dead_letters.chosen(dead_letters.of_queue(records, request.queue), request.where)
        texts = ("reason", "error", "text") if request.show_values else ("reason", "error")
        shown = [F.substring(name, 1, _SHOWN_CHARACTERS).alias(name) for name in texts]
        rows = rows.select("partition", "offset", "dead_lettered_at", "size", "id", "attempts", *shown)
        left = dead_letters.unsettled(rows, dead_letters.notes(records, self.topic))
        if request.limit is not None:
            left = left.orderBy("dead_lettered_at", "partition", "offset").limit(request.limit)
        return ChosenDeadLetters(left.persist(StorageLevel.MEMORY_AND_DISK), request)


class ChosenDeadLetters:
    """The chosen dead letters: their places, and a preview for the user."""

    def __init__(self, frame: DataFrame, request: Request) -> None:
        self._frame = frame
        try:
            places = frame.select(
                "partition", "offset", "size", F.unix_millis("dead_lettered_at").alias("died_ms")
            ).toArrow()
        except (PySparkException, Py4JError) as error:
            what = "reading the dead letters failed" if request.where is None else f"--where {request.where!r} fails"
            raise PipelineError(f"{what}: {sentence(error)}") from error
        self.partitions, self.offsets, sizes, self._died_ms = (
            places.column(name).to_numpy() for name in ("partition", "offset", "size", "died_ms")
        )
        self.largest_bytes = int(max(sizes, default=0))

    def __len__(self) -> int:
        return len(self.offsets)

    def preview(self) -> dict[str, Any]:
        """Return the count, the time range, the reasons, and the oldest dead letters."""
        if not len(self):
            return {"dead_letters": 0, "oldest": None, "newest": None, "reasons": {}, "rows": []}
        reasons = self._frame.groupBy("reason").count().orderBy(F.desc("count"), "reason").limit(REASONS).collect()
        shown = self._frame.withColumn("dead_lettered_at", F.unix_millis("dead_lettered_at"))
        rows = shown.orderBy("dead_lettered_at", "partition", "offset").limit(SAMPLE_ROWS).collect()
        return {
            "dead_letters": len(self),
            "oldest": _iso(int(self._died_ms.min())),
            "newest": _iso(int(self._died_ms.max())),
            "reasons": {row["reason"]: row["count"] for row in reasons},
            "rows": [row.asDict() | {"dead_lettered_at": _iso(row["dead_lettered_at"])} for row in rows],
        }


def _iso(time_ms: int) -> str:
    return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")


class Answers:
    """The known outcome for each chosen dead letter, from notes."""

    def __init__(self, partitions: np.ndarray, offsets: np.ndarray) -> None:
        order = np.lexsort((offsets, partitions))
        self._partitions, self._offsets = partitions[order], offsets[order]
        self._states = np.zeros(len(offsets), dtype=np.uint8)
        numbers, starts = np.unique(self._partitions, return_index=True)
        stops = np.append(starts[1:], len(offsets))
        self._slices = {int(p): slice(int(a), int(b)) for p, a, b in zip(numbers, starts, stops, strict=True)}

    def steps(self, size: int) -> Iterator[np.ndarray]:
        """Yield steps in the order of each partition's offsets, with a proportional share of every partition."""
        shares = np.empty(len(self._offsets))
        for span in self._slices.values():
            count = span.stop - span.start
            shares[span] = (np.arange(count) + 0.5) / count
        order = np.argsort(shares, kind="stable")
        for start in range(0, len(order), size):
            yield np.sort(order[start : start + size])

    def places(self, step: np.ndarray) -> dict[int, np.ndarray]:
        """Return the offsets of a step by partition."""
        partitions, offsets = self._partitions[step], self._offsets[step]
        return {int(partition): offsets[partitions == partition] for partition in np.unique(partitions)}

    def ask(self, step: np.ndarray) -> None:
        self._states[step] = np.maximum(self._states[step], _ASKED)

    def answer(self, partition: int, offsets: np.ndarray, disposition: str) -> None:
        """Apply a note; ignore places that are not among the chosen ones."""
        span = self._slices.get(partition)
        if span is None:
            return
        known, states = self._offsets[span], self._states[span]
        at = np.minimum(np.searchsorted(known, offsets), len(known) - 1)
        at = at[known[at] == offsets]
        if disposition == Disposition.BEFORE:
            # A marker that a task wrote twice is answered twice; the first answer counts.
            states[at] = np.where(states[at] == _DONE, _DONE, _BEFORE)
        else:
            states[at] = _DONE

    def removed(self, begins: Mapping[int, int]) -> int:
        """Return how many requests can't be answered because retention removed their dead letters first."""
        asked = self._states == _ASKED
        return sum(
            int(np.count_nonzero(asked[span] & (self._offsets[span] < begins.get(partition, 0))))
            for partition, span in self._slices.items()
        )

    def result(self) -> Result:
        counts = np.bincount(self._states, minlength=4)
        chosen = len(self._states)
        return Result(chosen, int(chosen - counts[_NOT_ASKED]), int(counts[_DONE]), int(counts[_BEFORE]))


class Redrive:
    """Sends the requests for a survey at its pace, and reads notes."""

    def __init__(self, topic: Letters, survey: ChosenDeadLetters, request: Request) -> None:
        self._topic = topic
        self._request = request
        self._positions = dict(topic.ends)
        self._markers = markers_of(topic.topics, topic.connection)
        self._requester = Requester(request.to, secrets.randbits(63) | 1, topic.topic, self._markers)
        self._answers = Answers(survey.partitions, survey.offsets)
        self._progress = Progress("deleted" if request.delete else "redriven", len(survey))
        limit_arrow_batches(topic.spark, survey.largest_bytes)

    def run(self) -> Result:
        """Send all requests and wait until all are answered, or until no note comes for ``wait_s``."""
        topic, pace = self._topic, StepPacer(self._request.rate, STEP_LETTERS)
        try:
            for step in self._answers.steps(pace.step):
                if not self._wait(MAX_UNANSWERED):
                    break
                pace.wait(len(step))
                write(self._markers_of(self._answers.places(step)), topic.connection, self._markers)
                self._answers.ask(step)
                self._read_notes()
            self._wait(0)
        finally:
            self._progress.clear()
        result = self.result()
        if result.unanswered:
            result.removed = self._answers.removed(topic.topics.begins([topic.topic])[topic.topic])
        return result

    def result(self) -> Result:
        """Return the counts so far without asking the cluster, which may follow an interrupt."""
        return self._answers.result()

    def _markers_of(self, wanted: Mapping[int, np.ndarray]) -> DataFrame:
        if self._request.delete:
            return self._topic.spark.createDataFrame(dead_letters.discard(wanted, self._request.queue, self._requester))
        ranges = {partition: range(int(offsets[0]), int(offsets[-1]) + 1) for partition, offsets in wanted.items()}
        return dead_letters.redrive(self._topic.records(ranges), wanted, self._requester)

    def _wait(self, most: int) -> bool:
        """Wait until at most this many requests are unanswered; return False if no more notes arrive."""
        until_s = time.monotonic() + self._request.wait_s
        while (before := self.result().unanswered) > most:
            self._read_notes()
            if self.result().unanswered < before:
                until_s = time.monotonic() + self._request.wait_s
            elif time.monotonic() > until_s:
                return False
            else:
                time.sleep(_POLL_S)
        return True

    def _read_notes(self) -> None:
        """Read from the last position to the current end of the topic."""
        topic = self._topic
        ends = topic.topics.ends([topic.topic])[topic.topic]
        starts = {partition: self._positions.get(partition, 0) for partition in ends}
        new = {partition: range(starts[partition], end) for partition, end in ends.items() if end > starts[partition]}
        if new:
            noted = dead_letters.notes(topic.records(new), topic.topic)
            mine = noted.where(F.col("by") == f"{self._requester.holder:016x}").toArrow()
            partitions, offsets, became = (mine.column(n).to_numpy() for n in ("partition", "offset", "became"))
            for partition, disposition in product(np.unique(partitions), Disposition):
                chosen = (partitions == partition) & (became == disposition)
                self._answers.answer(int(partition), offsets[chosen], disposition)
            self._positions |= {partition: offsets.stop for partition, offsets in new.items()}
        result = self.result()
        self._progress.show(result.done + result.already_settled)
