"""Reads logs without a consumer group: needs no permission on a group, and commits nothing."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError, KafkaTimeoutError

from marq.kafka.connection import client_options, started, stop_consumer
from marq.kafka.fetched_columns import fetch_records
from marq.kafka.foreign_transactions import CautiousConsumer
from marq.kafka.paced_clients import client_of
from marq.kafka.protocol import ids_of_topics, is_missing
from marq.kafka.records import Records
from marq.kafka.role_permissions import refused
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, reason_of
from marq.wire.markers import Source
from marq.wire.names import log_name

#: Maximum number of records of one fetch.
MAX_RECORDS = 10_000
#: Longest wait of a read; it ends at the first record.
READ_WAIT_S = 1.0
#: Longest wait of the broker before it answers a fetch without records.
FETCH_WAIT_MS = 100
#: The same for clients that wait for a tracker's answer.
MARKERS_FETCH_WAIT_MS = 500
STOP_S = 2.0
_PAUSE_S = 0.1

Ranges = Mapping[Source, range]
Positions = Mapping[Source, int]


class LogReader:
    """Reads ranges of topics once (:meth:`read`), or follows partitions (:meth:`seek`, then :meth:`poll`).

    The topics of sources may have ids of incarnations, which are ignored: they come back as they were passed.

    ``committed``: skip records of open and aborted transactions. Without it, only records of other programs'
    transactions are skipped, and reading waits for open ones. All calls raise BrokerUnavailable, or Forbidden if the
    permission to read a topic is missing. ``ends_apart``: look up offsets on a second connection, because a lookup on
    the first one waits up to ``fetch_wait_ms``.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        committed: bool,
        fetch_wait_ms: int = FETCH_WAIT_MS,
        ends_apart: bool = False,
        **options: Any,
    ) -> None:
        self._settings = settings
        self._ends_apart = ends_apart
        self._limit_s = settings.request_timeout_ms / 1000
        self._options = options | {
            "isolation_level": "read_committed" if committed else "read_uncommitted",
            "fetch_max_wait_ms": fetch_wait_ms,
        }
        self._consumer: AIOKafkaConsumer | None = None
        #: The followed sources by their partitions.
        self._sources: dict[TopicPartition, Source] = {}

    async def start(self) -> None:
        consumer = await started(self._make, self._settings, lambda consumer: stop_consumer(consumer, 0))
        client_of(consumer).offsets_apart = self._ends_apart
        self._consumer = consumer

    async def stop(self, limit_s: float = STOP_S) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, limit_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- bounds -------------------------------------------------------------------------------------------------------

    async def has_topic(self, topic: str) -> bool:
        """Return whether a topic exists that this client may describe; :meth:`ranges` might create a missing one."""
        async with self._answers([topic]):
            return log_name(topic) in await self._running().topics()

    async def missing(self, sources: Collection[Source]) -> set[Source]:
        """Return the partitions that are known not to exist; none that the client has no permission to describe.

        A partition of another incarnation of its topic does not exist, either. Its leader is asked, which knows at
        least the incarnation that it has served.
        """
        client = client_of(self._running())
        by_node: dict[int, list[Source]] = {}
        for source in sources:
            leader = client.cluster.leader_for_partition(TopicPartition(*source.log))
            node = client.get_random_node() if leader is None or leader < 0 else leader
            by_node.setdefault(node, []).append(source)
        missing: set[Source] = set()
        for node, asked in by_node.items():
            topics = sorted({log_name(source.topic) for source in asked})
            try:
                async with self._answers(topics):
                    answer = await client.send(node, ids_of_topics(topics), group=ConnectionGroup.COORDINATION)
            except NotImplementedError:
                # aiokafka raises it for a broker that does not know the request: Kafka before 2.8.
                continue
            missing.update(source for source in asked if is_missing(answer, source.topic, source.partition))
        return missing

    async def ranges(self, topic: str) -> dict[Source, range]:
        """Return the offsets that each partition of a topic has now."""
        async with self._answers([topic]):
            ranges = await log_ranges(self._running(), log_name(topic))
        return {Source(topic, number): span for number, span in ranges.items()}

    async def ends(self, sources: Collection[Source]) -> dict[Source, int]:
        """Return where partitions end now; waits while a broker is unavailable."""
        partitions = _by_partition(sources)
        async with self._answers({source.topic for source in sources}, limited=False):
            ends = await _ends(self._running(), [*partitions])
        return {partitions[partition]: end for partition, end in ends.items()}

    async def offsets_at(self, sources: Iterable[Source], time_ms: int) -> dict[Source, int | None]:
        """Return the first offset with this timestamp or a later one, None if there is none."""
        partitions = _by_partition(sources)
        async with self._answers({partition.topic for partition in partitions}):
            offsets = await self._running().offsets_for_times(dict.fromkeys(partitions, time_ms))
        return {partitions[partition]: None if at is None else at.offset for partition, at in offsets.items()}

    @asynccontextmanager
    async def _answers(self, topics: Collection[str] = (), *, limited: bool = True) -> AsyncIterator[None]:
        """Turn aiokafka's errors in a block into ours; ``topics``: what it reads, by default the followed ones."""
        try:
            async with asyncio.timeout(self._limit_s if limited else None):
                yield
        except (KafkaError, TimeoutError) as error:
            names = sorted(topics or {partition.topic for partition in self._running().assignment()})
            raise refused(self._settings, error, "Read", names[0]) or BrokerUnavailable(
                f"topic {', '.join(names)} at {self._settings.bootstrap_servers}: it could not be read"
                f" ({reason_of(error)})"
            ) from error

    # --- following ----------------------------------------------------------------------------------------------------

    def seek(self, positions: Mapping[Source, int | None]) -> None:
        """Read only these partitions from now on, from these offsets; None: from the start of the log."""
        consumer = self._running()
        self._sources = _by_partition(positions)
        consumer.assign([*self._sources])
        for partition, source in self._sources.items():
            offset = positions[source]
            if offset is not None:
                consumer.seek(partition, offset)

    async def poll(self, wait_s: float = READ_WAIT_S) -> dict[Source, Records]:
        """Return the next records, or nothing if none came in time; messages without the headers of copied records."""
        async with self._answers(limited=False):
            fetched = await fetch_records(self._running(), wait_s, MAX_RECORDS)
        names = self._settings.names
        for source, read in fetched.items():
            if source.topic == names.messages or names.is_senders_topic(source.topic):
                fetched[source] = read.without_copied_headers(own_topic=source.topic != names.messages)
        return {self._sources[TopicPartition(*partition)]: records for partition, records in fetched.items()}

    async def positions(self) -> dict[Source, int]:
        """Return the offset to read next in each partition, which also moves past hidden records."""
        consumer = self._running()
        async with self._answers():
            return {self._sources[partition]: await consumer.position(partition) for partition in consumer.assignment()}

    # --- ranges -------------------------------------------------------------------------------------------------------

    async def read(self, ranges: Ranges) -> AsyncIterator[dict[Source, Records]]:
        """Read all records of these ranges, some at a time.

        Raises BrokerUnavailable if nothing more could be read within the request timeout, or a partition ends before
        its range.
        """
        left = {source: span for source, span in ranges.items() if span}
        if not left:
            return
        self.seek({source: span.start for source, span in left.items()})
        before: Positions = {}
        until_s = time.monotonic() + self._limit_s
        while left:
            fetched = await self.poll()
            # If only control records of transactions are left, the position advances without a record.
            positions = await self.positions()
            for source, span in left.items():
                # aiokafka would read from the start of the log on.
                if positions[source] < span.start:
                    raise BrokerUnavailable(f"{source.topic}/{source.partition} ends before offset {span.start}")
            wanted = {source: _before(read, left[source].stop) for source, read in fetched.items() if source in left}
            if records := {source: read for source, read in wanted.items() if len(read)}:
                yield records
            if positions != before:
                before, until_s = positions, time.monotonic() + self._limit_s
            elif time.monotonic() > until_s:
                raise self._stuck(left, positions)
            done = [source for source, span in left.items() if positions[source] >= span.stop]
            for source in done:
                del left[source]
            if done:
                # Otherwise it would be fetched until the next call, which would wait for that fetch.
                self._running().pause(*_by_partition(done))

    def _stuck(self, left: Ranges, positions: Positions) -> BrokerUnavailable:
        where = ", ".join(f"{s.topic}/{s.partition} at {positions[s]} of {span.stop}" for s, span in left.items())
        return BrokerUnavailable(
            f"no progress for {self._limit_s:g} s while reading {where}: the broker is slow, a transaction is open"
            " there, or the topic was deleted; try again"
        )

    def _running(self) -> AIOKafkaConsumer:
        assert self._consumer is not None
        return self._consumer

    def _make(self) -> AIOKafkaConsumer:
        return CautiousConsumer(
            **client_options(self._settings),
            **self._options,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            messages_topic=self._settings.names.messages,
        )


def _by_partition(sources: Iterable[Source]) -> dict[TopicPartition, Source]:
    return {TopicPartition(*source.log): source for source in sources}


def _before(read: Records, end: int) -> Records:
    return read if read.offsets[-1] < end else read[: bisect_left(read.offsets, end)]


async def existing_ranges(view: LogReader, sources: Iterable[Source]) -> dict[Source, range]:
    """Return the existing offsets of source partitions; partitions that do not exist are left out."""
    wanted = set(sources)
    return {
        source: span
        for topic in sorted({source.topic for source in wanted})
        for source, span in (await view.ranges(topic)).items()
        if source in wanted
    }


async def log_ranges(consumer: AIOKafkaConsumer, topic: str) -> dict[int, range]:
    """Return the offsets that each partition of a topic has now; the caller sets a limit. Raises KafkaError."""
    # A request for one partition makes the client learn about an unknown topic.
    await _ends(consumer, [TopicPartition(topic, 0)])
    numbers = consumer.partitions_for_topic(topic) or {0}
    partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
    starts = await consumer.beginning_offsets(partitions)
    ends = await consumer.end_offsets(partitions)
    return {tp.partition: range(starts[tp], max(starts[tp], ends[tp])) for tp in partitions}


async def _ends(consumer: AIOKafkaConsumer, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the end offsets of partitions; retry while a new partition lacks a leader."""
    while True:
        try:
            ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
            return ends
        except KafkaError as error:
            if not (error.retriable or isinstance(error, KafkaTimeoutError)):
                raise
        await asyncio.sleep(_PAUSE_S)


# --- markers ----------------------------------------------------------------------------------------------------------


class MarkersReader(Protocol):
    """Reads markers of some partitions as they come, for a client that waits for a tracker's answer."""

    async def read(self) -> Sequence[bytes | None]:
        """Return the next markers, or nothing after a while; same errors as :class:`LogReader`."""

    async def stop(self, limit_s: float) -> None: ...


class KafkaMarkersReader:
    """Reads the markers that trackers commit after :meth:`start`."""

    def __init__(self, settings: ClientSettings, partitions: Collection[int]) -> None:
        self._sources = [Source(settings.names.markers, partition) for partition in partitions]
        self._limit_s = settings.request_timeout_ms / 1000
        self._reader = LogReader(settings, committed=True, fetch_wait_ms=MARKERS_FETCH_WAIT_MS)

    async def start(self) -> None:
        """Seek to the ends of the partitions; same errors as :class:`LogReader`."""
        await self._reader.start()
        try:
            async with asyncio.timeout(self._limit_s):
                self._reader.seek(await self._reader.ends(self._sources))
        except BaseException as error:
            await self.stop(0)
            if isinstance(error, TimeoutError):
                raise BrokerUnavailable(
                    f"topic {self._sources[0].topic}: no broker returned its end offset within {self._limit_s:g} s"
                ) from None
            raise

    async def stop(self, limit_s: float) -> None:
        await self._reader.stop(limit_s)

    async def read(self) -> Sequence[bytes | None]:
        return [value for records in (await self._reader.poll()).values() for value in records.values]
