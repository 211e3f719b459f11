"""Looks at an installation from outside: joins no group, leases nothing, commits nothing, and needs no worker.

Waiting messages are the records of a queue after the furthest position that any group has committed for it. Open
messages are folded from the changelog and the markers that follow it, as a tracker does when it takes a partition over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.connection import client_options, close_admin, started
from marq.core import rows
from marq.core.copies import Origin, deliver_at_ms, origin, record_id
from marq.core.definitions import Definitions
from marq.core.errors import BrokerUnavailable, Forbidden, UnknownVersion
from marq.core.markers import NOW, Headers, Source
from marq.core.queue import QueueSettings
from marq.core.tracker import Tracker
from marq.log_view import LogView
from marq.offsets import AT_ONCE, groups_of, positions_of
from marq.positions import Positions
from marq.records import Records, Row
from marq.settings import ClientSettings

log = logging.getLogger("marq")

#: Records that a look for messages reads at the most.
MAX_SCANNED = 1_000_000
#: Rows of a book that are kept in memory at a time while markers are folded.
_PENDING_ROWS = 50_000

#: How far each queue has been read in each partition where it may have records.
Places = Mapping[str, Mapping[Source, int]]


@dataclass(frozen=True)
class Waiting:
    """What waits of each queue: messages that nobody has taken yet.

    ``complete``: all that had to be looked at was; else there may be more. ``ends``: up to where was looked.
    """

    counts: Counter[str] = field(default_factory=Counter)
    #: When the first of them was sent, in ms since the epoch.
    oldest_ms: dict[str, int] = field(default_factory=dict)
    #: Keys of records that were read and are of no queue that was asked for.
    strangers: Counter[bytes] = field(default_factory=Counter)
    scanned: int = 0
    complete: bool = True
    ends: Mapping[Source, int] = field(default_factory=dict)


class Peeked(NamedTuple):
    """A message that waits, and where its record stands."""

    source: Source
    row: Row

    @property
    def id(self) -> str:
        return self._origin.id

    @property
    def attempt(self) -> int:
        return self._origin.attempt

    @property
    def sent_ms(self) -> int:
        """When it was first sent."""
        return self._origin.first_sent_ms

    @property
    def headers(self) -> Headers:
        return self.row.headers

    @property
    def _origin(self) -> Origin:
        return origin(self.source, self.row.offset, self.row.timestamp, self.row.headers)

    def deliver_at_ms(self, settings: QueueSettings) -> int | None:
        """Return before when it must not be delivered, None when it may be at once."""
        due_ms = deliver_at_ms(self.row.timestamp, self.row.headers, settings.delay_ms)
        return None if due_ms == NOW else due_ms


class Unknown(NamedTuple):
    """A marker record of a newer version, which stops its partition."""

    offset: int
    timestamp_ms: int
    value: bytes
    #: Why it can't be read.
    error: str


@dataclass(frozen=True)
class Owned:
    """What a markers partition's changelog and markers say, without its owner.

    ``behind``: markers after what the changelog says; Kafka's own records, of transactions, are none.
    ``owner``: who wrote its rows last, as that one says, "" when it did not; ``written_ms``: the log's clock then.
    ``unknown``: the record before which an owner of this version stops; no later record is folded.
    """

    tracker: Tracker
    applied: int
    end: int
    behind: int = 0
    owner: str = ""
    written_ms: int | None = None
    unknown: Unknown | None = None


class Inspector:
    """``definitions`` are what is known of queues when it is made."""

    def __init__(self, settings: ClientSettings, definitions: Definitions) -> None:
        self._settings = settings
        self._names = settings.names
        self._definitions = definitions

    # --- messages -----------------------------------------------------------------------------------------------------

    async def places(self, queues: Iterable[str]) -> dict[str, dict[Source, int]]:
        """Return how far each queue has been read, in each partition where it may have records.

        Raises:
            BrokerUnavailable: no broker answered in time.
        """
        wanted = sorted(set(queues))
        async with self._view(committed=False) as view:
            topics = {self._names.messages, *self._own_topics(wanted)}
            ranges = {source: span for topic in sorted(topics) for source, span in (await view.ranges(topic)).items()}
        known = await self._furthest(wanted, ranges)
        return {queue: self._places_of(queue, ranges, known) for queue in wanted}

    async def waiting(
        self, queues: Iterable[str], limit: int = MAX_SCANNED, progress: Callable[[int, int], None] | None = None
    ) -> Waiting:
        """Count what waits; ``limit``: records that are read at the most. Raises as :meth:`places`.

        ``progress`` is called with how many records were read, and of how many.
        """
        places = await self.places(queues)
        found = Waiting()
        async with self._view(committed=False) as view:
            ranges, complete = _cut(await self._unread(view, places), limit)
            total = sum(map(len, ranges.values()))
            scanned = 0
            async for fetched in view.read(ranges):
                for source, read in fetched.items():
                    self._count(found, source, read, places)
                    scanned += len(read)
                if progress is not None:
                    progress(scanned, total)
        ends = {source: span.stop for source, span in ranges.items()}
        return replace(found, scanned=scanned, complete=complete, ends=ends)

    async def peek(self, queue: str, count: int, limit: int = MAX_SCANNED) -> tuple[list[Peeked], bool]:
        """Return the messages of a queue that waited longest, and whether nothing had to be left unread.

        At most ``limit`` records are read. Raises as :meth:`places`.
        """
        places = await self.places([queue])
        found: list[Peeked] = []
        async with self._view(committed=False) as view:
            ranges, complete = _cut(await self._unread(view, places), limit)
            async for fetched in view.read(ranges):
                for source, read in fetched.items():
                    found += [Peeked(source, read[place]) for place in self._of(queue, source, read, places)]
                # By partition, those that were sent first: more of it need not be kept.
                found = sorted(found, key=lambda each: (each.row.timestamp, each.source, each.row.offset))[:count]
        return found, complete

    async def arrived(self, queue: str, ends: Mapping[Source, int]) -> int:
        """Return how many records of a queue stand at these offsets or behind them; raises as :meth:`places`."""
        starts = {queue: dict(ends)}
        found = Waiting()
        async with self._view(committed=False) as view:
            async for fetched in view.read(await self._unread(view, starts)):
                for source, read in fetched.items():
                    self._count(found, source, read, starts)
        return found.counts[queue]

    async def marker_ends(self) -> dict[int, int]:
        """Return where each markers partition ends; raises as :meth:`places`."""
        async with self._view(committed=False) as view:
            return {source.partition: span.stop for source, span in (await view.ranges(self._names.markers)).items()}

    def _count(self, found: Waiting, source: Source, read: Records, places: Places) -> None:
        shared = source.topic == self._names.messages
        starts = {queue.encode(): (queue, each[source]) for queue, each in places.items() if source in each}
        owner = None if shared else next(iter(starts.values()))
        counts, oldest_ms = found.counts, found.oldest_ms
        purges = {queue: purge for queue in places if (purge := self._definitions.purge(queue)) is not None}
        for offset, key, sent_ms in zip(read.offsets, read.keys, read.timestamps, strict=True):
            whose = starts.get(key) if shared else owner  # type: ignore[arg-type]
            if whose is None:
                if shared and key:
                    found.strangers[key] += 1
            elif offset >= whose[1]:
                queue = whose[0]
                if queue in purges and not purges[queue].left(source, offset, sent_ms):
                    # Whoever reads it passes it over.
                    continue
                counts[queue] += 1
                if sent_ms < oldest_ms.get(queue, sent_ms + 1):
                    oldest_ms[queue] = sent_ms

    def _of(self, queue: str, source: Source, read: Records, places: Places) -> list[int]:
        """Return the places of a queue's records among these that nobody has taken."""
        start = places[queue].get(source)
        if start is None:
            return []
        key = queue.encode() if source.topic == self._names.messages else None
        purge = self._definitions.purge(queue)
        return [
            place
            for place, (offset, each, sent_ms) in enumerate(zip(read.offsets, read.keys, read.timestamps, strict=True))
            if (key is None or each == key)
            and offset >= start
            and (purge is None or purge.left(source, offset, sent_ms))
        ]

    async def _unread(self, view: LogView, places: Places) -> dict[Source, range]:
        starts: dict[Source, int] = {}
        for by_source in places.values():
            for source, start in by_source.items():
                starts[source] = min(start, starts.get(source, start))
        ranges: dict[Source, range] = {}
        for topic in sorted({source.topic for source in starts}):
            for source, span in (await view.ranges(topic)).items():
                if source in starts:
                    ranges[source] = range(min(max(span.start, starts[source]), span.stop), span.stop)
        return ranges

    def _own_topics(self, queues: Iterable[str]) -> set[str]:
        return {topic for queue in queues if (topic := self._definitions.settings(queue).topic) is not None}

    def _places_of(
        self, queue: str, ranges: Collection[Source], known: Mapping[Source, Mapping[str, int]]
    ) -> dict[Source, int]:
        own, reads = self._definitions.settings(queue).topic, self._definitions.placement(queue).reads
        here = [
            source
            for source in ranges
            if source.topic == own
            or (source.topic == self._names.messages and (reads is None or source.partition in reads))
        ]
        return {source: known[source].get(queue, 0) for source in here}

    async def _furthest(self, queues: Collection[str], sources: Collection[Source]) -> dict[Source, dict[str, int]]:
        """Return the furthest position that any group has committed for each queue.

        A queue whose group changes continues from there (marq/offsets.py), so earlier records do not wait.
        """
        admin = await started(
            lambda: AIOKafkaAdminClient(**client_options(self._settings)), self._settings, close_admin
        )
        try:
            groups = await groups_of(admin, self._names, queues)
            furthest: dict[Source, dict[str, int]] = {source: {} for source in sources}
            for first in range(0, len(groups), AT_ONCE):
                asked = (self._positions(admin, group, sources) for group in groups[first : first + AT_ONCE])
                for positions in await asyncio.gather(*asked):
                    for source, each in positions.items():
                        _advance(furthest[source], each.by_queue)
            return furthest
        except KafkaError as error:
            raise BrokerUnavailable(
                f"how far queues were read could not be learned from {self._settings.bootstrap_servers}: {error}"
            ) from error
        finally:
            await close_admin(admin)

    async def _positions(
        self, admin: AIOKafkaAdminClient, group: str, sources: Collection[Source]
    ) -> dict[Source, Positions]:
        try:
            return await positions_of(self._settings, admin, group, sources)
        except Forbidden as error:
            # As in consumers: a request for one queue must not fail because of another queue's large group.
            log.warning("group %s: how far queues were read there can't be seen: %s", group, error)
            return {}

    # --- leases -------------------------------------------------------------------------------------------------------

    async def owned(
        self, progress: Callable[[int, int], None] | None = None, *, incomplete: bool = False
    ) -> dict[int, Owned]:
        """Return what each markers partition holds open, from its changelog and the markers after it.

        ``incomplete``: a partition that a record of a newer version stops is returned as it was before that record.

        Raises:
            BrokerUnavailable: a topic could not be read.
            UnknownVersion: a record of a newer version stops a partition, and ``incomplete`` is False.
        """
        async with self._view(committed=True) as view:
            changelog = await view.ranges(self._names.changelog)
            markers = await view.ranges(self._names.markers)
            tables, writers = await self._tables(view, changelog, progress)
            found = {}
            for source, span in markers.items():
                number = source.partition
                tracker = Tracker(
                    self._definitions.settings, holder=0, ordered=partial(self._definitions.quarantine, number)
                )
                tracker.book.restore(sorted(tables.pop(number, {}).items()))
                applied, behind, unknown = tracker.book.applied, 0, None
                async for fetched in view.read({source: range(max(applied + 1, span.start), span.stop)}):
                    for row in fetched.get(source, ()):
                        behind += 1
                        if unknown is None:
                            unknown = _read(tracker, row)
                        if tracker.book.pending_rows > _PENDING_ROWS:
                            tracker.book.take_changes()
                if unknown is not None and not incomplete:
                    raise UnknownVersion(
                        f"record {record_id(source, unknown.offset)} stops its partition: {unknown.error}, so its open"
                        " messages are not known: `faust -A app quarantine` shows what to do"
                    )
                owner, written_ms = writers.get(number, ("", None))
                found[number] = Owned(tracker, applied, span.stop, behind, owner, written_ms, unknown)
        return found

    async def _tables(
        self, view: LogView, changelog: Mapping[Source, range], progress: Callable[[int, int], None] | None
    ) -> tuple[dict[int, dict[bytes, bytes]], dict[int, tuple[str, int]]]:
        """Return the rows of each partition, of messages without their payloads, and who wrote last."""
        tables: dict[int, dict[bytes, bytes]] = {source.partition: {} for source in changelog}
        writers: dict[int, tuple[str, int]] = {}
        scanned, total = 0, sum(map(len, changelog.values()))
        async for fetched in view.read(changelog):
            for source, read in fetched.items():
                table = tables[source.partition]
                for row in read:
                    _take_row(table, row)
                    if row.key == rows.APPLIED_KEY:
                        writers[source.partition] = (_owner(row.headers), row.timestamp)
                scanned += len(read)
            if progress is not None:
                progress(scanned, total)
        return tables, writers

    def _view(self, *, committed: bool) -> LogView:
        return LogView(self._settings, committed=committed)


def _read(tracker: Tracker, row: Row) -> Unknown | None:
    try:
        tracker.read(row.value, row.timestamp, row.offset)
    except UnknownVersion as error:
        return Unknown(row.offset, row.timestamp, row.value or b"", str(error))
    return None


def _take_row(table: dict[bytes, bytes], row: Row) -> None:
    if row.key is None or row.key == rows.IDENTITY_KEY:
        return
    if row.value is None:
        table.pop(row.key, None)
    else:
        table[row.key] = rows.encoded_lease(row.value) if row.key.startswith(b"r") else row.value


def _owner(headers: Headers) -> str:
    found = [value for name, value in headers if name == rows.OWNER_HEADER and value is not None]
    return found[-1].decode("utf-8", "replace") if found else ""


def _advance(furthest: dict[str, int], positions: Mapping[str, int]) -> None:
    for queue, position in positions.items():
        furthest[queue] = max(position, furthest.get(queue, 0))


def _cut(ranges: Mapping[Source, range], limit: int) -> tuple[dict[Source, range], bool]:
    """Return ranges of at most so many records, the same part of each, and whether nothing was left out."""
    total = sum(map(len, ranges.values()))
    if total <= limit:
        return dict(ranges), True
    return {source: span[: len(span) * limit // total] for source, span in ranges.items()}, False


def open_counts(owned: Iterable[Owned]) -> dict[str, dict[str, int]]:
    """Return, by queue, how many messages are open, by the names that the workers' pages use."""
    totals: dict[str, Counter[str]] = {}
    for each in owned:
        for queue, gauge in each.tracker.book.gauges().items():
            figures = totals.setdefault(queue, Counter())
            figures["in_flight"] += gauge.in_flight
            figures["waiting_for_redelivery"] += gauge.released
            figures["waiting_for_dead_letters"] += gauge.rejected
            figures["waiting_for_delivery"] += gauge.delayed
    return {queue: {name: figures[name] for name in OPEN} for queue, figures in totals.items()}


#: What an open message may be.
OPEN: Sequence[str] = ("in_flight", "waiting_for_delivery", "waiting_for_redelivery", "waiting_for_dead_letters")
