"""Ends what waits in a queue, as if it had been acknowledged: by markers, so that the log tells of each message.

1. **Pause** the queue, and wait until all know: then nothing moves between the topic and the trackers.
2. **Say** up to where records are purged (:mod:`marq.core.purges`): consumers pass them over from here on. Crash: they
   do so all the same, and the next purge writes what is missing of 3.
3. **Take** what nobody has read into ACQUIREs with a due time that is far off, and cancel it. Crash in between: it
   would be delivered then, unless the next purge cancels it before.
4. **Cancel** what trackers hold: messages that wait for a redelivery or are due, and if asked for those that wait for
   their time. The trackers' facts (CANCELLED) say of each whether it came in time.
5. **Resume** the queue, unless it was paused before.

Only one purge of a queue goes on: by its record of 2 a later one takes over what an earlier one has left, and that ends
when it sees the record. Otherwise the earlier one would resume the queue under the later one's hands, and what both
take might be delivered and ended. The same holds when somebody resumes the queue meanwhile.

What somebody holds goes on to its end: acknowledged it is done, released it comes back.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from marq.acquisition import acquisitions
from marq.cluster import cluster_of
from marq.core.definitions import Definitions, purge_key
from marq.core.errors import ConfigError, MarqError
from marq.core.markers import Source
from marq.core.names import check_queue_name, is_drawn, is_scheduled
from marq.core.purges import Purge, read_offsets, written_offsets
from marq.core.rows import WAITING, State
from marq.dead_letters import DeadLetters
from marq.flow_settings import FlowSettings
from marq.inspector import Inspector
from marq.letter_filter import Snapshot
from marq.log_view import LogView
from marq.producer import Producer
from marq.queues import Queues
from marq.receipt import Receipt
from marq.records import Records
from marq.settings import MEMORY_SCHEME, ClientSettings
from marq.topics import Topics, ensure_topics
from marq.writer import MarkerRecord

#: How long until all consumers and trackers know of a pause.
HEARD_S = 2.5
#: When what was taken and not cancelled is delivered after all.
FAR_MS = 3_600_000
#: Clocks of senders may be ahead of this machine's by so much.
SKEW_MS = 600_000
#: Messages that are cancelled at a time.
AT_ONCE = 2_000
_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class Purged:
    """How many messages a purge has ended, by what they were doing; ``too_late``: those that went on meanwhile.

    ``paused``: the queue was paused before, and is so still.
    """

    waiting: int = 0
    redelivery: int = 0
    delayed: int = 0
    dead: int = 0
    too_late: int = 0
    paused: bool = False

    @property
    def total(self) -> int:
        return self.waiting + self.redelivery + self.delayed + self.dead


@dataclass(frozen=True)
class Extent:
    """What existed when the user was asked to confirm a purge: a purge with an extent ends no later messages.

    ``ends`` are the end offsets of the partitions with the queue's records. ``clocks`` are the log's clocks of the
    markers partitions: a message that has no record there, because its sender delayed it, existed if its lease began
    by then. ``letters``: the dead letters at that moment, if they were part of the question.
    """

    ends: Mapping[Source, int]
    clocks: Mapping[int, int]
    letters: Snapshot | None = None

    def __str__(self) -> str:
        return json.dumps({"ends": written_offsets(self.ends), "clocks": self.clocks}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what ``str()`` returned; it has no dead letters.

        Raises:
            ConfigError: the text is not an extent.
        """
        try:
            document = json.loads(text)
            clocks = {int(partition): int(clock_ms) for partition, clock_ms in document["clocks"].items()}
            return cls(read_offsets(document, "ends"), clocks)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"extent={text[:40]}: not the extent of a purge; get a new one and pass it unchanged"
            ) from error

    def has(self, markers_partition: int, source: Source, number: int, since_ms: int) -> bool:
        """Whether a message existed."""
        if source in self.ends:
            return number < self.ends[source]
        return since_ms <= self.clocks.get(markers_partition, -1)


Progress = Callable[[int, int], None]


async def meant(
    settings: ClientSettings, queue: str, *, delayed: bool = False, dead: bool = False
) -> tuple[Purged, Extent]:
    """Return what a purge would end now, and the extent to give it; nothing is changed. Raises as :func:`purge`."""
    _check(settings, queue)
    await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        waiting = await inspector.waiting([queue])
        held, clocks = await _held(inspector, queue, delayed=delayed)
    letters, snapshot = 0, None
    if dead:
        async with DeadLetters.of(settings) as known:
            snapshot = await known.snapshot()
            letters = sum([each.letters for each in await known.count(queue, as_of=snapshot)])
    kinds = [kind for _, kind in held]
    purged = Purged(
        waiting.counts[queue] + kinds.count("waiting"), kinds.count("redelivery"), kinds.count("delayed"), letters
    )
    # If the count ended early, the question says "at least", and the purge ends all messages that waited then.
    ends = waiting.ends if waiting.complete else await _ends(settings, inspector, queue)
    return purged, Extent(ends, clocks, snapshot)


async def extent_now(
    settings: ClientSettings, definitions: Definitions, queue: str, clocks: Mapping[int, int]
) -> Extent:
    """Return the extent of a purge without counting, given the clocks of the trackers; raises as :func:`purge`."""
    _check(settings, queue)
    return Extent(await _ends(settings, Inspector(settings, definitions), queue), clocks)


async def _ends(settings: ClientSettings, inspector: Inspector, queue: str) -> dict[Source, int]:
    spans = await _spans(settings, (await inspector.places([queue]))[queue])
    return {source: span.stop for source, span in spans.items()}


async def _spans(settings: ClientSettings, sources: Iterable[Source]) -> dict[Source, range]:
    wanted = set(sources)
    async with LogView(settings, committed=False) as view:
        return {
            source: span
            for topic in sorted({source.topic for source in wanted})
            for source, span in (await view.ranges(topic)).items()
            if source in wanted
        }


async def purge(
    settings: ClientSettings,
    queue: str,
    *,
    delayed: bool = False,
    dead: bool = False,
    extent: Extent | None = None,
    progress: Progress | None = None,
) -> Purged:
    """End what waits in a queue; ``delayed``: what waits for its time, too; ``dead``: its dead letters, too.

    With an ``extent``, which :func:`meant` and :func:`extent_now` return, messages that came after it stay. The queue
    is paused meanwhile. When this is interrupted it stays so, if it was not paused before: purge it again, or resume
    it. ``progress`` is called with how many messages are ended, and of how many.

    Raises:
        MarqError: another purge of the queue took over, or somebody resumed it, before this one was done.
        ConfigError: the name is wrong, or a right is missing.
        BrokerUnavailable: not known how far it came, as when no worker runs: purge it again.
    """
    _check(settings, queue)
    topics = await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues, Producer.of(settings) as producer:
        paused_before = queues[queue].paused
        await queues.pause(queue)
        await asyncio.sleep(HEARD_S)
        purging = _Purging(settings, topics, queues, producer, queue, extent, progress)
        found = replace(await purging.run(delayed=delayed), paused=paused_before)
        if not paused_before:
            await purging.resume()
    if dead:
        async with DeadLetters.of(settings) as letters:
            as_of = None if extent is None else extent.letters
            found = replace(found, dead=(await letters.delete(queue, as_of=as_of)).deleted)
    return found


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
        #: What this purge has said last.
        self._said: Purge | None = queues.definitions.purge(queue)
        self._done = self._of = 0

    async def run(self, *, delayed: bool) -> Purged:
        await self._goes_on()
        purge = await self._say()
        waiting, too_late = 0, 0
        async for some in self._take(purge):
            outcomes = await self._cancel(some)
            waiting += outcomes.count(True)
            too_late += outcomes.count(False)
        await self._goes_on()
        await self._publish(purge.done())
        held, _ = await _held(self._inspector, self._queue, delayed=delayed, extent=self._extent)
        self._of = self._done + len(held)
        ended: dict[str, int] = dict.fromkeys(("waiting", "redelivery", "delayed"), 0)
        for first in range(0, len(held), AT_ONCE):
            piece = held[first : first + AT_ONCE]
            await self._goes_on()
            outcomes = await self._cancel([receipt for receipt, _ in piece])
            for (_, kind), in_time in zip(piece, outcomes, strict=True):
                ended[kind] += in_time
                too_late += not in_time
        return Purged(waiting + ended["waiting"], ended["redelivery"], ended["delayed"], 0, too_late)

    async def resume(self) -> None:
        """Let the queue be delivered again; raises MarqError: another purge has taken over."""
        await self._alone()
        await self._queues.resume(self._queue)

    async def _alone(self) -> None:
        await self._queues.hear(self._settings.request_timeout_ms / 1000)
        if self._queues.definitions.purge(self._queue) != self._said:
            raise MarqError(
                f"queue {self._queue!r}: another purge of it goes on, so this one has ended: that one does what this"
                " one has left, and says whether the queue stays paused"
            )

    async def _goes_on(self) -> None:
        await self._alone()
        if not self._queues[self._queue].paused:
            raise MarqError(
                f"queue {self._queue!r}: somebody resumed it while it was purged, so this purge has ended before it was"
                " done: purge it again, which finishes it"
            )

    async def _publish(self, purge: Purge) -> None:
        self._said = purge
        await self._queues.publish({purge_key(self._queue): purge.document()})

    async def _say(self) -> Purge:
        places = (await self._inspector.places([self._queue]))[self._queue]
        spans = await _spans(self._settings, places)
        until_ms = int(time.time() * 1000) + SKEW_MS
        starts = {source: max(places[source], span.start) for source, span in spans.items()}
        ends = {source: span.stop for source, span in spans.items()}
        if self._extent is not None:
            # A partition that is not in the extent was added later, with all of its records.
            known = self._extent.ends
            ends = {source: min(end, known.get(source, starts[source])) for source, end in ends.items()}
        purge = Purge(until_ms, ends, starts).after(self._queues.definitions.purge(self._queue))
        await self._publish(purge)
        return purge

    async def _take(self, purge: Purge) -> AsyncIterator[list[Receipt]]:
        """Write ACQUIREs for what nobody has read, and return the receipts of each piece."""
        cluster, holder = cluster_of(self._settings), secrets.randbits(63) | 1
        writer = cluster.writer(self._topics)
        await writer.start()
        try:
            async with LogView(self._settings, committed=False) as view:
                spans = await self._spans(view, purge)
                async for fetched in view.read(spans):
                    for source, read in fetched.items():
                        own = read.at(self._own(source, read, purge))
                        for first in range(0, len(own), AT_ONCE):
                            piece = own[first : first + AT_ONCE]
                            await self._goes_on()
                            records = list(self._markers(source, piece, holder))
                            await writer.write(records, self._settings.request_timeout_ms / 1000)
                            self._of += len(piece)
                            yield [Receipt(self._queue, *source, offset) for offset in piece.offsets]
        finally:
            await writer.stop(_STOP_S)

    async def _spans(self, view: LogView, purge: Purge) -> dict[Source, range]:
        there: dict[Source, range] = {}
        for topic in sorted({source.topic for source in purge.starts}):
            there.update(await view.ranges(topic))
        return {
            source: range(max(start, there[source].start), max(start, min(purge.ends[source], there[source].stop)))
            for source, start in purge.starts.items()
            if source in there
        }

    def _own(self, source: Source, read: Records, purge: Purge) -> list[int]:
        key = self._queue.encode() if source.topic == self._settings.names.messages else None
        return [
            place
            for place, (offset, each, sent_ms) in enumerate(zip(read.offsets, read.keys, read.timestamps, strict=True))
            if (key is None or each == key) and not purge.left(source, offset, sent_ms)
        ]

    def _markers(self, source: Source, own: Records, holder: int) -> Iterator[MarkerRecord]:
        lease_ms = self._queues.definitions(self._queue).lease_ms
        flow = FlowSettings(
            lease_ms=lease_ms,
            max_in_flight=AT_ONCE,
            max_lease_ms=lease_ms,
            markers_partitions=self._topics.markers_partitions,
            limit_bytes=self._topics.markers_limit_bytes,
        )
        own_topic = source.topic != self._settings.names.messages
        due_ms = int(time.time() * 1000) + FAR_MS
        for each in acquisitions((self._queue, source), holder, own, own.offsets[0], flow, own_topic=own_topic):
            yield from replace(each, dues_ms=[due_ms] * len(each.offsets)).records()

    async def _cancel(self, receipts: Sequence[Receipt]) -> list[bool]:
        outcomes = await self._producer.cancel(receipts) if receipts else []
        self._done += len(receipts)
        if self._progress is not None:
            self._progress(self._done, self._of)
        return outcomes


async def _held(
    inspector: Inspector, queue: str, *, delayed: bool, extent: Extent | None = None
) -> tuple[list[tuple[Receipt, str]], dict[int, int]]:
    """Return the open messages of a queue that no consumer holds, each with its kind, and the trackers' clocks."""
    found, clocks = [], {}
    for partition, each in (await inspector.owned()).items():
        book = each.tracker.book
        clocks[partition] = book.clock.now_ms
        for source, leases in book.leases_by_source():
            if is_scheduled(source.topic):
                # The schedule goes on; its next time is not a message yet.
                continue
            for number, lease in leases:
                if lease.queue != queue or lease.state not in WAITING:
                    continue
                if extent is not None and not extent.has(partition, source, number, lease.since_ms):
                    continue
                kind = _kind(lease.state, source, early=lease.due_ms > book.clock.now_ms)
                if delayed or kind != "delayed":
                    found.append((Receipt(queue, *source, number), kind))
    return found, clocks


def _kind(state: State, source: Source, *, early: bool) -> str:
    if state is State.RELEASED:
        return "redelivery"
    # What was left with a tracker while the queue was paused has been due since it was sent.
    return "delayed" if early or is_drawn(source.topic) else "waiting"


def _check(settings: ClientSettings, queue: str) -> None:
    check_queue_name(queue)
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        raise ConfigError("purge: a broker in memory has none; receive and ack what waits")
