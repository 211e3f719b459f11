"""Rows become messages: checked, numbered, and written as DELAY markers that count once however often they are written.

**Why markers, and not records of the messages topic.** A record that is written is a message. A task that Spark tries
again, or a load that was killed and is started again, writes records a second time, and no Kafka transaction spans the
tasks of a Spark job. A DELAY names a message by a source and a number; with ``from_offset`` a tracker takes each number
once and for ever (docs/protocol.md, "What a sender does that delays"). So it does not matter how often a row is
written, nor by how many at the same time. It costs a way round: trackers send a copy of each row, some 65,900 a second
on two cores, where a record would need nobody.

A load draws one source, and numbers its rows in as many partitions of it as the markers topic has, :data:`RUN` rows in
each in turn, without gaps: so all trackers share the work, and what a tracker keeps of a load are a few intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.core.marker_codec import encode
from marq.core.markers import Columns, Delay, Source
from marq.core.names import ENVELOPE_ROOM_BYTES, HEADER_ROOM_BYTES, RESERVED_HEADER
from pipeline.errors import PipelineError
from pipeline.inputs import CORRUPT, LINE, Input
from pipeline.letters import records_of
from pipeline.writing import RECORDS, Markers

#: Rows that follow each other in one partition of the source, and the most in one marker.
RUN = 500
#: As in the library: longer than a calendar.
MAX_DELAY_MS = 10_000 * 366 * 24 * 3_600_000
#: Of a marker's bytes, what is no payload; of the envelope's room, what the rest of an ACQUIRE takes.
_HEAD_BYTES, _ENVELOPE_USED_BYTES = 1_024, 2_048
#: What Kafka adds to each header at the most.
_HEADER_FRAME_BYTES = 10
_MAX_HEADER_NAME_BYTES = 65_535
#: ISO 8601 with a zone: without one it is nobody's time.
_ISO = r"^\s*\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?\s*(Z|[+-]\d{2}:?\d{2})\s*$"
_HEADERS = "array<struct<key:string,value:binary>>"

NO_LINE = "the line can't be read"
NO_VALUE = "no value"
NO_TIME = "unreadable time"
NEGATIVE = "negative delay"
NO_TEXT = "a header is not UTF-8"


class Fields(NamedTuple):
    """Which columns make the message; ``json_value`` are those of its JSON, None with ``value`` or for all."""

    value: str | None = None
    json_value: tuple[str, ...] | None = None
    key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay: str | None = None
    at: str | None = None


class Sent(NamedTuple):
    """What all rows of a load have in common; ``topic`` stands for one in their identities."""

    queue: str
    topic: str
    holder: int
    timestamp_ms: int
    relative: bool
    markers: Markers


# --- checking ---------------------------------------------------------------------------------------------------------


def checked(rows: Input, fields: Fields, queue: str, messages_limit_bytes: int) -> DataFrame:
    """Return of each row value, key, headers and time, or why it can't be a message, and the row itself.

    Raises:
        PipelineError: there is no such column, or it has a type that can't be what it is to be.
    """
    time_ms, time_fault = _time(rows, fields)
    headers, header_fault = _headers(rows, fields)
    key = F.lit(None).cast("binary") if fields.key is None else _text(rows, "--key", fields.key)
    corrupt = F.col(CORRUPT).isNotNull() if CORRUPT in rows.frame.columns else F.lit(False)
    parts = rows.frame.select(
        _original(rows).alias("original"),
        F.when(corrupt, NO_LINE).when(time_fault.isNotNull(), time_fault).when(header_fault, NO_TEXT).alias("fault"),
        _value(rows, fields).alias("value"),
        key.alias("key"),
        headers.alias("headers"),
        time_ms.alias("time_ms"),
    )
    most = messages_limit_bytes - HEADER_ROOM_BYTES
    too_large = f"too large: more than {most:,} bytes with key and headers"
    reason = (
        F.when(F.col("fault").isNotNull(), F.col("fault"))
        .when(F.col("value").isNull(), NO_VALUE)
        .when(~_fits(queue, messages_limit_bytes), too_large)
    )
    told = parts.withColumn("reason", reason).drop("fault")
    return told.withColumn("original", F.when(F.col("reason").isNotNull(), F.col("original")))


def _value(rows: Input, fields: Fields) -> Column:
    if fields.value is not None:
        return _text(rows, "--value", fields.value)
    if fields.json_value is not None:
        named = [rows.column("--json-value", name).alias(name.rpartition(".")[2]) for name in fields.json_value]
        return F.to_json(F.struct(*named), {"ignoreNullFields": "false"}).cast("binary")
    return _whole(rows).cast("binary")


def _whole(rows: Input) -> Column:
    """The row as JSON: as it stood, where it was JSON."""
    if LINE in rows.frame.columns:
        return F.col(LINE)
    return F.to_json(F.struct(*[F.col(f"`{name}`") for name in rows.columns]), {"ignoreNullFields": "false"})


def _original(rows: Input) -> Column:
    if CORRUPT not in rows.frame.columns:
        return _whole(rows)
    line = F.to_json(F.struct(F.col(CORRUPT)))
    return F.when(F.col(CORRUPT).isNotNull(), line).otherwise(_whole(rows) if rows.columns else line)


def _text(rows: Input, option: str, name: str) -> Column:
    """A column as bytes: text as UTF-8, bytes as they are, numbers as text, and what has parts as JSON."""
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind.startswith(("struct", "array", "map", "variant")):
        return F.to_json(column).cast("binary")
    return column if kind == "binary" else column.cast("string").cast("binary")


def _headers(rows: Input, fields: Fields) -> tuple[Column, Column]:
    """The headers, and whether one is no text; a null leaves its header out."""
    pairs, faults = [], [F.lit(False)]
    for name, column in fields.headers:
        option = f"--header {name}={column}"
        _check_header(option, name)
        if rows.kind(rows.column(option, column)).startswith(("struct", "array", "map", "variant")):
            raise PipelineError(f"{option}: the column has parts, and a header is text; name one of the parts")
        value = _text(rows, option, column)
        pairs.append(F.struct(F.lit(name).alias("key"), value.alias("value")))
        faults.append(F.coalesce(~F.is_valid_utf8(value.cast("string")), F.lit(False)))
    if not pairs:
        return F.array().cast(_HEADERS), F.lit(False)
    fault = faults[0]
    for each in faults[1:]:
        fault = fault | each
    return F.filter(F.array(*pairs), lambda pair: pair["value"].isNotNull()).cast(_HEADERS), fault


def _check_header(option: str, name: str) -> None:
    if not name or len(name.encode()) > _MAX_HEADER_NAME_BYTES:
        raise PipelineError(f"{option}: expected a name of 1 to {_MAX_HEADER_NAME_BYTES:,} bytes before the =")
    if name.startswith(RESERVED_HEADER):
        raise PipelineError(f"{option}: names beginning with {RESERVED_HEADER!r} are marq's own; take another")


def _time(rows: Input, fields: Fields) -> tuple[Column, Column]:
    """When each row is due, in milliseconds, 0 for at once; and what is wrong with that. An empty column is at once."""
    none = F.lit(None).cast("string")
    if fields.delay is not None:
        return _delay(rows, f"--delay {fields.delay}", fields.delay)
    if fields.at is not None:
        return _moment(rows, f"--at {fields.at}", fields.at)
    return F.lit(0).cast("bigint"), none


def _delay(rows: Input, option: str, name: str) -> tuple[Column, Column]:
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind in ("boolean", "binary", "date") or kind.startswith(("timestamp", "struct", "array", "map", "interval")):
        raise PipelineError(f"{option}: the column is of type {kind}, but a delay is a number of seconds")
    seconds = F.when(F.trim(column.cast("string")) != "", column.cast("string").try_cast("double"))
    given = F.trim(column.cast("string")) != ""
    usable = seconds.isNotNull() & ~F.isnan(seconds) & (seconds <= MAX_DELAY_MS / 1000)
    fault = F.when(given & ~usable, NO_TIME).when(given & (seconds < 0), NEGATIVE)
    ms = F.when(usable & (seconds >= 0), F.round(seconds * 1000).cast("bigint")).otherwise(F.lit(0))
    return F.coalesce(ms, F.lit(0)).cast("bigint"), fault


def _moment(rows: Input, option: str, name: str) -> tuple[Column, Column]:
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind == "timestamp":
        ms = F.unix_millis(column)
        return F.coalesce(F.greatest(ms, F.lit(0)), F.lit(0)).cast("bigint"), F.lit(None).cast("string")
    if kind != "string":
        raise PipelineError(
            f"{option}: the column is of type {kind}, but a time is a timestamp with a time zone, or text such as"
            " 2030-01-31T08:00:00+01:00"
        )
    found = F.when(F.rlike(column, F.lit(_ISO)), F.unix_millis(F.trim(column).try_cast("timestamp")))
    fault = F.when((F.trim(column) != "") & found.isNull(), NO_TIME)
    return F.coalesce(F.greatest(found, F.lit(0)), F.lit(0)).cast("bigint"), fault


def _fits(queue: str, limit_bytes: int) -> Column:
    """The rules of the library's own `send`."""
    sizes = F.transform("headers", lambda pair: F.octet_length(pair["key"]) + F.octet_length(pair["value"]))
    count = F.size("headers")
    headers = F.aggregate(sizes, F.lit(0), lambda total, size: total + size)
    names = F.aggregate(
        F.transform("headers", lambda pair: F.length(pair["key"])), F.lit(0), lambda total, size: total + size
    )
    plain = F.coalesce(F.octet_length("key"), F.lit(len(queue.encode()))) + F.octet_length("value")
    marked = 40 + plain + headers + 6 * count + 3 * names
    return (plain + headers + _HEADER_FRAME_BYTES * count <= limit_bytes - HEADER_ROOM_BYTES) & (
        marked <= limit_bytes + ENVELOPE_ROOM_BYTES - _ENVELOPE_USED_BYTES
    )


# --- numbering --------------------------------------------------------------------------------------------------------


def numbered(good: DataFrame, starts: Sequence[int]) -> DataFrame:
    """Return the rows with their numbers, from 0 on; ``starts`` has for each of Spark's partitions its first number."""
    # One literal, whatever the number of partitions: Spark works it out once.
    first = F.element_at(F.from_json(F.lit(str(list(starts))), "array<bigint>"), F.spark_partition_id() + 1)
    in_partition = F.monotonically_increasing_id().bitwiseAND(F.lit(2**33 - 1))
    return good.withColumn("row", first + in_partition)


def placed(rows: DataFrame, partitions: int) -> DataFrame:
    """Return rows with the partition of the load's source and the number there that each has."""
    turn = F.floor(F.col("row") / RUN)
    return rows.withColumn("source_partition", (turn % partitions).cast("int")).withColumn(
        "number", F.floor(turn / partitions) * RUN + F.col("row") % RUN
    )


# --- markers ----------------------------------------------------------------------------------------------------------


def markers(rows: DataFrame, sent: Sent, tasks: int) -> DataFrame:
    """Return the markers of placed rows; each partition's are written by one task in the order of their numbers.

    That keeps what trackers know of a source in one interval, of which they remember a limited number.
    """
    ordered = (
        rows.select("source_partition", "number", "value", "key", "headers", "time_ms")
        .repartition(tasks, "source_partition")
        .sortWithinPartitions("source_partition", "number")
    )

    def encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for run in _runs(batches, sent.markers.room_bytes - _HEAD_BYTES):
            source = Source(sent.topic, run[0][0])
            yield records_of(sent.markers, [(source, encode(_delay_of(sent, source, run)))])

    return ordered.mapInArrow(encoded, RECORDS)


#: One row: partition, number, value, key, headers, time.
_Row = tuple[int, int, bytes, bytes | None, list[dict[str, str | bytes]], int]


def _delay_of(sent: Sent, source: Source, run: Sequence[_Row]) -> Delay:
    _, numbers, values, keys, headers, times = zip(*run, strict=True)
    queue_key = sent.queue.encode()
    pairs = [tuple((each["key"], each["value"]) for each in row) for row in headers]
    payloads = Columns(
        queue_key,
        [sent.timestamp_ms] * len(run),
        values,
        keys=[queue_key if key is None else key for key in keys] if any(key is not None for key in keys) else None,
        headers=pairs if any(pairs) else None,
    )
    # `from_offset` is the first number: nothing is claimed of rows that are not in this marker.
    return Delay(sent.queue, sent.holder, source, numbers, times, sent.relative, numbers[0], payloads)


def _runs(batches: Iterable[pa.RecordBatch], limit_bytes: int) -> Iterator[list[_Row]]:
    """Cut rows into runs for one marker each."""
    run: list[_Row] = []
    size = 0
    for batch in batches:
        for row in zip(*[column.to_pylist() for column in batch.columns], strict=True):
            extra = sum(6 + 4 * len(each["key"]) + len(each["value"]) for each in row[4])
            bytes_here = 48 + len(row[2]) + len(row[3] or b"") + extra
            if run and (row[0] != run[-1][0] or len(run) == RUN or size + bytes_here > limit_bytes):
                yield run
                run, size = [], 0
            run.append(row)
            size += bytes_here
    if run:
        yield run
