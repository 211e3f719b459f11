"""The records of a queue that consumers skip, because they were purged or came before the queue.

Consumers deliver records without asking a tracker. So before a purge writes its PURGE markers, it publishes in the
queues topic, under the key ``purge:NAME``, the offset in each partition before which consumers skip the queue's records
(:mod:`marq.admin.purge`).

The records that a topic had before a queue with ``start = "latest"`` are skipped in the same way, under the key
``start:NAME`` (:mod:`marq.queues.subscription_start`). They are not the queue's, so they get no markers.

Offsets of a recreated topic start at 0 again. So offsets in a queue's own topic belong to one incarnation of it, and
records with a later timestamp are never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from marq.wire.errors import ConfigError
from marq.wire.markers import Source


@dataclass(frozen=True, slots=True)
class SkippedRecords:
    """Records before ``ends`` with timestamps up to ``until_ms`` are skipped.

    ``untils_ms`` has the highest timestamps in partitions where it is not ``until_ms``. Messages in flight before the
    offsets ``in_flight`` were purged, too.
    """

    until_ms: int
    ends: Mapping[Source, int] = field(hash=False)
    untils_ms: Mapping[Source, int] = field(default_factory=dict, hash=False)
    in_flight: Mapping[Source, int] = field(default_factory=dict, hash=False)

    def left(self, source: Source, offset: int, timestamp_ms: int) -> bool:
        """Return whether a record is not skipped."""
        return offset >= self.ends.get(source, 0) or timestamp_ms > self.until_of(source)

    def has_ended(self, source: Source, offset: int, timestamp_ms: int) -> bool:
        """Return whether a purge has ended a message, even if it was in flight."""
        return offset < self.in_flight.get(source, 0) and not self.left(source, offset, timestamp_ms)

    def until_of(self, source: Source) -> int:
        """Return the highest timestamp of skipped records in a partition."""
        return self.untils_ms.get(source, self.until_ms)

    @property
    def topics(self) -> set[str]:
        """The topics of the skipped records, without the ids of their incarnations."""
        return {source.log.topic for source in self.ends}

    def along_with(self, other: SkippedRecords) -> SkippedRecords:
        """Return a purge of the records of both; in each partition, the later time counts, or this purge if equal."""
        # The end with the later time may be the lower one: the topic was recreated since.
        ends = {
            source: end
            for source, end in self.ends.items()
            if source not in other.ends or self.until_of(source) >= other.until_of(source)
        }
        return replace(replace(self, ends=ends)._with_partitions_of(other), in_flight=self.in_flight)

    def outweighing(self, start: SkippedRecords | None) -> SkippedRecords:
        """Return this purge with a time late enough to take precedence over the start of its queue."""
        # The clock that wrote the start may be ahead.
        return self if start is None else replace(self, until_ms=max(self.until_ms, start.until_ms))

    def decided_by(self, former: SkippedRecords) -> SkippedRecords:
        """Return the starts of a queue, in each topic the first one."""
        ends = {source: end for source, end in self.ends.items() if source.log.topic not in former.topics}
        return former._with_partitions_of(replace(self, ends=ends))

    def _with_partitions_of(self, other: SkippedRecords) -> SkippedRecords:
        """Return this purge plus the partitions that only the other has, each with its own highest timestamp."""
        ends = {**other.ends, **self.ends}
        untils_ms = {source: (self if source in self.ends else other).until_of(source) for source in ends}
        until_ms = max(untils_ms.values(), default=self.until_ms)
        others = {source: own_ms for source, own_ms in untils_ms.items() if own_ms != until_ms}
        return SkippedRecords(until_ms, ends, others)

    def after(self, former: SkippedRecords | None, stops: Mapping[Source, int]) -> SkippedRecords:
        """Return this purge merged with the one before it; ``stops`` are the current ends of the partitions."""
        if former is None:
            return self

        # A former end beyond the end of a partition dates from before the topic was recreated.
        def merged(own: Mapping[Source, int], earlier: Mapping[Source, int]) -> dict[Source, int]:
            known = {source: end for source, end in earlier.items() if end <= stops.get(source, 0)}
            return {source: max(own.get(source, 0), known.get(source, 0)) for source in {**known, **own}}

        ends = {source: end for source, end in merged(self.ends, former.ends).items() if source in self.ends}
        both = SkippedRecords(max(self.until_ms, former.until_ms), ends)
        # The queue may return to a former topic.
        return replace(both._with_partitions_of(former), in_flight=merged(self.in_flight, former.in_flight))

    def document(self) -> dict[str, Any]:
        """Return the value of its record."""
        members = {"ends": self.ends, "untils_ms": self.untils_ms, "in_flight": self.in_flight}
        written = {name: written_offsets(offsets) for name, offsets in members.items() if offsets or name == "ends"}
        return {"until_ms": self.until_ms, **written}

    @classmethod
    def read(cls, document: object) -> SkippedRecords:
        """Read what :meth:`document` returned. Raises ConfigError if it can't be understood."""
        if not isinstance(document, Mapping) or not _is_count(document.get("until_ms")):
            raise ConfigError(f"expected a table with until_ms and ends, not {document!r}")
        return cls(document["until_ms"], *[read_offsets(document, name) for name in ("ends", "untils_ms", "in_flight")])


def written_offsets(offsets: Mapping[Source, int]) -> dict[str, int]:
    """Return offsets, or other numbers, for a document, by ``topic/partition``."""
    return {f"{source.topic}/{source.partition}": offset for source, offset in sorted(offsets.items())}


def read_offsets(document: Mapping[str, Any], name: str) -> dict[Source, int]:
    """Read a member of a document that :func:`written_offsets` returned. Raises ConfigError."""
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
