"""Where the messages of each queue are sent to: the installation's messages topic, or a topic of the queue's own.

In the messages topic a queue may live on some partitions only (:mod:`marq.core.spread`). These can change, and whoever
sends by what it heard too long ago sends to where nobody reads: so each parcel notes what it goes by (:class:`News`).
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from marq.cluster import Cluster, Followed
from marq.core.names import Names, check_queue_name
from marq.core.spread import HEARD_S, SENT_S, Partitions
from marq.topics import Topics

#: Queues that are remembered; past that all are looked up again.
_MAX_KNOWN_QUEUES = 10_000


class Lane:
    """Partitions of one topic, all or ``among`` some, which are used evenly by all queues that share the lane."""

    __slots__ = ("_among", "next", "partitions", "topic")

    def __init__(self, topic: str, partitions: int, among: Partitions = None) -> None:
        self.topic = topic
        #: How many are used.
        self.partitions = partitions if among is None else len(among)
        self._among = among
        # A queue on few partitions has a lane of its own, and may have few messages: not each lane begins at the first.
        self.next = 0 if among is None else random.randrange(len(among))

    def take(self) -> int:
        """Return the partition for what is sent next."""
        place = self.next
        self.next = (place + 1) % self.partitions
        return place if self._among is None else self._among[place]


class Route:
    """A lane, and the key that marks a queue's records there; in its own topic they need none."""

    __slots__ = ("key", "lane")

    def __init__(self, lane: Lane, key: bytes | None) -> None:
        self.lane = lane
        self.key = key


class News(NamedTuple):
    """What was known of placements: when it was known to be all, and how many changes that were."""

    heard_s: float
    moves: int


class Routes:
    """Routes of queues by their definitions, which may change."""

    def __init__(self, cluster: Cluster, names: Names, topics: Topics, queues: Followed) -> None:
        self._cluster = cluster
        self._topics = topics
        self._queues = queues
        self._definitions = queues.definitions
        self._shared = Lane(names.messages, topics.messages_partitions)
        self._own: dict[str, Lane] = {}
        #: What is known; a queue that is missing is looked up by :meth:`find`.
        self.known: dict[str, Route] = {}
        self._stop = queues.listen(self.known.clear)

    def close(self) -> None:
        """Follow the definitions no more."""
        self._stop()

    async def find(self, queue: str) -> Route:
        """Return the route of a queue.

        Raises:
            ConfigError: the queue's name is not allowed, or its own topic can't be used.
            BrokerUnavailable: no broker told of its own topic in time.
        """
        topic = self._definitions.settings(check_queue_name(queue)).topic
        route = (
            Route(self._shared_lane(queue), queue.encode()) if topic is None else Route(await self._lane(topic), None)
        )
        if self._definitions.settings(queue).topic == topic:
            if len(self.known) >= _MAX_KNOWN_QUEUES:
                self.known.clear()
            self.known[queue] = route
        return route

    @property
    def news(self) -> News:
        """What routes go by now."""
        return News(self._queues.heard_s, self._definitions.moves)

    async def check(self, limit_s: float) -> None:
        """Return when what routes go by is new enough to send by it; raises as :meth:`marq.queues.Queues.hear`."""
        if time.monotonic() - self._queues.heard_s > HEARD_S:
            await self._queues.hear(limit_s)

    async def still_held(self, news: News, limit_s: float) -> bool:
        """Whether what was sent by some news until now is where it is read; raises as :meth:`check`."""
        if time.monotonic() - news.heard_s <= SENT_S:
            return True
        await self._queues.hear(limit_s)
        return self._definitions.moves == news.moves

    def _shared_lane(self, queue: str) -> Lane:
        sends = self._definitions.placement(queue).sends
        if sends is None:
            return self._shared
        # Of partitions that have been added since our start this producer knows nothing, as long as it can do without.
        known = tuple(each for each in sends if each < self._topics.messages_partitions)
        return Lane(self._shared.topic, self._shared.partitions, known or sends)

    async def _lane(self, topic: str) -> Lane:
        lane = self._own.get(topic)
        if lane is None:
            partitions = await self._cluster.own_topics([topic], self._topics)
            lane = self._own.setdefault(topic, Lane(topic, partitions[topic]))
        return lane
