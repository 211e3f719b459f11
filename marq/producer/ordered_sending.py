"""Where to send the messages of an ordering key: all to one partition, in the order of the calls.

The key and the queue's fixed list of partitions determine the partition. Two senders with different lists would put
messages with a key into different partitions. So a message with a key is sent only by a fixed list that is in force
everywhere (:meth:`marq.settings.placements.Placement.takes_keys`); until then, the call waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from aiokafka.partitioner import murmur2

from marq.backend.cluster import DefinitionsView
from marq.client.message_checks import Header
from marq.producer.routes import PartitionCursor, Route, Routes
from marq.settings.ordering_keys import partition_of
from marq.settings.queue import ORDERED_BY_KEY, QueueSettings
from marq.wire.errors import BrokerUnavailable, ConfigError
from marq.wire.names import ORDERING_KEY_HEADER, check_queue_name


class KeyedRoutes:
    """The routes of one producer's ordering keys."""

    def __init__(self, routes: Routes, queues: DefinitionsView, topic: str, limit_s: float) -> None:
        self._routes = routes
        self._queues = queues
        self._topic = topic
        self._limit_s = limit_s
        self._turns: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()
        #: Since when calls wait for the partitions of each queue.
        self._waited_since_s: dict[str, float] = {}

    @asynccontextmanager
    async def turn(self, queues: Iterable[str], key: bytes) -> AsyncIterator[float]:
        """Wait for the earlier calls with this key; a call that finds its route first must not overtake them.

        The value is the time of this call, for :meth:`find`.
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

    async def find(
        self, queue: str, key: bytes, headers: Sequence[Header], called_s: float, *, delayed: bool = False
    ) -> tuple[Route, list[Header]]:
        """Return the route of a key, and the headers of its messages, in the turn of a call.

        Raises:
            ConfigError: the queue has no ordering, or its own topic can't be used.
            BrokerUnavailable: the queue's list of partitions is not in force in time.
        """
        settings = await self._settings(queue)
        topic = settings.topic
        if topic is None:
            partitions = await self._partitions(queue, called_s)
            cursor = PartitionCursor(self._topic, len(partitions), (partition_of(key, partitions),))
            return Route(cursor, queue.encode()), [*headers, (ORDERING_KEY_HEADER, key)]
        if delayed:
            raise ConfigError(
                f"queue {queue!r}: ordering_key cannot be combined with delay or deduplication_id in its own topic"
                f" {topic!r}, because such a message is delivered through the messages topic; send it without a key"
            )
        count = await self._routes.own_partitions(topic)
        return Route(PartitionCursor(topic, count, (default_partition(key, count),)), key), list(headers)

    async def _settings(self, queue: str) -> QueueSettings:
        settings = self._queues.definitions.settings(check_queue_name(queue))
        if not settings.by_key:
            # It may have just been set.
            await self._queues.sync(self._limit_s)
            settings = self._queues.definitions.settings(queue)
        if not settings.by_key:
            raise ConfigError(
                f'queue {queue!r}: ordering_key needs the setting ordering = "{ORDERED_BY_KEY}", limits or fair, but'
                f' ordering is "{settings.ordering}": set one in [queues.{queue}] of marq.toml, or leave the key out'
            )
        return settings

    async def _partitions(self, queue: str, called_s: float) -> Sequence[int]:
        """Return the queue's fixed partitions, as soon as all clients send by them."""
        placement = self._queues.definitions.placement(queue)
        if not placement.takes_keys:
            # The limit includes the time for which this call waited behind calls that waited for the partitions, too.
            # Otherwise the calls would fail one after the other. Time in which those sent messages does not count.
            since_s = self._waited_since_s.setdefault(queue, asyncio.get_running_loop().time())
            changed = asyncio.Event()
            end = self._queues.listen(changed.set)
            try:
                async with asyncio.timeout_at(max(called_s, since_s) + self._limit_s):
                    while not (placement := self._queues.definitions.placement(queue)).takes_keys:
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
