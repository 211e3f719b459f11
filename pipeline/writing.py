"""Writes markers to Kafka: topic limits, pace and progress of the jobs that send.

An idempotent producer writes each record with ``acks=all`` into the partition of its row, so a step that returns is
durable. A task that Spark retries writes its markers again; each job explains why that is harmless.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from marq.wire.names import FRAME_BYTES
from pipeline.errors import PipelineError, sentence
from pipeline.kafka import Connection

HEADERS = "array<struct<key:string,value:binary>>"
MAX_RATE = 1_000_000
#: The producer's buffer, unless four records need more.
_BUFFER_BYTES = 32 << 20
#: Seconds between progress lines: where they stay, and where each overwrites the one before.
_QUIET_S, _SMOOTH_S = 10.0, 0.1
_CLEAR_LINE = "\r\x1b[K"


class MarkersTopic(NamedTuple):
    """The markers topic, with the largest record batch that it accepts."""

    topic: str
    partitions: int
    limit_bytes: int

    @property
    def room_bytes(self) -> int:
        """The largest marker."""
        return self.limit_bytes - FRAME_BYTES


def write(frame: DataFrame, connection: Connection, markers: MarkersTopic) -> None:
    """Write records; return when they are durable, raise PipelineError if that is unknown."""
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
            f"writing markers to {markers.topic} was not confirmed ({sentence(error)}): run the same command again,"
            " markers that were written count once"
        ) from error


def check_limits(rate: float | None, limit: int | None, unit: str) -> None:
    if rate is not None and not 0 < rate <= MAX_RATE:
        raise PipelineError(f"--rate {rate:g}: expected {unit} a second, more than 0 and at most {MAX_RATE:,}")
    if limit is not None and limit < 1:
        raise PipelineError(f"--limit {limit}: expected a number of {unit}, 1 or more")


class StepPacer:
    """Spreads steps over time, at most ``rate`` rows a second; None: without pauses."""

    #: Seconds that a step lasts at least, because starting one takes some tenths of a second.
    STEP_S = 1.0

    def __init__(self, rate: float | None, most: int) -> None:
        self._rate = rate
        self._next_s = time.monotonic()
        #: Rows in one step.
        self.step = most if rate is None else max(1, min(most, int(rate * self.STEP_S)))

    def wait(self, count: int) -> None:
        """Sleep until the next step may begin, which has ``count`` rows."""
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        if self._rate is not None:
            self._next_s = max(self._next_s, time.monotonic()) + count / self._rate


class Progress:
    """Reports count and rate on standard error: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, verb: str, total: int, before: int = 0) -> None:
        self._verb = verb
        self._total = total
        self._before = before
        self._terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        # Without a terminal, a short job prints nothing.
        self._next_s = self._began_s + (0.0 if self._terminal else _QUIET_S)

    def show(self, done: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_SMOOTH_S if self._terminal else _QUIET_S)
        rate = (done - self._before) / max(now_s - self._began_s, 0.001)
        line = f"{self._verb} {done:,} of {self._total:,} ({rate:,.0f} a second)"
        _write(f"{_CLEAR_LINE}{line}" if self._terminal else f"{line}\n")

    def clear(self) -> None:
        """Empty the line for the next output."""
        if self._terminal:
            _write(_CLEAR_LINE)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
