"""Markers on their way from rows to Kafka, and how large and how many they may be.

A record is written with ``acks=all`` by an idempotent producer, into the partition that its row names; a step that
returns is durable. A task that Spark tries again writes its markers once more: each job says why that changes nothing.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from marq.core.topic_rules import LIMIT
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, Topics
from pipeline.sentences import sentence

#: What Kafka's framing adds to a record, at the most (docs/protocol.md, "The marker record").
FRAME_BYTES = 512
#: The columns that Spark's Kafka sink takes.
RECORDS = "topic string, partition int, value binary"
#: Of Kafka's producer; more where a record may be larger.
_BUFFER_BYTES = 32 << 20
#: Bytes that go to a Python worker at once, so that rows of a megabyte don't come by the thousand.
_ARROW_BYTES = 32 << 20
_ARROW_ROWS = 1_000


class Markers(NamedTuple):
    """The markers topic: how many partitions, and the largest record batch that it accepts."""

    topic: str
    partitions: int
    limit_bytes: int

    @property
    def room_bytes(self) -> int:
        """The largest marker."""
        return self.limit_bytes - FRAME_BYTES


def markers_of(topics: Topics, connection: Connection) -> Markers:
    """Look the markers topic up in the cluster; raises PipelineError where there is none, or no broker answers."""
    topic = connection.names.markers
    return Markers(topic, topics.partitions([topic])[topic], limit_of(topics, topic))


def limit_of(topics: Topics, topic: str) -> int:
    """Return the largest record batch that a topic accepts; raises as :func:`markers_of`."""
    return int(topics.settings(topic)[LIMIT])


def write(frame: DataFrame, connection: Connection, markers: Markers) -> None:
    """Write records (:data:`RECORDS`) and return when they are durable.

    Raises:
        PipelineError: they are not known to be.
    """
    limit = markers.limit_bytes
    options = connection.options() | {
        "kafka.acks": "all",
        "kafka.enable.idempotence": "true",
        "kafka.max.request.size": str(limit),
        "kafka.buffer.memory": str(max(_BUFFER_BYTES, 4 * limit)),
    }
    try:
        frame.write.format("kafka").options(**options).save()
    except (PySparkException, Py4JError) as error:
        raise PipelineError(
            f"markers for {markers.topic} are not known to be written ({sentence(error)}): run the same command again,"
            " what was written counts once"
        ) from error


def keep_rows_small(spark: SparkSession, largest_bytes: int) -> None:
    """Have no more rows go to Python at once than memory has room for."""
    rows = max(1, min(_ARROW_ROWS, _ARROW_BYTES // max(1, largest_bytes)))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows))


class Pace:
    """At most so many a second; None: as fast as it goes."""

    #: What a step lasts at the least: starting one costs some tenths of a second.
    STEP_S = 1.0

    def __init__(self, rate: float | None, most: int) -> None:
        self._rate = rate
        self._next_s = time.monotonic()
        #: How many go in one step.
        self.step = most if rate is None else max(1, min(most, int(rate * self.STEP_S)))

    def wait_s(self) -> float:
        """How long until the next step may begin."""
        return max(0.0, self._next_s - time.monotonic())

    def took(self, count: int) -> None:
        """So many were in the step that begins now."""
        if self._rate is not None:
            self._next_s = max(self._next_s, time.monotonic()) + count / self._rate
