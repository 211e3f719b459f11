"""Purge: ends the waiting messages of a queue with markers, so that the log records each message.

1. **Pause** the queue, and wait until all clients know: then nothing moves between the topic and the trackers.
2. **Publish** the end offsets of the purge (:mod:`marq.settings.purged_offsets`): consumers skip earlier records from
   here on. After a crash they still do, and the next purge completes step 3. If consumers continued in between, the
   next purge completes the former purge's records first, then its own. The records between the two may be in flight.
3. **Acquire** unread records with a due time in the far future, and cancel them. After a crash in between, they
   would be delivered then, unless the next purge cancels them before.
4. **Cancel** messages that trackers hold: those due or waiting for a redelivery, and on request delayed ones. The
   trackers' facts (CANCELLED) show for each one whether the request came in time. On request, **acknowledge** messages
   in flight: the pause keeps them where they are, and after that, their holders' own markers have no effect.
5. **Resume** the queue, unless it was paused before; its run-time setting is as before, too.

Only one purge of a queue runs at a time: a later one takes over by publishing its own record of step 2, and the earlier
one ends when it sees that record. Otherwise it would resume the queue during the later one, and messages that both
acquire might be delivered. A purge also ends if the queue is resumed meanwhile.

Otherwise messages in flight are not affected: they end with an ack, or return to the queue after a release, even if
their consumers release them because of the pause. A purge that completes an interrupted one can't recognize messages
that were released because of the earlier pause, and ends them, too.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from marq.admin.purge_extent import (
    Extent,
    check_purgeable,
    end_offsets,
    existing_ranges,
    held_places,
    open_messages,
)
from marq.backend.cluster import cluster_of, marker_writer
from marq.client.receipt import Receipt
from marq.consumer.acquire import acquisitions
from marq.core.storage.acquired_ranges import AcquiredRanges, acquired_in
from marq.core.storage.rows import State
from marq.dead_letters.dead_letters import DeadLetters
from marq.kafka.inspector import Inspector
from marq.kafka.log_reader import LogReader
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.records import Records
from marq.kafka.topics import Topics, ensure_topics
from marq.leases.receiver_settings import ReceiverSettings
from marq.producer.producer import Producer
from marq.queues.queues import Queues
from marq.settings.client import ClientSettings
from marq.settings.definitions import purge_key
from marq.settings.purged_offsets import Purge
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import NOW, Ack, Source
from marq.wire.record_headers import deliver_at_ms

#: How long until all consumers and trackers know of a pause.
PAUSE_KNOWN_S = 2.5
#: When an acquired message is delivered if it is not cancelled.
FAR_MS = 3_600_000
#: How far senders' clocks may be ahead of this machine's.
SKEW_MS = 600_000
#: How many messages are cancelled at a time.
AT_ONCE = 2_000


class PurgeEnded(MarqError):
    """Another purge or a user has decided whether the queue stays paused."""

    @classmethod
    def by_another(cls, queue: str) -> PurgeEnded:
        return cls(
            f"queue {queue!r}: another purge has taken over, so this one has ended; the other one completes it and"
            " decides whether the queue stays paused"
        )

    @classmethod
    def by_resuming(cls, queue: str) -> PurgeEnded:
        return cls(
            f"queue {queue!r}: it was resumed during the purge, so the purge has ended early: purge it again to"
            " complete it"
        )


@contextmanager
def naming_the_pause(queue: str, *, certain: bool = True) -> Iterator[None]:
    """Add to errors that the queue is still paused, because the next purge cannot know which purge paused it.

    ``certain=False`` is for the pause itself: after an error, the queue may be paused.
    """
    # A ConfigError refuses a pause before it is written.
    unchanged = PurgeEnded if certain else ConfigError
    try:
        yield
    except unchanged:
        raise
    except MarqError as error:
        state = "is" if certain else "may be"
        error.args = (f"{error}; queue {queue!r} {state} paused: purge it again, then resume it",)
        raise


@dataclass(frozen=True, slots=True)
class Purged:
    """How many messages a purge has ended, by their former state.

    ``too_late`` counts messages that were delivered meanwhile; ``paused`` tells whether the queue was paused before,
    and so still is.
    """

    waiting: int = 0
    redelivery: int = 0
    delayed: int = 0
    dead_letters: int = 0
    too_late: int = 0
    paused: bool = False

    @property
    def total(self) -> int:
        return self.waiting + self.redelivery + self.delayed + self.dead_letters


Progress = Callable[[int, int], None]


async def preview(
    settings: ClientSettings, queue: str, *, delayed: bool = False, dead: bool = False
) -> tuple[Purged, Extent, bool]:
    """Return what a purge would end now, its extent, and whether the count is complete; nothing changes.

    The count stops after ``MAX_SCANNED`` records. If there are more, the purge ends more messages than were counted.
    Same errors as :func:`purge`.
    """
    check_purgeable(settings, queue)
    await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        waiting = await inspector.waiting([queue])
        held, clocks = await open_messages(inspector, queue, delayed=delayed)
    count, snapshot = 0, None
    if dead:
        async with DeadLetters.of(settings) as known:
            snapshot = await known.snapshot()
            count = sum([count.dead_letters for count in await known.count(queue, as_of=snapshot)])
    kinds = [kind for _, kind in held]
    purged = Purged(
        waiting.counts[queue] + kinds.count("waiting"), kinds.count("redelivery"), kinds.count("delayed"), count
    )
    # If the count ended early, the caller says "at least", and the purge ends all messages that waited then.
    ends = waiting.ends if waiting.complete else await end_offsets(settings, inspector, queue)
    return purged, Extent(ends, clocks, snapshot), waiting.complete


async def purge(
    settings: ClientSettings,
    queue: str,
    *,
    delayed: bool = False,
    dead: bool = False,
    in_flight: bool = False,
    extent: Extent | None = None,
    paused_before: str | bool | None = None,
    progress: Progress | None = None,
) -> Purged:
    """End the waiting messages of a queue; ``delayed`` includes delayed messages, ``dead`` its dead letters.

    With ``in_flight``, messages in flight end too; the result does not count them. With an ``extent`` from
    :func:`preview` or :func:`extent_now`, later messages stay. The queue is paused meanwhile, and stays paused if the
    call is interrupted: purge it again, or resume it. ``paused_before`` is the pause before an interrupted purge, which
    this one completes. ``progress`` is called with the number of ended messages and the total.

    Raises:
        MarqError: before this purge was complete, another one took over, or the queue was resumed.
        ConfigError: the name is wrong, or a permission is missing.
        BrokerUnavailable: it is unknown how far the purge got, for example because no worker runs; purge again.
    """
    check_purgeable(settings, queue)
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues, Producer.of(settings) as producer:
        # A caller that passes paused_before repeats the purge itself, and then resumes the queue.
        told = paused_before is None
        # The run-time setting, None without one: marq.toml may pause the queue.
        restored = (queues.definitions.layer("change", queue) or {}).get("paused") if told else paused_before
        paused_before = queues[queue].paused if paused_before is None else paused_before
        purging = _Purging(settings, topics, queues, producer, queue, extent, progress)
        if not in_flight:
            await purging.note_held()
        with naming_the_pause(queue, certain=False) if told else nullcontext():
            await purging.pause()
        with naming_the_pause(queue) if told else nullcontext():
            purged = replace(await purging.run(delayed=delayed, in_flight=in_flight), paused=bool(paused_before))
            if restored is not True:
                await purging.end(restored)
    if dead:
        async with DeadLetters.of(settings) as dead_letters:
            as_of = None if extent is None else extent.dead_letters
            purged = replace(purged, dead_letters=(await dead_letters.delete(queue, as_of=as_of)).deleted)
    return purged


class _Purging:
    def __init__(
        self,
        settings: ClientSettings,
        topics: Topics,
        queues: Queues,
        producer: Producer,
        queue: str,
        extent: Extent | None,
        progress: Progress | None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._queues = queues
        self._producer = producer
        self._queue = queue
        self._extent = extent
        self._progress = progress
        self._inspector = Inspector(settings, queues.definitions)
        #: Offsets that consumers of a queue with ordering have acquired: they deliver these messages.
        self._acquired: dict[Source, AcquiredRanges] = {}
        #: Delayed ones among them.
        self._delayed: dict[Source, set[int]] = {}
        #: The record that this purge published last; before that, the one that it takes over from.
        self._published: Purge | None = queues.definitions.purge(queue)
        #: The purge before this one: most of its records have ended already, and must not be counted again.
        self._former: Purge | None = None
        #: The messages that were in flight before the pause, which makes consumers release those not in a handler.
        self._held: set[tuple[Source, int]] = set()
        self._done = self._of = 0

    async def note_held(self) -> None:
        """Note which messages are in flight, so that they stay."""
        self._held = await held_places(self._inspector, self._queue)

    async def pause(self) -> None:
        """Pause the queue, and wait until all clients know."""
        await self._queues.pause(self._queue)
        await asyncio.sleep(PAUSE_KNOWN_S)
        # This purge takes over from any other one up to here.
        self._published = self._queues.definitions.purge(self._queue)

    async def run(self, *, delayed: bool, in_flight: bool) -> Purged:
        await self._check_paused()
        places = (await self._inspector.places([self._queue]))[self._queue]
        await self._note_acquired()
        outcomes: Counter[bool] = Counter()
        if self._published is not None and (left := self._published.before(places)).starts:
            outcomes += await self._end_waiting(left)
        purge = await self._begin(places)
        outcomes += await self._end_waiting(purge)
        waiting, too_late = outcomes[True], outcomes[False]
        await self._check_paused()
        await self._publish(purge.done(in_flight=in_flight))
        held, _ = await open_messages(
            self._inspector, self._queue, delayed=delayed, in_flight=in_flight, extent=self._extent, leave=self._held
        )
        leased = [receipt for receipt, kind in held if kind == "in flight"]
        held = [(receipt, kind) for receipt, kind in held if kind != "in flight"]
        self._of = self._done + len(held)
        await self._acknowledge(leased)
        ended: dict[str, int] = dict.fromkeys(("waiting", "redelivery", "delayed"), 0)
        for first in range(0, len(held), AT_ONCE):
            piece = held[first : first + AT_ONCE]
            await self._check_paused()
            cancelled = await self._cancel([receipt for receipt, _ in piece])
            for (_, kind), in_time in zip(piece, cancelled, strict=True):
                ended[kind] += in_time
                too_late += not in_time
        return Purged(waiting + ended["waiting"], ended["redelivery"], ended["delayed"], 0, too_late)

    async def _note_acquired(self) -> None:
        if not self._queues.definitions(self._queue).ordered:
            return
        for content in (await self._inspector.owned(incomplete=True)).values():
            book = content.tracker.book
            self._acquired |= acquired_in(book.acquired, self._queue)
            for source, leases in book.leases_by_source():
                self._delayed.setdefault(source, set()).update(
                    number for number, lease in leases if lease.queue == self._queue and lease.state is State.DELAYED
                )

    async def end(self, paused: str | bool | None) -> None:
        """Resume the queue (False), or restore this run-time setting; raise MarqError if another purge has taken over.

        Without one (None), the other layers apply again.
        """
        await self._check_alone()
        if paused is False:
            await self._queues.resume(self._queue)
        else:
            await self._queues.change(self._queue, paused=paused)

    async def _check_alone(self) -> None:
        await self._queues.sync(self._settings.request_timeout_ms / 1000)
        if self._queues.definitions.purge(self._queue) != self._published:
            raise PurgeEnded.by_another(self._queue)

    async def _check_paused(self) -> None:
        await self._check_alone()
        if not self._queues[self._queue].paused:
            raise PurgeEnded.by_resuming(self._queue)

    async def _publish(self, purge: Purge) -> None:
        self._published = purge
        await self._queues.publish({purge_key(self._queue): purge.document()})

    async def _begin(self, places: Mapping[Source, int]) -> Purge:
        async with LogReader(self._settings, committed=False) as view:
            spans = await existing_ranges(view, places)
        until_ms = int(time.time() * 1000) + SKEW_MS
        starts = {source: max(places[source], span.start) for source, span in spans.items()}
        ends = stops = {source: span.stop for source, span in spans.items()}
        if self._extent is not None:
            # A partition that is not in the extent was added later, and so were all its records.
            known = self._extent.ends
            ends = {source: min(stop, known.get(source, starts[source])) for source, stop in stops.items()}
        definitions = self._queues.definitions
        former = definitions.purge(self._queue)
        purge = Purge(until_ms, ends, starts).after(former, stops)
        if former is not None:
            # An end beyond that of a partition dates from before the topic was recreated.
            known = {source: end for source, end in former.ends.items() if end <= stops.get(source, 0)}
            self._former = replace(former, ends=known)
        purge = purge.outweighing(definitions.begin(self._queue))
        await self._publish(purge)
        return purge

    async def _end_waiting(self, purge: Purge) -> Counter[bool]:
        """Cancel the waiting messages of a purge; return how many requests were in time (True) or too late (False)."""
        outcomes: Counter[bool] = Counter()
        async for receipts in self._acquire(purge):
            outcomes.update(await self._cancel(receipts))
        return outcomes

    async def _acquire(self, purge: Purge) -> AsyncIterator[list[Receipt]]:
        """Write ACQUIREs for unread records, and return the receipts of each write."""
        holder = secrets.randbits(63) | 1
        async with (
            marker_writer(cluster_of(self._settings), self._topics) as writer,
            LogReader(self._settings, committed=False) as view,
        ):
            spans = await self._spans(view, purge)
            async for fetched in view.read(spans):
                for source, read in fetched.items():
                    own, kept = self._own(source, read, purge)
                    for first in range(0, len(own), AT_ONCE):
                        piece = own[first : first + AT_ONCE]
                        await self._check_paused()
                        records = [
                            record for run in _runs(piece, kept) for record in self._markers(source, run, holder)
                        ]
                        await writer.write(records, self._settings.request_timeout_ms / 1000)
                        self._of += len(piece)
                        yield [Receipt(self._queue, *source, offset) for offset in piece.offsets]

    async def _spans(self, view: LogReader, purge: Purge) -> dict[Source, range]:
        existing = await existing_ranges(view, purge.starts)
        starts = {source: purge.starts[source] for source in existing}
        return {
            source: range(max(starts[source], span.start), max(starts[source], min(purge.ends[source], span.stop)))
            for source, span in existing.items()
        }

    def _own(self, source: Source, read: Records, purge: Purge) -> tuple[Records, list[int]]:
        """Return the records to end, and the offsets of the queue's records that the purge keeps."""
        key = self._queue.encode() if source.topic == self._settings.names.messages else None
        own: list[int] = []
        kept: list[int] = []
        for index, (offset, record_key, sent_ms) in enumerate(
            zip(read.offsets, read.keys, read.timestamps, strict=True)
        ):
            if (key is not None and record_key != key) or self._is_acquired(source, read, index):
                continue
            if self._former is not None and self._former.has_ended(source, offset, sent_ms):
                continue
            if purge.left(source, offset, sent_ms):
                kept.append(offset)
            else:
                own.append(index)
        return read.at(own), kept

    def _is_acquired(self, source: Source, read: Records, index: int) -> bool:
        """Return whether a consumer of a queue with ordering has acquired a record."""
        row = read[index]
        if row.offset not in self._acquired.get(source, ()):
            return False
        # Such a queue has no delay, so only an interrupted purge delays a record without a due time.
        delayed = row.offset in self._delayed.get(source, ())
        return not delayed or deliver_at_ms(row.timestamp, row.headers, 0) != NOW

    def _markers(self, source: Source, own: Records, holder: int) -> Iterator[MarkerRecord]:
        lease_ms = self._queues.definitions(self._queue).lease_ms
        settings = ReceiverSettings(
            lease_ms=lease_ms,
            max_in_flight=AT_ONCE,
            max_lease_ms=lease_ms,
            markers_partitions=self._topics.markers_partitions,
            limit_bytes=self._topics.markers_limit_bytes,
        )
        own_topic = source.topic != self._settings.names.messages
        due_ms = int(time.time() * 1000) + FAR_MS
        for acquisition in acquisitions(
            (self._queue, source), holder, own, own.offsets[0], settings, own_topic=own_topic
        ):
            yield from replace(acquisition, dues_ms=[due_ms] * len(acquisition.offsets)).records()

    async def _acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Write ACKs for messages in flight; a tracker accepts them from anyone."""
        holder, partitions = secrets.randbits(63) | 1, self._topics.markers_partitions
        async with marker_writer(cluster_of(self._settings), self._topics) as writer:
            for first in range(0, len(receipts), AT_ONCE):
                await self._check_paused()
                offsets: dict[Source, list[int]] = {}
                for receipt in receipts[first : first + AT_ONCE]:
                    offsets.setdefault(Source(receipt.topic, receipt.partition), []).append(receipt.offset)
                records = [
                    MarkerRecord.of(Ack(self._queue, holder, source, sorted(own)), partitions)
                    for source, own in offsets.items()
                ]
                await writer.write(records, self._settings.request_timeout_ms / 1000)

    async def _cancel(self, receipts: Sequence[Receipt]) -> list[bool]:
        outcomes = await self._producer.cancel(receipts) if receipts else []
        self._done += len(receipts)
        if self._progress is not None:
            self._progress(self._done, self._of)
        return outcomes


def _runs(own: Records, kept: Sequence[int]) -> Iterator[Records]:
    """Split records wherever a kept one lies between them.

    An ACQUIRE marks all offsets between its messages as seen. If a kept message were among them, the tracker would
    ignore the ACQUIRE of the consumer that receives it, and would never redeliver it.
    """
    start = 0
    for offset in kept:
        cut = bisect_left(own.offsets, offset)
        if start < cut < len(own):
            yield own[start:cut]
            start = cut
    yield own[start:]
