"""Delayed messages, as a producer writes them: markers instead of records, and no payload anywhere else.

A producer draws a number for itself and counts its messages, one after the other for each markers partition: these are
their identities until they are delivered. What is delayed in the same moment goes out together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from marq.cluster import Cluster, Writer
from marq.content import Header
from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import encode
from marq.core.markers import Columns, Payload, Source, payload_bytes, spans
from marq.core.markers import Delay as DelayMarker
from marq.core.names import drawn_topic, markers_partition
from marq.receipt import Receipt
from marq.topics import Topics
from marq.when import When
from marq.writer import FRAME_BYTES, MarkerRecord

#: The head of a DELAY: queue, source, numbers.
_HEAD_BYTES = 600
#: Messages of one marker at the most: a tracker folds so many within some milliseconds.
MAX_MESSAGES = 500
#: Markers that are on their way at a time.
_WINDOW = 64


class _Item(NamedTuple):
    """One message to delay."""

    value: bytes
    headers: Sequence[Header]
    time_ms: int


class _Parcel:
    """Messages of one queue that go out together, and who waits for each."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.futures: list[asyncio.Future[Receipt]] = []


class Delays:
    """The delayed messages of one producer, from its start to its stop."""

    def __init__(self, cluster: Cluster, topics: Topics, limit_s: float) -> None:
        self._cluster = cluster
        self._topics = topics
        self._limit_s = limit_s
        self._topic = drawn_topic(secrets.randbits(128))
        self._numbers = [0] * topics.markers_partitions
        self._turn = secrets.randbelow(topics.markers_partitions)
        self._writer: Writer | None = None
        self._starting = asyncio.Lock()
        self._open: dict[tuple[str, bool], _Parcel] = {}
        self._sending: set[asyncio.Task[Any]] = set()

    async def stop(self, limit_s: float) -> None:
        """Wait for what is on its way, and end."""
        self._submit()
        if self._sending:
            await asyncio.wait(self._sending, timeout=limit_s)
        for task in list(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        if self._writer is not None:
            await self._writer.stop(limit_s)

    async def writer(self) -> Writer:
        """Return the producer's writer of markers, started when it is needed first.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
        """
        async with self._starting:
            if self._writer is None:
                writer = self._cluster.writer(self._topics)
                await writer.start()
                self._writer = writer
            return self._writer

    # --- one by one ---------------------------------------------------------------------------------------------------

    def post(self, queue: str, value: bytes, headers: Sequence[Header], when: When) -> asyncio.Future[Receipt]:
        """Delay one message, together with all others of this turn of the loop; the future raises as :meth:`send`."""
        loop = asyncio.get_running_loop()
        if not self._open:
            loop.call_soon(self._submit)
        parcel = self._open.setdefault((queue, when.relative), _Parcel())
        parcel.items.append(_Item(value, headers, when.time_ms))
        future: asyncio.Future[Receipt] = loop.create_future()
        parcel.futures.append(future)
        return future

    def _submit(self) -> None:
        for (queue, relative), parcel in self._open.items():
            task = asyncio.create_task(self._deliver(queue, relative, parcel), name="marq-delay")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        self._open = {}

    async def _deliver(self, queue: str, relative: bool, parcel: _Parcel) -> None:
        index = 0
        try:
            async for receipts in self._send(queue, relative, parcel.items):
                for receipt in receipts:
                    if not parcel.futures[index].done():
                        parcel.futures[index].set_result(receipt)
                    index += 1
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError)
            failure = BrokerUnavailable("the producer was stopped: unknown whether the message was delayed")
            for future in parcel.futures[index:]:
                if not future.done():
                    future.set_exception(failure if stopped else error)
            if stopped:
                raise

    # --- many ---------------------------------------------------------------------------------------------------------

    async def send_many(
        self, queue: str, values: Sequence[bytes], headers: Sequence[Header], whens: Sequence[When], into: list[Receipt]
    ) -> None:
        """Delay messages, and add the receipts of those that are durable to ``into``.

        Raises:
            BrokerUnavailable: not known whether the messages without a receipt were delayed.
        """
        relative = whens[0].relative
        items = [_Item(value, headers, when.time_ms) for value, when in zip(values, whens, strict=True)]
        async for receipts in self._send(queue, relative, items):
            into += receipts

    async def _send(self, queue: str, relative: bool, items: Sequence[_Item]) -> AsyncIterator[list[Receipt]]:
        writer = await self.writer()
        pieces = list(self._pieces(queue, items))
        for start in range(0, len(pieces), _WINDOW):
            markers = [self._marker(queue, relative, items[piece]) for piece in pieces[start : start + _WINDOW]]
            records = [MarkerRecord(self._partition(each.source), encode(each)) for each in markers]
            await writer.write(records, self._limit_s)
            yield [Receipt(queue, *each.source, number) for each in markers for number in each.offsets]

    def _pieces(self, queue: str, items: Sequence[_Item]) -> Iterator[slice]:
        key = queue.encode()
        room = self._topics.markers_limit_bytes - FRAME_BYTES - _HEAD_BYTES
        sizes = [payload_bytes(Payload(0, 1, key, item.headers, item.value)) for item in items]
        for piece in spans(sizes, room):
            for start in range(piece.start, piece.stop, MAX_MESSAGES):
                yield slice(start, min(start + MAX_MESSAGES, piece.stop))

    def _marker(self, queue: str, relative: bool, items: Sequence[_Item]) -> DelayMarker:
        where = self._turn
        self._turn = (where + 1) % len(self._numbers)
        first = self._numbers[where]
        self._numbers[where] += len(items)
        now_ms = int(self._cluster.wall_s() * 1000)
        values, headers, times = zip(*items, strict=True)
        payloads = Columns(queue.encode(), [now_ms] * len(items), values, headers=headers if any(headers) else None)
        numbers, source = range(first, first + len(items)), Source(self._topic, where)
        # No holder: nobody holds them. The number only says who wrote it.
        return DelayMarker(queue, 1, source, numbers, times, relative, None, payloads)

    def _partition(self, source: Source) -> int:
        return markers_partition(*source, self._topics.markers_partitions)
