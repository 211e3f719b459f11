"""Records of the messages and dead-letters topics as rows: what their keys, headers and times say.

The rules are those of docs/protocol.md: a header that can't be read counts as absent, and where one occurs twice the
last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from marq.core.names import (
    ATTEMPT_HEADER,
    DELIVER_AT_HEADER,
    DIED_AT_HEADER,
    ERROR_HEADER,
    FIRST_SENT_HEADER,
    ID_HEADER,
    MAX_QUEUE_NAME_BYTES,
    ORIGIN_HEADER,
    REASON_HEADER,
    SETTLED_HEADER,
)
from pipeline.tables import DEAD_LETTERS, LAST_MS, MESSAGES, MOST_ATTEMPTS, PAYLOAD

#: "topic/partition/offset".
_PLACE = r"^(.+)/([0-9]{1,10})/([0-9]{1,19})$"


def messages(records: DataFrame, own_topics: Mapping[str, str], *, payload: bool = False) -> DataFrame:
    """Return the rows of :data:`~pipeline.tables.MESSAGES`.

    ``records``: records with their headers; ``own_topics``: the queue of each topic that is a queue's own.
    """
    rows = _with_headers(records).select(
        "topic",
        "partition",
        "offset",
        F.col("timestamp").alias("sent_at"),
        _queue_of(own_topics).alias("queue"),
        F.length("value").alias("size"),
        _text(ID_HEADER).alias("id"),
        _attempt().alias("attempt"),
        _time(FIRST_SENT_HEADER).alias("first_sent_at"),
        _time(DELIVER_AT_HEADER).alias("deliver_at"),
        _text(ERROR_HEADER).alias("error"),
        *_payload(payload),
    )
    return rows.select(*MESSAGES.names, *PAYLOAD.names * payload)


def dead_letters(records: DataFrame, *, payload: bool = False) -> DataFrame:
    """Return the rows of :data:`~pipeline.tables.DEAD_LETTERS`; notes on what became of them are left out."""
    letters = _with_headers(records).where(_header(SETTLED_HEADER).isNull() & _queue().isNotNull())
    origin = _text(ORIGIN_HEADER)
    rows = letters.select(
        "topic",
        "partition",
        "offset",
        F.col("timestamp").alias("sent_at"),
        _queue().alias("queue"),
        F.length("value").alias("size"),
        _text(ID_HEADER).alias("id"),
        _attempt().alias("attempt"),
        _time(FIRST_SENT_HEADER).alias("first_sent_at"),
        _time(DIED_AT_HEADER).alias("died_at"),
        _text(REASON_HEADER).alias("reason"),
        _text(ERROR_HEADER).alias("error"),
        place(origin, 1).alias("origin_topic"),
        place(origin, 2).cast("long").alias("origin_partition"),
        place(origin, 3).try_cast("long").alias("origin_offset"),
        *_payload(payload),
    )
    return rows.select(*DEAD_LETTERS.names, *PAYLOAD.names * payload)


def place(text: Column, part: int) -> Column:
    """Return a part of "topic/partition/offset", counted from 1; null where the text is no place."""
    return F.nullif(F.regexp_extract(text, _PLACE, part), F.lit(""))


def _with_headers(records: DataFrame) -> DataFrame:
    """Keep marq's own headers apart: most records have none, and nothing is looked for in them."""
    own = F.filter("headers", lambda header: header["key"].startswith("marq-"))
    return records.withColumn("own", F.when(F.size("headers") > 0, own))


def _header(name: str) -> Column:
    # The last one counts; in a reversed list that is the first.
    found = F.filter("own", lambda header: (header["key"] == name) & header["value"].isNotNull())
    return F.try_element_at(found, F.lit(-1))["value"]


def _text(name: str) -> Column:
    # Anybody may write a header: what is no text would stop readers that are stricter than Spark.
    return F.nullif(F.make_valid_utf8(_header(name).cast("string")), F.lit(""))


def _digits(name: str) -> Column:
    """As long as they may be, leading zeros among them; so more than a long can have."""
    text = _text(name)
    return F.when(text.rlike(r"\A[0-9]{1,20}\z"), text.cast("decimal(20,0)"))


def _attempt() -> Column:
    number = _digits(ATTEMPT_HEADER)
    # Cut as it is in markers, so that a copy and its fact say the same.
    return F.when(number.between(1, 2**32 - 1), F.least(number, F.lit(MOST_ATTEMPTS)).cast("int"))


def _time(name: str) -> Column:
    number = _digits(name)
    return F.when(number <= LAST_MS, F.timestamp_millis(number.cast("long")))


def _queue() -> Column:
    text = F.col("key").cast("string")
    return F.when(F.length("key").between(1, MAX_QUEUE_NAME_BYTES) & F.is_valid_utf8(text), text)


def _queue_of(own_topics: Mapping[str, str]) -> Column:
    """The key says it, but in a topic that is a queue's own."""
    return reduce(
        lambda rest, own: F.when(F.col("topic") == own[0], F.lit(own[1])).otherwise(rest),
        sorted(own_topics.items()),
        _queue(),
    )


def _payload(wanted: bool) -> list[Column]:
    return [F.col(name) for name in PAYLOAD.names] if wanted else []
