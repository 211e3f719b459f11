"""Dead letters as rows, the SQL that chooses among them, and the markers that settle them.

What a dead letter says, which markers settle it and what a note tells is said in ``marq.core`` once; here it is applied
to a DataFrame. A letter's place in its topic is its identity for the trackers, who take each place once and for ever:
so markers may be written twice, by a task that is tried again or by somebody else at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.core import dead_letters
from marq.core.marker_codec import encode
from marq.core.markers import Headers, Source
from marq.core.names import (
    ATTEMPT_HEADER,
    DIED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
    SETTLED_HEADER,
    markers_partition,
)
from marq.core.notes import decode
from pipeline.errors import PipelineError
from pipeline.sentences import sentence
from pipeline.writing import RECORDS, Markers

#: What an expression may name.
COLUMNS = (
    "id", "queue", "value", "text", "headers", "reason", "error", "attempts", "first_sent_at", "died_at", "origin",
    "partition", "offset", "size",
)  # fmt: skip
#: Letters of one marker, before they are counted in bytes.
_PIECE = dead_letters.MAX_BATCH_LETTERS
_NOTED = "partition int, offset long, became string, by string"
_HEADERS = "array<struct<key:string,value:binary>>"
#: A time that has more digits is none: year 33658 and later.
_DIGITS = "^[0-9]{1,15}$"


class Place(NamedTuple):
    """A record of the dead-letters topic, as ``marq.core`` wants it."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Asked(NamedTuple):
    """Who asks for what: ``queue`` is where letters go to, ``holder`` the number by which notes answer."""

    queue: str
    holder: int
    topic: str
    markers: Markers


# --- rows -------------------------------------------------------------------------------------------------------------


def letters(records: DataFrame, queue: str) -> DataFrame:
    """Return the dead letters of a queue, settled or not, among the records of their topic."""
    kept = records.where((F.col("key") == F.lit(queue.encode())) & ~_is_note())
    headers = F.coalesce(F.col("headers"), F.lit(None).cast(_HEADERS), F.array().cast(_HEADERS))
    place = F.concat_ws("/", F.col("topic"), F.col("partition"), F.col("offset"))
    return kept.withColumn("headers", headers).select(
        F.when(F.length(_text(ID_HEADER)) > 0, _text(ID_HEADER)).otherwise(place).alias("id"),
        F.lit(queue).alias("queue"),
        F.col("value"),
        F.make_valid_utf8(F.col("value").cast("string")).alias("text"),
        _senders_headers().alias("headers"),
        F.coalesce(_text(REASON_HEADER), F.lit("")).alias("reason"),
        F.coalesce(_text(ERROR_HEADER), F.lit("")).alias("error"),
        F.coalesce(_number(ATTEMPT_HEADER).cast("int"), F.lit(1)).alias("attempts"),
        F.coalesce(F.timestamp_millis(_number(FIRST_SENT_HEADER)), F.col("timestamp")).alias("first_sent_at"),
        F.coalesce(F.timestamp_millis(_number(DIED_AT_HEADER)), F.col("timestamp")).alias("died_at"),
        F.coalesce(_text(ORIGIN_HEADER), F.lit("")).alias("origin"),
        F.col("partition"),
        F.col("offset"),
        F.coalesce(F.length("value"), F.lit(0)).alias("size"),
    )


def notes(records: DataFrame, topic: str) -> DataFrame:
    """Return what notes among the records say: partition, offset, became, by (16 hexadecimal digits)."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for row in (row for batch in batches for row in batch.to_pylist()):
            note = decode(Source(topic, row["partition"]), row["value"])
            if note is not None:
                alike = (row["partition"], str(note.became), f"{note.holder:016x}")
                columns = [pa.array([each] * len(note.offsets)) for each in alike]
                offsets = pa.array(note.offsets, pa.int64())
                yield pa.RecordBatch.from_arrays(
                    [columns[0].cast(pa.int32()), offsets, *columns[1:]], names=["partition", "offset", "became", "by"]
                )

    return records.where(_is_note()).select("partition", "value").mapInArrow(read, _NOTED)


def unsettled(chosen: DataFrame, noted: DataFrame) -> DataFrame:
    """Return the letters that no note names."""
    return chosen.join(noted.select("partition", "offset").distinct(), ["partition", "offset"], "left_anti")


def chosen(found: DataFrame, where: str | None) -> DataFrame:
    """Return the letters of which a SQL expression is true.

    Raises:
        PipelineError: it is no expression, names a column that there is not, or is not boolean.
    """
    if where is None:
        return found
    try:
        return found.where(where)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"--where {where!r}: {_refusal(error)}") from error


def _refusal(error: Exception) -> str:
    listed = f"the columns are {', '.join(COLUMNS)}"
    known = isinstance(error, PySparkException)
    condition, said = (error.getCondition() or "", error.getMessageParameters() or {}) if known else ("", {})
    if condition.startswith("UNRESOLVED_COLUMN"):
        return f"there is no column {said.get('objectName', '').strip('`')!r}; {listed}"
    if condition == "DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN":
        kind = said.get("type", "").strip('"').lower()
        return f"it is of type {kind}, but it has to be true or false, such as \"reason LIKE '%timeout%'\"; {listed}"
    if condition.startswith("PARSE_"):
        return f"it is no SQL expression ({_plain(sentence(error))}); {listed}"
    return f"{_plain(sentence(error))}; {listed}"


def _plain(text: str) -> str:
    """Leave out what Spark's own messages begin with, and where they point to."""
    text = text.rpartition("Exception: ")[2]
    return text.partition("] ")[2].partition(" SQLSTATE")[0].rstrip(". ") or text


def _is_note() -> Column:
    headers = F.coalesce(F.col("headers"), F.array().cast(_HEADERS))
    return F.exists(headers, lambda header: header["key"] == SETTLED_HEADER)


def _text(name: str) -> Column:
    """A header as text, the last one where there are several; null where there is none."""
    found = F.filter(F.col("headers"), lambda header: header["key"] == name)
    return F.make_valid_utf8(F.try_element_at(found, F.lit(-1))["value"].cast("string"))


def _number(name: str) -> Column:
    return F.when(F.rlike(_text(name), F.lit(_DIGITS)), _text(name).try_cast("bigint"))


def _senders_headers() -> Column:
    """Those of the sender as a map; of several with one name the last one."""

    def last(header: Column, index: Column) -> Column:
        later = F.slice(F.col("headers"), index + 2, F.size("headers"))
        return ~header["key"].startswith(RESERVED_HEADER) & ~F.exists(later, lambda each: each["key"] == header["key"])

    kept = F.filter(F.col("headers"), last)
    return F.map_from_entries(
        F.transform(
            kept,
            lambda each: F.struct(
                each["key"].alias("key"), F.make_valid_utf8(each["value"].cast("string")).alias("value")
            ),
        )
    )


# --- markers ----------------------------------------------------------------------------------------------------------


def redrive(records: DataFrame, wanted: Mapping[int, np.ndarray], asked: Asked) -> DataFrame:
    """Return the markers that send letters back, of those records that stand at ``wanted``: offsets by partition."""
    rows = records.select(
        "partition", "offset", F.unix_millis("timestamp").alias("timestamp"), "key", "value", "headers"
    )

    def ask(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for piece in _pieces(_places(batches, wanted), asked.markers.room_bytes):
            source = Source(asked.topic, piece[0].partition)
            made = dead_letters.redrive(asked.queue, asked.holder, source, piece, asked.markers.room_bytes)
            yield records_of(asked.markers, [(source, encode(marker)) for marker in made])

    return rows.mapInArrow(ask, RECORDS)


def discard(wanted: Mapping[int, np.ndarray], queue: str, asked: Asked) -> pa.Table:
    """Return the markers that delete letters of a queue which stand at ``wanted``."""
    made = [
        (marker.source, encode(marker))
        for partition, offsets in wanted.items()
        for marker in dead_letters.discard(queue, asked.holder, Source(asked.topic, partition), offsets.tolist())
    ]
    return pa.Table.from_batches([records_of(asked.markers, made)])


def records_of(markers: Markers, made: Sequence[tuple[Source, bytes]]) -> pa.RecordBatch:
    """Return rows for the Kafka sink: each marker goes where its source belongs."""
    partitions = [markers_partition(*source, markers.partitions) for source, _ in made]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([markers.topic] * len(made), pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array([value for _, value in made], pa.binary()),
        ],
        names=["topic", "partition", "value"],
    )


def _places(batches: Iterable[pa.RecordBatch], wanted: Mapping[int, np.ndarray]) -> Iterator[Place]:
    for batch in batches:
        offsets, partitions = batch.column("offset").to_numpy(), batch.column("partition").to_numpy()
        mine = np.zeros(len(offsets), dtype=bool)
        for partition in np.unique(partitions):
            here = partitions == partition
            mine[here] = np.isin(offsets[here], wanted.get(int(partition), []))
        for row in batch.filter(pa.array(mine)).to_pylist():
            headers = tuple((each["key"], each["value"]) for each in row.pop("headers") or ())
            yield Place(**row, headers=headers)


def _pieces(places: Iterable[Place], limit_bytes: int) -> Iterator[list[Place]]:
    """Cut places into runs of one partition each that are about one marker, so that no more is in memory."""
    for _, group in groupby(places, key=lambda place: place.partition):
        piece: list[Place] = []
        size = 0
        for place in group:
            bytes_here = len(place.value or b"") + sum(len(value or b"") for _, value in place.headers)
            if piece and (len(piece) == _PIECE or size + bytes_here > limit_bytes):
                yield piece
                piece, size = [], 0
            piece.append(place)
            size += bytes_here
        if piece:
            yield piece
