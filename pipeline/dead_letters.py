"""Dead letters as rows, their selection by SQL, and the markers that redrive or delete them.

``marq.core`` defines what a dead letter contains, which markers settle it and what a note means; this module applies
that to DataFrames. Trackers accept each place of the dead-letter topic once. So markers may be written twice, by a
retried task or by another client at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.core.deliveries import dead_letter_records
from marq.wire.dead_letter_notes import decode
from marq.wire.marker_codec import encode
from marq.wire.markers import Headers, Source
from marq.wire.names import (
    DEAD_LETTERED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
    markers_partition,
)
from pipeline.errors import PipelineError, sentence
from pipeline.records import header_attempt, header_text, header_time, is_note, with_own_headers
from pipeline.writing import HEADERS, RECORDS, MarkersTopic, runs

#: Columns for expressions.
COLUMNS = (
    "id", "queue", "value", "text", "headers", "reason", "error", "attempts", "first_sent_at", "dead_lettered_at",
    "origin", "partition", "offset", "size",
)  # fmt: skip
_NOTES = "partition int, offset long, became string, by string"


class StoredDeadLetter(NamedTuple):
    """A record of the dead-letter topic, as ``marq.core`` expects it."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Requester(NamedTuple):
    """The sender of markers: ``queue`` receives redriven messages, notes answer to the number ``holder``."""

    queue: str
    holder: int
    topic: str
    markers: MarkersTopic


def of_queue(records: DataFrame, queue: str) -> DataFrame:
    """Return the dead letters of a queue, settled or not, among the records of their topic."""
    kept = with_own_headers(records).where((F.col("key") == F.lit(queue.encode())) & ~is_note())
    place = F.concat_ws("/", F.col("topic"), F.col("partition"), F.col("offset"))
    columns = {
        "id": F.coalesce(header_text(ID_HEADER), place),
        "queue": F.lit(queue),
        "text": F.make_valid_utf8(F.col("value").cast("string")),
        "headers": _senders_headers(),
        "reason": F.coalesce(header_text(REASON_HEADER), F.lit("")),
        "error": F.coalesce(header_text(ERROR_HEADER), F.lit("")),
        "attempts": F.coalesce(header_attempt(), F.lit(1)),
        "first_sent_at": F.coalesce(header_time(FIRST_SENT_HEADER), F.col("timestamp")),
        "dead_lettered_at": F.coalesce(header_time(DEAD_LETTERED_AT_HEADER), F.col("timestamp")),
        "origin": F.coalesce(header_text(ORIGIN_HEADER), F.lit("")),
        "size": F.coalesce(F.length("value"), F.lit(0)),
    }
    rows = kept.withColumn("headers", F.coalesce(F.col("headers"), F.lit(None).cast(HEADERS), F.array().cast(HEADERS)))
    return rows.withColumns(columns).select(*COLUMNS)


def notes(records: DataFrame, topic: str) -> DataFrame:
    """Return the contents of notes among the records: partition, offset, became, by (16 hexadecimal digits)."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for row in (row for batch in batches for row in batch.to_pylist()):
            note = decode(Source(topic, row["partition"]), row["value"])
            if note is not None:
                offsets = note.settled_before(row["offset"])
                count = len(offsets)
                columns = [
                    pa.array([row["partition"]] * count, pa.int32()),
                    pa.array(offsets, pa.int64()),
                    pa.array([str(note.became)] * count),
                    pa.array([f"{note.holder:016x}"] * count),
                ]
                yield pa.RecordBatch.from_arrays(columns, names=["partition", "offset", "became", "by"])

    return with_own_headers(records).where(is_note()).select("partition", "offset", "value").mapInArrow(read, _NOTES)


def unsettled(chosen: DataFrame, noted: DataFrame) -> DataFrame:
    return chosen.join(noted.select("partition", "offset").distinct(), ["partition", "offset"], "left_anti")


def chosen(rows: DataFrame, where: str | None) -> DataFrame:
    """Return the dead letters for which a SQL expression is true; raises PipelineError if it can't be used."""
    if where is None:
        return rows
    try:
        return rows.where(where)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"--where {where!r}: {_problem(error)}; the columns are {', '.join(COLUMNS)}") from error


def _problem(error: Exception) -> str:
    known = isinstance(error, PySparkException)
    condition, details = (error.getCondition() or "", error.getMessageParameters() or {}) if known else ("", {})
    if condition.startswith("UNRESOLVED_COLUMN"):
        return f"there is no column {details.get('objectName', '').strip('`')!r}"
    if condition == "DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN":
        kind = details.get("type", "").strip('"').lower()
        return f"it is of type {kind}, but it must be true or false, such as \"reason LIKE '%timeout%'\""
    # Spark's own message, without the class and the error condition before it and the state after it.
    text = sentence(error).rpartition("Exception: ")[2]
    text = text.partition("] ")[2].partition(" SQLSTATE")[0].rstrip(". ") or text
    return f"it is not a valid SQL expression ({text})" if condition.startswith("PARSE_") else text


def _senders_headers() -> Column:
    """Return the sender's headers as a map; of several with one name the last one."""

    def last(header: Column, index: Column) -> Column:
        later = F.slice(F.col("headers"), index + 2, F.size("headers"))
        return ~header["key"].startswith(RESERVED_HEADER) & ~F.exists(
            later, lambda other: other["key"] == header["key"]
        )

    def entry(header: Column) -> Column:
        return F.struct(header["key"].alias("key"), F.make_valid_utf8(header["value"].cast("string")).alias("value"))

    return F.map_from_entries(F.transform(F.filter(F.col("headers"), last), entry))


def redrive(records: DataFrame, wanted: Mapping[int, np.ndarray], requester: Requester) -> DataFrame:
    """Return the markers that redrive the records at the offsets ``wanted`` of each partition."""
    timestamp = F.unix_millis("timestamp").alias("timestamp")
    rows = records.select("partition", "offset", timestamp, "key", "value", "headers")
    room_bytes = requester.markers.room_bytes

    def encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places = _places(batches, wanted)
        for run in runs(places, attrgetter("partition"), _bytes, dead_letter_records.MAX_BATCH_LETTERS, room_bytes):
            source = Source(requester.topic, run[0].partition)
            markers = dead_letter_records.redrive(requester.queue, requester.holder, source, run, room_bytes)
            yield records_of(requester.markers, [(source, encode(marker)) for marker in markers])

    return rows.mapInArrow(encoded, RECORDS)


def discard(wanted: Mapping[int, np.ndarray], queue: str, requester: Requester) -> pa.Table:
    """Return the markers that delete the dead letters of a queue at the offsets ``wanted`` of each partition."""
    encoded = [
        (marker.source, encode(marker))
        for partition, offsets in wanted.items()
        for marker in dead_letter_records.discard(
            queue, requester.holder, Source(requester.topic, partition), offsets.tolist()
        )
    ]
    return pa.Table.from_batches([records_of(requester.markers, encoded)])


def records_of(markers: MarkersTopic, encoded: Sequence[tuple[Source, bytes]]) -> pa.RecordBatch:
    """Return rows for the Kafka sink: each marker goes to the partition of its source."""
    partitions = [markers_partition(*source, markers.partitions) for source, _ in encoded]
    columns = [
        pa.array([markers.topic] * len(encoded), pa.string()),
        pa.array(partitions, pa.int32()),
        pa.array([value for _, value in encoded], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["topic", "partition", "value"])


def _places(batches: Iterable[pa.RecordBatch], wanted: Mapping[int, np.ndarray]) -> Iterator[StoredDeadLetter]:
    for batch in batches:
        offsets, partitions = batch.column("offset").to_numpy(), batch.column("partition").to_numpy()
        mask = np.zeros(len(offsets), dtype=bool)
        for partition in np.unique(partitions):
            here = partitions == partition
            mask[here] = np.isin(offsets[here], wanted.get(int(partition), []))
        for row in batch.filter(pa.array(mask)).to_pylist():
            headers = tuple((header["key"], header["value"]) for header in row.pop("headers") or ())
            yield StoredDeadLetter(**row, headers=headers)


def _bytes(place: StoredDeadLetter) -> int:
    return len(place.value or b"") + sum(len(value or b"") for _, value in place.headers)
