"""How a producer sends messages: the route of each one, the check that it fits, and the batches of each partition.

**Routes.** The messages of a queue go to the messages topic, or to the queue's own topic. In the messages topic a queue
may use only some partitions (:mod:`marq.settings.placements`). These can change, and no consumer of the queue reads the
former ones. So each batch carries the version of the placements by which its partition was chosen.

All messages of an ordering key go to one partition, in the order of the calls. The key and the queue's fixed list of
partitions determine the partition. Two senders with different lists would put messages with a key into different
partitions. So a message with a key is sent only by a fixed list that is in force everywhere
(:meth:`marq.settings.placements.Placement.takes_keys`); until then, the call waits.

**Batches.** Messages of the same iteration of the event loop share batches. With a ``linger_s``, so do those that come
while others are on their way, and they go to one partition: one large batch costs less than several small ones.

A connection that failed is replaced, because it would retry messages although their callers were told that they may not
have been sent. After a batch that the broker refused, later ones of its partition would lack their predecessor: the
connection is replaced when the batches of other callers have been sent, and new ones wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from aiokafka.errors import KafkaError
from aiokafka.partitioner import murmur2

from marq.backend.cluster import Cluster, DefinitionsView, Sender
from marq.client.codecs import Codec, not_bytes
from marq.client.receipt import Receipt
from marq.client.send_options import Header
from marq.kafka.produce_errors import refusal
from marq.kafka.role_permissions import refused
from marq.kafka.topics import Topics
from marq.settings.client import ClientSettings
from marq.settings.ordering_keys import partition_of
from marq.settings.placements import SENT_S, SYNCED_S, Partitions
from marq.settings.queue import ORDERED_BY_KEY, QueueSettings
from marq.wire.errors import BrokerUnavailable, ConfigError, MarqError, MessageTooLarge, error_text, reason_of
from marq.wire.markers import Payload, payload_bytes
from marq.wire.names import ENVELOPE_ROOM_BYTES, HEADER_ROOM_BYTES, ORDERING_KEY_HEADER, check_queue_name

log = logging.getLogger("marq")

#: How long a stop waits for messages that are being sent.
STOP_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 1.0
#: Pause between two attempts to reconnect.
RETRY_S = 1.0
#: Maximum number of remembered routes; beyond it all are looked up again.
_MAX_KNOWN_QUEUES = 10_000
#: Bytes of an ACQUIRE's envelope that are not headers.
_ENVELOPE_USED_BYTES = 2_048
#: Maximum number of bytes that Kafka adds to each header.
_HEADER_FRAME_BYTES = 10


# --- routes -----------------------------------------------------------------------------------------------------------


class PartitionCursor:
    """All partitions of a topic, or those in ``among``, used evenly by all queues that share the cursor."""

    __slots__ = ("_among", "next", "partitions", "topic")

    def __init__(self, topic: str, partitions: int, among: Partitions = None) -> None:
        self.topic = topic
        #: The number of partitions in use.
        self.partitions = partitions if among is None else len(among)
        self._among = among
        # Queues on a few partitions have their own cursors, and maybe few messages: start at different partitions.
        self.next = 0 if among is None else random.randrange(len(among))

    def take(self) -> int:
        """Return the partition to send to next."""
        index = self.next
        self.next = (index + 1) % self.partitions
        return index if self._among is None else self._among[index]


class Route:
    """A cursor, and the key of the queue's records; None in its own topic."""

    __slots__ = ("cursor", "key")

    def __init__(self, cursor: PartitionCursor, key: bytes | None) -> None:
        self.cursor = cursor
        self.key = key


class PlacementVersion(NamedTuple):
    """The known placements: when they were known to be complete, and how many changes there were."""

    synced_s: float
    moves: int


class Routes:
    """The routes of queues, which follow their definitions."""

    def __init__(self, cluster: Cluster, settings: ClientSettings, topics: Topics, queues: DefinitionsView) -> None:
        self._cluster = cluster
        self._limit_s = settings.request_timeout_ms / 1000
        self._topics = topics
        self._queues = queues
        self._definitions = queues.definitions
        self._shared = PartitionCursor(settings.names.messages, topics.messages_partitions)
        self._own: dict[str, PartitionCursor] = {}
        #: Known routes; :meth:`find` looks up the others.
        self.known: dict[str, Route] = {}
        #: Stops following the definitions.
        self.close = queues.listen(self.known.clear)
        #: The calls with each ordering key, one after the other.
        self._turns: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()
        #: Since when calls with ordering keys wait for the partitions of each queue.
        self._waited_since_s: dict[str, float] = {}

    async def find(self, queue: str) -> Route:
        """Return the route of a queue.

        Raises:
            ConfigError: the queue's name is not allowed, or its own topic can't be used.
            BrokerUnavailable: no broker described its own topic in time.
        """
        topic = self._definitions.settings(check_queue_name(queue)).topic
        if topic is None:
            route = Route(self._shared_cursor(queue), queue.encode())
        else:
            route = Route(await self._own_cursor(topic), None)
        if self._definitions.settings(queue).topic == topic:
            if len(self.known) >= _MAX_KNOWN_QUEUES:
                self.known.clear()
            self.known[queue] = route
        return route

    def check_may_expire(self, queues: Sequence[str], key: bytes | None) -> None:
        """Check that none of the queues goes by keys: their messages do not expire. Raises ConfigError."""
        for queue in queues:
            settings = self._definitions.settings(check_queue_name(queue))
            if key is not None or settings.by_key:
                raise ConfigError(
                    f"queue {queue!r}: expires_in cannot be combined with an ordering_key, nor with the settings"
                    " ordering, limits, fair and priority: leave expires_in out, or compare message.sent_at in the"
                    " handler"
                )

    @property
    def placements(self) -> PlacementVersion:
        """The placements that routes follow now."""
        return PlacementVersion(self._queues.synced_s, self._definitions.moves)

    @property
    def are_recent(self) -> bool:
        """Whether the placements are recent enough to send by."""
        return time.monotonic() - self._queues.synced_s <= SYNCED_S

    async def sync(self) -> None:
        """Learn of recent placements; same errors as :meth:`marq.queues.queues.Queues.sync`."""
        await self._queues.sync(self._limit_s)

    async def still_hold(self, placements: PlacementVersion) -> bool:
        """Whether consumers read the partitions chosen by some placements; same errors as :meth:`sync`."""
        if time.monotonic() - placements.synced_s <= SENT_S:
            return True
        await self.sync()
        return self._definitions.moves == placements.moves

    def _shared_cursor(self, queue: str) -> PartitionCursor:
        sends = self._definitions.placement(queue).sends
        if sends is None:
            return self._shared
        # Partitions that were added since the start are unknown here, and not used as long as there are others.
        known = tuple(partition for partition in sends if partition < self._topics.messages_partitions)
        return PartitionCursor(self._shared.topic, self._shared.partitions, known or sends)

    async def _own_cursor(self, topic: str) -> PartitionCursor:
        cursor = self._own.get(topic)
        if cursor is None:
            partitions = await self._cluster.own_topics([topic], self._topics)
            cursor = self._own.setdefault(topic, PartitionCursor(topic, partitions[topic]))
        return cursor

    # --- ordering keys ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, queues: Iterable[str], key: bytes) -> AsyncIterator[float]:
        """Wait for the earlier calls with this key; a call that finds its route first must not overtake them.

        The value is the time of this call, for :meth:`find_by_key`.
        """
        called_s = asyncio.get_running_loop().time()
        turns: list[asyncio.Lock] = []
        try:
            # Sorted, so that two calls can't wait for each other.
            for queue in sorted(queues):
                turn = self._turns.get((queue, key)) or asyncio.Lock()
                self._turns[queue, key] = turn
                await turn.acquire()
                turns.append(turn)
            yield called_s
        finally:
            for turn in turns:
                turn.release()

    async def find_by_key(
        self, queue: str, key: bytes, headers: Sequence[Header], called_s: float, *, delayed: bool = False
    ) -> tuple[Route, list[Header]]:
        """Return the route of a key, and the headers of its messages, in the turn of a call.

        Raises:
            ConfigError: the queue has no ordering, or its own topic can't be used.
            BrokerUnavailable: the queue's list of partitions is not in force in time.
        """
        settings = await self._settings_by_key(queue)
        topic = settings.topic
        if topic is None:
            partitions = await self._fixed_partitions(queue, called_s)
            cursor = PartitionCursor(self._shared.topic, len(partitions), (partition_of(key, partitions),))
            return Route(cursor, queue.encode()), [*headers, (ORDERING_KEY_HEADER, key)]
        if delayed:
            raise ConfigError(
                f"queue {queue!r}: ordering_key cannot be combined with delay or deduplication_id in its own topic"
                f" {topic!r}, because such a message is delivered through the messages topic; send it without a key"
            )
        count = (await self._own_cursor(topic)).partitions
        return Route(PartitionCursor(topic, count, (default_partition(key, count),)), key), list(headers)

    async def _settings_by_key(self, queue: str) -> QueueSettings:
        settings = self._definitions.settings(check_queue_name(queue))
        if not settings.by_key:
            # It may have just been set.
            await self.sync()
            settings = self._definitions.settings(queue)
        if not settings.by_key:
            raise ConfigError(
                f'queue {queue!r}: ordering_key needs the setting ordering = "{ORDERED_BY_KEY}", limits or fair, but'
                f' ordering is "{settings.ordering}": set one in [queues.{queue}] of marq.toml, or leave the key out'
            )
        return settings

    async def _fixed_partitions(self, queue: str, called_s: float) -> Sequence[int]:
        """Return the queue's fixed partitions, as soon as all clients send by them."""
        placement = self._definitions.placement(queue)
        if not placement.takes_keys:
            # The limit includes the time for which this call waited behind calls that waited for the partitions, too.
            # Otherwise the calls would fail one after the other. Time in which those sent messages does not count.
            since_s = self._waited_since_s.setdefault(queue, asyncio.get_running_loop().time())
            changed = asyncio.Event()
            end = self._queues.listen(changed.set)
            try:
                async with asyncio.timeout_at(max(called_s, since_s) + self._limit_s):
                    while not (placement := self._definitions.placement(queue)).takes_keys:
                        changed.clear()
                        await changed.wait()
            except TimeoutError:
                raise BrokerUnavailable(
                    f"queue {queue!r}: "
                    + (
                        f"no worker has fixed the partitions of its ordering keys within {self._limit_s:g} s; start a"
                        if placement.fixed is None
                        else "its partitions are changing, which takes a minute after consumers have read the former"
                        " ones; retry, and make sure that they run, and a"
                    )
                    + " worker. The message was not sent"
                ) from None
            finally:
                end()
        self._waited_since_s.pop(queue, None)
        assert placement.sends is not None, "a fixed list names its partitions"
        return placement.sends


def default_partition(key: bytes, partitions: int) -> int:
    """Return the partition that the default partitioner of Kafka's Java client gives to a record key."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


# --- content ----------------------------------------------------------------------------------------------------------


def encode(codec: Codec, queue: object, value: object, item: int | None = None) -> bytes:
    """Return a value's bytes; ``queue`` and ``item``, its place among several, are for the text of an error.

    Raises TypeError or ValueError if the codec can't encode it; MarqError or OSError as the codec raised them.
    """
    try:
        data = codec.encode(value)
    except (MarqError, OSError):
        raise
    except Exception as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"queue {queue!r}{_item(item)}: {codec!r} can't encode the value: {error_text(error)}") from error
    if not isinstance(data, bytes):
        raise TypeError(f"queue {queue!r}{_item(item)}: {codec!r} encoded to {type(data).__name__}, expected bytes")
    return data


class Content:
    """Checks messages against the limit of the messages topic."""

    def __init__(self, limit_bytes: int) -> None:
        #: Redelivery adds headers, for which there must be room.
        self.limit_bytes = limit_bytes - HEADER_ROOM_BYTES
        self._envelope_bytes = limit_bytes + ENVELOPE_ROOM_BYTES - _ENVELOPE_USED_BYTES

    def check(
        self, queue: str, key: bytes | None, value: object, headers: Sequence[Header], item: int | None = None
    ) -> None:
        """Check one message; ``item`` is its place among several. Raises TypeError or MessageTooLarge."""
        if type(value) is not bytes and not isinstance(value, bytes):
            raise TypeError(f"queue {queue!r}{_item(item)}: {not_bytes(value)}")
        size = len(key or b"") + len(value)
        if headers:
            size += sum(len(name.encode()) + len(header or b"") + _HEADER_FRAME_BYTES for name, header in headers)
            if payload_bytes(Payload(0, 1, key, headers, value)) > self._envelope_bytes:
                raise MessageTooLarge(f"queue {queue!r}{_item(item)}: {len(headers)} headers are too many")
        if size > self.limit_bytes:
            raise MessageTooLarge(
                f"queue {queue!r}{_item(item)}: the message has {size} bytes with key and headers, at most"
                f" {self.limit_bytes} are allowed (max.message.bytes of the messages topic less {HEADER_ROOM_BYTES})"
            )

    def check_many(self, queue: str, key: bytes | None, values: Sequence[object], headers: Sequence[Header]) -> None:
        """Check messages with equal headers; errors name the item."""
        if not values:
            return
        if set(map(type, values)) == {bytes}:
            # Checking the largest one is enough.
            values_bytes: Sequence[bytes] = values  # type: ignore[assignment]
            sizes = list(map(len, values_bytes))
            largest = sizes.index(max(sizes))
            self.check(queue, key, values_bytes[largest], headers, largest)
            return
        for item, value in enumerate(values):
            self.check(queue, key, value, headers, item)


def _item(item: int | None) -> str:
    return "" if item is None else f", item {item}"


# --- batches ----------------------------------------------------------------------------------------------------------


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
        if not await self._routes.still_hold(batch.placements):
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
                    await self._routes.sync()
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
