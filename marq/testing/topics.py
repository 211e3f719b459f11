"""Topics in memory: partitions of records that are only ever appended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from marq.core.topic_rules import DEFAULT_LIMIT_BYTES

Headers = Sequence[tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record where it stands."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class Topic:
    """Partitions of records. Any thread may append: that is how a SyncProducer sends."""

    def __init__(self, name: str, partitions: int, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.name = name
        self.partitions = partitions
        self.limit_bytes = limit_bytes
        self.logs: list[list[LogRecord]] = [[] for _ in range(partitions)]
        self._listeners: dict[Callable[[], None], asyncio.AbstractEventLoop] = {}
        self._appending = threading.Lock()
        self._turn = -1

    def append(
        self,
        partition: int,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> int:
        """Append a record and return its offset."""
        log = self.logs[partition]
        with self._appending:
            offset = len(log)
            log.append(LogRecord(offset, timestamp, key, value, tuple(headers)))
        self._tell()
        return offset

    def next_partition(self, key: bytes | None = None) -> int:
        """Return the partition for a record: always the same for a key, else one after the other."""
        if key is not None:
            return crc32(key) % self.partitions
        self._turn = (self._turn + 1) % self.partitions
        return self._turn

    def listen(self, call: Callable[[], None]) -> None:
        """Call back, in the running event loop, after each append."""
        self._listeners[call] = asyncio.get_running_loop()

    def ignore(self, call: Callable[[], None]) -> None:
        """Call back no more."""
        self._listeners.pop(call, None)

    def _tell(self) -> None:
        here = asyncio._get_running_loop()
        for call, loop in list(self._listeners.items()):
            if loop is here:
                call()
            elif loop.is_closed():
                self.ignore(call)
            else:
                loop.call_soon_threadsafe(call)
