"""Turns rows into messages: checks and numbers them, and writes them as DELAY markers that count once.

**Why markers instead of records of the messages topic.** A written record is a message. A retried task, or a load that
was killed and started again, would write records twice, and no Kafka transaction spans the tasks of a Spark job. A
DELAY names a message by a source and a number; with ``from_offset`` a tracker takes each number once, forever
(docs/protocol.md, "Delay a message"). So rows may be written any number of times, even by several
processes at once. The price is a detour: trackers send a copy of each row, some 65,900 a second on two cores.

A load draws one source at random. It numbers its rows in as many partitions of the source as the markers topic has,
:data:`RUN` rows in each in turn, without gaps: so all trackers share the work, and remember a load as a few intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.wire.marker_codec import Columns, encode, encode_headers
from marq.wire.markers import Delay, Source
from marq.wire.names import ENVELOPE_ROOM_BYTES, HEADER_ROOM_BYTES, RESERVED_HEADER, markers_partition
from pipeline.errors import PipelineError
from pipeline.inputs import CORRUPT, LINE, Input
from pipeline.load_stage import LoadStage
from pipeline.writing import HEADERS, MarkersTopic

#: Consecutive rows in one partition of the source, and the most in one marker.
RUN = 500
#: As in the library: longer than any calendar.
MAX_DELAY_MS = 10_000 * 366 * 24 * 3_600_000
#: Bytes of a marker besides payloads, and of the envelope's room that the rest of an ACQUIRE takes.
_HEAD_BYTES, _ENVELOPE_USED_BYTES = 1_024, 2_048
#: The most that Kafka adds to each header.
_HEADER_FRAME_BYTES = 10
_MAX_HEADER_NAME_BYTES = 65_535
#: ISO 8601 with a zone, without which a time is ambiguous.
_ISO = r"^\s*\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?\s*(Z|[+-]\d{2}:?\d{2})\s*$"
_NESTED = ("struct", "array", "map", "variant")

_RECORD = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("value", pa.binary())])

NO_LINE = "the line can't be read"
NO_VALUE = "no value"
NO_TIME = "unreadable time"
NEGATIVE = "negative delay"
NO_TEXT = "a header is not UTF-8"


class Fields(NamedTuple):
    """The columns that make the message; without ``value`` and ``json_value``, the message is the whole row."""

    value: str | None = None
    json_value: tuple[str, ...] | None = None
    key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    delay: str | None = None
    at: str | None = None


def checked(rows: Input, fields: Fields, queue: str, messages_limit_bytes: int) -> DataFrame:
    """Return value, key, headers and time of each row, or the reason why it can't be a message and the row itself."""
    time_ms, time_fault = _time(rows, fields)
    headers, header_fault = _headers(rows, fields)
    key = F.lit(None).cast("binary") if fields.key is None else _bytes(rows, "--key", fields.key)
    corrupt = F.col(CORRUPT).isNotNull() if CORRUPT in rows.frame.columns else F.lit(False)
    parts = rows.frame.select(
        _original(rows).alias("original"),
        F.when(corrupt, NO_LINE).when(time_fault.isNotNull(), time_fault).when(header_fault, NO_TEXT).alias("fault"),
        _value(rows, fields).alias("value"),
        key.alias("key"),
        headers.alias("headers"),
        time_ms.alias("time_ms"),
    )
    too_large = f"too large: more than {messages_limit_bytes - HEADER_ROOM_BYTES:,} bytes with key and headers"
    reason = (
        F.when(F.col("fault").isNotNull(), F.col("fault"))
        .when(F.col("value").isNull(), NO_VALUE)
        .when(~_fits(queue, messages_limit_bytes), too_large)
    )
    with_reason = parts.withColumn("reason", reason).drop("fault")
    return with_reason.withColumn("original", F.when(F.col("reason").isNotNull(), F.col("original")))


def _value(rows: Input, fields: Fields) -> Column:
    if fields.value is not None:
        return _bytes(rows, "--value", fields.value)
    if fields.json_value is not None:
        named = [rows.column("--json-value", name).alias(name.rpartition(".")[2]) for name in fields.json_value]
        return _json(named).cast("binary")
    return _whole(rows).cast("binary")


def _whole(rows: Input) -> Column:
    """Return the row as JSON; a JSON line stays as it was."""
    return F.col(LINE) if LINE in rows.frame.columns else _json([F.col(f"`{name}`") for name in rows.columns])


def _json(columns: Sequence[Column]) -> Column:
    return F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})


def _original(rows: Input) -> Column:
    if CORRUPT not in rows.frame.columns:
        return _whole(rows)
    line = F.to_json(F.struct(F.col(CORRUPT)))
    return F.when(F.col(CORRUPT).isNotNull(), line).otherwise(_whole(rows) if rows.columns else line)


def _bytes(rows: Input, option: str, name: str) -> Column:
    """Return a column as bytes: text and numbers as UTF-8, nested values as JSON."""
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind.startswith(_NESTED):
        return F.to_json(column).cast("binary")
    return column if kind == "binary" else column.cast("string").cast("binary")


def _headers(rows: Input, fields: Fields) -> tuple[Column, Column]:
    """Return the headers, and whether one is not text; a null leaves its header out."""
    pairs, faults = [], [F.lit(False)]
    for name, column in fields.headers:
        option = f"--header {name}={column}"
        if not name or len(name.encode()) > _MAX_HEADER_NAME_BYTES:
            raise PipelineError(f"{option}: expected a name of 1 to {_MAX_HEADER_NAME_BYTES:,} bytes before the =")
        if name.startswith(RESERVED_HEADER):
            raise PipelineError(f"{option}: names beginning with {RESERVED_HEADER!r} are reserved; use another")
        if rows.kind(rows.column(option, column)).startswith(_NESTED):
            raise PipelineError(f"{option}: the column is nested, and a header is text; name one of its fields")
        value = _bytes(rows, option, column)
        pairs.append(F.struct(F.lit(name).alias("key"), value.alias("value")))
        faults.append(F.coalesce(~F.is_valid_utf8(value.cast("string")), F.lit(False)))
    present = F.filter(F.array(*pairs), lambda pair: pair["value"].isNotNull()) if pairs else F.array()
    return present.cast(HEADERS), reduce(or_, faults)


def _time(rows: Input, fields: Fields) -> tuple[Column, Column]:
    """Return the due time of each row in ms, and its error; 0 and an empty column mean now."""
    if fields.delay is not None:
        ms, fault = _delay(rows, f"--delay {fields.delay}", fields.delay)
    elif fields.at is not None:
        ms, fault = _moment(rows, f"--at {fields.at}", fields.at)
    else:
        ms, fault = F.lit(0), F.lit(None).cast("string")
    return F.coalesce(F.greatest(ms, F.lit(0)), F.lit(0)).cast("bigint"), fault


def _delay(rows: Input, option: str, name: str) -> tuple[Column, Column]:
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind in ("boolean", "binary", "date") or kind.startswith(("timestamp", "struct", "array", "map", "interval")):
        raise PipelineError(f"{option}: the column is of type {kind}, but a delay is a number of seconds")
    text = column.cast("string")
    present = F.trim(text) != ""
    seconds = F.when(present, text.try_cast("double"))
    usable = seconds.isNotNull() & ~F.isnan(seconds) & (seconds <= MAX_DELAY_MS / 1000)
    fault = F.when(present & ~usable, NO_TIME).when(present & (seconds < 0), NEGATIVE)
    return F.when(usable & (seconds >= 0), F.round(seconds * 1000).cast("bigint")), fault


def _moment(rows: Input, option: str, name: str) -> tuple[Column, Column]:
    column = rows.column(option, name)
    kind = rows.kind(column)
    if kind == "timestamp":
        return F.unix_millis(column), F.lit(None).cast("string")
    if kind != "string":
        raise PipelineError(
            f"{option}: the column is of type {kind}, but a time is a timestamp with a time zone, or text such as"
            " 2030-01-31T08:00:00+01:00"
        )
    ms = F.when(F.rlike(column, F.lit(_ISO)), F.unix_millis(F.trim(column).try_cast("timestamp")))
    return ms, F.when((F.trim(column) != "") & ms.isNull(), NO_TIME)


def _fits(queue: str, limit_bytes: int) -> Column:
    """Return whether a message is small enough, by the rules of the library's `send`."""

    def total(size: Callable[[Column], Column]) -> Column:
        return F.aggregate(F.transform("headers", size), F.lit(0), lambda sum_, bytes_: sum_ + bytes_)

    headers = total(lambda pair: F.octet_length(pair["key"]) + F.octet_length(pair["value"]))
    names = total(lambda pair: F.length(pair["key"]))
    count = F.size("headers")
    plain = F.coalesce(F.octet_length("key"), F.lit(len(queue.encode()))) + F.octet_length("value")
    marked = 40 + plain + headers + 6 * count + 3 * names
    return (plain + headers + _HEADER_FRAME_BYTES * count <= limit_bytes - HEADER_ROOM_BYTES) & (
        marked <= limit_bytes + ENVELOPE_ROOM_BYTES - _ENVELOPE_USED_BYTES
    )


def numbered(good: DataFrame, starts: Sequence[int]) -> DataFrame:
    """Number the rows from 0; ``starts`` has the first number of each of Spark's partitions."""
    # One literal for all partitions, which Spark evaluates once.
    first = F.element_at(F.from_json(F.lit(str(list(starts))), "array<bigint>"), F.spark_partition_id() + 1)
    in_partition = F.monotonically_increasing_id().bitwiseAND(F.lit(2**33 - 1))
    return good.withColumn("row", first + in_partition)


def placed(rows: DataFrame, partitions: int) -> DataFrame:
    """Add each row's partition of the load's source, and its number there."""
    turn = F.floor(F.col("row") / RUN)
    return rows.withColumn("source_partition", (turn % partitions).cast("int")).withColumn(
        "number", F.floor(turn / partitions) * RUN + F.col("row") % RUN
    )


def markers(rows: DataFrame, stage: LoadStage, topic: MarkersTopic, tasks: int) -> DataFrame:
    """Return the markers of placed rows; one task writes each partition in the order of its numbers.

    So what trackers remember of a source stays one interval; they remember a limited number.
    """
    ordered = (
        rows.select("source_partition", "number", "value", "key", "headers", "time_ms")
        .repartition(tasks, "source_partition")
        .sortWithinPartitions("source_partition", "number")
    )

    def encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns = ([column.to_pylist() for column in batch.columns] for batch in batches)
        rows = chain.from_iterable(zip(*batch, strict=True) for batch in columns)
        for run in _runs(rows, topic.room_bytes - _HEAD_BYTES):
            source = Source(stage.topic, run[0][0])
            partition = markers_partition(*source, topic.partitions)
            row = {"topic": topic.topic, "partition": partition, "value": encode(_delay_of(stage, source, run))}
            yield pa.RecordBatch.from_pylist([row], _RECORD)

    return ordered.mapInArrow(encoded, "topic string, partition int, value binary")


#: One row: partition, number, value, key, headers, time.
_Row = tuple[int, int, bytes, bytes | None, list[dict[str, str | bytes]], int]


def _delay_of(stage: LoadStage, source: Source, run: Sequence[_Row]) -> Delay:
    _, numbers, values, keys, headers, times = zip(*run, strict=True)
    queue_key = stage.queue.encode()
    pairs = [tuple((header["key"], header["value"]) for header in row) for row in headers]
    payloads = Columns(
        queue_key,
        [stage.staged_at_ms] * len(run),
        values,
        keys=[queue_key if key is None else key for key in keys] if any(key is not None for key in keys) else None,
        headers=[encode_headers(message_pairs) for message_pairs in pairs] if any(pairs) else None,
    )
    # With the first number as `from_offset`, the marker claims no rows but its own.
    relative = stage.arguments["at"] is None
    return Delay(stage.queue, stage.holder, source, numbers, times, relative, numbers[0], payloads)


def _runs(rows: Iterable[_Row], most_bytes: int) -> Iterator[list[_Row]]:
    """Divide rows into runs of one partition that fit into one marker each, without buffering more than one."""
    run: list[_Row] = []
    run_bytes = 0
    for row in rows:
        row_bytes = _row_bytes(row)
        full = len(run) == RUN or run_bytes + row_bytes > most_bytes
        if run and (full or row[0] != run[0][0]):
            yield run
            run, run_bytes = [], 0
        run.append(row)
        run_bytes += row_bytes
    if run:
        yield run


def _row_bytes(row: _Row) -> int:
    headers = sum(6 + 4 * len(header["key"]) + len(header["value"]) for header in row[4])
    return 48 + len(row[2]) + len(row[3] or b"") + headers
