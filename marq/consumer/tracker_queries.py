"""Asks trackers about open messages: RESUME and its answer, RESUMED.

The reader begins before the questions are written, and a question without an answer is repeated, because its
partition may have another owner by now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from marq.backend.cluster import Cluster
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.wire.errors import BrokerUnavailable, CorruptMarker
from marq.wire.marker_codec import decode
from marq.wire.markers import Kind, Resume, Resumed
from marq.wire.names import markers_partition

log = logging.getLogger("marq")

#: How long to wait for an answer before a question is repeated, and before a missing tracker is reported.
AGAIN_S, PATIENCE_S = 1.0, 5.0
#: Pause after a broker error.
RETRY_S = 1.0
_WRITE_LIMIT_S, _STOP_S = 10.0, 1.0
#: The place of a marker's kind in its bytes.
_KIND_AT = 3


class TrackerQueries:
    """Sends the questions of one receiver; an outage of trackers is reported once, however many questions it delays."""

    def __init__(self, cluster: Cluster, writer: MarkerWriter, markers_partitions: int) -> None:
        self._open_reader = cluster.markers_reader
        self._writer = writer
        self._markers_partitions = markers_partitions
        self._clock, self._sleep = cluster.now_s, cluster.sleep
        #: Whether a missing answer was reported since the last one.
        self._reported = False
        self._failed = RepeatedWarning("queue %s: unfinished messages are unknown, asking again: %s")

    async def answers(self, questions: Sequence[Resume]) -> AsyncGenerator[tuple[Resume, list[Resumed]]]:
        """Yield each question with the parts of its answer, as answers arrive; wait without limit for missing ones."""
        left = {question.holder: question for question in questions}
        parts: dict[int, dict[int, Resumed]] = {question.holder: {} for question in questions}
        patience_s = self._clock() + PATIENCE_S
        while left:
            try:
                await self._ask(list(left.values()), parts)
            except BrokerUnavailable as error:
                self._failed.write(self._clock(), questions[0].queue, error)
                await self._sleep(RETRY_S)
            answered = [holder for holder in left if _is_whole(parts[holder])]
            for holder in answered:
                self._reported = False
                yield left.pop(holder), _parts(parts[holder])
            if left and self._clock() > patience_s and not self._reported:
                self._reported = True
                log.warning(
                    "queue %s: no tracker has answered for %g s: is a worker running (marq worker)? A partition of a"
                    " queue with ordering, limits, fair or priority is not delivered before its tracker answers",
                    next(iter(left.values())).queue,
                    PATIENCE_S,
                )

    async def _ask(self, left: Sequence[Resume], answers: dict[int, dict[int, Resumed]]) -> None:
        """Write questions, and read until all are answered, or some are and nothing more arrives for a while."""
        partitions = {markers_partition(*question.source, self._markers_partitions) for question in left}
        reader = await self._open_reader(partitions)
        again = asyncio.ensure_future(self._sleep(AGAIN_S))
        try:
            records = [MarkerRecord.of(question, self._markers_partitions) for question in left]
            await self._writer.write(records, _WRITE_LIMIT_S)
            while not again.done() and not all(_is_whole(answers[question.holder]) for question in left):
                reading = asyncio.ensure_future(reader.read())
                try:
                    await asyncio.wait([reading, again], return_when=asyncio.FIRST_COMPLETED)
                    if reading.done():
                        _take(reading.result(), answers)
                finally:
                    reading.cancel()
        finally:
            again.cancel()
            await reader.stop(_STOP_S)


def _take(values: Sequence[bytes | None], answers: dict[int, dict[int, Resumed]]) -> None:
    for value in values:
        if value is None or value[_KIND_AT : _KIND_AT + 1] != bytes([Kind.RESUMED]):
            continue
        try:
            batch = decode(value)
        except CorruptMarker:
            continue
        if isinstance(batch, Resumed) and (parts := answers.get(batch.holder)) is not None:
            if batch.asked_at != next(iter(parts.values()), batch).asked_at:
                # The answer to a repeated question; parts of two answers do not fit together.
                parts.clear()
            parts[batch.left] = batch


def _is_whole(parts: dict[int, Resumed]) -> bool:
    return 0 in parts and len(parts) == max(parts) + 1


def _parts(parts: dict[int, Resumed]) -> list[Resumed]:
    return [parts[left] for left in sorted(parts, reverse=True)]
