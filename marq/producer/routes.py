"""Where to send the messages of each queue: to the messages topic, or to the queue's own topic.

In the messages topic a queue may use only some partitions (:mod:`marq.settings.placements`). These can change, and no
consumer of the queue reads the former ones. So each batch carries the version of the placements by which its partition
was chosen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from marq.backend.cluster import Cluster, DefinitionsView
from marq.kafka.topics import Topics
from marq.settings.placements import SENT_S, SYNCED_S, Partitions
from marq.wire.errors import ConfigError
from marq.wire.names import Names, check_queue_name

#: Maximum number of remembered routes; beyond it all are looked up again.
_MAX_KNOWN_QUEUES = 10_000


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

    def __init__(self, cluster: Cluster, names: Names, topics: Topics, queues: DefinitionsView) -> None:
        self._cluster = cluster
        self._topics = topics
        self._queues = queues
        self._definitions = queues.definitions
        self._shared = PartitionCursor(names.messages, topics.messages_partitions)
        self._own: dict[str, PartitionCursor] = {}
        #: Known routes; :meth:`find` looks up the others.
        self.known: dict[str, Route] = {}
        #: Stops following the definitions.
        self.close = queues.listen(self.known.clear)

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

    async def own_partitions(self, topic: str) -> int:
        """Return the number of partitions of a queue's own topic; same errors as :meth:`find`."""
        return (await self._own_cursor(topic)).partitions

    @property
    def placements(self) -> PlacementVersion:
        """The placements that routes follow now."""
        return PlacementVersion(self._queues.synced_s, self._definitions.moves)

    @property
    def are_recent(self) -> bool:
        """Whether the placements are recent enough to send by."""
        return time.monotonic() - self._queues.synced_s <= SYNCED_S

    async def check(self, limit_s: float) -> None:
        """Wait until the placements are recent enough; same errors as :meth:`marq.queues.queues.Queues.sync`."""
        if not self.are_recent:
            await self._queues.sync(limit_s)

    async def still_hold(self, placements: PlacementVersion, limit_s: float) -> bool:
        """Whether consumers read the partitions chosen by some placements; same errors as :meth:`check`."""
        if time.monotonic() - placements.synced_s <= SENT_S:
            return True
        await self._queues.sync(limit_s)
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
