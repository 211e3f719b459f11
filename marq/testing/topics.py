"""Topics in memory: append-only partitions, and their readers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from zlib import crc32

from marq.kafka.records import Row
from marq.settings.topic_configs import DEFAULT_LIMIT_BYTES
from marq.wire.markers import Headers, Source

#: The key, value and headers of a record.
Unplaced = tuple[bytes | None, bytes | None, Headers]


class Topic:
    """Partitions of records. Any thread may append, as the thread of a SyncProducer does."""

    def __init__(self, name: str, partitions: int, limit_bytes: int = DEFAULT_LIMIT_BYTES, topic_id: str = "") -> None:
        self.name = name
        #: Differs from that of a deleted topic of the same name; empty for topics of the namespace.
        self.id = topic_id
        self.partitions = partitions
        self.limit_bytes = limit_bytes
        self.logs: list[list[Row]] = [[] for _ in range(partitions)]
        self._listeners: dict[Callable[[], None], asyncio.AbstractEventLoop] = {}
        self._appending = threading.Lock()
        self._turn = -1

    @property
    def ends(self) -> dict[Source, int]:
        """The end offset of each partition."""
        return {source: len(self.logs[source.partition]) for source in self.sources}

    @property
    def sources(self) -> list[Source]:
        """The partitions of this incarnation."""
        return [Source(self.name, partition).of(self.id) for partition in range(self.partitions)]

    def replace(self, former: Topic) -> None:
        """Take over the listeners of a deleted topic, and call them."""
        self._listeners = former._listeners
        self._notify()

    def append(
        self,
        partition: int,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> int:
        """Append a record and return its offset."""
        return self.extend(partition, timestamp, [(key, value, headers)])

    def extend(self, partition: int, timestamp: int, records: Iterable[Unplaced]) -> int:
        """Append records with no other in between, and return the offset of the first."""
        log = self.logs[partition]
        with self._appending:
            first = len(log)
            log += [
                Row(offset, timestamp, key, value, tuple(headers))
                for offset, (key, value, headers) in enumerate(records, first)
            ]
        self._notify()
        return first

    def next_partition(self, key: bytes | None = None) -> int:
        """Return the partition for a record: the same for each key, else round robin."""
        if key is not None:
            return crc32(key) % self.partitions
        self._turn = (self._turn + 1) % self.partitions
        return self._turn

    def listen(self, callback: Callable[[], None]) -> None:
        """Call back in the running event loop after each append."""
        self._listeners[callback] = asyncio.get_running_loop()

    def ignore(self, callback: Callable[[], None]) -> None:
        """Stop calling back."""
        self._listeners.pop(callback, None)

    def _notify(self) -> None:
        here = asyncio._get_running_loop()
        for callback, loop in list(self._listeners.items()):
            if loop is here:
                callback()
            elif loop.is_closed():
                self.ignore(callback)
            else:
                loop.call_soon_threadsafe(callback)


class TopicReader:
    """Reads partitions of a topic from ``positions`` on, which the caller may change."""

    def __init__(self, topic: Topic, positions: Mapping[int, int]) -> None:
        self.topic = topic
        self.positions = dict(positions)
        self._more = asyncio.Event()
        topic.listen(self._more.set)

    def close(self) -> None:
        self.topic.ignore(self._more.set)

    async def read(self) -> list[tuple[int, Row]]:
        """Return the next records with their partitions; wait until there is one."""
        while True:
            self._more.clear()
            records: list[tuple[int, Row]] = []
            for partition, position in self.positions.items():
                log = self.topic.logs[partition][position:]
                records += [(partition, record) for record in log]
                self.positions[partition] = position + len(log)
            if records:
                return records
            await self._more.wait()
