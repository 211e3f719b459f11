"""The queues topic as a log: read from its start, followed, and occasionally written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from marq.client.backends import backend_of
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader
from marq.kafka.marker_writer import write_once
from marq.kafka.topics import ensure_topics, topic_exists
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source

#: Longest wait of the broker before it answers an empty fetch: an idle client costs about one request a second.
FETCH_WAIT_MS = 1_000
#: Longest wait of a read; it ends at the first record.
READ_WAIT_S = 5.0
#: Maximum number of records read to count the waiting messages of a queue.
MAX_SCANNED = 200_000


class Entry(NamedTuple):
    """One record of the topic."""

    offset: int
    key: bytes | None
    value: bytes | None


class DefinitionLog(Protocol):
    """A log of definitions, which all clients read in the same order.

    All calls raise BrokerUnavailable, or ConfigError if a permission is missing.
    """

    async def make(self) -> None:
        """Create the topics that are missing; same errors as :func:`marq.kafka.topics.ensure_topics`."""

    async def start(self) -> int:
        """Seek to the start of the log; return its end."""

    async def stop(self) -> None: ...

    async def read(self) -> tuple[Sequence[Entry], int]:
        """Return the next records, or none after a while, and the offset to read next.

        That offset moves past compacted records, so compare it with the end, not a count. A failed read may be retried.
        """

    async def end(self) -> int:
        """Return the current end of the log; waits while a broker is unavailable."""

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        """Write records; return their offsets by key when all are durable."""

    async def messages_of(self, queue: str, definitions: Definitions) -> str:
        """Return in words which messages of a queue are waiting or in flight, "" if there are none."""

    async def ends_of(self, topic: str) -> dict[Source, int]:
        """Return the end offset of each partition of a topic; nothing if it does not exist."""

    def wall_s(self) -> float:
        """Return the seconds since 1970."""

    async def sleep(self, seconds: float) -> None: ...


class KafkaDefinitionLog:
    """The queues topic."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._source = Source(settings.names.queues, 0)
        # No client writes transactions here; an open one of another program must not block all readers.
        self._reader = LogReader(settings, committed=False, fetch_wait_ms=FETCH_WAIT_MS)

    async def make(self) -> None:
        await ensure_topics(self._settings)

    async def start(self) -> int:
        await self._reader.start()
        self._reader.seek({self._source: None})
        return await self.end()

    async def stop(self) -> None:
        await self._reader.stop()

    async def read(self) -> tuple[Sequence[Entry], int]:
        fetched = await self._reader.poll(READ_WAIT_S)
        position = (await self._reader.positions())[self._source]
        return [Entry(row.offset, row.key, row.value) for row in fetched.get(self._source, ())], position

    async def end(self) -> int:
        return (await self._reader.ends([self._source]))[self._source]

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        return await write_once(self._settings, self._source.topic, records)

    async def messages_of(self, queue: str, definitions: Definitions) -> str:
        inspector = Inspector(self._settings, definitions)
        gauges = [each.tracker.book.gauges().get(queue) for each in (await inspector.owned()).values()]
        opened = sum(each.in_flight + each.released + each.rejected for each in gauges if each is not None)
        waiting = await inspector.waiting([queue], MAX_SCANNED)
        return unfinished(opened, waiting.counts[queue], MAX_SCANNED if not waiting.complete else 0)

    async def ends_of(self, topic: str) -> dict[Source, int]:
        if not await topic_exists(self._settings, topic):
            return {}
        async with LogReader(self._settings, committed=False) as view:
            return {source: span.stop for source, span in (await view.ranges(topic)).items()}

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def unfinished(opened: int, waiting: int, unread: int = 0) -> str:
    """Return the text of :meth:`DefinitionLog.messages_of`; ``unread``: records of all queues that were searched."""
    texts = [f"{waiting:,} waiting", f"{opened:,} in flight"]
    if unread and not waiting:
        texts[0] = f"more than {unread:,} records without a consumer's position, which may be waiting messages"
    return " and ".join(texts) if opened or waiting or unread else ""


def definition_log(settings: ClientSettings) -> DefinitionLog:
    """Return the log at the settings' address."""
    backend = backend_of(settings)
    log: DefinitionLog = KafkaDefinitionLog(settings) if backend is None else backend.definition_log(settings)
    return log
