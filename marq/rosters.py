"""Positions of the queues of a group that are too many for an offset's metadata.

Kafka keeps 4,096 bytes with a committed offset: enough for the names of about 120 queues. Where a group has more, the
names stand in a **roster**, a record of the rosters topic, and the metadata names the roster. It is durable before the
first commit that names it, is never changed, and no other commit than those of its group and partition names it. A
member makes one where reading begins, if what is committed there names none that will do; from then on all of its
commits have the same metadata, however many queues there are: the roster's queues move on with the offset.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from marq.core.errors import ConfigError, MarqError

#: What brokers accept as metadata of an offset (``offset.metadata.max.bytes``).
MAX_METADATA_BYTES = 4_096
#: Offsets have no more digits when it is judged whether the positions of a group's queues fit into that.
_LONG_OFFSET = 10**12
#: The names of a group's queues, and as much again those of queues that have left it, with their positions.
MAX_ROSTER_BYTES = 8 << 20
#: Around a name: quotes, colon, comma and a position.
_AROUND_BYTES = 4 + len(str(2**63))
#: The version of metadata that names a roster; metadata without a roster has none.
VERSION = 2


class UnknownPositions(MarqError):
    """An offset's metadata can't be understood: nothing is read, for messages would be lost or delivered again."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Queues of one group and partition, each with its position at the time of writing.

    Those in ``served`` are at the committed offset where that is further; those in ``past`` stay where they are.
    """

    id: str
    served: Mapping[str, int]
    past: Mapping[str, int]

    def encode(self) -> bytes:
        """Return the value of the record."""
        return _text({"served": dict(self.served), "past": dict(self.past)}).encode()

    @classmethod
    def decode(cls, roster_id: str, value: bytes) -> Roster:
        """Read what :meth:`encode` wrote.

        Raises:
            UnknownPositions: it is something else.
        """
        try:
            document = json.loads(value)
            return cls(roster_id, _positions(document["served"]), _positions(document["past"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnknownPositions(f"roster {roster_id}: it can't be read ({error!r})") from error

    def positions(self, offset: int, document: Mapping[str, Any]) -> dict[str, int]:
        """Return the positions that metadata which names this roster means at a committed offset.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it was written by somebody else.
        """
        served, past = _positions(document["served"]), _positions(document["past"])
        return {
            **{queue: max(position, offset) for queue, position in self.served.items()},
            **self.past,
            **{queue: max(position, offset) for queue, position in served.items()},
            **past,
        }

    def metadata(self, served: Mapping[str, int], past: Mapping[str, int]) -> str:
        """Return metadata that names this roster, with what is different from it."""
        return _text({"version": VERSION, "roster": self.id, "served": dict(served), "past": dict(past)})


def document_of(metadata: str) -> Mapping[str, Any] | None:
    """Return what metadata says that names a roster; None for any other.

    Raises:
        UnknownPositions: a newer version has written it.
    """
    try:
        document = json.loads(metadata)
    except ValueError:
        return None
    if not isinstance(document, dict) or "version" not in document:
        return None
    if document["version"] != VERSION:
        raise UnknownPositions(
            f"the metadata of an offset have version {document['version']!r}, and this marq knows {VERSION}: a newer"
            " one serves the group, or did; use that version here, too"
        )
    return document


def roster_named(metadata: str) -> str | None:
    """Return the id of the roster that metadata names, None where it names none.

    Raises:
        UnknownPositions: a newer version has written it.
    """
    document = document_of(metadata)
    return None if document is None else str(document.get("roster"))


def fits(queues: Collection[str], room_bytes: int) -> bool:
    """Whether metadata can say a position of its own for each queue, as while one of them catches up."""
    if sum(map(len, queues)) > room_bytes:
        return False
    return len(plain({}, dict.fromkeys(queues, _LONG_OFFSET)).encode()) <= room_bytes


def plain(here: Mapping[str, int], past: Mapping[str, int]) -> str:
    """Return metadata without a roster."""
    return _text({"at": sorted(here), "past": dict(sorted(past.items()))})


def check_room(group: str, queues: Collection[str]) -> None:
    """Check that the names of a group's queues fit into a roster.

    Raises:
        ConfigError: they are too many.
    """
    if sum([len(queue.encode()) + _AROUND_BYTES for queue in queues]) > MAX_ROSTER_BYTES:
        raise ConfigError(
            f"group {group!r} would have {len(queues)} queues: their names and positions take more than the"
            f" {MAX_ROSTER_BYTES} bytes that they may have; use shorter names, or more groups"
        )


def in_the_metadata(
    positions: Mapping[str, int], served: Collection[str], start: int, current: Roster | None, room_bytes: int
) -> str | None:
    """Return metadata for all offsets from ``start`` on that names the roster of now; None where that will not do."""
    if current is None:
        return None
    moving, past = {}, {}
    for queue, position in positions.items():
        at_least = max(position, start)
        # Of no queue is less known than the roster says, so that whatever differs is in here.
        if queue not in served:
            if queue in current.served or current.past.get(queue) != position:
                past[queue] = position
        # Known to the roster as 0 or more. The position of a queue that it does not know would be forgotten.
        elif (known := current.served.get(queue, -1)) < 0 or queue in current.past or max(known, start) != at_least:
            moving[queue] = position
        if len(moving) + len(past) > room_bytes // _AROUND_BYTES:
            return None
    moving |= {queue: 0 for queue in served if queue not in positions and queue not in current.served}
    text = current.metadata(moving, past)
    return text if len(text.encode()) <= room_bytes else None


def new_roster(roster_id: str, positions: Mapping[str, int], served: Collection[str], start: int) -> Roster:
    """Return a roster for all offsets from ``start`` on: commits need to name nothing but it."""
    # What is before the start will be at the offset with the first commit.
    moving = {queue: position if (position := positions.get(queue, 0)) > start else 0 for queue in sorted(served)}
    room_bytes = MAX_ROSTER_BYTES
    # Of queues that have left, the one that left first is forgotten: should it come back, it begins anew.
    past = {
        queue: position
        for queue, position in sorted(positions.items(), key=lambda each: (-each[1], each[0]))
        if queue not in moving and (room_bytes := room_bytes - len(queue.encode()) - _AROUND_BYTES) > 0
    }
    return Roster(roster_id, moving, past)


def _positions(value: Mapping[Any, Any]) -> dict[str, int]:
    return {str(queue): int(position) for queue, position in value.items()}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)
