"""A producer's delayed messages: markers that carry the payload.

The producer chooses a random number and counts its messages in each markers partition; both together identify a message
until it is delivered. Simultaneous messages are sent together.

Messages with a deduplication id are delayed messages, too, mostly by 0 ms. Their place decides which tracker looks
for duplicates (:func:`marq.wire.names.deduplicating_partition`). Those of one queue and markers partition are written
one batch after the other, so that the log has the order of the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from marq.backend.cluster import Cluster, Writer
from marq.client.receipt import Receipt
from marq.client.send_options import Expiry, Header, When, with_expiry
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.topics import Topics
from marq.producer.sending import SendCounts
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.marker_codec import Columns, encode_headers
from marq.wire.markers import Delay as DelayMarker
from marq.wire.markers import Payload, Source, payload_bytes, spans
from marq.wire.names import FRAME_BYTES, deduplicating_partition, source_partition, synthetic_topic
from marq.wire.record_headers import sequence

#: Bytes of the head of a DELAY: queue, source, numbers.
_HEAD_BYTES = 600
#: Maximum number of messages of one marker, which a tracker folds within some milliseconds.
MAX_MESSAGES = 500
#: Maximum number of markers of one write.
_WINDOW = 64


class _Item(NamedTuple):
    """One message to delay."""

    value: bytes
    headers: Sequence[Header]
    time_ms: int


class _DelayGroup(NamedTuple):
    """The common part of messages that are sent together; ``where``: their markers partition, None for any."""

    queue: str
    relative: bool
    where: int | None


class _DelayBatch:
    """Messages of one group, the receipts of the confirmed ones, and the futures of those sent one by one."""

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.receipts: list[Receipt] = []
        self.futures: list[asyncio.Future[Receipt]] = []

    def confirm(self, receipts: Sequence[Receipt]) -> None:
        for future, receipt in zip(self.futures[len(self.receipts) :], receipts, strict=False):
            if not future.done():
                future.set_result(receipt)
        self.receipts += receipts

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class Delays:
    """The delayed messages of one producer, from its start to its stop."""

    def __init__(self, cluster: Cluster, topics: Topics, limit_s: float, counts: SendCounts) -> None:
        self._cluster = cluster
        self._counts = counts
        self._topics = topics
        self._limit_s = limit_s
        self._topic = synthetic_topic(secrets.randbits(128))
        self._numbers = [0] * topics.markers_partitions
        self._turn = secrets.randbelow(topics.markers_partitions)
        self._writer: Writer | None = None
        self._starting = asyncio.Lock()
        self._open: dict[_DelayGroup, _DelayBatch] = {}
        #: Groups with a markers partition of which a batch is being written; their next one waits for it.
        self._busy: set[_DelayGroup] = set()
        self._sending: set[asyncio.Task[Any]] = set()
        #: Whether new messages are rejected, and whether the writer is stopped too.
        self._stopped = self._closed = False

    async def stop(self, limit_s: float) -> None:
        """Wait up to ``limit_s`` for messages that are being sent; accept no others."""
        self._stopped = True
        self._submit()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                # A batch that waited for another one is sent after it, so loop.
                while self._sending:
                    await asyncio.wait(self._sending)
        self._closed = True
        for task in list(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        for group, batch in self._open.items():
            self._counts.failed += _undelayed(group, batch.items)
            batch.fail(_stopped())
        if self._writer is not None:
            await self._writer.stop(limit_s)

    async def writer(self) -> Writer:
        """Return the producer's writer of markers, started at its first use.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
            MarqError: the producer was stopped.
        """
        async with self._starting:
            if self._writer is None and not self._closed:
                writer = self._cluster.writer(self._topics)
                await writer.start()
                self._writer = writer
                if self._closed:
                    await writer.stop(0)
            if self._writer is None or self._closed:
                raise _stopped()
            return self._writer

    # --- one by one ---------------------------------------------------------------------------------------------------

    def post(
        self, queue: str, value: bytes, headers: Sequence[Header], when: When, place: bytes | None = None
    ) -> asyncio.Future[Receipt]:
        """Delay one message, together with all others of this turn of the loop; the future gets its receipt.

        ``place`` is the ordering key of a message with a deduplication id, or without one the id: all messages of a
        queue with the same place go to one log, in the order of the calls.

        Raises:
            MarqError: the producer was stopped.
        """
        self.check_running()
        loop = asyncio.get_running_loop()
        where = None if place is None else deduplicating_partition(queue, place, len(self._numbers))
        group = _DelayGroup(queue, when.relative, where)
        batch = self._open.get(group)
        if batch is None:
            batch = self._open[group] = _DelayBatch([])
            if group not in self._busy:
                loop.call_soon(self._submit)
        batch.items.append(_Item(value, headers, when.time_ms))
        future: asyncio.Future[Receipt] = loop.create_future()
        batch.futures.append(future)
        return future

    def check_running(self) -> None:
        """Raise MarqError if the producer was stopped."""
        if self._stopped:
            raise _stopped()

    def _submit(self) -> None:
        if self._closed:
            return
        for group in [group for group in self._open if group not in self._busy]:
            if group.where is not None:
                self._busy.add(group)
            self._begin(group, self._open.pop(group))

    def _begin(self, group: _DelayGroup, batch: _DelayBatch) -> asyncio.Task[None]:
        task = asyncio.create_task(self._deliver(group, batch), name="marq-delay")
        self._sending.add(task)
        # See Batcher._begin().
        task.add_done_callback(partial(self._end, group, batch))
        return task

    def _end(self, group: _DelayGroup, batch: _DelayBatch, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if (error := _failure(task)) is not None:
            self._counts.failed += _undelayed(group, batch.items[len(batch.receipts) :])
            batch.fail(error)
        if group in self._busy:
            self._busy.remove(group)
            self._submit()

    async def _deliver(self, group: _DelayGroup, batch: _DelayBatch) -> None:
        async for receipts in self._send(group, batch.items):
            done = len(batch.receipts)
            self._counts.sent += _undelayed(group, batch.items[done : done + len(receipts)])
            batch.confirm(receipts)

    # --- many ---------------------------------------------------------------------------------------------------------

    async def send_many(
        self,
        queue: str,
        values: Sequence[bytes],
        headers: Sequence[Header],
        whens: Sequence[When],
        expires: Expiry | None = None,
    ) -> tuple[list[Receipt | None], BaseException | None]:
        """Delay messages; return the receipt of each, None if unknown, and the first failure."""
        if self._stopped:
            return [None] * len(values), _stopped()
        items = [
            _Item(value, headers if expires is None else with_expiry(headers, expires, when), when.time_ms)
            for value, when in zip(values, whens, strict=True)
        ]
        batch = _DelayBatch(items)
        # Send in a separate task, so that a stop waits for it, and only the caller can cause a cancellation here.
        task = self._begin(_DelayGroup(queue, whens[0].relative, None), batch)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        return [*batch.receipts, *[None] * (len(items) - len(batch.receipts))], _failure(task)

    async def send_each(
        self, queue: str, items: Iterable[tuple[bytes, Sequence[Header], When, bytes]]
    ) -> tuple[list[Receipt | None], BaseException | None]:
        """Delay messages that have deduplication ids: the arguments of :meth:`post`, and the result of send_many."""
        futures = [self.post(queue, *item) for item in items]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        receipts = [None if isinstance(outcome, BaseException) else outcome for outcome in outcomes]
        return receipts, next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)

    async def _send(self, group: _DelayGroup, items: Sequence[_Item]) -> AsyncIterator[list[Receipt]]:
        writer, queue = await self.writer(), group.queue
        pieces = list(self._pieces(queue, items))
        for start in range(0, len(pieces), _WINDOW):
            markers = [self._marker(group, items[piece]) for piece in pieces[start : start + _WINDOW]]
            records = [MarkerRecord.of(marker, self._topics.markers_partitions) for marker in markers]
            written = await writer.write(records, self._limit_s)
            yield [
                Receipt(queue, *marker.source, number, None if group.where is None else sequence(at, number))
                for marker, at in zip(markers, written, strict=True)
                for number in marker.offsets
            ]

    def _pieces(self, queue: str, items: Sequence[_Item]) -> Iterator[slice]:
        key = queue.encode()
        room = self._topics.markers_limit_bytes - FRAME_BYTES - _HEAD_BYTES
        sizes = [payload_bytes(Payload(0, 1, key, item.headers, item.value)) for item in items]
        for piece in spans(sizes, room):
            for start in range(piece.start, piece.stop, MAX_MESSAGES):
                yield slice(start, min(start + MAX_MESSAGES, piece.stop))

    def _marker(self, group: _DelayGroup, items: Sequence[_Item]) -> DelayMarker:
        queue, relative, wanted = group
        if wanted is None:
            where = self._turn
            self._turn = (where + 1) % len(self._numbers)
        else:
            where = source_partition(self._topic, wanted, len(self._numbers))
        first = self._numbers[where]
        self._numbers[where] += len(items)
        now_ms = int(self._cluster.wall_s() * 1000)
        values, headers, times = zip(*items, strict=True)
        encoded = [encode_headers(message_headers) for message_headers in headers] if any(headers) else None
        payloads = Columns(queue.encode(), [now_ms] * len(items), values, headers=encoded)
        numbers, source = range(first, first + len(items)), Source(self._topic, where)
        # The holder is a dummy, because the messages are not in flight.
        return DelayMarker(queue, 1, source, numbers, times, relative, None, payloads)


def _undelayed(group: _DelayGroup, items: Sequence[_Item]) -> int:
    """Return how many messages have a deduplication id but no delay."""
    if group.where is None or not group.relative:
        return 0
    return sum([item.time_ms == 0 for item in items])


def _stopped() -> MarqError:
    return MarqError("the producer was stopped: the message was not sent")


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return BrokerUnavailable("the producer was stopped: unknown whether the message was delayed")
    return task.exception()
