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
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from marq.acquisition import acquisitions
from marq.cluster import cluster_of
from marq.core.definitions import purge_key
from marq.core.errors import ConfigError, MarqError
from marq.core.markers import Source
from marq.core.names import check_queue_name, is_drawn, is_scheduled
from marq.core.purges import Purge
from marq.core.rows import WAITING, State
from marq.dead_letters import DeadLetters
from marq.flow_settings import FlowSettings
from marq.inspector import Inspector
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


Progress = Callable[[int, int], None]


async def meant(settings: ClientSettings, queue: str, *, delayed: bool = False, dead: bool = False) -> Purged:
    """Return what a purge would end now; nothing is changed. Raises as :func:`purge`."""
    _check(settings, queue)
    await ensure_topics(settings, changelog=True)
    async with Queues.of(settings) as queues:
        inspector = Inspector(settings, queues.definitions)
        waiting = await inspector.waiting([queue])
        held = await _held(inspector, queue, delayed=delayed)
    letters = 0
    if dead:
        async with DeadLetters.of(settings) as known:
            letters = sum([each.letters for each in await known.count(queue)])
    kinds = [kind for _, kind in held]
    return Purged(
        waiting.counts[queue] + kinds.count("waiting"), kinds.count("redelivery"), kinds.count("delayed"), letters
    )


async def purge(
    settings: ClientSettings,
    queue: str,
    *,
    delayed: bool = False,
    dead: bool = False,
    progress: Progress | None = None,
) -> Purged:
    """End what waits in a queue; ``delayed``: what waits for its time, too; ``dead``: its dead letters, too.

    The queue is paused meanwhile. When this is interrupted it stays so, if it was not paused before: purge it again, or
    resume it. ``progress`` is called with how many messages are ended, and of how many.

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
        purging = _Purging(settings, topics, queues, producer, queue, progress)
        found = replace(await purging.run(delayed=delayed), paused=paused_before)
        if not paused_before:
            await purging.resume()
    if dead:
        async with DeadLetters.of(settings) as letters:
            found = replace(found, dead=(await letters.delete(queue)).deleted)
    return found


class _Purging:
    def __init__(
        self,
        settings: ClientSettings,
        topics: Topics,
        queues: Queues,
        producer: Producer,
        queue: str,
        progress: Progress | None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._queues = queues
        self._producer = producer
        self._queue = queue
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
        held = await _held(self._inspector, self._queue, delayed=delayed)
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
        async with LogView(self._settings, committed=False) as view:
            spans = {
                source: span
                for topic in sorted({source.topic for source in places})
                for source, span in (await view.ranges(topic)).items()
                if source in places
            }
        until_ms = int(time.time() * 1000) + SKEW_MS
        starts = {source: max(places[source], span.start) for source, span in spans.items()}
        ends = {source: span.stop for source, span in spans.items()}
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


async def _held(inspector: Inspector, queue: str, *, delayed: bool) -> list[tuple[Receipt, str]]:
    """Return what trackers hold of a queue and nobody has, and what it waits for."""
    found = []
    for each in (await inspector.owned()).values():
        book = each.tracker.book
        for source, leases in book.leases_by_source():
            if is_scheduled(source.topic):
                # The schedule goes on; its next time is not a message yet.
                continue
            for number, lease in leases:
                if lease.queue != queue or lease.state not in WAITING:
                    continue
                kind = _kind(lease.state, source, early=lease.due_ms > book.clock.now_ms)
                if delayed or kind != "delayed":
                    found.append((Receipt(queue, *source, number), kind))
    return found


def _kind(state: State, source: Source, *, early: bool) -> str:
    if state is State.RELEASED:
        return "redelivery"
    # What was left with a tracker while the queue was paused has been due since it was sent.
    return "delayed" if early or is_drawn(source.topic) else "waiting"


def _check(settings: ClientSettings, queue: str) -> None:
    check_queue_name(queue)
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        raise ConfigError("purge: a broker in memory has none; receive and ack what waits")
