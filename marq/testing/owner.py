"""The owner of one markers partition in memory, which runs :class:`marq.owner.engine.OwnerEngine`.

It folds each marker when it is appended, and sends due messages in the millisecond in which they are due. No other
owner takes over, so it writes rows only together with other writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from marq.core.deliveries import redelivery_records
from marq.core.deliveries.schedule_planner import Planner
from marq.core.redeliver_or_dead_letter import Destination
from marq.core.storage.rows import LeaseRow
from marq.core.storage.table_image import Place
from marq.core.tracker import Tracker
from marq.owner.engine import OwnerEngine, OwnerTransaction
from marq.settings.cron import Times
from marq.testing.clock import Timer
from marq.wire import record_headers
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Ack, Batch, Payload, Source

if TYPE_CHECKING:
    from marq.testing.namespace import Namespace

log = logging.getLogger("marq.testing")

#: Rows are never written only because time has passed.
_NEVER_MS = 1 << 60


class Acked(NamedTuple):
    """A message that was acked."""

    queue: str
    source: Source
    offset: int
    payload: Payload


class _Table:
    """Rows in memory."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes] = {}

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        return [self._rows.get(key) for key in keys]

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        for key, row in changes.items():
            if row is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = row


class Owner:
    """The owner of one markers partition of a namespace."""

    def __init__(self, namespace: Namespace, partition: int) -> None:
        self._namespace = namespace
        self._partition = partition
        self._markers = markers = namespace.markers
        self._clock = clock = namespace.clock
        definitions, limit_bytes = namespace.definitions, namespace.limit_bytes
        planner = Planner(partition, markers.partitions, lambda: definitions.schedules, Times(), limit_bytes)
        self._engine = OwnerEngine(
            Source(markers.name, partition), self._new_tracker, planner, _Table(), lambda _: None, limit_bytes,
            flush_ms=_NEVER_MS,
        )  # fmt: skip
        self._engine.fenced((0, 0), clock.now_ms)
        self._engine.begin(0, 0, clock.now_ms)
        self._timer: Timer | None = None
        self._working = False
        # Delayed messages may come from the thread of a SyncProducer.
        self._lock = threading.RLock()

    def _new_tracker(self) -> Tracker:
        # The interval between TICKs spares a broker; here it would only delay redeliveries.
        return Tracker(self._namespace.definitions, holder=self._partition + 1, tick_interval_ms=0)

    @property
    def tracker(self) -> Tracker:
        return self._engine.tracker

    @property
    def awaits(self) -> bool:
        """Whether some message will be delivered as time passes."""
        return self.tracker.book.next_due_ms is not None

    def open_messages(self) -> Iterator[tuple[Source, int, LeaseRow, Payload]]:
        """Return each message that was received and has not ended."""
        for source, offset, lease in self.tracker.book.open_leases():
            yield source, offset, lease, self._payload(lease.queue, source, offset)

    def append(self, value: bytes | None) -> int:
        """Append a marker, fold it, and send what is due; return the marker's offset."""
        with self._lock:
            offset = self._append(value)
            self.work()
            return offset

    def work(self) -> None:
        """Send what is due, and set a timer for the next due time."""
        with self._lock:
            if self._working:
                return
            self._working = True
            try:
                while (write := self._next_write()) is not None:
                    self._perform(write)
            finally:
                self._working = False
            self._set_timer()

    def copy_from(self, topic: str) -> None:
        """Copy the payloads of all messages of a topic that is about to be deleted, as a worker would have done."""
        places = [
            Place(lease.queue, source, offset)
            for source, offset, lease in self.tracker.book.open_leases()
            if source.log.topic == topic
        ]
        self._copy(self._engine.left_among(places))

    def _copy(self, left: Mapping[Place, Payload]) -> None:
        self._engine.supply({place: self._namespace.record_at(place, payload) for place, payload in left.items()})

    def _append(self, value: bytes | None) -> int:
        offset = self._markers.append(self._partition, self._clock.wall_ms, None, value)
        self._record_acked(value)
        # From the position on: a test may have produced records to the markers topic itself.
        start = self._engine.position or 0
        was_read = self._engine.read(self._markers.logs[self._partition][start : offset + 1], start, offset + 1)
        assert was_read, "no marker is missing"
        for queue, (count, first) in self.tracker.book.invalid_times.take().items():
            log.warning("queue=%s messages=%s first=%s: marq-deliver-at is not a valid time", queue, count, first)
        return offset

    def _next_write(self) -> OwnerTransaction | None:
        engine, now_ms = self._engine, self._clock.now_ms
        engine.tracker.saw(now_ms)
        write = engine.next_write(now_ms)
        if write is None and (left := engine.missing()):
            self._copy(left)
            write = engine.next_write(now_ms)
        if write is None and (engine.tracker.unreadable or engine.flush_in_ms(now_ms) == 0):
            return engine.rows()
        return write

    def _perform(self, write: OwnerTransaction) -> None:
        """Append all parts of a write; no other task runs in between."""
        namespace = self._namespace
        names, settings = namespace.names, namespace.definitions
        sent = [
            redelivery_records.redelivery(
                action,
                payload,
                write.now_ms,
                own_topic=names.is_senders_topic(action.source.topic),
                ordered=settings(action.lease.queue).by_key,
            )
            for action, payload in write.due
            if action.destination is not Destination.NOWHERE
        ]
        offsets = [self._append(encode(batch)) for batch in write.markers]
        for redelivery in sent:
            namespace.send(redelivery)
        for note in write.notes:
            namespace.note(note)
        for offset, value, reason in write.quarantine:
            namespace.quarantine(value, f"{self._markers.name}/{self._partition}/{offset}", reason)
        self._engine.committed(write, self._clock.now_ms, marked=offsets[-1] if offsets else -1)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wait_ms = self.tracker.tick_in_ms(self._clock.now_ms)
        if wait_ms is not None:
            self._timer = self._clock.at(self._clock.now_ms + wait_ms, self.work)

    def _record_acked(self, value: bytes | None) -> None:
        batch = decoded(value)
        if not isinstance(batch, Ack):
            return
        opened = self.tracker.book.open_in(batch.queue, batch.source)
        for offset in filter(opened.__contains__, batch.offsets):
            queue = opened[offset].queue
            payload = self._payload(queue, batch.source, offset)
            self._namespace.acked.append(Acked(queue, batch.source, offset, payload))

    def _payload(self, queue: str, source: Source, offset: int) -> Payload:
        payload = self._engine.payload(queue, source, offset)
        if payload is not None and payload.left:
            payload = self._namespace.record_at(Place(queue, source, offset), payload)
        assert payload is not None, f"no payload of {record_headers.record_id(source, offset)}"
        return payload


def decoded(value: bytes | None) -> Batch | None:
    """Return a markers record's batch, None if it can't be read."""
    try:
        return decode(value)
    except CorruptMarker:
        return None
