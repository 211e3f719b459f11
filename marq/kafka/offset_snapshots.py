"""Positions of a group's queues that are too many for an offset's metadata, and the topic that stores them.

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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from marq.kafka.log_reader import LogReader
from marq.kafka.marker_writer import write_once
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


class UnknownPositions(MarqError):
    """An offset's metadata is unreadable. Reading stops: otherwise messages would be lost or delivered again."""


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


# --- the topic --------------------------------------------------------------------------------------------------------


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
