"""Purged queues: which records of a queue nobody is to be given any more.

A purge ends what waits by markers (ACQUIRE with a due time, CANCEL), as far as it is known to trackers. But whoever
reads a record hands it out without asking a tracker. So the purge is also said in the queues topic, under the key
``purge:NAME``: up to which offset of each partition records of the queue are passed over.

A topic that is made anew begins at offset 0 again. So what was stamped after the purge is never passed over, whatever
its offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marq.core.errors import ConfigError
from marq.core.markers import Source


@dataclass(frozen=True, slots=True)
class Purge:
    """Records before ``ends``, stamped until ``until_ms``, are purged.

    ``starts``: from where on some of them may not have got their markers yet, of a purge that did not come to its end.
    """

    until_ms: int
    ends: Mapping[Source, int] = field(hash=False)
    starts: Mapping[Source, int] = field(default_factory=dict, hash=False)

    def left(self, source: Source, offset: int, timestamp_ms: int) -> bool:
        """Whether a record is not purged."""
        return offset >= self.ends.get(source, 0) or timestamp_ms > self.until_ms

    def done(self) -> Purge:
        """Return the purge when all of it has its markers."""
        return Purge(self.until_ms, self.ends)

    def after(self, former: Purge | None) -> Purge:
        """Return this purge, with what is left to do of the one before it."""
        if former is None:
            return self
        ends = {source: max(end, former.ends.get(source, 0)) for source, end in self.ends.items()}
        starts = {source: min(start, former.starts.get(source, start)) for source, start in self.starts.items()}
        return Purge(max(self.until_ms, former.until_ms), ends, starts)

    def document(self) -> dict[str, Any]:
        """Return the value of its record."""
        starts = written_offsets(self.starts)
        return {"until_ms": self.until_ms, "ends": written_offsets(self.ends), **({"starts": starts} if starts else {})}

    @classmethod
    def read(cls, document: object) -> Purge:
        """Read what :meth:`document` returned.

        Raises:
            ConfigError: it can't be understood.
        """
        if not isinstance(document, Mapping) or not _is_count(document.get("until_ms")):
            raise ConfigError(f"expected a table with until_ms and ends, not {document!r}")
        return cls(document["until_ms"], read_offsets(document, "ends"), read_offsets(document, "starts"))


def written_offsets(offsets: Mapping[Source, int]) -> dict[str, int]:
    """Return offsets for a document, by ``topic/partition``."""
    return {f"{source.topic}/{source.partition}": offset for source, offset in sorted(offsets.items())}


def read_offsets(document: Mapping[str, Any], name: str) -> dict[Source, int]:
    """Read a member of a document that :func:`written_offsets` returned.

    Raises:
        ConfigError: it is not a table of offsets by topic/partition.
    """
    table = document.get(name, {})
    if not isinstance(table, Mapping) or not all(_is_count(offset) for offset in table.values()):
        raise ConfigError(f"{name}: expected a table of offsets by topic/partition, not {table!r}")
    return {_source(name, place): offset for place, offset in table.items()}


def _source(name: str, place: str) -> Source:
    topic, _, partition = place.rpartition("/")
    if not topic or not (partition.isascii() and partition.isdigit()) or len(partition) > 9:
        raise ConfigError(f"{name}: expected topic/partition, not {place!r}")
    return Source(topic, int(partition))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
