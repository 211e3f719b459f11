"""What one ACQUIRE takes: messages of one queue from one source partition, small enough for one record.

A message that is not to be delivered yet, by a header of its record or by its queue's ``delay``, is in the ACQUIRE like
all others, but with a time instead of a holder: the tracker delivers it then. A copy is never delayed again. So is a
message of a queue that is paused, which others of the group must not wait behind: it is due, and the tracker delivers
nothing of the queue until it is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from marq.core.copies import deliver_at_ms, origin
from marq.core.errors import ConfigError
from marq.core.marker_codec import encode
from marq.core.markers import (
    MAX_BATCH_MARKERS,
    NOW,
    Acquire,
    Columns,
    Payload,
    Source,
    payload_bytes,
    spans,
)
from marq.core.names import markers_partition
from marq.core.purges import Purge
from marq.flow_settings import FlowSettings
from marq.records import Records
from marq.writer import FRAME_BYTES, MarkerRecord

#: What an ACQUIRE takes for each message beside its value, where keys are the queue's name and there are no headers.
_COLUMNS_BYTES = 24
#: The head of an ACQUIRE: queue, topic, numbers.
_HEAD_BYTES = 600


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One ACQUIRE and the records that it takes."""

    queue: str
    source: Source
    holder: int
    offsets: Sequence[int]
    from_offset: int
    taken: Records
    #: When each is due that must not be delivered yet, NOW for the others; None when there is no such.
    dues_ms: Sequence[int] | None
    #: As the marker says it: settings may change before the messages are handed out.
    lease_ms: int
    settings: FlowSettings
    #: From a topic of the queue's own, where keys are the senders'.
    own_topic: bool

    @property
    def messages(self) -> Records:
        """Those that are delivered now."""
        if self.dues_ms is None:
            return self.taken
        return self.taken.at([place for place, due_ms in enumerate(self.dues_ms) if due_ms == NOW])

    def records(self) -> Iterator[MarkerRecord]:
        """Return the marker record."""
        partition = markers_partition(self.source.topic, self.source.partition, self.settings.markers_partitions)
        yield MarkerRecord(partition, encode(self._marker()))

    def _marker(self) -> Acquire:
        columns = _columns(self.queue, self.source, self.taken, self.own_topic)
        return Acquire(
            self.queue,
            self.holder,
            self.source,
            self.offsets,
            self.lease_ms,
            self.from_offset,
            columns,
            self.dues_ms,
        )


def acquisitions(
    lane: tuple[str, Source],
    holder: int,
    messages: Records,
    from_offset: int,
    settings: FlowSettings,
    *,
    own_topic: bool,
) -> Iterator[Acquisition]:
    """Cut the messages of one queue and partition into pieces that fit.

    Raises:
        ConfigError: a single message does not fit: it could never be acquired.
    """
    queue, source = lane
    room = settings.limit_bytes - FRAME_BYTES - _HEAD_BYTES
    lease_ms, rules = settings.lease_of(queue), settings.queue(queue)
    for part in _parts(queue, messages, room, own_topic):
        piece = messages if len(messages) == part.stop - part.start else messages[part]
        offsets = piece.offsets
        dues_ms = _parked_ms(piece, rules.delay_ms) if rules.paused else _dues_ms(piece, rules.delay_ms)
        yield Acquisition(queue, source, holder, offsets, from_offset, piece, dues_ms, lease_ms, settings, own_topic)
        from_offset = offsets[-1] + 1


def unpurged(purge: Purge | None, source: Source, own: Records) -> tuple[Records, int]:
    """Return what is left of a queue's records, and the offset from where on ACQUIREs may say that all is known; or 0.

    What is passed over must not count as known: the purge's own markers of it would be ignored.
    """
    end = 0 if purge is None else purge.ends.get(source, 0)
    if purge is None or own.offsets[0] >= end:
        return own, 0
    offsets, stamps = own.offsets, own.timestamps
    left = own.at([place for place in range(len(own)) if purge.left(source, offsets[place], stamps[place])])
    return left, min(end, left.offsets[0]) if len(left) else end


def _dues_ms(messages: Records, delay_ms: int) -> Sequence[int] | None:
    if not delay_ms and messages.headers is None:
        return None
    dues_ms = [deliver_at_ms(record.timestamp, record.headers, delay_ms) for record in messages]
    return None if dues_ms.count(NOW) == len(dues_ms) else dues_ms


def _parked_ms(messages: Records, delay_ms: int) -> Sequence[int]:
    dues_ms = _dues_ms(messages, delay_ms) or repeat(NOW)
    return [max(sent_ms, due_ms, 0) for sent_ms, due_ms in zip(messages.timestamps, dues_ms, strict=False)]


def _parts(queue: str, messages: Records, room: int, own_topic: bool) -> Iterator[slice]:
    count = len(messages)
    if not own_topic and count <= MAX_BATCH_MARKERS and messages.headers is None:
        total = sum([len(value or b"") for value in messages.values])
        if total + count * _COLUMNS_BYTES <= room:
            yield slice(0, count)
            return
    sizes = [payload_bytes(Payload(0, 1, record.key, record.headers, record.value)) for record in messages]
    if max(sizes) > room:
        large = messages[sizes.index(max(sizes))]
        raise ConfigError(
            f"queue {queue!r}, offset {large.offset}: the message needs {max(sizes)} bytes in the markers topic, which"
            f" accepts {room}: raise max.message.bytes of the markers and dead-letter topics, then start again"
        )
    yield from spans(sizes, room)


def _columns(queue: str, source: Source, messages: Records, own_topic: bool) -> Columns:
    keys = messages.keys if own_topic else None
    if messages.headers is None:
        return Columns(queue.encode(), messages.timestamps, messages.values, keys=keys)
    attempts = [
        origin(source, record.offset, record.timestamp, record.headers).attempt if record.headers else 1
        for record in messages
    ]
    return Columns(
        queue.encode(),
        messages.timestamps,
        messages.values,
        attempts=attempts if attempts.count(1) != len(attempts) else None,
        keys=keys,
        headers=messages.headers,
    )
