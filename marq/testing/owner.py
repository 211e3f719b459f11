"""The owner of one markers partition in memory: the shell around :class:`marq.core.tracker.Tracker`.

It folds each marker in the moment in which it is appended, and sends what is due in the millisecond in which it is.
Rows are never written, so payloads stay in the ACQUIREs that they came in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from marq.core import copies
from marq.core.errors import CorruptMarker
from marq.core.fires import Destination, Fire
from marq.core.marker_codec import decode, encode
from marq.core.markers import Ack, Batch, Payload, Source
from marq.core.notes import Note
from marq.core.planner import Planner
from marq.core.queue import QueueSettings
from marq.core.rows import Lease
from marq.core.schedules import ScheduleLayers
from marq.core.tracker import Tracker
from marq.cron import Times
from marq.testing.clock import Clock, Timer
from marq.testing.topics import Topic

log = logging.getLogger("marq.testing")


class Acked(NamedTuple):
    """A message that was finished."""

    queue: str
    source: Source
    offset: int
    payload: Payload


class Copies(Protocol):
    """Where an owner sends copies of messages."""

    limit_bytes: int

    def send(self, copy: copies.Copy, source: Source) -> None: ...
    def note(self, note: Note) -> None: ...
    def quarantine(self, value: bytes | None, origin: str, why: str) -> None: ...


class Owner:
    """One markers partition; ``acked`` is told of each message that is finished."""

    def __init__(
        self,
        markers: Topic,
        partition: int,
        clock: Clock,
        settings: Callable[[str], QueueSettings],
        sender: Copies,
        acked: Callable[[Acked], None],
        schedules: Callable[[], ScheduleLayers],
    ) -> None:
        self._markers = markers
        self._partition = partition
        self._clock = clock
        self._settings = settings
        self._sender = sender
        self._acked = acked
        # A pause between TICKs spares a broker; here it would only make time pass in which nothing happens.
        self._tracker = Tracker(settings, holder=partition + 1, tick_interval_ms=0)
        self._planner = Planner(partition, markers.partitions, schedules, Times(), sender.limit_bytes)
        self._timer: Timer | None = None
        self._working = False
        # Delayed messages may come from the thread of a SyncProducer.
        self._lock = threading.RLock()

    @property
    def awaits(self) -> bool:
        """Whether some message comes back unless somebody ends it."""
        return self._tracker.book.next_due_ms is not None

    def open_messages(self) -> Iterator[tuple[Source, int, Lease, Payload]]:
        """Each message that was received and has not ended."""
        book = self._tracker.book
        for source, offset, lease in book.open_leases():
            yield source, offset, lease, self._payload(source, offset)

    def append(self, value: bytes | None) -> None:
        """Append a marker, fold it, and do what is due now."""
        with self._lock:
            self._append(value)
            self.work()

    def work(self) -> None:
        """Send what is due, and come back when something will be."""
        with self._lock:
            if self._working:
                return
            self._working = True
            try:
                while self._step():
                    pass
            finally:
                self._working = False
            self._come_back()

    def _append(self, value: bytes | None) -> None:
        clock = self._clock
        offset = self._markers.append(self._partition, clock.wall_ms, None, value)
        self._note_acked(value)
        self._tracker.read(value, clock.wall_ms, offset)
        for bad, record, why in self._tracker.unreadable:
            self._sender.quarantine(record, f"{self._markers.name}/{self._partition}/{bad}", why)
        self._tracker.unreadable.clear()
        for queue, (count, first) in self._tracker.book.invalid_times.take().items():
            log.warning("queue=%s messages=%s first=%s: marq-deliver-at can't be read as a time", queue, count, first)

    def _step(self) -> bool:
        tracker, now_ms = self._tracker, self._clock.now_ms
        tracker.saw(now_ms)
        for answer in tracker.answers():
            self._append(encode(answer))
        for note in tracker.notes():
            self._sender.note(note)
        plan = self._planner.plan(tracker, now_ms)
        for batch in plan:
            self._append(encode(batch))
        fires = tracker.due()
        if fires:
            self._fire(fires)
        elif tracker.tick_in_ms(now_ms) == 0:
            self._append(encode(tracker.tick(now_ms)))
        else:
            return bool(plan)
        return True

    def _fire(self, fires: list[Fire]) -> None:
        """Append copies and the facts that tell of them: nobody can see the ones without the others."""
        limit = self._sender.limit_bytes
        fires = [copies.fitting(fire, self._payload(fire.source, fire.offset), limit) for fire in fires]
        following = self._planner.follow(self._tracker, fires, self._clock.now_ms)
        facts = [encode(fact) for fact in self._tracker.facts(fires)] + [encode(delay) for delay in following]
        sent = [(self._copy(fire), fire.source) for fire in fires if fire.destination is not Destination.NOWHERE]
        for fact in facts:
            self._append(fact)
        for copy, source in sent:
            self._sender.send(copy, source)

    def _copy(self, fire: Fire) -> copies.Copy:
        own_topic = self._settings(fire.lease.queue).topic
        payload = self._payload(fire.source, fire.offset)
        return copies.copy(fire, payload, self._tracker.book.clock.now_ms, own_topic)

    def _payload(self, source: Source, offset: int) -> Payload:
        payload = self._tracker.book.fresh_payload(source, offset)
        assert payload is not None, f"no payload of {copies.record_id(source, offset)}: rows are never written"
        return payload

    def _come_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_ms = self._tracker.tick_in_ms(self._clock.now_ms)
        if wait_ms is not None:
            self._timer = self._clock.at(self._clock.now_ms + wait_ms, self.work)

    def _note_acked(self, value: bytes | None) -> None:
        batch = _decoded(value)
        if not isinstance(batch, Ack):
            return
        opened = self._tracker.book.open_in(batch.source)
        for offset in batch.offsets:
            payload = self._tracker.book.fresh_payload(batch.source, offset)
            if payload is not None:
                self._acked(Acked(opened[offset].queue, batch.source, offset, payload))


def _decoded(value: bytes | None) -> Batch | None:
    try:
        return decode(value)
    except CorruptMarker:
        return None
