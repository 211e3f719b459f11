"""A redrive or deletion of dead letters from its survey to the trackers' last note.

The topic is read once for what is meant and once more, step by step, for the letters themselves; the driver keeps of
each only its place, so that a million letters of any size are no more than some megabytes here. What is asked for is
durable after each step and happens, whoever waits for it; trackers take each place once. So it may be killed at any
point and called again, twice at the same time, and Spark may try a task again.
"""

from __future__ import annotations

import json
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

from marq.core.notes import Became
from pipeline import letters
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, Topics
from pipeline.letters import Asked
from pipeline.progress import Progress
from pipeline.sentences import sentence
from pipeline.writing import Pace, keep_rows_small, markers_of, write

#: Letters that are asked for in one step.
STEP_LETTERS = 25_000
#: Letters that were asked for and of which no note has come: past that it waits, so that a tracker that is away does
#: not find a mountain of work.
MAX_UNANSWERED = 50_000
SAMPLE_ROWS = 10
REASONS = 20
_SHOWN_CHARACTERS = 200
_POLL_S = 0.2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NOT_ASKED, _ASKED, _DONE, _BEFORE = range(4)
_PREVIEWED = ("partition", "offset", "died_at", "size", "reason", "id", "attempts", "error")


class Request(NamedTuple):
    """What a user asks for; ``to`` is the queue that letters go to, ``wait_s`` how long to wait for the next note."""

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
    """How far it is; ``redriven`` and ``deleted`` by this call, ``already_settled`` by somebody else meanwhile."""

    chosen: int
    asked: int = 0
    done: int = 0
    already_settled: int = 0
    removed: int = 0

    @property
    def unanswered(self) -> int:
        return self.asked - self.done - self.already_settled - self.removed


class Letters:
    """The dead letters of one installation, as they are at the start."""

    def __init__(self, spark: SparkSession, connection: Connection) -> None:
        self.spark = spark
        self.connection = connection
        self.topics = Topics(spark, connection)
        self.topic = connection.names.dead_letters
        self.begins = self.topics.begins([self.topic])[self.topic]
        self.ends = self.topics.ends([self.topic])[self.topic]

    def records(self, ranges: Mapping[int, range]) -> DataFrame:
        """Return the committed records of these offsets."""
        options = self.connection.options() | {
            "assign": json.dumps({self.topic: sorted(ranges)}),
            "startingOffsets": json.dumps({self.topic: {str(p): each.start for p, each in ranges.items()}}),
            "endingOffsets": json.dumps({self.topic: {str(p): each.stop for p, each in ranges.items()}}),
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            # What the retention removes meanwhile can be redriven no more, and is no reason to leave the rest.
            "failOnDataLoss": "false",
        }
        return self.spark.read.format("kafka").options(**options).load()

    def ranges(self) -> dict[int, range]:
        """Return all offsets from the first that is kept to the end at the start."""
        return {p: range(begin, max(begin, self.ends[p])) for p, begin in self.begins.items()}

    def survey(self, request: Request) -> Survey:
        """Find what is meant.

        Raises:
            PipelineError: the expression can't be used, or the topic not be read.
        """
        records = self.records(self.ranges())
        found = letters.chosen(letters.letters(records, request.queue), request.where)
        shown = [F.substring(name, 1, _SHOWN_CHARACTERS).alias(name) for name in ("reason", "error")]
        shown += [F.substring("text", 1, _SHOWN_CHARACTERS).alias("text")] if request.show_values else []
        plain = [name for name in _PREVIEWED if name not in ("reason", "error")]
        left = letters.unsettled(found.select(*plain, *shown), letters.notes(records, self.topic))
        if request.limit is not None:
            left = left.orderBy("died_at", "partition", "offset").limit(request.limit)
        return Survey(left.persist(StorageLevel.MEMORY_AND_DISK), request)


class Survey:
    """The letters that are meant: where they stand, and what a user wants to know before."""

    def __init__(self, frame: DataFrame, request: Request) -> None:
        self._frame = frame
        try:
            places = frame.select("partition", "offset", "size", F.unix_millis("died_at").alias("died_ms")).toArrow()
        except (PySparkException, Py4JError) as error:
            what = "the dead letters can't be read" if request.where is None else f"--where {request.where!r} fails"
            raise PipelineError(f"{what}: {sentence(error)}") from error
        self.partitions = places.column("partition").to_numpy()
        self.offsets = places.column("offset").to_numpy()
        self._died_ms = places.column("died_ms").to_numpy()
        self.largest_bytes = int(max(places.column("size").to_numpy(), default=0))

    def __len__(self) -> int:
        return len(self.offsets)

    def preview(self) -> dict[str, Any]:
        """Return how many, of when, why they died, and those that died first."""
        if not len(self):
            return {"letters": 0, "oldest": None, "newest": None, "reasons": {}, "rows": []}
        reasons = self._frame.groupBy("reason").count().orderBy(F.desc("count"), "reason").limit(REASONS).collect()
        shown = self._frame.withColumn("died_at", F.unix_millis("died_at"))
        rows = shown.orderBy("died_at", "partition", "offset").limit(SAMPLE_ROWS).collect()
        return {
            "letters": len(self),
            "oldest": _iso(int(self._died_ms.min())),
            "newest": _iso(int(self._died_ms.max())),
            "reasons": {row["reason"]: row["count"] for row in reasons},
            "rows": [row.asDict() | {"died_at": _iso(row["died_at"])} for row in rows],
        }

    def close(self) -> None:
        self._frame.unpersist()


def _iso(time_ms: int) -> str:
    return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")


class Account:
    """What became of each place; answers come from notes."""

    def __init__(self, partitions: np.ndarray, offsets: np.ndarray) -> None:
        order = np.lexsort((offsets, partitions))
        self._partitions, self._offsets = partitions[order], offsets[order]
        self._states = np.zeros(len(offsets), dtype=np.uint8)
        numbers, starts = np.unique(self._partitions, return_index=True)
        stops = np.append(starts[1:], len(offsets))
        self._slices = {int(p): slice(int(a), int(b)) for p, a, b in zip(numbers, starts, stops, strict=True)}

    def steps(self, size: int) -> Iterator[np.ndarray]:
        """Return runs of letters, in the order of places within each partition, from all partitions alike."""
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
        return {int(each): offsets[partitions == each] for each in np.unique(partitions)}

    def ask(self, step: np.ndarray) -> None:
        """Note that these were asked for."""
        states = self._states[step]
        self._states[step] = np.maximum(states, _ASKED)

    def answer(self, partition: int, offsets: np.ndarray, became: str) -> None:
        """Take what a note says; of places that it is not about nothing is known here."""
        span = self._slices.get(partition)
        if span is None:
            return
        known, states = self._offsets[span], self._states[span]
        at = np.minimum(np.searchsorted(known, offsets), len(known) - 1)
        at = at[known[at] == offsets]
        if became == Became.BEFORE:
            # A marker that a task wrote twice is answered twice: what it did counts.
            states[at] = np.where(states[at] == _DONE, _DONE, _BEFORE)
        else:
            states[at] = _DONE

    def removed(self, begins: Mapping[int, int]) -> int:
        """Return how many have no answer because the retention removed them before they were read."""
        asked = self._states == _ASKED
        return sum(
            int(np.count_nonzero(asked[span] & (self._offsets[span] < begins.get(partition, 0))))
            for partition, span in self._slices.items()
        )

    def result(self) -> Result:
        counts = np.bincount(self._states, minlength=4)
        chosen = len(self._states)
        return Result(chosen, int(chosen - counts[_NOT_ASKED]), int(counts[_DONE]), int(counts[_BEFORE]))


class Settling:
    """Asks for what a survey found, at its pace, and listens to notes."""

    def __init__(self, of: Letters, survey: Survey, request: Request) -> None:
        self._of = of
        self._request = request
        self._spark = of.spark
        self._positions = dict(of.ends)
        self._markers = markers_of(of.topics, of.connection)
        self._asked = Asked(request.to, secrets.randbits(63) | 1, of.topic, self._markers)
        self._account = Account(survey.partitions, survey.offsets)
        self._progress = Progress("deleted" if request.delete else "redriven", len(survey))
        keep_rows_small(of.spark, survey.largest_bytes)

    def run(self) -> Result:
        """Ask for all and wait until all is answered, or for too long.

        Raises:
            PipelineError: it is not known how far it came: the same call again does the rest.
        """
        pace = Pace(self._request.rate, STEP_LETTERS)
        try:
            for step in self._account.steps(pace.step):
                if not self._listen(MAX_UNANSWERED):
                    break
                time.sleep(pace.wait_s())
                pace.took(len(step))
                write(self._markers_of(self._account.places(step)), self._of.connection, self._markers)
                self._account.ask(step)
                self._hear()
            self._listen(0)
        finally:
            self._progress.end()
        found = self.result()
        if found.unanswered:
            found.removed = self._account.removed(self._of.topics.begins([self._of.topic])[self._of.topic])
        return found

    def result(self) -> Result:
        """Return how far it is, without asking anybody: it may have been interrupted."""
        return self._account.result()

    def _markers_of(self, wanted: Mapping[int, np.ndarray]) -> DataFrame:
        if self._request.delete:
            return self._spark.createDataFrame(letters.discard(wanted, self._request.queue, self._asked))
        ranges = {partition: range(int(each[0]), int(each[-1]) + 1) for partition, each in wanted.items()}
        return letters.redrive(self._of.records(ranges), wanted, self._asked)

    def _listen(self, unanswered: int) -> bool:
        """Wait until no more than so many are unanswered; False if nothing comes any more."""
        until_s = time.monotonic() + self._request.wait_s
        while (before := self._account.result().unanswered) > unanswered:
            self._hear()
            if self._account.result().unanswered < before:
                until_s = time.monotonic() + self._request.wait_s
            elif time.monotonic() > until_s:
                return False
            else:
                time.sleep(_POLL_S)
        return True

    def _hear(self) -> None:
        """Read on from where the topic ended, up to where it ends now."""
        ends = self._of.topics.ends([self._of.topic])[self._of.topic]
        news = {p: range(self._positions.get(p, 0), end) for p, end in ends.items() if end > self._positions.get(p, 0)}
        if news:
            noted = letters.notes(self._of.records(news), self._of.topic)
            mine = noted.where(F.col("by") == f"{self._asked.holder:016x}").toArrow()
            partitions, offsets = mine.column("partition").to_numpy(), mine.column("offset").to_numpy()
            became = mine.column("became").to_numpy()
            for partition, what in product(np.unique(partitions), Became):
                self._account.answer(int(partition), offsets[(partitions == partition) & (became == what)], what)
            self._positions |= {partition: each.stop for partition, each in news.items()}
        found = self._account.result()
        self._progress.tell(found.done + found.already_settled)
