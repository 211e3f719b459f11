"""Purge: discards the waiting messages of a queue.

1. **Publish** the end offsets (:mod:`marq.settings.skipped_records`), and wait until all consumers know them. They skip
   earlier records from here on. Messages that they have acquired before are in flight.
2. **Mark**: write a PURGE for each partition with the queue's records, and for each markers partition. The trackers end
   the messages; nothing waits for them. In the other order, a consumer could deliver a message that its tracker does
   not know any more.
3. **Publish** again if messages in flight were purged, too: consumers drop those that they have not delivered.
4. **Count**: read and fold the markers up to the PURGEs, as the trackers do.

A purge can be repeated after a crash, and other purges of the queue may run at the same time: each step can only add to
what is purged. After a crash between steps 1 and 2, consumers skip messages without a marker that says so, until the
next purge writes it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from marq.backend.cluster import cluster_of, marker_writer
from marq.client.backends import require_kafka
from marq.core.lease_book import LeaseBook
from marq.core.storage.acquired_ranges import AcquiredRanges, acquired_in
from marq.core.storage.rows import HELD, State
from marq.dead_letters.dead_letters import DeadLetters
from marq.dead_letters.snapshots import Snapshot
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader, existing_ranges
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.owned_partitions import Owned
from marq.kafka.topics import Topics, ensure_topics
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions, purge_key
from marq.settings.skipped_records import SkippedRecords, read_offsets, written_offsets
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import MAX_TIME_MS, Purge, Source
from marq.wire.names import WITHOUT_RECORDS, check_queue_name, markers_partition

#: How long until all consumers know of the end offsets.
KNOWN_S = 2.5
#: How far senders' clocks may be ahead of this machine's.
SKEW_MS = 600_000
#: Changed rows to keep while markers are folded.
_MOST_ROWS = 50_000


@dataclass(frozen=True)
class Extent:
    """What existed when the user was asked to confirm a purge: a purge with an extent ends no later messages.

    ``ends`` are the end offsets of the partitions with the queue's records. ``clocks`` are the log's clocks of the
    markers partitions: a delayed message has no record, and existed if its DELAY came by then. ``dead_letters``, if
    given, is a snapshot of the dead letters.
    """

    ends: Mapping[Source, int]
    clocks: Mapping[int, int]
    dead_letters: Snapshot | None = None

    def __str__(self) -> str:
        return json.dumps({"ends": written_offsets(self.ends), "clocks": self.clocks}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of ``str()``, which has no dead letters; raise ConfigError if the text is not an extent."""
        try:
            document = json.loads(text)
            clocks = {int(partition): int(clock_ms) for partition, clock_ms in document["clocks"].items()}
            return cls(read_offsets(document, "ends"), clocks)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"extent={text[:40]}: not the extent of a purge; get a new one and pass it unchanged"
            ) from error


@dataclass(frozen=True, slots=True)
class Purged:
    """How many messages a purge has ended, by their former state; those in flight are not counted."""

    waiting: int = 0
    redelivery: int = 0
    delayed: int = 0
    dead_letters: int = 0

    @property
    def total(self) -> int:
        return self.waiting + self.redelivery + self.delayed + self.dead_letters


async def preview(
    settings: ClientSettings, queue: str, *, delayed: bool = False, dead: bool = False, before_ms: int | None = None
) -> tuple[Purged, Extent, bool]:
    """Return what a purge would end now, its extent, and whether the count is complete; nothing changes.

    With ``before_ms``, only messages before the first one sent at this time or later are in the extent.

    The count stops after ``MAX_SCANNED`` records. If there are more, the purge ends more messages than were counted.
    Same errors as :func:`purge`.
    """
    check_purgeable(settings, queue)
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        before = None if before_ms is None else await _ends(settings, inspector, queue, before_ms)
        waiting = await inspector.waiting([queue], ends=before)
        # If the count ended early, the caller says "at least", and the purge ends all messages that waited then.
        ends = before or (waiting.ends if waiting.complete else await _ends(settings, inspector, queue))
        owned = await inspector.owned()
    books = {partition: content.tracker.book for partition, content in owned.items()}
    if before is None:
        # Partitions without waiting messages may have some for redelivery.
        former = [acquired_in(book.acquired, queue) for book in books.values()]
        ends = {**{source: ranges.end for acquired in former for source, ranges in acquired.items()}, **ends}
    extent = Extent(ends, _clocks({partition: book.clock.now_ms for partition, book in books.items()}, before_ms))
    counts = Counter[str](waiting=waiting.counts[queue])
    for batch in _markers(queue, 1, extent, topics, delayed=delayed):
        counts += _counted(books[markers_partition(*batch.source, topics.markers_partitions)], batch)
    if dead:
        async with DeadLetters.of(settings) as known:
            extent = replace(extent, dead_letters=await known.snapshot())
            letters = await known.count(queue, as_of=extent.dead_letters)
            counts["dead_letters"] = sum([count.dead_letters for count in letters])
    return Purged(**counts), extent, waiting.complete


async def purge(
    settings: ClientSettings,
    queue: str,
    *,
    delayed: bool = False,
    dead: bool = False,
    in_flight: bool = False,
    extent: Extent | None = None,
) -> Purged:
    """End the waiting messages of a queue; ``delayed`` includes delayed messages, ``dead`` its dead letters.

    With ``in_flight``, messages in flight end too. With an ``extent`` from :func:`preview` or :func:`extent_now`, later
    messages stay.

    Raises:
        ConfigError: the name is wrong, or a permission is missing.
        BrokerUnavailable: it is unknown how far the purge got, or how many messages it ended; purge again.
    """
    check_purgeable(settings, queue)
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        purged = await _Purging(settings, topics, queues, queue).run(extent, delayed=delayed, in_flight=in_flight)
    if dead:
        async with DeadLetters.of(settings) as dead_letters:
            as_of = None if extent is None else extent.dead_letters
            purged = replace(purged, dead_letters=(await dead_letters.delete(queue, as_of=as_of)).deleted)
    return purged


async def extent_now(
    settings: ClientSettings,
    definitions: Definitions,
    queue: str,
    clocks: Mapping[int, int],
    before_ms: int | None = None,
) -> Extent:
    """Return the extent of a purge without counting, given the clocks of the trackers; same errors as :func:`purge`.

    ``before_ms`` as in :func:`preview`.
    """
    check_purgeable(settings, queue)
    ends = await _ends(settings, Inspector(settings, definitions), queue, before_ms)
    return Extent(ends, _clocks(clocks, before_ms))


def check_purgeable(settings: ClientSettings, queue: str) -> None:
    """Raise ConfigError if the name is wrong or the queue is not on Kafka."""
    check_queue_name(queue)
    require_kafka(settings, "purge", "receive and acknowledge the messages instead")


async def _ends(
    settings: ClientSettings, inspector: Inspector, queue: str, before_ms: int | None = None
) -> dict[Source, int]:
    """Return the end offsets of the partitions with a queue's records, or of their records sent before a time."""
    places = (await inspector.places([queue]))[queue]
    async with LogReader(settings, committed=False) as view:
        stops = {source: span.stop for source, span in (await existing_ranges(view, places)).items()}
        later = {} if before_ms is None else await view.offsets_at(stops, before_ms)
    firsts = {source: offset for source, offset in later.items() if offset is not None}
    return {source: min(stop, firsts.get(source, stop)) for source, stop in stops.items()}


def _clocks(clocks: Mapping[int, int], before_ms: int | None) -> dict[int, int]:
    """Return the clocks of an extent."""
    return {partition: ms if before_ms is None else min(ms, before_ms - 1) for partition, ms in clocks.items()}


def _markers(
    queue: str, holder: int, extent: Extent, topics: Topics, *, delayed: bool, in_flight: bool = False
) -> Iterator[Purge]:
    """Return the markers of a purge."""
    ends = dict(extent.ends)
    for number in range(topics.markers_partitions):
        source = Source(WITHOUT_RECORDS, number)
        ends[source] = extent.clocks.get(markers_partition(*source, topics.markers_partitions), -1) + 1
    for source, end in ends.items():
        if end > 0:
            yield Purge(queue, holder, source, [end], in_flight, delayed)


def _counted(book: LeaseBook, batch: Purge) -> Counter[str]:
    """Count the open messages that a PURGE would end now, except those in flight."""
    counts = Counter[str]()
    for opened, lease, offsets in book.purged(batch):
        if lease.state is State.DELAYED:
            counts["delayed" if lease.is_delayed(opened.source, book.clock.now_ms) else "waiting"] += len(offsets)
        elif lease.state not in HELD:
            counts["redelivery"] += len(offsets)
    return counts


@dataclass
class _Purging:
    """One purge of a queue."""

    settings: ClientSettings
    topics: Topics
    queues: Queues
    queue: str
    #: What the queue had acquired in each source when its PURGE was folded.
    acquired: dict[Source, AcquiredRanges] = field(default_factory=dict)

    async def run(self, extent: Extent | None, *, delayed: bool, in_flight: bool) -> Purged:
        queue, definitions = self.queue, self.queues.definitions
        inspector = Inspector(self.settings, definitions)
        former = definitions.purge(queue)
        places = (await inspector.places([queue]))[queue]
        # Before anything changes, because a record of a newer version may stop a partition.
        owned = await inspector.owned()
        async with LogReader(self.settings, committed=False) as view:
            spans = await existing_ranges(view, places)
            stops = {source: span.stop for source, span in spans.items()}
            if extent is None:
                extent = Extent(stops, dict.fromkeys(range(self.topics.markers_partitions), MAX_TIME_MS - 1))
            # A partition that is not in the extent was added later, and so were all its records.
            ends = {source: min(stop, extent.ends.get(source, 0)) for source, stop in stops.items()}
            until_ms = await self._until_ms(view, ends)
        extent = replace(extent, ends={**extent.ends, **ends})
        await self._publish(SkippedRecords(until_ms, ends), stops)
        await asyncio.sleep(KNOWN_S)
        holder, partitions = secrets.randbits(63) | 1, self.topics.markers_partitions
        markers = _markers(queue, holder, extent, self.topics, delayed=delayed, in_flight=in_flight)
        written = {MarkerRecord.of(batch, partitions): batch for batch in markers}
        async with marker_writer(cluster_of(self.settings), self.topics) as writer:
            await writer.write(list(written), self.settings.request_timeout_ms / 1000)
        if in_flight:
            await self._publish(SkippedRecords(until_ms, ends, in_flight=ends), stops)
        try:
            counts = await self._fold(owned, written)
            counts["waiting"] += await self._unread(spans, places, ends, former)
        except MarqError as error:
            error.args = (f"queue {queue!r}: its messages are purged, but could not be counted: {error}",)
            raise
        return Purged(**counts)

    async def _until_ms(self, view: LogReader, ends: Mapping[Source, int]) -> int:
        """Return a time that no purged record is later than, even if its sender's clock was far ahead."""
        now_ms, ahead_ms = int(time.time() * 1000), SKEW_MS
        while now_ms + ahead_ms < MAX_TIME_MS:
            later = await view.offsets_at(ends, now_ms + ahead_ms + 1)
            if all(offset is None or offset >= ends[source] for source, offset in later.items()):
                break
            ahead_ms *= 100
        return min(now_ms + ahead_ms, MAX_TIME_MS)

    async def _publish(self, skipped: SkippedRecords, stops: Mapping[Source, int]) -> None:
        def merged(former: Mapping[str, Any]) -> dict[str, Any]:
            # Of purges at the same time, the last one contains the others.
            purge = skipped.after(SkippedRecords.read(former) if former else None, stops)
            return purge.outweighing(self.queues.definitions.begin(self.queue)).document()

        def read(definitions: Definitions) -> Mapping[str, Any] | None:
            purge = definitions.purge(self.queue)
            return None if purge is None else purge.document()

        await self.queues.merge(f"queue {self.queue!r}", purge_key(self.queue), read, merged)

    async def _fold(self, owned: Mapping[int, Owned], written: Mapping[MarkerRecord, Purge]) -> Counter[str]:
        """Fold the markers up to this purge's, and count the open messages that these end."""
        counts = Counter[str]()
        async with LogReader(self.settings, committed=True) as view:
            spans = await view.ranges(self.settings.names.markers)
            left = {source: range(owned[source.partition].end, span.stop) for source, span in spans.items()}
            async for fetched in view.read(left):
                for source, read in fetched.items():
                    tracker = owned[source.partition].tracker
                    for row in read:
                        batch = written.get(MarkerRecord(source.partition, row.value or b""))
                        if batch is not None:
                            counts += _counted(tracker.book, batch)
                            ranges = tracker.book.acquired.get((self.queue, batch.source), AcquiredRanges())
                            self.acquired[batch.source] = AcquiredRanges(ranges.intervals)
                        tracker.read(row.value, row.timestamp, row.offset)
                        if tracker.book.pending_rows > _MOST_ROWS:
                            tracker.book.take_changes()
        return counts

    async def _unread(
        self,
        spans: Mapping[Source, range],
        places: Mapping[Source, int],
        ends: Mapping[Source, int],
        former: SkippedRecords | None,
    ) -> int:
        """Count the purged records that no consumer had acquired, including those of a purge without its PURGE."""
        count, ranges = 0, dict[Source, range]()
        for source, span in spans.items():
            if ends[source] <= span.start:
                continue
            acquired, begin = self.acquired[source], places[source]
            if former is not None:
                begin = min(begin, acquired.first_free(0) if 0 in acquired else 0)
            ranges[source] = range(min(max(span.start, begin), ends[source]), ends[source])
        async with LogReader(self.settings, committed=False) as view:
            async for fetched in view.read(ranges):
                for source, read in fetched.items():
                    key = self.queue.encode() if source.topic == self.settings.names.messages else None
                    for offset, record_key, sent_ms in zip(read.offsets, read.keys, read.timestamps, strict=True):
                        ours = (key is None or record_key == key) and offset not in self.acquired[source]
                        passed = offset < places[source] and (former is None or former.left(source, offset, sent_ms))
                        count += ours and not passed
        return count
