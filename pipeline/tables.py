"""The schemas of the tables. Times are UTC, exact to the millisecond.

``markers`` has one row for each marker: a batch of a thousand ACKs is a thousand rows. ``log_partition``,
``log_offset`` and ``index`` are its position in the markers topic; ``topic``, ``partition`` and ``offset`` name the
record that it is about. In a queue's own topic, ``topic`` is that of an incarnation (``NAME@ID``, see
:mod:`pipeline.incarnations`). The partition of a synthetic source may be any 32-bit number. A row of ``messages`` is a
record of the messages topic, or of a topic that queues name; there ``queue`` is null, because the record is a
message of each of them (:mod:`pipeline.subscriptions`). ``id`` is the id of the message that the record redelivers, and
null in a first delivery, whose id is its own place. ``line`` is a number made from the ordering key, in ACQUIREs of a
queue with ordering. ``text`` is the error of a RELEASE, the reason of a REJECT, or a digest of the deduplication id of
a DELAY within its ordering key. ``cause`` is that of a fact, or ``LAST`` for a RELEASE after the last attempt.

Columns are added, never renamed, and are null in older files; any other change needs a new :data:`FORMAT`.
"""

from __future__ import annotations

from pyspark.sql import types
from pyspark.sql.types import ArrayType, StructField, StructType


def columns(text: str) -> StructType:
    """Return columns written as "name type, name type, …"; Spark's own parser needs a session."""
    pairs = [column.split() for column in text.split(",")]
    classes = {"int": "IntegerType"}
    return StructType(
        [StructField(name, getattr(types, classes.get(kind, f"{kind.title()}Type"))()) for name, kind in pairs]
    )


#: The format of a data directory; pipelines refuse all others.
FORMAT = 3
#: The last time that tables can express. Later due times of markers are capped to it. Later times of records and of
#: headers are null: a sender that counts in microseconds or nanoseconds does not mean them.
LAST_MS = 253_402_300_799_999
MOST_ATTEMPTS = 2**31 - 1

MARKERS = columns(
    """
    log_partition int, log_offset long, index int, logged_at timestamp,
    version int, kind string, queue string, holder string,
    topic string, partition long, offset long,
    attempt int, lease_ms long, from_offset long, due_at timestamp,
    delay_ms long, counted boolean, text string, cause string, outcome string,
    record_at timestamp, id string, size int, in_order boolean, line long
    """
)
#: Records of the markers topic that are not marker batches.
CORRUPT = columns("log_partition int, log_offset long, logged_at timestamp, error string, raw binary")
MESSAGES = columns(
    """
    topic string, partition int, offset long, sent_at timestamp, queue string, size int,
    id string, attempt int, first_sent_at timestamp, deliver_at timestamp, error string
    """
)
#: Columns that ``ingest --payload`` adds to messages and dead letters.
PAYLOAD = StructType(
    [
        *columns("key binary, value binary").fields,
        StructField("headers", ArrayType(columns("key string, value binary"))),
    ]
)
DEAD_LETTERS = columns(
    """
    topic string, partition int, offset long, sent_at timestamp, queue string, size int,
    id string, attempt int, first_sent_at timestamp, dead_lettered_at timestamp, reason string, error string,
    origin_topic string, origin_partition long, origin_offset long
    """
)
#: The tables that follow the streams: their commits name the batches that they have processed.
LIFECYCLE_TABLE, LIVE_TABLE = "lifecycle", "live"
#: The tables of ingest's streams, and the columns that date their rows.
STREAMS = {"markers": MARKERS, "messages": MESSAGES, "dead_letters": DEAD_LETTERS}
DAYS = {"markers": "logged_at", "messages": "sent_at", "dead_letters": "sent_at"}
