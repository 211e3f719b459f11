"""Rows from records of the messages and dead-letter topics: their keys, headers and times.

The rules are those of docs/protocol.md: an unreadable header counts as absent, and of several headers with one name the
last counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from marq.wire.dead_letter_notes import NOTE_KEY
from marq.wire.names import (
    ATTEMPT_HEADER,
    DEAD_LETTERED_AT_HEADER,
    DELIVER_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    MAX_QUEUE_NAME_BYTES,
    ORIGIN_HEADER,
    REASON_HEADER,
    RESERVED_HEADER,
    SETTLED_HEADER,
)
from marq.wire.record_headers import SENDERS_HEADERS
from pipeline.tables import DEAD_LETTERS, LAST_MS, MESSAGES, MOST_ATTEMPTS, PAYLOAD

#: "topic/partition/offset".
_PLACE = r"^(.+)/([0-9]{1,10})/([0-9]{1,19})$"


def messages(records: DataFrame, messages_topic: str, *, payload: bool = False) -> DataFrame:
    """Return the rows of :data:`~pipeline.tables.MESSAGES`; only in the messages topic a record's key is its queue."""
    shared = F.col("topic") == messages_topic
    queue = F.when(shared, _queue())
    columns = {"queue": queue, "deliver_at": header_time(DELIVER_AT_HEADER), "error": header_text(ERROR_HEADER)}
    return _rows(_without_copied(with_own_headers(records), shared), columns, MESSAGES, payload)


def dead_letters(records: DataFrame, *, payload: bool = False) -> DataFrame:
    """Return the rows of :data:`~pipeline.tables.DEAD_LETTERS`, without notes."""
    letters = with_own_headers(records).where(~is_note() & _queue().isNotNull())
    topic, partition, offset = (
        F.nullif(F.regexp_extract(header_text(ORIGIN_HEADER), _PLACE, part), F.lit("")) for part in (1, 2, 3)
    )
    columns = {
        "queue": _queue(),
        "attempt": header_attempt(0),
        "dead_lettered_at": header_time(DEAD_LETTERED_AT_HEADER),
        "reason": header_text(REASON_HEADER),
        "error": header_text(ERROR_HEADER),
        "origin_topic": topic,
        "origin_partition": partition.cast("long"),
        "origin_offset": offset.try_cast("long"),
    }
    return _rows(letters, columns, DEAD_LETTERS, payload)


def _rows(records: DataFrame, columns: Mapping[str, Column], schema: StructType, payload: bool) -> DataFrame:
    shared = {
        "sent_at": F.when(F.unix_millis("timestamp") <= LAST_MS, F.col("timestamp")),
        "size": F.length("value"),
        "id": header_text(ID_HEADER),
        "attempt": header_attempt(),
        "first_sent_at": header_time(FIRST_SENT_HEADER),
    }
    return records.withColumns({**shared, **columns}).select(*schema.names, *PAYLOAD.names * payload)


def with_own_headers(records: DataFrame) -> DataFrame:
    """Separate Marq's own headers: most records have none, and are then not searched."""
    own = F.filter("headers", lambda header: header["key"].startswith(RESERVED_HEADER))
    return records.withColumn("own", F.when(F.size("headers") > 0, own))


def _without_copied(records: DataFrame, shared: Column) -> DataFrame:
    """Leave out the headers of copied records, as :func:`marq.wire.record_headers.without_copied` does."""
    dead_lettered = F.exists("own", lambda header: header["key"] == DEAD_LETTERED_AT_HEADER)
    senders = F.filter("own", lambda header: header["key"].isin(*SENDERS_HEADERS))
    return records.withColumn("own", F.when(~shared | dead_lettered, senders).otherwise(F.col("own")))


def is_note() -> Column:
    """Return whether a record with its own headers is a note, as :func:`marq.wire.dead_letter_notes.is_note` does."""
    settled = F.exists("own", lambda header: header["key"] == SETTLED_HEADER)
    return F.coalesce((F.col("key") == F.lit(NOTE_KEY)) & settled, F.lit(False))


def _header(name: str) -> Column:
    values = F.filter("own", lambda header: (header["key"] == name) & header["value"].isNotNull())
    return F.try_element_at(values, F.lit(-1))["value"]


def header_text(name: str) -> Column:
    """Return a header as text; null if there is none or it is empty."""
    # Any client may write a header, and readers that are stricter than Spark would stop at invalid UTF-8.
    return F.nullif(F.make_valid_utf8(_header(name).cast("string")), F.lit(""))


def _digits(name: str) -> Column:
    """Return a number of up to 20 digits, leading zeros included, which may exceed a long."""
    text = header_text(name)
    return F.when(text.rlike(r"\A[0-9]{1,20}\z"), text.cast("decimal(20,0)"))


def header_attempt(least: int = 1) -> Column:
    """Return the attempt, capped as in markers: a redelivery and its fact have the same; null if there is none.

    A dead letter has 0 if no attempt of its message counted.
    """
    number = _digits(ATTEMPT_HEADER)
    return F.when(number.between(least, 2**32 - 1), F.least(number, F.lit(MOST_ATTEMPTS)).cast("int"))


def header_time(name: str) -> Column:
    """Return a header as a time; null if there is none."""
    number = _digits(name)
    return F.when(number <= LAST_MS, F.timestamp_millis(number.cast("long")))


def _queue() -> Column:
    text = F.col("key").cast("string")
    return F.when(F.length("key").between(1, MAX_QUEUE_NAME_BYTES) & F.is_valid_utf8(text), text)
