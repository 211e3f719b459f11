"""How far each queue has been read in a partition that several queues share.

A Kafka group commits one offset per partition, but queues join and leave a group: one that joins has still to be given
its records before that offset, and one that left must not be given again what it had. So the committed offset's
metadata says how far each queue is. A partition is read from the position of the queue that is furthest behind, and
records that a queue has had are passed over for it. A member that has not heard of a queue yet commits nothing for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.serving import Serving

#: What brokers accept as metadata of an offset (``offset.metadata.max.bytes``).
MAX_METADATA_BYTES = 4_096
#: Offsets have no more digits when it is judged whether the positions of a group's queues fit into that.
_LONG_OFFSET = 10**12


@dataclass
class Positions:
    """Positions of one partition: the offset after the last record that a queue has had, by queue."""

    by_queue: dict[str, int] = field(default_factory=dict)

    @classmethod
    def decode(cls, offset: int | None, metadata: str, owner: str | None = None) -> Positions:
        """Read what :meth:`encode` wrote; metadata of another writer says that no queue has had anything.

        In a group that is one queue's own (``owner``) an offset that somebody else has set is that queue's.
        """
        if offset is None:
            return cls()
        if owner is not None and not metadata:
            return cls({owner: offset})
        try:
            document = json.loads(metadata)
            here, past = list(document["at"]), dict(document["past"])
            return cls({**dict.fromkeys(map(str, here), offset), **{str(q): int(p) for q, p in past.items()}})
        except (ValueError, KeyError, TypeError):
            return cls()

    def encode(self, offset: int) -> str:
        """Return the metadata to commit with an offset.

        Raises:
            ConfigError: there are too many queues for it.
        """
        here = sorted(queue for queue, position in self.by_queue.items() if position == offset)
        past = {queue: position for queue, position in sorted(self.by_queue.items()) if position != offset}
        metadata = _metadata(here, past)
        while past and len(metadata.encode()) > MAX_METADATA_BYTES:
            # Of queues that have left, the one that left first is forgotten: should it come back, it begins anew.
            del past[min(past, key=lambda queue: past[queue])]
            metadata = _metadata(here, past)
        if len(metadata.encode()) > MAX_METADATA_BYTES:
            raise _too_many("the group", len(self.by_queue))
        return metadata

    def start(self, queues: Iterable[str], log_start: int) -> int:
        """Where to read on so that none of these queues misses a record."""
        return max(min((self.by_queue.get(queue, 0) for queue in queues), default=0), log_start)

    def newcomers(self, queues: Iterable[str], offset: int | None) -> list[str]:
        """Which queues are not where the group is: they may have been further with another group before."""
        return [queue for queue in queues if offset is None or self.by_queue.get(queue) != offset]

    @property
    def furthest(self) -> int:
        """The position that no queue is past."""
        return max(self.by_queue.values(), default=0)

    def after(self, queues: Iterable[str], offset: int) -> Positions:
        """Return the positions after these queues have had all records before an offset."""
        positions = Positions(dict(self.by_queue))
        positions.advance(queues, offset)
        return positions

    def had(self, queue: str, offset: int) -> bool:
        """Whether a queue has had the record at an offset."""
        return offset < self.by_queue.get(queue, 0)

    def advance(self, queues: Iterable[str], offset: int) -> None:
        """Note that these queues have had all records before an offset."""
        for queue in queues:
            self.by_queue[queue] = max(self.by_queue.get(queue, 0), offset)


def check_room(group: str, queues: Collection[str]) -> None:
    """Check that a commit can say a position of its own for each queue of a group, as while one of them catches up.

    Raises:
        ConfigError: they are too many.
    """
    if len(_metadata([], dict.fromkeys(queues, _LONG_OFFSET)).encode()) > MAX_METADATA_BYTES:
        raise _too_many(f"group {group!r}", len(queues))


def _too_many(where: str, count: int) -> ConfigError:
    return ConfigError(
        f"{where} would have {count} queues: their names and positions take more than the {MAX_METADATA_BYTES} bytes"
        " that an offset's metadata may have; use shorter names, or more groups"
    )


class Progress:
    """The positions in all partitions that a member of a group reads."""

    def __init__(self) -> None:
        self._positions: dict[Source, Positions] = {}
        self._starts: dict[Source, int] = {}

    def begin(self, source: Source, positions: Positions, start: int) -> None:
        """Read a partition from now on, from ``start``."""
        self._positions[source] = positions
        self._starts[source] = start

    def clear(self) -> None:
        """Read none any more."""
        self._positions.clear()
        self._starts.clear()

    def made_anew(self, fetched: Mapping[Any, Sequence[Any]]) -> dict[Source, int]:
        """Return what was read from before where reading began, and where that was: its log ended before that."""
        return {
            Source(*source): start
            for source, read in fetched.items()
            if (start := self._starts.get(Source(*source))) is not None and read[0].offset < start
        }

    def unmet(self, serving: Serving, fetched: Mapping[Any, Sequence[Any]]) -> dict[Source, Sequence[Any]]:
        """Take the keys from records that their queues have had: only where queues are at different positions."""
        return {
            source: [
                replace(record, key=None)
                if (queue := serving.queue_of(source.topic, record.key)) is not None
                and positions.had(queue, record.offset)
                else record
                for record in read
            ]
            if (positions := self._positions.get(Source(*source))) is not None and read[0].offset < positions.furthest
            else read
            for source, read in fetched.items()
        }

    def after(self, serving: Serving, offsets: Mapping[Source, int]) -> dict[Source, Positions]:
        """Return the positions when all before these offsets has been read; a partition that is not read is left out.

        :meth:`take` them when they are committed.
        """
        return {
            source: positions.after(serving.queues_in(source.topic), offset)
            for source, offset in offsets.items()
            if (positions := self._positions.get(Source(*source))) is not None
        }

    def take(self, after: Mapping[Source, Positions]) -> None:
        """Go on from positions that were committed, where the partition is still read."""
        for source, positions in after.items():
            if source in self._positions:
                self._positions[source] = positions


def _metadata(here: list[str], past: dict[str, int]) -> str:
    return json.dumps({"at": here, "past": past}, separators=(",", ":"), ensure_ascii=False)


def keys(queues: Iterable[str]) -> Mapping[bytes, str]:
    """The record keys of queues."""
    return {queue.encode(): queue for queue in queues}
