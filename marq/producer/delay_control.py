"""Requests to move or cancel delayed messages.

Requests and answers are markers. The producer reads the markers of the partition, from before its request on, until it
finds an answer or a fact that decides the request; it repeats requests that are not answered. Simultaneous requests are
sent together, in rounds. Each round has a connection of its own, so the next one begins when the round before has its
answers, or when these are late: a tracker that does not answer must not hold up the requests to others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from marq.backend.cluster import Cluster
from marq.client.receipt import Receipt
from marq.client.send_options import When
from marq.kafka.log_reader import MarkersReader
from marq.kafka.marker_writer import MarkerRecord, marker_records
from marq.kafka.topics import Topics
from marq.producer.delays import Delays
from marq.wire.errors import BrokerUnavailable, CorruptMarker, MarqError
from marq.wire.marker_codec import decode
from marq.wire.markers import ANY_QUEUE, Answer, Cancel, Fact, Kind, RequestOutcome, Reschedule, Source
from marq.wire.names import Names, markers_partition

#: How long to wait for an answer before a request is repeated, and before later requests no longer wait for it.
AGAIN_S = 2.0
_STOP_S = 1.0
_STOPPED = "the producer was stopped"


class _Request(NamedTuple):
    """A request to move a message (``when``) or to cancel it (None)."""

    receipt: Receipt
    when: When | None
    future: asyncio.Future[bool]

    @property
    def target(self) -> tuple[Source, int]:
        return Source(self.receipt.topic, self.receipt.partition), self.receipt.offset


class _Holders(NamedTuple):
    """The holders in a producer's requests: an answer names the holder, but not what was requested."""

    cancelling: int
    moving: int


class DelayControl:
    """The requests of one producer; ``limit_s`` is how long it waits for answers."""

    def __init__(self, cluster: Cluster, names: Names, topics: Topics, delays: Delays, limit_s: float) -> None:
        self._cluster = cluster
        self._names = names
        self._topics = topics
        self._delays = delays
        self._limit_s = limit_s
        self._waiting: list[_Request] = []
        self._asking: asyncio.Task[None] | None = None
        #: The requests of each round that has not ended; at most about ``limit_s / AGAIN_S`` rounds.
        self._rounds: dict[asyncio.Task[None], list[_Request]] = {}

    async def ask(self, receipts: Sequence[Receipt], when: When | None) -> list[bool]:
        """Move messages, or cancel them (None); return for each whether the request came in time.

        Raises:
            BrokerUnavailable: unknown, because no broker took the request or no tracker answered in time.
            MarqError: the producer was stopped.
        """
        self._delays.check_running()
        loop = asyncio.get_running_loop()
        requests = [_Request(receipt, when, loop.create_future()) for receipt in receipts]
        self._waiting += requests
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="marq-delay-control")
        answers = await asyncio.gather(*[request.future for request in requests], return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer is True for answer in answers]

    async def stop(self) -> None:
        """Stop; waiting callers get an error."""
        asking, self._asking = self._asking, None
        rounds = dict(self._rounds)
        tasks = [*rounds] if asking is None else [asking, *rounds]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        # A task that was cancelled before it ran has not done this.
        for requests in (self._waiting, *rounds.values()):
            _fail(requests, _STOPPED)

    async def _ask_all(self) -> None:
        try:
            while self._waiting:
                # Before a round begins: rounds that begin without a connection would try to connect one by one.
                failure = await self._connect()
                requests, self._waiting = self._waiting, []
                if failure is not None:
                    _fail(requests, failure)
                    continue
                begun = asyncio.create_task(self._ask_some(requests), name="marq-delay-control-round")
                self._rounds[begun] = requests
                begun.add_done_callback(self._rounds.pop)
                with suppress(TimeoutError):
                    await self._cluster.within(AGAIN_S, asyncio.wait([begun]))
        finally:
            self._asking = None
            _fail(self._waiting, _STOPPED)
            self._waiting = []

    async def _connect(self) -> str | None:
        """Start the writer at its first use; return why it can't be used, None if it can."""
        try:
            await self._delays.writer()
        except MarqError as error:
            return str(error)
        return None

    async def _ask_some(self, requests: list[_Request]) -> None:
        failure = _STOPPED
        reader: MarkersReader | None = None
        until_s = self._cluster.now_s() + self._limit_s
        try:
            writer = await self._delays.writer()
            requests = await self._in_incarnations(requests)
            count = self._topics.markers_partitions
            partitions = {markers_partition(*request.target[0], count) for request in requests}
            reader = await self._cluster.markers_reader(partitions)
            failure = f"no tracker answered within {self._limit_s:g} s: is a worker running (marq worker)?"
            holders = _Holders(secrets.randbits(62) * 2 + 1, secrets.randbits(62) * 2 + 2)
            while (left_s := until_s - self._cluster.now_s()) > 0 and not _all_done(requests):
                await writer.write(self._records(requests, holders), self._limit_s)
                try:
                    await self._cluster.within(min(left_s, AGAIN_S), self._listen(reader, requests, holders))
                except TimeoutError:
                    continue
        except MarqError as error:
            failure = str(error)
        finally:
            _fail(requests, failure)
            if reader is not None:
                await reader.stop(_STOP_S)

    async def _in_incarnations(self, requests: list[_Request]) -> list[_Request]:
        """Name the incarnations of queues' own topics: a receipt names a topic as Kafka does."""
        topics = {request.receipt.topic for request in requests}
        present = await self._cluster.incarnations([topic for topic in topics if self._names.has_incarnations(topic)])
        return [
            request._replace(
                receipt=request.receipt._replace(topic=present.get(request.receipt.topic, request.receipt.topic))
            )
            for request in requests
        ]

    async def _listen(self, reader: MarkersReader, requests: list[_Request], holders: _Holders) -> None:
        pending: dict[tuple[Source, int], list[_Request]] = {}
        for request in requests:
            if not request.future.done():
                pending.setdefault(request.target, []).append(request)
        while pending:
            for value in await reader.read():
                try:
                    batch = decode(value)
                except CorruptMarker:
                    continue
                if isinstance(batch, Fact) or (isinstance(batch, Answer) and batch.holder in holders):
                    _take(batch, pending, holders)

    def _records(self, requests: list[_Request], holders: _Holders) -> list[MarkerRecord]:
        groups: dict[tuple[str, Source, bool, bool], dict[int, int]] = {}
        for request in requests:
            if request.future.done():
                continue
            source, offset = request.target
            when = request.when
            group = (request.receipt.queue, source, when is None, when is not None and when.relative)
            groups.setdefault(group, {})[offset] = 0 if when is None else when.time_ms
        records: list[MarkerRecord] = []
        for (queue, source, cancelled, relative), times in groups.items():
            offsets = sorted(times)
            batch = (
                Cancel(queue, holders.cancelling, source, offsets)
                if cancelled
                else Reschedule(queue, holders.moving, source, offsets, [times[offset] for offset in offsets], relative)
            )
            records += marker_records(batch, self._topics.markers_partitions, self._topics.markers_limit_bytes)
        return records


def _take(batch: Fact | Answer, pending: dict[tuple[Source, int], list[_Request]], holders: _Holders) -> None:
    for index, offset in enumerate(batch.offsets):
        target = (batch.source, offset)
        for request in pending.pop(target, ()):
            came_in_time = _came_in_time(request, batch, index, holders)
            if came_in_time is None:
                pending.setdefault(target, []).append(request)
            elif not request.future.done():
                request.future.set_result(came_in_time)


def _came_in_time(request: _Request, batch: Fact | Answer, index: int, holders: _Holders) -> bool | None:
    """Return the answer that a marker about its place gives to a request; None if it leaves the request undecided."""
    queue, cancels = request.receipt.queue, request.when is None
    if isinstance(batch, Fact):
        cancelled = cancels and batch.kind is Kind.CANCELLED
        # Several queues may have a message at this place. If the request names no queue, one in time is enough.
        return cancelled if batch.queue == queue or (cancelled and queue == ANY_QUEUE) else None
    holder = holders.cancelling if cancels else holders.moving
    return batch.outcomes[index] == RequestOutcome.DONE if (batch.holder, batch.queue) == (holder, queue) else None


def _all_done(requests: list[_Request]) -> bool:
    return all(request.future.done() for request in requests)


def _fail(requests: list[_Request], why: str) -> None:
    for request in requests:
        if not request.future.done():
            what = "cancelled" if request.when is None else "moved"
            request.future.set_exception(
                BrokerUnavailable(
                    f"queue {request.receipt.queue!r}: unknown whether message {request.receipt.id} was {what}: {why}"
                )
            )
