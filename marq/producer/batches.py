"""Batches of messages, one for each partition.

Messages of the same iteration of the event loop share batches. With a ``linger_s``, so do those that come while others
are on their way, and they go to one partition: one large batch costs less than several small ones.

A connection that failed is replaced, because it would retry messages although their callers were told that they may not
have been sent. After a batch that the broker refused, later ones of its partition would lack their predecessor: the
connection is replaced when the batches of other callers have been sent, and new ones wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiokafka.errors import KafkaError

from marq.backend.cluster import Cluster, Sender
from marq.client.message_checks import Header
from marq.client.receipt import Receipt
from marq.kafka.produce_errors import refusal
from marq.kafka.role_permissions import refused
from marq.kafka.topics import Topics
from marq.producer.routes import PartitionCursor, PlacementVersion, Route, Routes
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError, reason_of

log = logging.getLogger("marq")

#: How long a stop waits for messages that are being sent.
STOP_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0
#: Pause between two attempts to reconnect.
RETRY_S = 1.0


class SendCounts:
    """Numbers of messages that were confirmed, and of those that may not have been sent."""

    def __init__(self) -> None:
        self.sent = self.failed = 0


class ProducerBatch:
    """Messages for one partition, and the futures of their offsets."""

    __slots__ = ("batch", "count", "futures", "partition", "placements", "topic")

    def __init__(self, sender: Sender, topic: str, partition: int, placements: PlacementVersion) -> None:
        #: The placements by which the partition was chosen.
        self.placements = placements
        self.topic = topic
        self.partition = partition
        self.batch = sender.create_batch()
        self.futures: list[asyncio.Future[int]] = []
        self.count = 0

    def append(self, key: bytes | None, value: bytes, headers: list[Header]) -> asyncio.Future[int] | None:
        """Add a message; return None if the batch is full."""
        if self.batch.append(timestamp=None, key=key, value=value, headers=headers) is None:
            return None
        self.count += 1
        return self.future()

    def future(self) -> asyncio.Future[int]:
        """Return a new future for the offset of the first message that has none."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        return future

    def fill(self, key: bytes | None, values: Sequence[bytes], start: int, stop: int, headers: list[Header]) -> int:
        """Add messages until the batch is full; return the index of the first one left."""
        append, now_ms = self.batch.append, int(time.time() * 1000)
        for index in range(start, stop):
            if append(timestamp=now_ms, key=key, value=values[index], headers=headers) is None:
                self.count = index - start
                return index
        self.count = stop - start
        return stop

    def confirm(self, first_offset: int) -> None:
        for offset, future in enumerate(self.futures, first_offset):
            if not future.done():
                future.set_result(offset)

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)
                # A caller that was cancelled does not ask for it; asyncio would log it when the future is collected.
                future.exception()


class Batcher:
    """Sends the messages of a producer between its start and its stop.

    Args:
        linger_s: how long a batch waits for more messages while other batches are on their way.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ClientSettings,
        topics: Topics,
        routes: Routes,
        sender: Sender,
        counts: SendCounts,
        linger_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._limit_s = settings.request_timeout_ms / 1000
        self._topics = topics
        self._routes = routes
        self._sender = sender
        self._counts = counts
        self._linger_s = linger_s
        self._open: dict[tuple[str, int], ProducerBatch] = {}
        #: With a linger, the partition of the open batch by cursor.
        self._partitions: dict[PartitionCursor, int] = {}
        self._sending: set[asyncio.Task[Any]] = set()
        self._turns: dict[tuple[str, int], asyncio.Lock] = {}
        self._replacing: asyncio.Task[Any] | None = None
        #: Whether batches need not wait for another connection.
        self._go_on = asyncio.Event()
        self._go_on.set()
        #: The tasks whose batches the connection has.
        self._on_their_way: set[asyncio.Task[Any]] = set()
        self._stopping = self._stopped = False

    async def drain(self) -> None:
        """Wait a few seconds for accepted messages to be confirmed."""
        self._stopping = True
        self._submit_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT_S):
                # A running send_many continues to its last item, so loop.
                while self._sending:
                    await asyncio.wait(self._sending)

    async def close(self) -> None:
        """Give up unconfirmed messages, and close the connection."""
        self.give_up()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._cluster.close(self._sender, _CLOSE_LIMIT_S)

    def give_up(self) -> None:
        self._stopped = True
        for batch in self._open.values():
            self._fail(batch, _not_sent())
        self._open.clear()
        for task in list(self._sending):
            task.cancel()

    # --- one by one ---------------------------------------------------------------------------------------------------

    def post(self, route: Route, value: bytes, headers: list[Header]) -> tuple[int, asyncio.Future[int]]:
        """Add a message to the open batch, which is sent in the loop's next turn, or after ``linger_s``.

        Return the partition, and the future of the message's offset.
        """
        cursor = route.cursor
        while True:
            partition = self._partitions.get(cursor)
            if partition is None:
                partition = cursor.take()
                if self._linger_s:
                    self._partitions[cursor] = partition
            target = cursor.topic, partition
            batch = self._open.get(target) or self._open_batch(target)
            future = batch.append(route.key, value, headers)
            if future is not None:
                return partition, future
            assert batch.count, "an empty batch takes every message"
            self._submit(target)
            self._partitions.pop(cursor, None)

    def _open_batch(self, target: tuple[str, int]) -> ProducerBatch:
        if self._stopped:
            raise _not_sent()
        if not self._open:
            loop = asyncio.get_running_loop()
            if self._linger_s and self._sending:
                loop.call_later(self._linger_s, self._submit_all)
            else:
                loop.call_soon(self._submit_all)
        batch = self._open[target] = ProducerBatch(self._sender, *target, self._routes.placements)
        return batch

    def _submit_all(self) -> None:
        self._partitions.clear()
        for target in list(self._open):
            self._submit(target)

    def _submit(self, target: tuple[str, int]) -> None:
        self._begin(self._open.pop(target))

    # --- many ---------------------------------------------------------------------------------------------------------

    async def send_many(
        self,
        queue: str,
        items: Sequence[bytes],
        route: Route,
        headers: list[Header],
        find: Callable[[], Awaitable[tuple[Route, list[Header]]]],
        *,
        in_order: bool,
    ) -> tuple[list[Receipt | None], BaseException | None]:
        """Send messages of one queue; return the receipt of each, None if unknown, and the first failure.

        Args:
            find: returns route and headers for each further batch, because the queue may move before the last items.
            in_order: send each batch after the one before, so that a failure leaves no gap.
        """
        sends: list[asyncio.Future[int]] = []
        batches: list[tuple[str, int, int]] = []
        start, failure = 0, None
        while start < len(items):
            try:
                if sends:
                    route, headers = await find()
                if self._stopped:
                    raise _not_sent()
            except MarqError as error:
                failure = error
                break
            cursor, partition = route.cursor, route.cursor.take()
            if in_order and (cursor.topic, partition) in self._open:
                # Earlier calls with this key may have messages in the open batch.
                self._submit((cursor.topic, partition))
            batch = ProducerBatch(self._sender, cursor.topic, partition, self._routes.placements)
            share = max(1, -(-len(items) // cursor.partitions))
            stop = batch.fill(route.key, items, start, min(start + share, len(items)), headers)
            # Accepted only after the partition's previous batch was sent, which bounds memory.
            sends.append(batch.future())
            self._begin(batch)
            batches.append((cursor.topic, partition, stop - start))
            start = stop
            most = 1 if in_order else 2 * cursor.partitions
            if len(sends) % most == 0:
                await asyncio.wait(sends[-most:], return_when=asyncio.FIRST_COMPLETED)
            if in_order and sends[-1].exception() is not None:
                break
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        receipts: list[Receipt | None] = []
        for (topic, partition, count), outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                receipts += [None] * count
            else:
                receipts += [Receipt(queue, topic, partition, offset) for offset in range(outcome, outcome + count)]
        receipts += [None] * (len(items) - start)
        failures = (outcome for outcome in outcomes if isinstance(outcome, BaseException))
        return receipts, next(failures, failure)

    # --- to Kafka -----------------------------------------------------------------------------------------------------

    def _track(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    def _begin(self, batch: ProducerBatch) -> None:
        # Confirm or fail the batch in a callback, not in the task: a task that is cancelled before its first step never
        # runs, and its callers would wait forever.
        self._track(self._send(batch)).add_done_callback(partial(self._end, batch))

    def _end(self, batch: ProducerBatch, task: asyncio.Task[int]) -> None:
        if task.cancelled():
            self._fail(batch, self._unknown(batch, "the producer was stopped"))
        elif (error := task.exception()) is not None:
            self._fail(batch, error if isinstance(error, MarqError) else self._unknown(batch, repr(error)))
        else:
            self._counts.sent += batch.count
            batch.confirm(task.result())

    def _fail(self, batch: ProducerBatch, error: MarqError) -> None:
        self._counts.failed += batch.count
        batch.fail(error)

    async def _send(self, batch: ProducerBatch) -> int:
        """Send a batch and return the offset of its first message."""
        first_offset = await self._send_to_kafka(batch)
        if not await self._routes.still_hold(batch.placements, self._limit_s):
            raise self._unknown(batch, "its queue has moved to other partitions")
        return first_offset

    async def _send_to_kafka(self, batch: ProducerBatch) -> int:
        # One batch waits for its partition at a time: aiokafka 0.14 adds up the waiting times of several, and so
        # gives up too early. The check is in the turn, too: otherwise, a later batch that needs none would overtake.
        turn = self._turns.setdefault((batch.topic, batch.partition), asyncio.Lock())
        sender, task = self._sender, asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(self._limit_s) as limit, turn:
                if not self._routes.are_recent:
                    limit.reschedule(None)
                    await self._routes.check(self._limit_s)
                    limit.reschedule(asyncio.get_running_loop().time() + self._limit_s)
                await self._go_on.wait()
                if self._replacing is not None:
                    raise self._disconnected(batch)
                sender = self._sender
                self._on_their_way.add(task)
                sent = await sender.send_batch(batch.batch, batch.topic, partition=batch.partition)
            async with asyncio.timeout(self._limit_s):
                return int((await sent).offset)
        except (TimeoutError, KafkaError, AssertionError) as error:
            # aiokafka asserts that the partition exists; a recreated topic may have fewer partitions.
            known = refused(self._settings, error, "Write", batch.topic) or refusal(batch.topic, error)
            self._replace(sender, others_go_on=known is not None)
            if known is None and isinstance(error, TimeoutError) and task not in self._on_their_way:
                raise self._disconnected(batch) from error
            raise known or self._unknown(batch, reason_of(error)) from error
        finally:
            self._on_their_way.discard(task)

    def _replace(self, sender: Sender, others_go_on: bool) -> None:
        """Replace a connection that failed: it would retry messages that callers believe to have failed.

        If ``others_go_on``, the other batches that it has are sent first, and new ones wait. Otherwise, all fail.
        """
        if self._sender is sender and self._replacing is None and not self._stopping:
            if others_go_on:
                self._go_on.clear()
            self._replacing = self._track(self._connect_again(sender, STOP_LIMIT_S if others_go_on else 0))

    async def _connect_again(self, failed: Sender, limit_s: float) -> None:
        """Open another connection; until then sends wait, or fail at once."""
        try:
            if limit_s and self._on_their_way:
                await asyncio.wait(self._on_their_way.copy(), timeout=limit_s)
            await self._cluster.close(failed, 0)
            while True:
                try:
                    self._sender = await self._cluster.sender(self._topics)
                    return
                except BrokerUnavailable as error:
                    log.warning("cannot start a producer, retrying: %s", error)
                    self._go_on.set()
                    await self._cluster.sleep(RETRY_S)
        finally:
            self._replacing = None
            self._go_on.set()

    def _disconnected(self, batch: ProducerBatch) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"topic {batch.topic}: the connection to the broker at {self._settings.bootstrap_servers} has failed and is"
            " being replaced, so nothing was sent; retry"
        )

    def _unknown(self, batch: ProducerBatch, cause: str) -> BrokerUnavailable:
        within = f" within {self._limit_s:g} s" if cause == TimeoutError.__name__ else ""
        return BrokerUnavailable(
            f"topic {batch.topic}: the broker at {self._settings.bootstrap_servers} did not confirm{within}"
            f" ({cause}): unknown whether the message was sent; retry if duplicates are acceptable"
        )


def _not_sent() -> MarqError:
    return MarqError("the producer was stopped: the message was not sent")
