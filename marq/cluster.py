"""What clients use of a cluster: the one seam between the library and Kafka.

Above it are the producer, the consumer and the five steps; below it are aiokafka's clients, or a broker in memory
(:mod:`marq.testing`), for which an address begins with ``memory://``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar

from aiokafka import AIOKafkaProducer

from marq.connection import abandon_producer, client_options, started, stop_producer
from marq.core.definitions import Definitions
from marq.known_queues import known_queues
from marq.markers_reader import KafkaMarkersReader, MarkersReader
from marq.queues import Queues
from marq.reader import GroupMember, GroupReader
from marq.serving import Serving
from marq.settings import MEMORY_SCHEME, ClientSettings
from marq.starts import MARKED, MarkedStart, Start, TransactionalStart
from marq.topics import Topics, ensure_topics, own_topics
from marq.transactions import MarkerTransactions
from marq.watch import tracker_runs
from marq.writer import KafkaMarkerWriter, MarkerWriter

#: One batch of messages at the most: large enough that the broker is asked rarely, small enough to be built quickly.
MAX_BATCH_BYTES = 512 * 1024

T = TypeVar("T")


class Followed(Protocol):
    """The definitions of queues, as they are now."""

    definitions: Definitions
    #: A moment, of the monotonic clock, at which everything was known that was defined before.
    heard_s: float

    async def hear(self, limit_s: float) -> None:
        """Return when everything is known that was defined before; raises as :meth:`marq.queues.Queues.hear`."""

    async def start(self) -> None:
        """Read what there is, to its end."""

    async def stop(self) -> None: ...

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each change; return the call that ends it."""


class Connection(Protocol):
    """A connection to the brokers."""

    async def start(self) -> None: ...
    async def stop(self, limit_s: float) -> None: ...


class Writer(MarkerWriter, Connection, Protocol):
    """A writer of markers with a connection of its own."""


class Sender(Protocol):
    """What the producer uses of AIOKafkaProducer."""

    def create_batch(self) -> Any:
        """Return an empty batch of records."""

    async def send_batch(self, batch: Any, topic: str, *, partition: int) -> asyncio.Future[Any]:
        """Accept a batch; the future's result has the ``offset`` of its first record."""


class Cluster(Protocol):
    """The brokers, and the time that passes there and here."""

    def now_s(self) -> float:
        """Return the seconds of a monotonic clock."""

    def wall_s(self) -> float:
        """Return the seconds since 1970, as people count them."""

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        """Wait for something, but not for longer; None: however long it takes.

        Raises:
            TimeoutError: the time is over.
        """

    async def topics(self) -> Topics:
        """Make and check the topics; raises as :func:`marq.topics.ensure_topics`."""

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        """Check queues' own topics and return their partition counts; raises as :func:`marq.topics.own_topics`."""

    def queues(self) -> Followed: ...
    def writer(self, topics: Topics) -> Writer: ...

    async def markers_reader(self, partitions: Collection[int]) -> MarkersReader:
        """Return a reader of what comes to some markers partitions from now on.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
        """

    def member(self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False) -> GroupMember:
        """Return a member of a group; ``committed``: it never sees records of transactions that were aborted."""

    def start(
        self, how: str, topics: Topics, member: GroupMember, group: str, instance_id: str | None
    ) -> tuple[Start, Connection]:
        """Return how a member starts messages (``how`` is one of :data:`marq.starts.STARTS`), and what that needs."""

    async def sender(self, topics: Topics) -> Sender:
        """Connect a producer.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
        """

    async def close(self, sender: Sender, limit_s: float) -> None:
        """Close a sender after what it holds was sent, or after the limit."""

    async def tracker_runs(self) -> bool | None:
        """Whether there is a tracker; None when that can't be found out."""

    async def known_queues(self, wanted: str) -> set[str]:
        """Return the names of queues that are known; the search may end as soon as ``wanted`` is among them.

        A queue is known if it has a definition, a consumer group, or messages that are waiting or open. Dead letters
        are not looked at.

        Raises:
            BrokerUnavailable: no broker answered in time.
        """


class KafkaCluster:
    """Kafka, through aiokafka."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings

    # No method of ours in between: it is asked twice for each message.
    now_s = staticmethod(time.monotonic)

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        async with asyncio.timeout(seconds):
            return await waiting

    async def topics(self) -> Topics:
        return await ensure_topics(self._settings)

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        return await own_topics(self._settings, names, topics)

    def queues(self) -> Followed:
        return Queues.of(self._settings)

    def writer(self, topics: Topics) -> Writer:
        return KafkaMarkerWriter(self._settings, topics.markers_limit_bytes)

    async def markers_reader(self, partitions: Collection[int]) -> KafkaMarkersReader:
        reader = KafkaMarkersReader(self._settings, partitions)
        await reader.start()
        return reader

    def member(self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False) -> GroupMember:
        return GroupReader(self._settings, group, serving, instance_id=instance_id, committed=committed)

    def start(
        self, how: str, topics: Topics, member: GroupMember, group: str, instance_id: str | None
    ) -> tuple[Start, Connection]:
        if how == MARKED:
            writer = self.writer(topics)
            return MarkedStart(writer, member), writer
        assert isinstance(member, GroupReader)
        # The same after a restart where the member has a name: what it left open is then aborted at once.
        own = instance_id or secrets.token_hex(8)
        transactional_id = self._settings.names.start_id(group, own)
        transactions = MarkerTransactions(self._settings, topics.markers_limit_bytes, transactional_id)
        return TransactionalStart(transactions, member), transactions

    async def sender(self, topics: Topics) -> Sender:
        def make() -> AIOKafkaProducer:
            return AIOKafkaProducer(
                **client_options(self._settings),
                enable_idempotence=True,
                linger_ms=0,
                max_batch_size=min(MAX_BATCH_BYTES, topics.messages_limit_bytes),
                max_request_size=topics.messages_limit_bytes,
            )

        sender: Sender = await started(make, self._settings, abandon_producer, writes=self._settings.names.messages)
        return sender

    async def close(self, sender: Sender, limit_s: float) -> None:
        await stop_producer(sender, limit_s)

    async def known_queues(self, wanted: str) -> set[str]:
        return await known_queues(self._settings, wanted)

    async def tracker_runs(self) -> bool | None:
        return await tracker_runs(self._settings)


def cluster_of(settings: ClientSettings) -> Cluster:
    """Return the cluster at the settings' address."""
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        # Not at the top: a service that never tests never loads it.
        from marq.testing import memory_cluster

        return memory_cluster(settings)
    return KafkaCluster(settings)
