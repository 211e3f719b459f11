"""Topics in memory: partitions of records that are only ever appended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Topic:
    """``on_append`` is called after each append."""

    name: str
    partitions: int
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    logs: list[list[LogRecord]] = field(init=False)
    on_append: set[Callable[[], None]] = field(default_factory=set)
    _turn: int = -1

    def __post_init__(self) -> None:
        self.logs = [[] for _ in range(self.partitions)]

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
        log.append(LogRecord(len(log), timestamp, key, value, tuple(headers)))
        for call in list(self.on_append):
            call()
        return len(log) - 1

    def next_partition(self, key: bytes | None = None) -> int:
        """Return the partition for a record: always the same for a key, else one after the other."""
        if key is not None:
            return crc32(key) % self.partitions
        self._turn = (self._turn + 1) % self.partitions
        return self._turn
