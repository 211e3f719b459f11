"""The interface between the clients and a broker: Kafka through aiokafka, or the in-memory broker.

Addresses of the in-memory broker (:mod:`marq.testing`) begin with ``memory://``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from aiokafka import AIOKafkaProducer

from marq.client.backends import backend_of
from marq.kafka.broker_clock import BrokerClock
from marq.kafka.connection import abandon_producer, client_options, started, stop_producer
from marq.kafka.group_reader import GroupMember, GroupReader
from marq.kafka.log_reader import KafkaMarkersReader, MarkersReader
from marq.kafka.marker_writer import KafkaMarkerWriter, MarkerWriter
from marq.kafka.queue_records import Serving
from marq.kafka.topics import Topics, ensure_topics, incarnations, own_topics
from marq.kafka.transactions import MarkerTransactions
from marq.queues.known_queues import known_queues
from marq.queues.queues import Queues
from marq.queues.tracker_watch import tracker_runs
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions

#: Maximum size of a batch: large enough for few requests, small enough to be built quickly.
MAX_BATCH_BYTES = 512 * 1024
#: How long to wait for the end of a writer's connection.
WRITER_STOP_S = 2.0

T = TypeVar("T")


class DefinitionsView(Protocol):
    """The current definitions of queues; see :class:`marq.queues.queues.Queues`."""

    @property
    def definitions(self) -> Definitions: ...

    @property
    def synced_s(self) -> float:
        """When all earlier definitions were known, in seconds of the monotonic clock."""

    async def sync(self, limit_s: float) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def listen(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class WriterConnection(Protocol):
    async def start(self) -> None: ...
    async def stop(self, limit_s: float) -> None: ...


class Writer(MarkerWriter, WriterConnection, Protocol):
    """A writer of markers with its own connection."""


class Sender(Protocol):
    """The part of AIOKafkaProducer that the producer uses."""

    def create_batch(self) -> Any: ...

    async def send_batch(self, batch: Any, topic: str, *, partition: int) -> asyncio.Future[Any]:
        """Accept a batch; the future's result has the ``offset`` of its first record."""


class Cluster(Protocol):
    """The brokers and their clock. Calls that connect raise BrokerUnavailable if no broker answers in time."""

    def now_s(self) -> float:
        """Return the seconds of a monotonic clock."""

    def wall_s(self) -> float:
        """Return the seconds since 1970."""

    def broker_ms(self) -> int | None:
        """Return the milliseconds since 1970 by the brokers' clock; None before the first write of markers."""

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        """Wait up to ``seconds`` (None: without a limit); raise TimeoutError after that."""

    async def topics(self) -> Topics:
        """Create and check the topics; same errors as :func:`marq.kafka.topics.ensure_topics`."""

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        """Check queues' own topics and return their partition counts, as :func:`marq.kafka.topics.own_topics`."""

    async def incarnations(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the present incarnations of topics, as :func:`marq.kafka.topics.incarnations`."""

    def queues(self) -> DefinitionsView: ...
    def writer(self, topics: Topics) -> Writer: ...

    async def markers_reader(self, partitions: Collection[int]) -> MarkersReader:
        """Return a reader of markers that are written to some partitions from now on."""

    def member(
        self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False, url: str = ""
    ) -> GroupMember:
        """Return a group member; with ``committed`` it skips records of aborted transactions.

        ``url`` is the address that it tells its group.
        """

    def acquirer(self, topics: Topics) -> Writer:
        """Return what writes ACQUIREs outside of transactions."""

    def transactions(self, topics: Topics, group: str, instance_id: str | None) -> MarkerTransactions | None:
        """Return what writes ACQUIREs and commits a group's offsets in transactions; None if neither can fail here."""

    async def sender(self, topics: Topics) -> Sender:
        """Connect a producer."""

    async def close(self, sender: Sender, limit_s: float) -> None:
        """Close a sender when its batches are sent, or after the limit."""

    async def tracker_runs(self) -> bool | None:
        """Whether a tracker runs; None if unknown."""

    async def known_queues(self, wanted: str) -> set[str]:
        """Return the names of known queues; the search may end when ``wanted`` is among them.

        A queue is known if it has a definition, a consumer group, or messages that are waiting or open. Dead letters
        do not count.
        """


class KafkaCluster:
    """Kafka, through aiokafka.

    ``acquirer`` returns what writes ACQUIREs instead of the writer or the transactions that it is given: these
    themselves, or one that passes each write on.
    """

    def __init__(self, settings: ClientSettings, acquirer: Callable[[Any], Any] = lambda writer: writer) -> None:
        self._settings = settings
        self._acquirer_of = acquirer
        self._broker_clock = BrokerClock()

    # A hot path: called twice for each message.
    now_s = staticmethod(time.monotonic)

    def wall_s(self) -> float:
        return time.time()

    def broker_ms(self) -> int | None:
        return self._broker_clock.now_ms()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        async with asyncio.timeout(seconds):
            return await waiting

    async def topics(self) -> Topics:
        return await ensure_topics(self._settings)

    async def own_topics(self, names: Iterable[str], topics: Topics) -> dict[str, int]:
        return await own_topics(self._settings, names, topics)

    async def incarnations(self, topics: Iterable[str]) -> dict[str, str]:
        return await incarnations(self._settings, topics)

    def queues(self) -> DefinitionsView:
        return Queues.of(self._settings)

    def writer(self, topics: Topics) -> Writer:
        return KafkaMarkerWriter(self._settings, topics.markers_limit_bytes, self._broker_clock)

    async def markers_reader(self, partitions: Collection[int]) -> KafkaMarkersReader:
        reader = KafkaMarkersReader(self._settings, partitions)
        await reader.start()
        return reader

    def member(
        self, group: str, serving: Serving, instance_id: str | None, *, committed: bool = False, url: str = ""
    ) -> GroupMember:
        return GroupReader(self._settings, group, serving, instance_id=instance_id, committed=committed, url=url)

    def acquirer(self, topics: Topics) -> Writer:
        acquirer: Writer = self._acquirer_of(self.writer(topics))
        return acquirer

    def transactions(self, topics: Topics, group: str, instance_id: str | None) -> MarkerTransactions:
        # A named member has the same id after a restart, which aborts its open transaction at once.
        transactional_id = self._settings.names.start_id(group, instance_id or secrets.token_hex(8))
        transactions: MarkerTransactions = self._acquirer_of(
            MarkerTransactions(self._settings, topics.markers_limit_bytes, transactional_id, self._broker_clock)
        )
        return transactions

    async def sender(self, topics: Topics) -> Sender:
        def make() -> AIOKafkaProducer:
            return AIOKafkaProducer(
                **client_options(self._settings),
                enable_idempotence=True,
                linger_ms=0,
                max_batch_size=min(MAX_BATCH_BYTES, topics.messages_limit_bytes),
                max_request_size=topics.messages_limit_bytes,
                compression_type=None if self._settings.compression == "none" else self._settings.compression,
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
    backend = backend_of(settings)
    cluster: Cluster = KafkaCluster(settings) if backend is None else backend.cluster(settings)
    return cluster


@asynccontextmanager
async def marker_writer(cluster: Cluster, topics: Topics, stop_s: float = WRITER_STOP_S) -> AsyncIterator[Writer]:
    """Yield a writer of markers that is connected during the block. Raises BrokerUnavailable."""
    writer = cluster.writer(topics)
    try:
        await writer.start()
        yield writer
    finally:
        await writer.stop(stop_s)
