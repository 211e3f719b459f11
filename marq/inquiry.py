"""Asks the tracker to move or cancel delayed messages, and learns from the log what became of that.

The question is a marker, and so is the answer. Whoever asks reads the markers of the partition from before its question
on, until it finds an answer or a fact that says it all; what is not answered is asked again. Questions of the same
moment are asked together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from marq.cluster import Cluster
from marq.core.errors import BrokerUnavailable, CorruptMarker
from marq.core.marker_codec import decode, encode
from marq.core.markers import Answer, Batch, Cancel, Fact, Kind, Outcome, Reschedule, Source
from marq.core.names import markers_partition
from marq.delays import Delays
from marq.markers_reader import MarkersReader
from marq.receipt import Receipt
from marq.topics import Topics
from marq.when import When
from marq.writer import MarkerRecord

#: After which a question is asked again.
AGAIN_S = 2.0
_STOP_S = 1.0


class _Question(NamedTuple):
    """To move a message (``when``) or to cancel it (None)."""

    receipt: Receipt
    when: When | None
    future: asyncio.Future[bool]

    @property
    def place(self) -> tuple[Source, int]:
        return Source(self.receipt.topic, self.receipt.partition), self.receipt.offset


class _Holders(NamedTuple):
    """Who asks."""

    cancelling: int
    moving: int


class Inquiry:
    """The questions of one producer; ``limit_s``: how long to wait for answers."""

    def __init__(self, cluster: Cluster, topics: Topics, delays: Delays, limit_s: float) -> None:
        self._cluster = cluster
        self._topics = topics
        self._delays = delays
        self._limit_s = limit_s
        self._waiting: list[_Question] = []
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, receipts: Sequence[Receipt], when: When | None) -> list[bool]:
        """Move messages, or cancel them (None); return for each whether it came in time.

        Raises:
            BrokerUnavailable: not known: no broker took the question, or no tracker answered in time.
        """
        loop = asyncio.get_running_loop()
        questions = [_Question(receipt, when, loop.create_future()) for receipt in receipts]
        self._waiting += questions
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="marq-inquiry")
        answers = await asyncio.gather(*[each.future for each in questions], return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer is True for answer in answers]

    async def stop(self) -> None:
        """Ask nothing any more; who waits gets an error."""
        task, self._asking = self._asking, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _ask_all(self) -> None:
        try:
            while self._waiting:
                questions, self._waiting = self._waiting, []
                await self._ask_some(questions)
        finally:
            self._asking = None
            _fail(self._waiting, "the producer was stopped")
            self._waiting = []

    async def _ask_some(self, questions: list[_Question]) -> None:
        failure = "the producer was stopped"
        reader: MarkersReader | None = None
        try:
            writer = await self._delays.writer()
            reader = await self._cluster.markers_reader({self._partition(each) for each in questions})
            until_s = self._cluster.now_s() + self._limit_s
            failure = f"no tracker answered within {self._limit_s:g} s: is a worker running (faust -A app worker)?"
            # An answer says whom it answers, but not what the question was.
            holders = _Holders(secrets.randbits(62) * 2 + 1, secrets.randbits(62) * 2 + 2)
            while (left_s := until_s - self._cluster.now_s()) > 0 and not _all_done(questions):
                await writer.write(self._records(questions, holders), self._limit_s)
                try:
                    await self._cluster.within(min(left_s, AGAIN_S), self._listen(reader, questions, holders))
                except TimeoutError:
                    continue
        except BrokerUnavailable as error:
            failure = str(error)
        finally:
            _fail(questions, failure)
            if reader is not None:
                await reader.stop(_STOP_S)

    async def _listen(self, reader: MarkersReader, questions: list[_Question], holders: _Holders) -> None:
        open_questions: dict[tuple[Source, int], list[_Question]] = {}
        for question in questions:
            if not question.future.done():
                open_questions.setdefault(question.place, []).append(question)
        while open_questions:
            for value in await reader.read():
                try:
                    batch = decode(value)
                except CorruptMarker:
                    continue
                if isinstance(batch, Fact) or (isinstance(batch, Answer) and batch.holder in holders):
                    _take(batch, open_questions, holders)

    def _records(self, questions: list[_Question], holders: _Holders) -> list[MarkerRecord]:
        groups: dict[tuple[str, Source, bool, bool], dict[int, int]] = {}
        for each in questions:
            if each.future.done():
                continue
            source, offset = each.place
            when = each.when
            alike = (each.receipt.queue, source, when is None, when is not None and when.relative)
            groups.setdefault(alike, {})[offset] = 0 if when is None else when.time_ms
        records = []
        for (queue, source, cancelled, relative), times in groups.items():
            offsets = sorted(times)
            batch: Batch = (
                Cancel(queue, holders.cancelling, source, offsets)
                if cancelled
                else Reschedule(queue, holders.moving, source, offsets, [times[offset] for offset in offsets], relative)
            )
            where = markers_partition(*source, self._topics.markers_partitions)
            records.append(MarkerRecord(where, encode(batch)))
        return records

    def _partition(self, question: _Question) -> int:
        return markers_partition(*question.place[0], self._topics.markers_partitions)


def _take(batch: Fact | Answer, open_questions: dict[tuple[Source, int], list[_Question]], holders: _Holders) -> None:
    for index, offset in enumerate(batch.offsets):
        place = (batch.source, offset)
        for question in open_questions.pop(place, ()):
            cancels = question.when is None
            if isinstance(batch, Fact):
                came_in_time = cancels and batch.kind is Kind.CANCELLED
            elif batch.holder == (holders.cancelling if cancels else holders.moving):
                came_in_time = batch.outcomes[index] == Outcome.DONE
            else:
                open_questions.setdefault(place, []).append(question)
                continue
            if not question.future.done():
                question.future.set_result(came_in_time)


def _all_done(questions: list[_Question]) -> bool:
    return all(each.future.done() for each in questions)


def _fail(questions: list[_Question], why: str) -> None:
    for each in questions:
        if not each.future.done():
            what = "cancelled" if each.when is None else "moved"
            each.future.set_exception(
                BrokerUnavailable(
                    f"queue {each.receipt.queue!r}: unknown whether message {each.receipt.id} was {what}: {why}"
                )
            )
