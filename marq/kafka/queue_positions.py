"""Positions of several queues that share a partition.

A Kafka group commits one offset per partition, but queues join and leave a group. A queue that joins still needs its
records before that offset, and a queue that left must not receive records again. So the metadata of the committed
offset has a position for each queue. A member reads a partition from the lowest position, and queues with higher
positions skip records. A member that does not know a queue yet commits nothing for it.

Kafka keeps 4,096 bytes with a committed offset: enough for the names of about 120 queues. For more queues the names are
in a **snapshot**, a record of the snapshots topic, and the metadata names the snapshot. A snapshot is durable before
the first commit that names it, never changes, and only commits of its group and partition name it. A member writes a
new one when it starts to read a partition whose committed metadata names no usable snapshot. From then on all of its
commits have the same metadata, however many queues there are: the snapshot's queues advance with the offset.

A record's key is ``ID TOPIC/PARTITION GROUP``; a record without a value removes the snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from marq.kafka.log_reader import LogReader
from marq.kafka.marker_writer import write_once
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.kafka.topics import offset_snapshot_topic
from marq.settings.client import ClientSettings
from marq.settings.topic_configs import SNAPSHOT_LIMIT_BYTES
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import Source

log = logging.getLogger("marq")

#: The broker's limit for the metadata of an offset (``offset.metadata.max.bytes``).
MAX_METADATA_BYTES = 4_096
#: An offset with as many digits as any real one, to decide whether the positions of a group's queues fit.
_LONG_OFFSET = 10**12
#: Bytes for the names of a group's queues; as many again for queues that have left it, with their positions.
MAX_SNAPSHOT_BYTES = 8 << 20
#: Bytes around a name: quotes, colon, comma and a position.
_AROUND_BYTES = 4 + len(str(2**63))
#: The version of metadata that names a snapshot; metadata without a snapshot has none.
VERSION = 2
#: A snapshot that its partition's commit does not name is removed if it is this much older than the newest one. A
#: snapshot is named within seconds or never: by then its writer must have been expelled from the group.
UNNAMED_MS = 3_600_000
#: The JSON keys of the committer, of its knowledge of the definitions, of positions of queues with ordering, and of the
#: id of the topic's incarnation, in the metadata.
_BY, _CHANGED_AT, _BEHIND, _TOPIC_ID = "by", "changed_at", "behind", "topic_id"

#: Positions of queues with ordering: their lowest open messages.
LowWatermarks = Mapping[tuple[str, Source], int]
_NONE: Mapping[str, int] = MappingProxyType({})
NOT_BEHIND: LowWatermarks = MappingProxyType({})


class UnknownPositions(MarqError):
    """An offset's metadata is unreadable. Reading stops: otherwise messages would be lost or delivered again."""


class Positions:
    """Positions of one partition, by queue: the offset after the last record that the queue has received.

    The queues that a member serves advance together, at a cost that does not depend on their number. ``metadata`` is
    that of all later commits if they name a snapshot.
    """

    def __init__(self, by_queue: Mapping[str, int] | None = None, metadata: str | None = None) -> None:
        self._metadata = metadata
        #: Separate positions, and the queues that are at ``_reached`` if that is further.
        self._own = dict(by_queue or {})
        self._together: Sequence[str] = ()
        #: The queues that the metadata was made for, those behind included; () before the first commit.
        self._served: Sequence[str] = ()
        self._members: frozenset[str] = frozenset()
        self._reached = 0
        self._furthest_own = max(self._own.values(), default=0)
        #: Positions of queues with ordering, which are in the metadata on their own.
        self._behind: dict[str, int] = {}

    @classmethod
    def decode(
        cls,
        offset: int | None,
        metadata: str,
        owner: str | None = None,
        snapshots: Mapping[str, OffsetSnapshot] | None = None,
    ) -> Positions:
        """Read what :meth:`encode` wrote; with metadata of another writer, no queue has received anything.

        In a group that belongs to one queue (``owner``), an offset without metadata is that queue's.

        Raises UnknownPositions if a newer version has written it, or it names none of these snapshots.
        """
        if offset is None:
            return cls()
        if owner is not None and not metadata:
            return cls({owner: offset})
        named = document_of(metadata)
        if named is not None:
            return cls._with_behind(_of_snapshot(offset, named, snapshots or {}), named)
        document = parsed(metadata)
        try:
            here, past = list(document["at"]), dict(document["past"])
            by_queue = {**dict.fromkeys(map(str, here), offset), **{str(q): int(p) for q, p in past.items()}}
            return cls._with_behind(by_queue, document)
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()

    @classmethod
    def _with_behind(cls, by_queue: Mapping[str, int], document: Mapping[str, Any]) -> Positions:
        behind = {str(queue): int(at) for queue, at in document.get(_BEHIND, {}).items()}
        positions = cls({**by_queue, **behind})
        positions._behind = behind
        return positions

    def encode(self, offset: int, by: str = "", changed_at: int = -1, topic_id: str = "") -> str:
        """Return the metadata to commit with an offset. Raises ConfigError if there are too many queues.

        ``by`` is a readable name of the committer, ``changed_at`` that of its
        :class:`marq.kafka.queue_records.Serving`. Each is left out if there is no room for it. ``topic_id`` is that of
        the topic's incarnation, and is never left out: in another incarnation, the offset means nothing.
        """
        of_topic = f',"{_TOPIC_ID}":"{topic_id}"' if topic_id else ""
        room_bytes = MAX_METADATA_BYTES - len(of_topic)
        metadata = self._metadata if self._metadata is not None else self._without_snapshot(offset, room_bytes)
        metadata = f"{metadata[:-1]}{of_topic}}}"
        if self._behind:
            metadata = f'{metadata[:-1]},"{_BEHIND}":{json.dumps(self._behind, ensure_ascii=False)}}}'
            if len(metadata.encode()) > MAX_METADATA_BYTES:
                raise ConfigError(
                    f"{len(self._behind)} queues with ordering are too many for one group: put some into another group"
                )
        for key, value in ((_CHANGED_AT, changed_at if changed_at >= 0 else None), (_BY, by or None)):
            longer = f'{metadata[:-1]},"{key}":{json.dumps(value, ensure_ascii=False)}}}'
            if value is not None and len(longer.encode()) <= MAX_METADATA_BYTES:
                metadata = longer
        return metadata

    def _without_snapshot(self, offset: int, room_bytes: int) -> str:
        by_queue = {queue: at for queue, at in self.by_queue.items() if queue not in self._behind}
        here = {queue: position for queue, position in by_queue.items() if position == offset}
        past = {queue: position for queue, position in by_queue.items() if position != offset}
        metadata = plain(here, past)
        while past and len(metadata.encode()) > room_bytes:
            # The queue that left first is forgotten first: if it returns, it starts from the beginning.
            del past[min(sorted(past), key=lambda queue: past[queue])]
            metadata = plain(here, past)
        if len(metadata.encode()) > room_bytes:
            raise ConfigError(f"{len(by_queue)} queues are too many for the metadata of an offset without a snapshot")
        return metadata

    @property
    def by_queue(self) -> dict[str, int]:
        """The position of each known queue."""
        return {**self._own, **{queue: max(self._own.get(queue, 0), self._reached) for queue in self._together}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self.by_queue == other.by_queue

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Positions({self.by_queue!r})"

    def start(self, queues: Iterable[str], log_start: int) -> int:
        """Return where to continue so that none of these queues misses a record."""
        by_queue = self.by_queue
        return max(min((by_queue.get(queue, 0) for queue in queues), default=0), log_start)

    def committed_offset(self, queues: Sequence[str], offset: int) -> int:
        """Return the offset to commit: the lowest position if all of these queues have ordering."""
        behind = self._behind
        return min(behind.values()) if behind and behind.keys() >= set(queues) else offset

    def newcomers(self, queues: Iterable[str], offset: int | None) -> list[str]:
        """Return the queues that are not at the group's offset: another group may have read them further."""
        by_queue = self.by_queue
        return [
            queue for queue in queues if offset is None or (by_queue.get(queue) != offset and queue not in self._behind)
        ]

    @property
    def behind(self) -> Collection[str]:
        """The queues with ordering: some of their messages at their positions are open."""
        return self._behind.keys()

    @property
    def furthest(self) -> int:
        """The highest position of a queue."""
        return max(self._furthest_own, self._reached)

    def advanced_to(self, queues: Sequence[str], offset: int, behind: Mapping[str, int] = _NONE) -> Positions:
        """Return the positions when these queues have received all records before an offset.

        Those of ``behind`` have received all records before an offset of their own.
        """
        together = tuple([queue for queue in queues if queue not in behind]) if behind else queues
        if together == self._together:
            after = copy(self)
            after._reached = max(self._reached, offset)
        else:
            members = _members(tuple(together))
            own = {queue: at for queue, at in self.by_queue.items() if at > offset or queue not in members}
            # A queue that becomes ordered while its group is served is behind from then on. The metadata still holds.
            after = Positions(own, self._metadata if self._served in ((), queues) else None)
            after._together, after._members, after._reached = together, members, offset
        after._served = queues
        if behind:
            before = self.by_queue
            # A position never goes back: records before it are finished.
            after._behind = {queue: max(at, before.get(queue, 0)) for queue, at in behind.items()}
            after._own = {**after._own, **after._behind}
            after._furthest_own = max(after._own.values())
        return after

    def until(self, end: int) -> Positions:
        """Return the positions of these queues in a log that has lost all records from an offset on."""
        until = Positions({queue: min(position, end) for queue, position in self.by_queue.items()})
        until._behind = {queue: min(position, end) for queue, position in self._behind.items()}
        return until

    def has_received(self, queue: str, offset: int) -> bool:
        """Return whether a queue has received the record at an offset."""
        return offset < self._own.get(queue, 0) or (offset < self._reached and queue in self._members)

    def without_received(self, serving: Serving, source: Source, read: Records) -> Records:
        """Remove the keys of records that their queues have received, so that no queue receives them again."""
        return read.with_keys(
            [
                None
                if (queue := serving.queue_of(source.topic, key)) is not None and self.has_received(queue, offset)
                else key
                for offset, key in zip(read.offsets, read.keys, strict=True)
            ]
        )

    def advance(self, queues: Iterable[str], offset: int, behind: Collection[str] = ()) -> None:
        """Note that these queues have received all records before an offset; those of ``behind`` have ordering."""
        for queue in queues:
            self._own[queue] = max(self._own.get(queue, 0), offset)
            self._furthest_own = max(self._furthest_own, offset)
            if queue in behind:
                self._behind[queue] = self._own[queue]


def committer(name: str) -> str:
    """Return the name of this process as a committer; ``name`` is its instance id or client id."""
    return f"{name} on {socket.gethostname()} (process {os.getpid()})"


def committed_by(metadata: str) -> str | None:
    """Return the committer in a commit's metadata, None if it has none."""
    by = parsed(metadata).get(_BY)
    return by if isinstance(by, str) else None


def topic_id_of(metadata: str) -> str:
    """Return the id of the incarnation that a commit's offset belongs to, empty if its writer named none."""
    topic_id = parsed(metadata).get(_TOPIC_ID)
    return topic_id if isinstance(topic_id, str) else ""


def is_older(metadata: str, changed_at: int) -> bool:
    """Return whether a commit's queues may have been in another group since.

    Metadata is empty only if a program set the offset, which then counts.
    """
    try:
        document = parsed(metadata)
        return bool(metadata) and (not document or int(document.get(_CHANGED_AT, -1)) < changed_at)
    except (ValueError, TypeError):
        return True


@lru_cache(maxsize=4)
def _members(queues: tuple[str, ...]) -> frozenset[str]:
    """Return one set for all partitions: with many queues it is large."""
    return frozenset(queues)


def _of_snapshot(offset: int, document: Mapping[str, Any], snapshots: Mapping[str, OffsetSnapshot]) -> dict[str, int]:
    snapshot = snapshots.get(str(document.get("snapshot")))
    if snapshot is None:
        raise UnknownPositions(f"offset {offset} names the snapshot {document.get('snapshot')!r}, which is not there")
    try:
        return snapshot.positions(offset, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownPositions(f"offset {offset}: its metadata can't be read ({error!r})") from error


class MemberPositions:
    """The positions in all partitions that a member of a group reads."""

    def __init__(self) -> None:
        self._positions: dict[Source, Positions] = {}
        #: The offsets that belong to the positions. A failed cycle reads again, but never from before them.
        self._reached: dict[Source, int] = {}

    def begin(self, source: Source, positions: Positions, start: int) -> None:
        """Start to read a partition."""
        self._positions[source] = positions
        self._reached[source] = start

    def clear(self) -> None:
        """Stop reading all partitions."""
        self._positions.clear()
        self._reached.clear()

    def recreated(self, fetched: Mapping[Source, Records]) -> dict[Source, int]:
        """Return partitions that returned records from before the last committed offset, with that offset.

        Their logs ended before it, because the topic was recreated or has lost records.
        """
        return {
            source: reached
            for source, read in fetched.items()
            if (reached := self._reached.get(source)) is not None and read.offsets[0] < reached
        }

    def without_received(self, serving: Serving, fetched: Mapping[Source, Records]) -> dict[Source, Records]:
        """Remove the keys of records that their queues have received, where queues are at different positions.

        In a queue's own topic, all records are the queue's; the keys are their senders'.
        """
        return {
            source: positions.without_received(serving, source, read)
            if (positions := self._positions.get(source)) is not None
            and read.offsets[0] < positions.furthest
            and not serving.is_own(source.topic)
            else read
            for source, read in fetched.items()
        }

    def advanced_to(
        self, serving: Serving, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND
    ) -> dict[Source, Positions]:
        """Return the positions when all records before these offsets are read, without partitions that are not read.

        Pass them to :meth:`take` when they are committed.
        """
        return {
            source: positions.advanced_to(
                serving.queues_in(source.topic),
                offset,
                {queue: at for (queue, place), at in behind.items() if place == source} if behind else _NONE,
            )
            for source, offset in offsets.items()
            if (positions := self._positions.get(Source(*source))) is not None
        }

    def current(self, sources: Iterable[Source]) -> tuple[dict[Source, int], dict[Source, Positions]]:
        """Return the offsets and positions of partitions as they are, to commit them again."""
        known = [source for source in sources if source in self._positions]
        return {source: self._reached[source] for source in known}, {
            source: self._positions[source] for source in known
        }

    def take(self, offsets: Mapping[Source, int], after: Mapping[Source, Positions]) -> None:
        """Take over committed positions of partitions that are still read."""
        for source, positions in after.items():
            if source in self._positions:
                self._positions[source] = positions
                # Like positions, it never goes back, even if the log has lost records; recreated() notices that later.
                self._reached[source] = max(self._reached[source], offsets[source])


# --- snapshots --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OffsetSnapshot:
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
    def decode(cls, snapshot_id: str, value: bytes) -> OffsetSnapshot:
        """Read the value of a record. Raises UnknownPositions."""
        try:
            document = json.loads(value)
            return cls(snapshot_id, _positions(document["served"]), _positions(document["past"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UnknownPositions(f"snapshot {snapshot_id}: it can't be read ({error!r})") from error

    def positions(self, offset: int, document: Mapping[str, Any]) -> dict[str, int]:
        """Return the positions at a committed offset whose metadata names this snapshot.

        Raises ValueError, KeyError, TypeError or AttributeError for metadata of another writer.
        """
        served, past = _positions(document["served"]), _positions(document["past"])
        return {
            **{queue: max(position, offset) for queue, position in self.served.items()},
            **self.past,
            **{queue: max(position, offset) for queue, position in served.items()},
            **past,
        }

    def metadata(self, served: Mapping[str, int], past: Mapping[str, int]) -> str:
        """Return metadata that names this snapshot, with the positions that differ from it."""
        return _text({"version": VERSION, "snapshot": self.id, "served": dict(served), "past": dict(past)})


def parsed(metadata: str) -> Mapping[str, Any]:
    """Return the content of metadata; empty if it is not a JSON object, as if another program has written it."""
    try:
        document = json.loads(metadata)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def document_of(metadata: str) -> Mapping[str, Any] | None:
    """Return the content of metadata that names a snapshot, None for any other.

    Raises UnknownPositions if a newer version has written it.
    """
    document = parsed(metadata)
    if "version" not in document:
        return None
    if document["version"] != VERSION:
        raise UnknownPositions(
            f"the metadata of an offset has version {document['version']!r}, but this marq knows {VERSION}: a newer"
            " one serves or served the group; use that version here, too"
        )
    return document


def snapshot_named(metadata: str) -> str | None:
    """Return the id of the snapshot that metadata names, or None; same errors as :func:`document_of`."""
    document = document_of(metadata)
    return None if document is None else str(document.get("snapshot"))


def fits(queues: Collection[str], room_bytes: int) -> bool:
    """Return whether metadata has room for a separate position of each queue, as while one of them catches up."""
    if sum(map(len, queues)) > room_bytes:
        return False
    return len(plain({}, dict.fromkeys(queues, _LONG_OFFSET)).encode()) <= room_bytes


def plain(here: Mapping[str, int], past: Mapping[str, int]) -> str:
    """Return metadata without a snapshot."""
    return _text({"at": sorted(here), "past": dict(sorted(past.items()))})


def check_room(group: str, queues: Collection[str]) -> None:
    """Check that the names of a group's queues fit into a snapshot. Raises ConfigError if they are too many."""
    if sum([len(queue.encode()) + _AROUND_BYTES for queue in queues]) > MAX_SNAPSHOT_BYTES:
        raise ConfigError(
            f"group {group!r} would have {len(queues)} queues: their names and positions take more than the"
            f" {MAX_SNAPSHOT_BYTES} bytes that they may have; use shorter names, or more groups"
        )


def in_the_metadata(
    positions: Mapping[str, int], served: Collection[str], start: int, current: OffsetSnapshot | None, room_bytes: int
) -> str | None:
    """Return metadata for all offsets from ``start`` on that names the current snapshot; None if that is impossible."""
    if current is None:
        return None
    moving, past = {}, {}
    for queue, position in positions.items():
        at_least = max(position, start)
        # Every queue of the snapshot is in ``positions``, so this loop sees all differences.
        if queue not in served:
            if queue in current.served or current.past.get(queue) != position:
                past[queue] = position
        # The snapshot has 0 or more for each of its queues. The position of any other queue would be forgotten.
        elif (known := current.served.get(queue, -1)) < 0 or queue in current.past or max(known, start) != at_least:
            moving[queue] = position
        if len(moving) + len(past) > room_bytes // _AROUND_BYTES:
            return None
    moving |= {queue: 0 for queue in served if queue not in positions and queue not in current.served}
    text = current.metadata(moving, past)
    return text if len(text.encode()) <= room_bytes else None


def new_snapshot(snapshot_id: str, positions: Mapping[str, int], served: Collection[str], start: int) -> OffsetSnapshot:
    """Return a snapshot for all offsets from ``start`` on: commits need to name nothing else."""
    # Queues with positions before the start are at the committed offset from the first commit on.
    moving = {queue: position if (position := positions.get(queue, 0)) > start else 0 for queue in sorted(served)}
    room_bytes = MAX_SNAPSHOT_BYTES
    # If there is no room, the queue that left first is forgotten first: if it returns, it starts from the beginning.
    past = {
        queue: position
        for queue, position in sorted(positions.items(), key=lambda entry: (-entry[1], entry[0]))
        if queue not in moving and (room_bytes := room_bytes - len(queue.encode()) - _AROUND_BYTES) > 0
    }
    return OffsetSnapshot(snapshot_id, moving, past)


def _positions(value: Mapping[Any, Any]) -> dict[str, int]:
    return {str(queue): int(position) for queue, position in value.items()}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


# --- the topic of snapshots -------------------------------------------------------------------------------------------


class OffsetSnapshotKey(NamedTuple):
    """The key of a record of the topic."""

    id: str
    source: Source
    group: str

    def encode(self) -> bytes:
        return f"{self.id} {self.source.topic}/{self.source.partition} {self.group}".encode()

    @classmethod
    def decode(cls, key: bytes | None) -> OffsetSnapshotKey | None:
        """Return the key, None for the record of another program."""
        parts = (key or b"").decode(errors="replace").split(" ", 2)
        topic, slash, partition = parts[1].rpartition("/") if len(parts) == 3 else ("", "", "")
        return cls(parts[0], Source(topic, int(partition)), parts[2]) if slash and partition.isdecimal() else None


def left_over(
    written: Mapping[OffsetSnapshotKey, int], group: str, committed: Mapping[Source, str | None]
) -> list[OffsetSnapshotKey]:
    """Return the snapshots of a group that no commit names; ``written`` has their broker timestamps, in ms.

    ``committed`` has the snapshot that the group's commit names, for the partitions that we own in the group now.
    """
    oldest_ms = max(written.values(), default=0) - UNNAMED_MS
    return [
        key
        for key, written_ms in written.items()
        if key.group == group and key.source in committed and committed[key.source] != key.id and written_ms < oldest_ms
    ]


class OffsetSnapshotLog:
    """Reads the topic from start to end when a snapshot is needed, and keeps no connection."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._topic = settings.names.offset_snapshots

    async def read(
        self, wanted: Iterable[str], group: str = "", committed: Mapping[Source, Any] | None = None
    ) -> dict[str, OffsetSnapshot]:
        """Return snapshots by their ids, without those that do not exist.

        With ``committed``, the commits of a group in partitions that we own, remove the group's unused snapshots.

        Raises BrokerUnavailable; UnknownPositions if a snapshot can't be read; Forbidden.
        """
        ids = set(wanted)
        if not ids or not await offset_snapshot_topic(self._settings, make=False):
            return {}
        values, written = await self._read(ids)
        named = {source: snapshot_named(offset.metadata) for source, offset in (committed or {}).items()}
        if gone := left_over(written, group, named):
            await self._write({key.encode(): None for key in gone})
        return {snapshot_id: OffsetSnapshot.decode(snapshot_id, value) for snapshot_id, value in values.items()}

    async def write(self, group: str, snapshots: Mapping[Source, OffsetSnapshot]) -> None:
        """Write snapshots of a group's partitions; return when they are durable.

        Raises BrokerUnavailable; ConfigError if the permission to write, or to create the topic, is missing.
        """
        if snapshots:
            await offset_snapshot_topic(self._settings, make=True)
            await self._write(
                {
                    OffsetSnapshotKey(snapshot.id, source, group).encode(): snapshot.encode()
                    for source, snapshot in snapshots.items()
                }
            )

    async def _read(self, ids: set[str]) -> tuple[dict[str, bytes], dict[OffsetSnapshotKey, int]]:
        """Return the values of these snapshots, and the times of all."""
        values: dict[str, bytes] = {}
        written: dict[OffsetSnapshotKey, int] = {}
        async with LogReader(self._settings, committed=False, max_partition_fetch_bytes=SNAPSHOT_LIMIT_BYTES) as reader:
            async for fetched in reader.read(await reader.ranges(self._topic)):
                for row in fetched.get(Source(self._topic, 0), ()):
                    key = OffsetSnapshotKey.decode(row.key)
                    if key is None:
                        log.warning("%s/0/%s is not an offset snapshot and is skipped", self._topic, row.offset)
                    elif row.value is None:
                        written.pop(key, None)
                        values.pop(key.id, None)
                    else:
                        written[key] = row.timestamp
                        if key.id in ids:
                            values[key.id] = row.value
        return values, written

    async def _write(self, records: Mapping[bytes, bytes | None]) -> None:
        # Names compress well, and Python has gzip built in.
        await write_once(
            self._settings, self._topic, records, compression_type="gzip", max_request_size=SNAPSHOT_LIMIT_BYTES
        )
