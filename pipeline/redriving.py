"""Redrives or deletes dead letters in bulk: Spark finds them, and Marq's own client settles them.

Spark reads the topic once. The driver keeps only the place of each dead letter, so a million take a few megabytes.
Every written request is durable and takes effect even if nothing waits for it, and trackers take each place once. So a
redrive may be killed at any point and run again, twice at the same time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from marq.backend.cluster import cluster_of, marker_writer
from marq.core.deliveries import dead_letter_records
from marq.dead_letters.log import DeadLetterLog, open_dead_letter_log
from marq.dead_letters.redrive_requests import RedriveLimits, RedriveProgress, RedriveRequester
from marq.dead_letters.selection import Spot, dead_letters_at
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Delay, Discard, Source
from marq.wire.names import FRAME_BYTES
from pipeline import dead_letters
from pipeline.errors import PipelineError, sentence
from pipeline.kafka import Connection, TopicAdmin, committed_records
from pipeline.writing import Progress

SAMPLE_ROWS = 10
REASONS = 20
_SHOWN_CHARACTERS = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


def survey(spark: SparkSession, connection: Connection, request: Request) -> ChosenDeadLetters:
    """Find the dead letters of a request."""
    topics, topic = TopicAdmin(spark, connection), connection.names.dead_letters
    begins, ends = topics.begins([topic])[topic], topics.ends([topic])[topic]
    bounds = {topic: {partition: (begin, max(begin, ends[partition])) for partition, begin in begins.items()}}
    # Dead letters that retention removes meanwhile can't be redriven; the others still can.
    records = committed_records(spark, connection, bounds, failOnDataLoss="false", includeHeaders="true")
    rows = dead_letters.chosen(dead_letters.of_queue(records, request.queue), request.where)
    texts = ("reason", "error", "text") if request.show_values else ("reason", "error")
    shown = [F.substring(name, 1, _SHOWN_CHARACTERS).alias(name) for name in texts]
    rows = rows.select("partition", "offset", "dead_lettered_at", "size", "id", "attempts", *shown)
    left = rows.join(dead_letters.settled(records, topic), ["partition", "offset"], "left_anti")
    if request.limit is not None:
        left = left.orderBy("dead_lettered_at", "partition", "offset").limit(request.limit)
    return ChosenDeadLetters(left.persist(StorageLevel.MEMORY_AND_DISK), request, ends)


class ChosenDeadLetters:
    """The chosen dead letters: their places, and a preview for the user."""

    def __init__(self, frame: DataFrame, request: Request, ends: Mapping[str, int]) -> None:
        self._frame = frame
        #: Where each partition ended when they were chosen: notes about them come later.
        self.ends = ends
        try:
            places = frame.select("partition", "offset", F.unix_millis("dead_lettered_at").alias("died_ms")).toArrow()
        except (PySparkException, Py4JError) as error:
            what = "reading the dead letters failed" if request.where is None else f"--where {request.where!r} fails"
            raise PipelineError(f"{what}: {sentence(error)}") from error
        in_order = places.sort_by([("partition", "ascending"), ("offset", "ascending")])
        self._partitions, self._offsets, self._died_ms = (column.to_numpy() for column in in_order.columns)

    def __len__(self) -> int:
        return len(self._offsets)

    def spots(self) -> Iterator[Spot]:
        """Return the places, by partition and offset."""
        return (Spot(int(p), int(o), 0, 0) for p, o in zip(self._partitions, self._offsets, strict=True))

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


class Redrive:
    """Settles the chosen dead letters at the request's rate."""

    def __init__(self, connection: Connection, chosen: ChosenDeadLetters, request: Request) -> None:
        self._topic = connection.names.dead_letters
        self._chosen = chosen
        self._request = request
        self._limits = RedriveLimits(None, request.rate, False)
        self._holder = secrets.randbits(63) | 1
        self._removed = 0
        self._line = Progress("deleted" if request.delete else "redriven", len(chosen))
        self._counts = RedriveProgress(self._topic, len(chosen), Result, self._show)

    def run(self) -> Result:
        """Send all requests and wait until all are answered, or until no note comes for ``wait_s``.

        Raises:
            MarqError: the cluster does not answer, a permission is missing, or a write was not confirmed.
        """
        try:
            asyncio.run(self._settle())
        except BrokerUnavailable:
            if not self._counts.stalled:
                raise
        finally:
            self._line.clear()
        return self.result()

    def result(self) -> Result:
        """Return the counts so far without asking the cluster, which may follow an interrupt."""
        counts = self._counts.result
        return replace(counts, requested=counts.requested + self._removed, removed=self._removed)

    async def _settle(self) -> None:
        settings = ClientSettings.read()
        cluster, wait_s = cluster_of(settings), self._request.wait_s
        topics = await cluster.topics()
        async with (
            marker_writer(cluster, topics) as writer,
            open_dead_letter_log(settings) as log,
            open_dead_letter_log(settings) as notes,
        ):
            notes.seek({int(partition): end for partition, end in self._chosen.ends.items()})
            requester = RedriveRequester(
                cluster, writer, topics.markers_partitions, notes, self._counts, self._holder, self._limits,
                settings.request_timeout_ms / 1000, wait_s,
            )  # fmt: skip
            if self._request.delete:
                for discards in self._discards():
                    await requester.ask(discards)
            else:
                async for delays in self._delays(log, topics.markers_limit_bytes - FRAME_BYTES):
                    await requester.ask(delays)
                # Retention has removed the others, which can't be redriven any more.
                self._removed = len(self._chosen) - self.result().requested
            await requester.finish()

    async def _delays(self, log: DeadLetterLog, limit_bytes: int) -> AsyncIterator[Sequence[Delay]]:
        async for records in dead_letters_at(log, self._chosen.spots()):
            for piece in self._limits.pieces(records):
                for partition, letters in groupby(piece, attrgetter("partition")):
                    source = Source(self._topic, partition)
                    yield [
                        *dead_letter_records.redrive(self._request.to, self._holder, source, [*letters], limit_bytes)
                    ]

    def _discards(self) -> Iterator[Sequence[Discard]]:
        for piece in self._limits.pieces(self._chosen.spots()):
            for partition, spots in groupby(piece, attrgetter("partition")):
                offsets, source = [spot.offset for spot in spots], Source(self._topic, partition)
                yield [*dead_letter_records.discard(self._request.queue, self._holder, source, offsets)]

    def _show(self, result: Result) -> None:
        self._line.show(result.done + result.already_settled)
