"""Where the messages of each queue are sent to: the installation's messages topic, or a topic of the queue's own."""

from __future__ import annotations

from marq.cluster import Cluster, Followed
from marq.core.names import Names, check_queue_name
from marq.topics import Topics

#: Queues that are remembered; past that all are looked up again.
_MAX_KNOWN_QUEUES = 10_000


class Lane:
    """One topic, and which of its partitions comes next: all are used evenly, by all queues that share it."""

    __slots__ = ("next", "partitions", "topic")

    def __init__(self, topic: str, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.next = 0

    def take(self) -> int:
        """Return the partition for what is sent next."""
        partition = self.next
        self.next = (partition + 1) % self.partitions
        return partition


class Route:
    """A lane, and the key that marks a queue's records there; in its own topic they need none."""

    __slots__ = ("key", "lane")

    def __init__(self, lane: Lane, key: bytes | None) -> None:
        self.lane = lane
        self.key = key


class Routes:
    """Routes of queues by their definitions, which may change."""

    def __init__(self, cluster: Cluster, names: Names, topics: Topics, queues: Followed) -> None:
        self._cluster = cluster
        self._topics = topics
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
        route = Route(self._shared, queue.encode()) if topic is None else Route(await self._lane(topic), None)
        if self._definitions.settings(queue).topic == topic:
            if len(self.known) >= _MAX_KNOWN_QUEUES:
                self.known.clear()
            self.known[queue] = route
        return route

    async def _lane(self, topic: str) -> Lane:
        lane = self._own.get(topic)
        if lane is None:
            partitions = await self._cluster.own_topics([topic], self._topics)
            lane = self._own.setdefault(topic, Lane(topic, partitions[topic]))
        return lane
