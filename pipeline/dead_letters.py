"""Dead letters as rows, and their selection by SQL.

``marq.wire`` defines what a dead letter contains and what a note means; this module applies that to DataFrames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.wire.dead_letter_notes import decode
from marq.wire.markers import Source
from marq.wire.names import (
    DEAD_LETTERED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
)
from pipeline.errors import PipelineError, sentence
from pipeline.records import header_attempt, header_text, header_time, is_note, with_own_headers
from pipeline.writing import HEADERS

#: Columns for expressions.
COLUMNS = (
    "id", "queue", "value", "text", "headers", "reason", "error", "attempts", "first_sent_at", "dead_lettered_at",
    "origin", "partition", "offset", "size",
)  # fmt: skip
_PLACE = "partition int, offset long"


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
        "attempts": F.coalesce(header_attempt(0), F.lit(1)),
        "first_sent_at": F.coalesce(header_time(FIRST_SENT_HEADER), F.col("timestamp")),
        "dead_lettered_at": F.coalesce(header_time(DEAD_LETTERED_AT_HEADER), F.col("timestamp")),
        "origin": F.coalesce(header_text(ORIGIN_HEADER), F.lit("")),
        "size": F.coalesce(F.length("value"), F.lit(0)),
    }
    rows = kept.withColumn("headers", F.coalesce(F.col("headers"), F.lit(None).cast(HEADERS), F.array().cast(HEADERS)))
    return rows.withColumns(columns).select(*COLUMNS)


def settled(records: DataFrame, topic: str) -> DataFrame:
    """Return the places of dead letters that notes among the records settle: partition and offset."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for row in (row for batch in batches for row in batch.to_pylist()):
            note = decode(Source(topic, row["partition"]), row["value"])
            if note is not None:
                offsets = note.settled_before(row["offset"])
                partitions = pa.array([row["partition"]] * len(offsets), pa.int32())
                columns = [partitions, pa.array(offsets, pa.int64())]
                yield pa.RecordBatch.from_arrays(columns, names=["partition", "offset"])

    return with_own_headers(records).where(is_note()).select("partition", "offset", "value").mapInArrow(read, _PLACE)


def chosen(rows: DataFrame, where: str | None) -> DataFrame:
    """Return the dead letters for which a SQL expression is true; raises PipelineError if it can't be used."""
    if where is None:
        return rows
    try:
        return rows.where(where)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"--where {where!r}: {_problem(error)}; the columns are {', '.join(COLUMNS)}") from error


def _problem(error: Exception) -> str:
    condition, details = "", dict[str, str]()
    if isinstance(error, PySparkException):
        condition, details = error.getCondition() or "", error.getMessageParameters() or {}
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
