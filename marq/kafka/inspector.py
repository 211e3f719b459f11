"""Inspects a namespace from outside: joins no group, leases and commits nothing, and needs no worker.

Waiting messages are the records of a queue after the furthest position that any group has committed for it. The
position of a queue with ordering is its first unfinished message, so only the records after it that no consumer
has acquired are waiting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.kafka.committed_offsets import AT_ONCE, groups_of, positions_of
from marq.kafka.connection import admin_client
from marq.kafka.log_reader import LogReader
from marq.kafka.owned_partitions import Owned, owned_partitions
from marq.kafka.queue_positions import Positions
from marq.kafka.records import Records, Row
from marq.kafka.topics import incarnations
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.settings.queue import QueueSettings
from marq.wire.errors import BrokerUnavailable, Forbidden
from marq.wire.markers import NOW, Headers, Source
from marq.wire.names import log_name
from marq.wire.record_headers import Origin, deliver_at_ms, origin

log = logging.getLogger("marq")

#: Limit for the records that one call reads.
MAX_SCANNED = 1_000_000

#: Messages to compare with a search before yielding to other tasks.
_AT_A_TIME = 500

#: The position of each queue in each partition where it may have records.
Places = Mapping[str, Mapping[Source, int]]
#: The offsets that queues with ordering have acquired.
Acquired = Mapping[tuple[str, Source], AcquiredRanges]
_NONE = AcquiredRanges()


@dataclass(frozen=True)
class Waiting:
    """The waiting messages of each queue.

    ``complete`` is False if the limit left records unread. ``ends`` are the offsets up to which records were read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    #: Messages at or after the position of an ordered queue that are in flight or finished.
    uncommitted: Counter[str] = field(default_factory=Counter)
    #: The time of the first of them, in ms since the epoch.
    oldest_ms: dict[str, int] = field(default_factory=dict)
    #: Keys of records of other queues.
    unknown_keys: Counter[bytes] = field(default_factory=Counter)
    scanned: int = 0
    complete: bool = True
    ends: Mapping[Source, int] = field(default_factory=dict)


class Peeked(NamedTuple):
    """A waiting message and its record."""

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
        """The time at which it was first sent."""
        return self._origin.first_sent_ms

    @property
    def headers(self) -> Headers:
        return self.row.headers

    @property
    def _origin(self) -> Origin:
        return origin(self.source, self.row.offset, self.row.timestamp, self.row.headers)

    def deliver_at_ms(self, settings: QueueSettings) -> int | None:
        """Return its earliest delivery time, None for immediately."""
        due_ms = deliver_at_ms(self.row.timestamp, self.row.headers, settings.delay_ms)
        return None if due_ms == NOW else due_ms


@dataclass
class Search:
    """The first messages of a queue that fit, and what was searched.

    ``matching``: how many fit; ``waiting``: how many messages of the queue were examined; ``scanned``: how many records
    were read; ``complete``: whether those are all.
    """

    messages: list[Peeked] = field(default_factory=list)
    matching: int = 0
    waiting: int = 0
    scanned: int = 0
    complete: bool = True


def by_age(message: Peeked) -> tuple[int, Source, int]:
    """Return the sort key by which messages that have waited longest come first."""
    return message.row.timestamp, message.source, message.row.offset


class Inspector:
    """Inspects with the ``definitions`` of queues at its creation. All calls raise BrokerUnavailable."""

    def __init__(self, settings: ClientSettings, definitions: Definitions) -> None:
        self._settings = settings
        self._names = settings.names
        self._definitions = definitions

    # --- messages -----------------------------------------------------------------------------------------------------

    async def places(self, queues: Iterable[str]) -> dict[str, dict[Source, int]]:
        """Return the position of each queue in each partition where it may have records."""
        wanted = sorted(set(queues))
        # First: if a topic is created again meanwhile, its offsets count for the former one, which does no harm.
        own = await incarnations(self._settings, self._own_topics(wanted))
        async with LogReader(self._settings, committed=False) as view:
            topics = {self._names.messages, *own.values()}
            ranges = {source: span for topic in sorted(topics) for source, span in (await view.ranges(topic)).items()}
        known = await self._furthest(wanted, ranges)
        return {queue: self._places_of(queue, ranges, known) for queue in wanted}

    async def waiting(
        self, queues: Iterable[str], limit: int = MAX_SCANNED, ends: Mapping[Source, int] | None = None
    ) -> Waiting:
        """Count waiting messages, or those before these offsets."""
        places = await self.places(queues)
        acquired = await self.acquired(places)
        found = Waiting()
        async with LogReader(self._settings, committed=False) as view:
            unread = await self._unread(view, places)
            if ends is not None:
                unread = {
                    source: range(span.start, min(span.stop, ends.get(source, 0))) for source, span in unread.items()
                }
            ranges, complete = _cut(unread, limit)
            scanned = 0
            async for fetched in view.read(ranges):
                for source, read in fetched.items():
                    self._count(found, source, read, places, acquired)
                    scanned += len(read)
        ends = {source: span.stop for source, span in ranges.items()}
        return replace(found, scanned=scanned, complete=complete, ends=ends)

    async def peek(self, queue: str, count: int, limit: int = MAX_SCANNED) -> tuple[list[Peeked], bool]:
        """Return the messages of a queue that have waited longest, and whether all records were read."""
        found = await self.search(queue, count, limit)
        return found.messages, found.complete

    async def search(
        self,
        queue: str,
        count: int,
        limit: int = MAX_SCANNED,
        fits: Callable[[Peeked], bool] = lambda _: True,
        order: Callable[[Peeked], Any] = by_age,
        limit_s: float = inf,
    ) -> Search:
        """Return the first ``count`` waiting messages of a queue that fit, in this order.

        Reads at most ``limit`` records, and no more after ``limit_s`` seconds.
        """
        places = await self.places([queue])
        acquired = await self.acquired([queue])
        found, until_s = Search(), time.monotonic() + limit_s
        async with LogReader(self._settings, committed=False) as view:
            ranges, found.complete = _cut(await self._unread(view, places), limit)
            async for fetched in view.read(ranges):
                if time.monotonic() >= until_s:
                    found.complete = False
                    break
                for source, read in fetched.items():
                    found.scanned += len(read)
                    ours = self._of(queue, source, read, places, acquired)
                    found.waiting += len(ours)
                    # In pieces, because reading payloads may take long.
                    for start in range(0, len(ours), _AT_A_TIME):
                        some = [Peeked(source, read[place]) for place in ours[start : start + _AT_A_TIME]]
                        fitting = [message for message in some if fits(message)]
                        found.matching += len(fitting)
                        found.messages += fitting
                        await asyncio.sleep(0)
                # Drop the others now, to limit memory.
                found.messages = sorted(found.messages, key=order)[:count]
        return found

    async def arrived(self, queue: str, ends: Mapping[Source, int]) -> int:
        """Return the number of records of a queue at or after these offsets."""
        starts = {queue: dict(ends)}
        found = Waiting()
        async with LogReader(self._settings, committed=False) as view:
            async for fetched in view.read(await self._unread(view, starts)):
                for source, read in fetched.items():
                    self._count(found, source, read, starts, {})
        return found.counts[queue]

    async def acquired(self, queues: Iterable[str]) -> Acquired:
        """Return the acquired offsets of those of these queues that have ordering."""
        ordered = {queue for queue in queues if self._definitions.settings(queue).by_key}
        owned = await self.owned(incomplete=True) if ordered else {}
        return {
            (queue, source): ranges
            for content in owned.values()
            for (queue, source), ranges in content.tracker.book.acquired.items()
            if queue in ordered
        }

    async def marker_ends(self) -> dict[int, int]:
        """Return where each markers partition ends."""
        async with LogReader(self._settings, committed=False) as view:
            return {source.partition: span.stop for source, span in (await view.ranges(self._names.markers)).items()}

    def _count(self, found: Waiting, source: Source, read: Records, places: Places, acquired: Acquired) -> None:
        shared = source.topic == self._names.messages
        starts = {queue.encode(): (queue, offsets[source]) for queue, offsets in places.items() if source in offsets}
        everyone = list(starts.values())
        counts, oldest_ms = found.counts, found.oldest_ms
        skipped = {queue: purge for queue in places if (purge := self._definitions.skipped(queue)) is not None}
        for offset, key, sent_ms in zip(read.offsets, read.keys, read.timestamps, strict=True):
            if shared and key and key not in starts:
                found.unknown_keys[key] += 1
            for queue, start in ([starts[key]] if key in starts else ()) if shared else everyone:
                if offset < start or (queue in skipped and not skipped[queue].left(source, offset, sent_ms)):
                    continue
                if offset in acquired.get((queue, source), _NONE):
                    found.uncommitted[queue] += 1
                    continue
                counts[queue] += 1
                if sent_ms < oldest_ms.get(queue, sent_ms + 1):
                    oldest_ms[queue] = sent_ms

    def _of(self, queue: str, source: Source, read: Records, places: Places, acquired: Acquired) -> list[int]:
        """Return the indexes of a queue's waiting records."""
        start = places[queue].get(source)
        if start is None:
            return []
        key = queue.encode() if source.topic == self._names.messages else None
        purge, taken = self._definitions.skipped(queue), acquired.get((queue, source), _NONE)
        return [
            place
            for place, (offset, record_key, sent_ms) in enumerate(
                zip(read.offsets, read.keys, read.timestamps, strict=True)
            )
            if (key is None or record_key == key)
            and offset >= start
            and offset not in taken
            and (purge is None or purge.left(source, offset, sent_ms))
        ]

    async def _unread(self, view: LogReader, places: Places) -> dict[Source, range]:
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
        self, queue: str, ranges: Mapping[Source, range], known: Mapping[Source, Mapping[str, int]]
    ) -> dict[Source, int]:
        own, reads = self._definitions.settings(queue).topic, self._definitions.placement(queue).reads
        here = [
            source
            for source in ranges
            if log_name(source.topic) == own
            or (source.topic == self._names.messages and (reads is None or source.partition in reads))
        ]
        begin = self._definitions.begin(queue)
        starts = {} if begin is None else begin.ends
        # A start beyond the end of a partition dates from before the topic was recreated.
        return {
            source: max(known[source].get(queue, 0), start if (start := starts.get(source, 0)) <= span.stop else 0)
            for source, span in ranges.items()
            if source in here
        }

    async def _furthest(self, queues: Collection[str], sources: Collection[Source]) -> dict[Source, dict[str, int]]:
        """Return the furthest position that any group has committed for each queue.

        A queue whose group changes continues from there (marq/kafka/committed_offsets.py), so earlier records do not
        wait.
        """
        async with admin_client(self._settings) as admin:
            try:
                groups = await groups_of(admin, self._names, queues)
                furthest: dict[Source, dict[str, int]] = {source: {} for source in sources}
                for first in range(0, len(groups), AT_ONCE):
                    requests = (self._positions(admin, group, sources) for group in groups[first : first + AT_ONCE])
                    for answer in await asyncio.gather(*requests):
                        for source, positions in answer.items():
                            known = furthest[source]
                            for queue, position in positions.by_queue.items():
                                known[queue] = max(position, known.get(queue, 0))
                return furthest
            except KafkaError as error:
                raise BrokerUnavailable(
                    f"the positions of queues could not be read from {self._settings.bootstrap_servers}: {error}"
                ) from error

    async def _positions(
        self, admin: AIOKafkaAdminClient, group: str, sources: Collection[Source]
    ) -> dict[Source, Positions]:
        try:
            return await positions_of(self._settings, admin, group, sources)
        except Forbidden as error:
            # As in consumers: a request for one queue must not fail because of another queue's large group.
            log.warning("group %s: the positions of its queues are unknown: %s", group, error)
            return {}

    async def owned(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        incomplete: bool = False,
        ends: Mapping[int, int] | None = None,
    ) -> dict[int, Owned]:
        """Return the content of each markers partition; see :func:`marq.kafka.owned_partitions.owned_partitions`."""
        return await owned_partitions(self._settings, self._definitions, progress, incomplete=incomplete, ends=ends)


def _cut(ranges: Mapping[Source, range], limit: int) -> tuple[dict[Source, range], bool]:
    """Return ranges shortened in proportion to at most ``limit`` records, and whether nothing was left out."""
    total = sum(map(len, ranges.values()))
    if total <= limit:
        return dict(ranges), True
    return {source: span[: len(span) * limit // total] for source, span in ranges.items()}, False
