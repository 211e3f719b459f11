"""Replay: delivers finished messages of a queue again, starting at a time or an offset.

Committed offsets and open messages stay as they are. Each finished message is sent again as a DELAY marker that is due
at once, with its sender's headers and a new identity. The header ``marq-replayed-from`` names the original record.

The replay covers the queue's records from the start up to where its group had read when the replay began, except

* open messages, which are in flight, delayed, or wait for a redelivery: they will be delivered anyway.
* redelivered messages, except their last record; and all their records if one of them waits or is open, in any
  partition.
* records that the topic had before a queue with ``start = "latest"``.

Records that the group had read were acquired before their offset was committed, so the markers read afterwards tell
which are open. A message that ends in between is delivered again, because it is finished.

**Once.** Identities are the records' sources and offsets under a name derived from the replay's id, and a tracker
accepts each range of them once. So an interrupted replay may be repeated with its id without duplicates; it skips the
messages that it has delivered itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from marq.backend.cluster import Writer, cluster_of, marker_writer
from marq.client.backends import require_kafka
from marq.core.storage.acquired_ranges import AcquiredRanges, acquired_in
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader, existing_ranges
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.records import Row
from marq.kafka.topics import Topics, ensure_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import ConfigError
from marq.wire.large_messages import without_value
from marq.wire.markers import Delay, Payload, Source, payload_bytes, spans
from marq.wire.names import (
    FRAME_BYTES,
    ID_HEADER,
    KEY_HEADER,
    ORDERING_KEY_HEADER,
    REPLAYED_HEADER,
    RESERVED_HEADER,
    TYPE_HEADER,
    check_queue_name,
    synthetic_topic,
)
from marq.wire.record_headers import is_redelivery, last_value, not_expiring, origin, record_id

#: Maximum number of messages of one marker.
MAX_MESSAGES = 500
#: Bytes of a marker besides its messages.
_HEAD_BYTES = 600
#: Marq's headers with values from the sender: they are kept.
_KEPT = (KEY_HEADER, ORDERING_KEY_HEADER)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin: at a time in ms since the epoch, or at an offset of a single partition."""

    time_ms: int | None = None
    place: tuple[Source, int] | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The messages of a replay: ``messages`` are delivered again, ``unfinished`` are left out.

    ``earlier_records`` are superseded records of messages that are delivered again.
    """

    id: str
    messages: int = 0
    unfinished: int = 0
    earlier_records: int = 0


def new_id() -> str:
    """Return an id for a replay."""
    return secrets.token_hex(8)


async def replay(
    settings: ClientSettings,
    queue: str,
    start: Start,
    *,
    identity: str,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Replayed:
    """Deliver finished messages of a queue again; ``identity`` is that of the replay to continue, or a new one.

    All messages are durable on return. ``progress`` is called with the number of messages written and the total.

    Raises:
        ConfigError: a name is wrong, the queue has no such partition, or a permission is missing.
        BrokerUnavailable: it is unknown how far the replay got; call it again with the same identity.
    """
    check_queue_name(queue)
    require_kafka(settings, "replay", "send the messages again instead")
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        replaying = _Replaying(settings, topics, inspector, queues.definitions, queue, identity)
        await replaying.look(start)
        if not dry_run:
            await replaying.write(progress)
    return replaying.totals


class _Replaying:
    def __init__(
        self,
        settings: ClientSettings,
        topics: Topics,
        inspector: Inspector,
        definitions: Definitions,
        queue: str,
        identity: str,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._inspector = inspector
        self._queue = queue
        self._key = queue.encode()
        self._ordered = definitions(queue).by_key
        #: The records before the start of the queue.
        self._before = definitions.begin(queue)
        #: Prefixes of the ids of this replay's messages.
        self._prefixes: tuple[bytes, ...] = ()
        #: The end of the ranges requested so far.
        self._asked_to: dict[Source, int] = {}
        self.totals = Replayed(identity)
        self._spans: dict[Source, range] = {}
        #: The group's positions; in a queue with ordering, those of its first unfinished messages.
        self._places: Mapping[Source, int] = {}
        #: What consumers of a queue with ordering have acquired, also after the positions.
        self._acquired: dict[Source, AcquiredRanges] = {}
        #: Offsets of open messages.
        self._open: dict[Source, set[int]] = {}
        #: Ids of messages of which a record is open or waits, and the last record of each redelivered message.
        self._alive: set[str] = set()
        self._last: dict[str, tuple[int, Source, int]] = {}

    async def look(self, start: Start) -> None:
        """Find out which messages to deliver again."""
        # The group's position first, then the open messages: by then the markers cover all that the group had read.
        self._places = places = (await self._inspector.places([self._queue]))[self._queue]
        for content in (await self._inspector.owned()).values():
            book = content.tracker.book
            if self._ordered:
                self._acquired |= acquired_in(book.acquired, self._queue)
            for source, leases in book.leases_by_source():
                self._open.setdefault(source, set()).update(
                    number for number, lease in leases if lease.queue == self._queue
                )
        async with LogReader(self._settings, committed=False) as view:
            ranges = await existing_ranges(view, places)
            topics = {source.topic for source in ranges}
            self._prefixes = tuple(f"{self._synthetic(topic)}/".encode() for topic in topics)
            starts = await self._starts(view, start, ranges)
            ends = {source: min(self._read_to(source), ranges[source].stop) for source in starts}
            self._spans = {source: range(start, max(start, ends[source])) for source, start in starts.items()}
            async for fetched in view.read(self._noted(ranges, places)):
                for source, read in fetched.items():
                    for row in read:
                        self._note(source, row)
        again = skipped = copies = 0
        async for _, _, fate in self._fates():
            again += fate == "again"
            skipped += fate == "open"
            copies += fate == "copy"
        self.totals = replace(self.totals, messages=again, unfinished=skipped, earlier_records=copies)

    def _read_to(self, source: Source) -> int:
        """Return where the group had read to."""
        return max(self._places[source], self._acquired[source].end if source in self._acquired else 0)

    def _is_waiting(self, source: Source, offset: int) -> bool:
        """Return whether no consumer had acquired a record."""
        return offset >= self._places[source] and offset not in self._acquired.get(source, ())

    async def _starts(self, view: LogReader, start: Start, ranges: Mapping[Source, range]) -> dict[Source, int]:
        if start.place is not None:
            place, offset = start.place
            # A caller does not know the id of the topic's incarnation.
            source = {candidate.log: candidate for candidate in ranges}.get(place, place)
            if source not in ranges:
                raise ConfigError(
                    f"queue {self._queue!r} is not read in {source.topic}/{source.partition}: expected one of"
                    f" {', '.join(f'{candidate.topic}/{candidate.partition}' for candidate in sorted(ranges))}"
                )
            return {source: min(max(offset, ranges[source].start), ranges[source].stop)}
        offsets = await view.offsets_at(ranges, start.time_ms or 0)
        ends = {source: span.stop for source, span in ranges.items()}
        return ends | {source: offset for source, offset in offsets.items() if offset is not None}

    def _noted(self, ranges: Mapping[Source, range], places: Mapping[Source, int]) -> dict[Source, range]:
        """Return the ranges that show which messages are unfinished; their redeliveries may be in any partition."""
        noted = {}
        for source, existing in ranges.items():
            if source in self._spans:
                begin = self._spans[source].start
            else:
                begin = max(existing.start, min([places[source], *self._open.get(source, ())]))
            # Waiting redeliveries come after the group's position, so read to the end.
            noted[source] = range(begin, existing.stop)
        return noted

    def _is_own(self, source: Source, row: Row) -> bool:
        if source.topic == self._settings.names.messages and row.key != self._key:
            return False
        if self._before is not None and not self._before.left(source, row.offset, row.timestamp):
            return False
        # Skip messages that this replay delivered before it was interrupted.
        return not (last_value(row.headers, ID_HEADER) or b"").startswith(self._prefixes)

    def _note(self, source: Source, row: Row) -> None:
        """Note a redelivery."""
        if not self._is_own(source, row) or not is_redelivery(row.headers):
            return
        identity = origin(source, row.offset, row.timestamp, row.headers).id
        if self._is_waiting(source, row.offset) or row.offset in self._open.get(source, ()):
            self._alive.add(identity)
        elif row.offset in self._spans.get(source, ()):
            here = (row.timestamp, source, row.offset)
            self._last[identity] = max(here, self._last.get(identity, here))

    async def _fates(self) -> AsyncIterator[tuple[Source, Row, str]]:
        """Return each record of the queue with its fate: again, open, or copy."""
        async with LogReader(self._settings, committed=False) as view:
            async for fetched in view.read(self._spans):
                for source, read in fetched.items():
                    for row in read.with_fitting_headers():
                        if self._is_own(source, row):
                            yield source, row, self._fate(source, row)

    def _fate(self, source: Source, row: Row) -> str:
        identity = origin(source, row.offset, row.timestamp, row.headers).id
        if row.offset in self._open.get(source, ()) or identity in self._alive or self._is_waiting(source, row.offset):
            return "open"
        last = self._last.get(identity)
        return "again" if last is None or last[1:] == (source, row.offset) else "copy"

    async def write(self, progress: Progress | None) -> None:
        """Write a DELAY for each message that is delivered again."""
        written, batch = 0, list[tuple[Source, Row]]()
        async with marker_writer(cluster_of(self._settings), self._topics) as writer:
            async for source, row, fate in self._fates():
                if fate != "again":
                    continue
                if batch and (batch[0][0] != source or len(batch) == MAX_MESSAGES):
                    written += await self._send(writer, batch)
                    batch = []
                    if progress is not None:
                        progress(written, self.totals.messages)
                batch.append((source, row))
            if batch:
                written += await self._send(writer, batch)

    async def _send(self, writer: Writer, batch: Sequence[tuple[Source, Row]]) -> int:
        records = list(self._markers(batch[0][0], [row for _, row in batch]))
        await writer.write(records, self._settings.request_timeout_ms / 1000)
        return len(batch)

    def _markers(self, source: Source, rows: Sequence[Row]) -> Iterator[MarkerRecord]:
        target = Source(self._synthetic(source.topic), source.partition)
        room = self._topics.markers_limit_bytes - FRAME_BYTES - _HEAD_BYTES
        payloads = [self._payload(source, row) for row in rows]
        # As a consumer acquires such a message: it must not stop the replay of the others.
        payloads = [
            payload
            if payload_bytes(payload) <= room
            else without_value(payload, record_id(source.log, row.offset), f"a marker has room for {room}")
            for payload, row in zip(payloads, rows, strict=True)
        ]
        for piece in spans(map(payload_bytes, payloads), room):
            some = payloads[piece]
            numbers = [row.offset for row in rows[piece]]
            # The range begins where the previous one ended, so that a second write counts once.
            begin = self._asked_to.get(source, self._spans[source].start)
            self._asked_to[source] = numbers[-1] + 1
            delay = Delay(self._queue, 1, target, numbers, [0] * len(numbers), True, begin, some)
            yield MarkerRecord.of(delay, self._topics.markers_partitions)

    def _synthetic(self, topic: str) -> str:
        """Return the name under which offsets of a topic identify this replay's messages."""
        digest = sha256(f"replay/{self.totals.id}/{topic}/{self._queue}".encode()).digest()
        return synthetic_topic(int.from_bytes(digest[:16]))

    def _payload(self, source: Source, row: Row) -> Payload:
        kept = [
            header
            for header in row.headers
            if header[0] in (*_KEPT, TYPE_HEADER) or not header[0].startswith(RESERVED_HEADER)
        ]
        if source.topic != self._settings.names.messages and row.key is not None:
            kept = [*(header for header in kept if header[0] not in _KEPT), (KEY_HEADER, row.key)]
            if self._ordered and row.key:
                kept.append((ORDERING_KEY_HEADER, row.key))
        came_from = (REPLAYED_HEADER, record_id(source.log, row.offset).encode())
        # It may have been sent long ago, and must be delivered.
        return Payload(int(time.time() * 1000), 1, self._key, not_expiring([*kept, came_from]), row.value)
