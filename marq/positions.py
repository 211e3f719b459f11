"""How far each queue has been read in a partition that several queues share.

A Kafka group commits one offset per partition, but queues join and leave a group: one that joins has still to be given
its records before that offset, and one that left must not be given again what it had. So the committed offset's
metadata says how far each queue is, with a roster (:mod:`marq.rosters`) where the queues are many. A partition is read
from the position of the queue that is furthest behind, and records that a queue has had are passed over for it. A
member that has not heard of a queue yet commits nothing for it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.records import Records
from marq.rosters import MAX_METADATA_BYTES, Roster, UnknownPositions, document_of, plain
from marq.serving import Serving

#: The member of the metadata that says who committed.
_BY = "by"


class Positions:
    """Positions of one partition: the offset after the last record that a queue has had, by queue.

    The queues that a member serves move on together, at the same cost however many they are. ``metadata``: what all
    commits from here on say, where they name a roster.
    """

    def __init__(self, by_queue: Mapping[str, int] | None = None, metadata: str | None = None) -> None:
        self._metadata = metadata
        #: Positions of their own, and the queues that are at ``_reached`` where that is further.
        self._own = dict(by_queue or {})
        self._together: Sequence[str] = ()
        self._members: frozenset[str] = frozenset()
        self._reached = 0
        self._furthest_own = max(self._own.values(), default=0)

    @classmethod
    def decode(
        cls, offset: int | None, metadata: str, owner: str | None = None, rosters: Mapping[str, Roster] | None = None
    ) -> Positions:
        """Read what :meth:`encode` wrote; metadata of another writer says that no queue has had anything.

        In a group that is one queue's own (``owner``) an offset that somebody else has set is that queue's.

        Raises:
            UnknownPositions: a newer version has written it, or it names none of these rosters.
        """
        if offset is None:
            return cls()
        if owner is not None and not metadata:
            return cls({owner: offset})
        named = document_of(metadata)
        if named is not None:
            return cls(_of_roster(offset, named, rosters or {}))
        try:
            document = json.loads(metadata)
            here, past = list(document["at"]), dict(document["past"])
            return cls({**dict.fromkeys(map(str, here), offset), **{str(q): int(p) for q, p in past.items()}})
        except (ValueError, KeyError, TypeError):
            return cls()

    def encode(self, offset: int, by: str = "") -> str:
        """Return the metadata to commit with an offset.

        Args:
            offset: the offset to commit.
            by: a human-readable name of the committer; left out if the names of queues leave no room for it.

        Raises:
            ConfigError: there are too many queues for it.
        """
        metadata = self._metadata if self._metadata is not None else self._without_roster(offset)
        if not by:
            return metadata
        signed = f'{metadata[:-1]},"{_BY}":{json.dumps(by, ensure_ascii=False)}}}'
        return signed if len(signed.encode()) <= MAX_METADATA_BYTES else metadata

    def _without_roster(self, offset: int) -> str:
        by_queue = self.by_queue
        here = {queue: position for queue, position in by_queue.items() if position == offset}
        past = {queue: position for queue, position in by_queue.items() if position != offset}
        metadata = plain(here, past)
        while past and len(metadata.encode()) > MAX_METADATA_BYTES:
            # Of queues that have left, the one that left first is forgotten: should it come back, it begins anew.
            del past[min(sorted(past), key=lambda queue: past[queue])]
            metadata = plain(here, past)
        if len(metadata.encode()) > MAX_METADATA_BYTES:
            raise ConfigError(f"{len(by_queue)} queues are too many for the metadata of an offset without a roster")
        return metadata

    @property
    def by_queue(self) -> dict[str, int]:
        """The position of each queue of which something is known."""
        return {**self._own, **{queue: max(self._own.get(queue, 0), self._reached) for queue in self._together}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self.by_queue == other.by_queue

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Positions({self.by_queue!r})"

    def start(self, queues: Iterable[str], log_start: int) -> int:
        """Where to read on so that none of these queues misses a record."""
        by_queue = self.by_queue
        return max(min((by_queue.get(queue, 0) for queue in queues), default=0), log_start)

    def newcomers(self, queues: Iterable[str], offset: int | None) -> list[str]:
        """Which queues are not where the group is: they may have been further with another group before."""
        by_queue = self.by_queue
        return [queue for queue in queues if offset is None or by_queue.get(queue) != offset]

    @property
    def furthest(self) -> int:
        """The position that no queue is past."""
        return max(self._furthest_own, self._reached)

    def after(self, queues: Sequence[str], offset: int) -> Positions:
        """Return the positions after these queues have had all records before an offset."""
        if queues == self._together:
            after = copy(self)
            after._reached = max(self._reached, offset)
            return after
        members = _members(tuple(queues))
        own = {queue: at for queue, at in self.by_queue.items() if at > offset or queue not in members}
        # What the metadata say holds for the queues that it was made for.
        after = Positions(own, None if self._together else self._metadata)
        after._together, after._members, after._reached = queues, members, offset
        return after

    def had(self, queue: str, offset: int) -> bool:
        """Whether a queue has had the record at an offset."""
        return offset < self._own.get(queue, 0) or (offset < self._reached and queue in self._members)

    def unmet(self, serving: Serving, source: Source, read: Records) -> Records:
        """Take the keys from records that their queues have had, so that they are nobody's."""
        return read.with_keys(
            [
                None if (queue := serving.queue_of(source.topic, key)) is not None and self.had(queue, offset) else key
                for offset, key in zip(read.offsets, read.keys, strict=True)
            ]
        )

    def advance(self, queues: Iterable[str], offset: int) -> None:
        """Note that these queues have had all records before an offset."""
        for queue in queues:
            self._own[queue] = max(self._own.get(queue, 0), offset)
            self._furthest_own = max(self._furthest_own, offset)


def committer(name: str) -> str:
    """Return how a process names itself in its commits; ``name`` is its instance id or client id."""
    return f"{name} on {socket.gethostname()} (process {os.getpid()})"


def committed_by(metadata: str) -> str | None:
    """Return who made a commit, according to its metadata; None if the metadata does not say."""
    try:
        said = json.loads(metadata)
    except ValueError:
        return None
    by = said.get(_BY) if isinstance(said, dict) else None
    return by if isinstance(by, str) else None


@lru_cache(maxsize=4)
def _members(queues: tuple[str, ...]) -> frozenset[str]:
    """One set for all partitions: it is large where the queues are many."""
    return frozenset(queues)


def _of_roster(offset: int, document: Mapping[str, Any], rosters: Mapping[str, Roster]) -> dict[str, int]:
    roster = rosters.get(str(document.get("roster")))
    if roster is None:
        raise UnknownPositions(f"offset {offset} names the roster {document.get('roster')!r}, which is not there")
    try:
        return roster.positions(offset, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownPositions(f"offset {offset}: its metadata can't be read ({error!r})") from error


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

    def made_anew(self, fetched: Mapping[Source, Records]) -> dict[Source, int]:
        """Return what was read from before where reading began, and where that was: its log ended before that."""
        return {
            source: start
            for source, read in fetched.items()
            if (start := self._starts.get(source)) is not None and read.offsets[0] < start
        }

    def unmet(self, serving: Serving, fetched: Mapping[Source, Records]) -> dict[Source, Records]:
        """Take the keys from records that their queues have had: only where queues are at different positions."""
        return {
            source: positions.unmet(serving, source, read)
            if (positions := self._positions.get(source)) is not None and read.offsets[0] < positions.furthest
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
