"""Delivers messages of a queue again that it has had, from a time or an offset on.

Nothing is moved back: committed offsets stay, and so does what is open. Each message that is finished is sent once
more, as a copy of its record: a DELAY marker that is due at once, which a tracker delivers as any other, with its
sender's headers and a new identity. A header (``marq-rewound-from``) says which record it is a copy of.

Which records: those of the queue between the start and where its group had read to when this began. Of these are left
out

* what is open: somebody holds it, or it waits for a redelivery or for its time. It will be delivered anyhow.
* what was redelivered, but for its last copy; and all of them while a copy waits or is open.

What the group had read was acquired before it was committed, so the markers that are read afterwards tell whether it is
open. A message that ends between is simply delivered again: it has been finished.

**Once.** Identities follow from the rewind's own id: its records' sources and offsets, under a name that is drawn from
the id. A tracker takes each range of them once and for ever. So a rewind that was interrupted is called again with its
id, and doubles nothing; what it has delivered itself it passes over.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from marq.cluster import Writer, cluster_of
from marq.core.copies import origin, record_id
from marq.core.errors import ConfigError
from marq.core.marker_codec import encode
from marq.core.markers import Delay, Payload, Source, payload_bytes, spans
from marq.core.names import (
    ATTEMPT_HEADER,
    ID_HEADER,
    RESERVED_HEADER,
    REWOUND_HEADER,
    check_queue_name,
    drawn_topic,
    markers_partition,
)
from marq.inspector import Inspector
from marq.log_view import LogView
from marq.queues import Queues
from marq.records import Row
from marq.settings import MEMORY_SCHEME, ClientSettings
from marq.topics import Topics, ensure_topics
from marq.writer import FRAME_BYTES, MarkerRecord

#: Messages of one marker at the most.
MAX_MESSAGES = 500
#: Bytes of a marker beside its messages.
_HEAD_BYTES = 600
_STOP_S = 2.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin: at a time, in ms since the epoch, or at an offset of one partition alone."""

    time_ms: int | None = None
    place: tuple[Source, int] | None = None


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind has found, in messages; ``again``: those that are delivered again."""

    id: str
    again: int = 0
    #: Left out, because they are still open or wait.
    open: int = 0
    #: Records that are earlier copies of messages that are delivered again.
    copies: int = 0


def new_id() -> str:
    """Return an id for a rewind."""
    return secrets.token_hex(8)


async def rewind(
    settings: ClientSettings,
    queue: str,
    start: Start,
    *,
    identity: str,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Rewound:
    """Deliver again what a queue has had since a start; ``identity``: of a rewind that is gone on with, or a new one.

    When it returns all is durable that is to be delivered. ``progress`` is called with how many records were read, and
    of how many.

    Raises:
        ConfigError: a name is wrong, the start is none of the queue's, or a right is missing.
        BrokerUnavailable: not known how far it came: call it again with the same identity.
    """
    check_queue_name(queue)
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        raise ConfigError("rewind: a broker in memory has none; send the messages again")
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        rewinding = _Rewinding(settings, topics, inspector, queue, identity)
        await rewinding.look(start)
        if not dry_run:
            await rewinding.write(progress)
    return rewinding.found


class _Rewinding:
    def __init__(
        self, settings: ClientSettings, topics: Topics, inspector: Inspector, queue: str, identity: str
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._inspector = inspector
        self._queue = queue
        self._key = queue.encode()
        #: What ids of its own messages begin with.
        self._prefixes: tuple[bytes, ...] = ()
        #: Up to where a tracker has been asked for all.
        self._asked_to: dict[Source, int] = {}
        self.found = Rewound(identity)
        self._spans: dict[Source, range] = {}
        #: Places that are open.
        self._open: dict[Source, set[int]] = {}
        #: Ids of messages of which some copy is open or waits, and the last copy of each that was redelivered.
        self._alive: set[str] = set()
        self._last: dict[str, tuple[int, Source, int]] = {}

    async def look(self, start: Start) -> None:
        """Find out what is to be delivered again."""
        # First how far the group is, and then what is open: what it had read is among the markers by then.
        places = (await self._inspector.places([self._queue]))[self._queue]
        for each in (await self._inspector.owned()).values():
            for source, leases in each.tracker.book.leases_by_source():
                self._open.setdefault(source, set()).update(
                    number for number, lease in leases if lease.queue == self._queue
                )
        async with LogView(self._settings, committed=False) as view:
            there = await self._there(view, places)
            self._prefixes = tuple(f"{self._drawn(topic)}/".encode() for topic in {each.topic for each in there})
            starts = await self._starts(view, start, there)
            self._spans = {source: range(starts[source], max(starts[source], places[source])) for source in starts}
            # Copies that wait stand behind that, so all up to the end is looked at.
            async for fetched in view.read({source: range(starts[source], there[source].stop) for source in starts}):
                for source, read in fetched.items():
                    for row in read:
                        self._note(source, row)
        again = skipped = copies = 0
        async for _, _, fate in self._fates():
            again += fate == "again"
            skipped += fate == "open"
            copies += fate == "copy"
        self.found = replace(self.found, again=again, open=skipped, copies=copies)

    async def _there(self, view: LogView, places: Mapping[Source, int]) -> dict[Source, range]:
        there: dict[Source, range] = {}
        for topic in sorted({source.topic for source in places}):
            there.update(await view.ranges(topic))
        return {source: span for source, span in there.items() if source in places}

    async def _starts(self, view: LogView, start: Start, there: Mapping[Source, range]) -> dict[Source, int]:
        if start.place is not None:
            source, offset = start.place
            if source not in there:
                raise ConfigError(
                    f"queue {self._queue!r} is not read in {source.topic}/{source.partition}: expected one of"
                    f" {', '.join(f'{each.topic}/{each.partition}' for each in sorted(there))}"
                )
            return {source: min(max(offset, there[source].start), there[source].stop)}
        at = await view.offsets_at(there, start.time_ms or 0)
        return {source: span.stop if (found := at.get(source)) is None else found for source, span in there.items()}

    def _is_own(self, source: Source, row: Row) -> bool:
        if source.topic == self._settings.names.messages and row.key != self._key:
            return False
        # What this rewind has delivered before it was interrupted is none of what it was asked for.
        identity = next((value for name, value in row.headers if name == ID_HEADER and value is not None), b"")
        return not identity.startswith(self._prefixes)

    def _note(self, source: Source, row: Row) -> None:
        if not self._is_own(source, row):
            return
        read = row.offset < self._spans[source].stop
        is_copy = any(name == ATTEMPT_HEADER for name, _ in row.headers)
        identity = origin(source, row.offset, row.timestamp, row.headers).id if is_copy else ""
        if not read or row.offset in self._open.get(source, ()):
            if is_copy:
                self._alive.add(identity)
            return
        if is_copy:
            here = (row.timestamp, source, row.offset)
            self._last[identity] = max(here, self._last.get(identity, here))

    async def _fates(self) -> AsyncIterator[tuple[Source, Row, str]]:
        """Return each record of the queue, and what is to become of it: again, open, copy."""
        async with LogView(self._settings, committed=False) as view:
            async for fetched in view.read(self._spans):
                for source, read in fetched.items():
                    for row in read:
                        if self._is_own(source, row):
                            yield source, row, self._fate(source, row)

    def _fate(self, source: Source, row: Row) -> str:
        identity = origin(source, row.offset, row.timestamp, row.headers).id
        if row.offset in self._open.get(source, ()) or identity in self._alive:
            return "open"
        last = self._last.get(identity)
        return "again" if last is None or last[1:] == (source, row.offset) else "copy"

    async def write(self, progress: Progress | None) -> None:
        """Write a DELAY for each message that is delivered again."""
        writer = cluster_of(self._settings).writer(self._topics)
        await writer.start()
        written, parcel = 0, list[tuple[Source, Row]]()
        try:
            async for source, row, fate in self._fates():
                if fate != "again":
                    continue
                if parcel and (parcel[0][0] != source or len(parcel) == MAX_MESSAGES):
                    written += await self._send(writer, parcel)
                    parcel = []
                    if progress is not None:
                        progress(written, self.found.again)
                parcel.append((source, row))
            if parcel:
                written += await self._send(writer, parcel)
        finally:
            await writer.stop(_STOP_S)

    async def _send(self, writer: Writer, parcel: Sequence[tuple[Source, Row]]) -> int:
        records = list(self._markers(parcel[0][0], [row for _, row in parcel]))
        await writer.write(records, self._settings.request_timeout_ms / 1000)
        return len(parcel)

    def _markers(self, source: Source, rows: Sequence[Row]) -> Iterator[MarkerRecord]:
        drawn = Source(self._drawn(source.topic), source.partition)
        payloads = [self._payload(source, row) for row in rows]
        room = self._topics.markers_limit_bytes - FRAME_BYTES - _HEAD_BYTES
        where = markers_partition(*drawn, self._topics.markers_partitions)
        for piece in spans(map(payload_bytes, payloads), room):
            some = payloads[piece]
            numbers = [row.offset for row in rows[piece]]
            # All before it is known: so one that is written a second time counts once.
            begin = self._asked_to.get(source, self._spans[source].start)
            self._asked_to[source] = numbers[-1] + 1
            delay = Delay(self._queue, 1, drawn, numbers, [0] * len(numbers), True, begin, some)
            yield MarkerRecord(where, encode(delay))

    def _drawn(self, topic: str) -> str:
        """Return the name under which offsets of a topic are identities of this rewind's messages."""
        digest = sha256(f"rewind/{self.found.id}/{topic}/{self._queue}".encode()).digest()
        return drawn_topic(int.from_bytes(digest[:16]))

    def _payload(self, source: Source, row: Row) -> Payload:
        kept = [each for each in row.headers if not each[0].startswith(RESERVED_HEADER)]
        came_from = (REWOUND_HEADER, record_id(source, row.offset).encode())
        return Payload(int(time.time() * 1000), 1, row.key, [*kept, came_from], row.value)
