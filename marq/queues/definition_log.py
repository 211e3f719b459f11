"""The queues topic as a log: read from its start, followed, and occasionally written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from marq.client.backends import backend_of
from marq.core.storage.gauges import BEFORE_DELIVERY
from marq.core.storage.rows import LeaseRow
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader
from marq.kafka.marker_writer import write_once
from marq.kafka.records import Row
from marq.kafka.topics import ensure_topics, incarnations, topic_exists
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import is_scheduled

#: Longest wait of the broker before it answers an empty fetch: an idle client costs about one request a second.
FETCH_WAIT_MS = 1_000
#: Longest wait of a read; it ends at the first record.
READ_WAIT_S = 5.0
#: Records of one write up to this size are one record batch, which no crash divides. The topic's max.message.bytes
#: applies to it, so it is far below Kafka's default.
MAX_BATCH_BYTES = 131_072
#: Maximum number of records read to count the waiting messages of a queue.
MAX_SCANNED = 200_000


class UnfinishedMessages(NamedTuple):
    """The messages of a queue that have not ended; false if there are none.

    ``searched`` is the number of records of all queues that were searched, or 0 if that was all of them.
    ``uncommitted`` messages are in flight or finished, but their group has not committed their offsets. If the queue
    were no longer ordered, consumers would not ask the tracker, and would deliver these messages again.
    """

    waiting: int
    in_flight: int
    delayed: int
    searched: int = 0
    uncommitted: int = 0

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        waiting = f"{self.waiting:,} waiting"
        if self.searched and not self.waiting:
            waiting = (
                f"more than {self.searched:,} records after its consumers' positions, which may be waiting messages"
            )
        return f"{waiting}, {self.in_flight:,} in flight and {self.delayed:,} delayed"


class DefinitionLog(Protocol):
    """A log of definitions, which all clients read in the same order.

    All calls raise BrokerUnavailable, or ConfigError if a permission is missing.
    """

    async def make(self) -> None:
        """Create the topics that are missing; same errors as :func:`marq.kafka.topics.ensure_topics`."""

    async def start(self) -> int:
        """Seek to the start of the log; return its end."""

    async def stop(self) -> None: ...

    async def read(self) -> tuple[Sequence[Row], int]:
        """Return the next records, or none after a while, and the offset to read next.

        That offset moves past compacted records, so compare it with the end, not a count. A failed read may be retried.
        """

    async def end(self) -> int:
        """Return the current end of the log; waits while a broker is unavailable."""

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        """Write records in their order; return their offsets by key when all are durable.

        Readers get up to MAX_BATCH_BYTES of them at once, even after a crash.
        """

    async def messages_of(self, queue: str, definitions: Definitions) -> UnfinishedMessages:
        """Count the messages of a queue; a false result means that it had none at some moment during the call."""

    async def ends_of(self, topic: str) -> dict[Source, int]:
        """Return the end offset of each partition of a topic's incarnation; nothing if it does not exist."""

    def wall_s(self) -> float:
        """Return the seconds since 1970."""

    async def sleep(self, seconds: float) -> None: ...


class KafkaDefinitionLog:
    """The queues topic."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._source = Source(settings.names.queues, 0)
        # No client writes transactions here; an open one of another program must not block all readers.
        # A purge looks up the end of the log many times while its queue is paused, so a lookup must not wait.
        self._reader = LogReader(settings, committed=False, fetch_wait_ms=FETCH_WAIT_MS, ends_apart=True)

    async def make(self) -> None:
        await ensure_topics(self._settings)

    async def start(self) -> int:
        await self._reader.start()
        self._reader.seek({self._source: None})
        return await self.end()

    async def stop(self) -> None:
        await self._reader.stop()

    async def read(self) -> tuple[Sequence[Row], int]:
        fetched = await self._reader.poll(READ_WAIT_S)
        position = (await self._reader.positions())[self._source]
        return fetched.get(self._source, ()), position

    async def end(self) -> int:
        return (await self._reader.ends([self._source]))[self._source]

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        return await write_once(self._settings, self._source.topic, records, max_batch_size=MAX_BATCH_BYTES)

    async def messages_of(self, queue: str, definitions: Definitions) -> UnfinishedMessages:
        inspector = Inspector(self._settings, definitions)
        # Messages move from the topic to the markers, and delayed ones back. Another order of reads could miss some.
        waiting = await inspector.waiting([queue], MAX_SCANNED)
        books = [
            content.tracker.book for content in (await inspector.owned(ends=await inspector.marker_ends())).values()
        ]
        arrived = await inspector.arrived(queue, waiting.ends) if waiting.complete else 0
        leases = ((source, lease) for book in books for source, _, lease in book.open_leases() if lease.queue == queue)
        searched = 0 if waiting.complete else MAX_SCANNED
        return unfinished(waiting.counts[queue] + arrived, leases, waiting.uncommitted[queue], searched)

    async def ends_of(self, topic: str) -> dict[Source, int]:
        if not await topic_exists(self._settings, topic):
            return {}
        # First: the ends of a former incarnation must not count in one that is created meanwhile.
        [name] = (await incarnations(self._settings, [topic])).values()
        async with LogReader(self._settings, committed=False) as view:
            return {source: span.stop for source, span in (await view.ranges(name)).items()}

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def unfinished(
    waiting: int, leases: Iterable[tuple[Source, LeaseRow]], uncommitted: int, searched: int = 0
) -> UnfinishedMessages:
    """Count the messages of a queue that are waiting, and those that have these leases."""
    # A schedule always has a delayed message, which has no ordering key.
    states = [lease.state for source, lease in leases if not is_scheduled(source.topic)]
    delayed = sum([state in BEFORE_DELIVERY for state in states])
    return UnfinishedMessages(waiting, len(states) - delayed, delayed, searched, uncommitted)


def definition_log(settings: ClientSettings) -> DefinitionLog:
    """Return the log at the settings' address."""
    backend = backend_of(settings)
    log: DefinitionLog = KafkaDefinitionLog(settings) if backend is None else backend.definition_log(settings)
    return log
