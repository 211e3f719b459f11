"""The tables of the data directory: what each column is. Times are UTC, exact to the millisecond.

``markers`` has one row for each marker: a batch of a thousand ACKs is a thousand rows. ``log_partition``,
``log_offset`` and ``index`` say where it stands in the markers topic, ``topic``, ``partition`` and ``offset`` of which
record it speaks; the partition of a source that a sender has drawn may be any number of 32 bits. A row of ``messages``
is a record of the messages topic or of a queue's own. ``id`` is that of the message whose copy the record is, and null
in a first delivery, whose id is its own place.

Columns are added, never renamed, and what older files lack is null; a change that is more than that gets a new
:data:`FORMAT`.
"""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_TYPES: dict[str, type[DataType]] = {
    "binary": BinaryType,
    "boolean": BooleanType,
    "int": IntegerType,
    "long": LongType,
    "string": StringType,
    "timestamp": TimestampType,
}


def columns(text: str) -> StructType:
    """Return columns that are written as "name type, name type, …"; Spark's own parser needs a session."""
    pairs = [column.split() for column in text.split(",")]
    return StructType([StructField(name, _TYPES[kind]()) for name, kind in pairs])


#: Of the whole data directory: an older pipeline refuses a newer one.
FORMAT = 1
#: The last millisecond that can be said: what is later is cut to it, or null where a header said it.
LAST_MS = 253_402_300_799_999
MOST_ATTEMPTS = 2**31 - 1

MARKERS = columns(
    """
    log_partition int, log_offset long, index int, logged_at timestamp,
    version int, kind string, queue string, holder string,
    topic string, partition long, offset long,
    attempt int, lease_ms long, from_offset long, due_at timestamp,
    delay_ms long, counted boolean, text string, cause string, outcome string,
    record_at timestamp, id string, size int
    """
)
#: Records of the markers topic that hold no batch.
CORRUPT = columns("log_partition int, log_offset long, logged_at timestamp, error string, raw binary")
MESSAGES = columns(
    """
    topic string, partition int, offset long, sent_at timestamp, queue string, size int,
    id string, attempt int, first_sent_at timestamp, deliver_at timestamp, error string
    """
)
_HEADER = columns("key string, value binary")
#: What ``ingest --payload`` adds to messages and dead letters.
PAYLOAD = StructType([*columns("key binary, value binary").fields, StructField("headers", ArrayType(_HEADER))])
DEAD_LETTERS = columns(
    """
    topic string, partition int, offset long, sent_at timestamp, queue string, size int,
    id string, attempt int, first_sent_at timestamp, died_at timestamp, reason string, error string,
    origin_topic string, origin_partition long, origin_offset long
    """
)
