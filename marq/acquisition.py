"""What one ACQUIRE takes: messages of one queue from one source partition, small enough for one record.

A message that is not to be delivered yet, by a header of its record or by its queue's ``delay``, is in the ACQUIRE like
all others, but with a time instead of a holder: the tracker delivers it then. A copy is never delayed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from marq.message import Record
from marq.writer import FRAME_BYTES, MarkerRecord

if TYPE_CHECKING:
    from marq.flow import FlowSettings

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
    taken: Sequence[Record]
    #: When each is due that must not be delivered yet, NOW for the others; None when there is no such.
    dues_ms: Sequence[int] | None
    #: As the marker says it: settings may change before the messages are handed out.
    lease_ms: int
    settings: FlowSettings
    #: From a topic of the queue's own, where keys are the senders'.
    own_topic: bool

    @property
    def messages(self) -> Sequence[Record]:
        """Those that are delivered now."""
        if self.dues_ms is None:
            return self.taken
        return [record for record, due_ms in zip(self.taken, self.dues_ms, strict=True) if due_ms == NOW]

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
    messages: Sequence[Record],
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
    lease_ms, delay_ms = settings.lease_of(queue), settings.queue(queue).delay_ms
    for part in _parts(queue, messages, room, own_topic):
        piece = messages if len(messages) == part.stop - part.start else messages[part]
        offsets = [record.offset for record in piece]
        dues_ms = _dues_ms(piece, delay_ms)
        yield Acquisition(queue, source, holder, offsets, from_offset, piece, dues_ms, lease_ms, settings, own_topic)
        from_offset = offsets[-1] + 1


def _dues_ms(messages: Sequence[Record], delay_ms: int) -> Sequence[int] | None:
    # Thousands of messages: a list is quicker here than a generator.
    if not delay_ms and not any([record.headers for record in messages]):  # noqa: C419
        return None
    dues_ms = [deliver_at_ms(record.timestamp, record.headers, delay_ms) for record in messages]
    return None if dues_ms.count(NOW) == len(dues_ms) else dues_ms


def _parts(queue: str, messages: Sequence[Record], room: int, own_topic: bool) -> Iterator[slice]:
    count = len(messages)
    # Thousands of messages: a list is quicker here than a generator.
    if not own_topic and count <= MAX_BATCH_MARKERS and not any([record.headers for record in messages]):  # noqa: C419
        total = sum([len(record.value or b"") for record in messages])
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


def _columns(queue: str, source: Source, messages: Sequence[Record], own_topic: bool) -> Columns:
    timestamps = [record.timestamp for record in messages]
    values = [record.value for record in messages]
    headers = [record.headers for record in messages]
    keys = [record.key for record in messages] if own_topic else None
    if not any(headers):
        return Columns(queue.encode(), timestamps, values, keys=keys)
    attempts = [
        origin(source, record.offset, record.timestamp, record.headers).attempt if record.headers else 1
        for record in messages
    ]
    return Columns(
        queue.encode(),
        timestamps,
        values,
        attempts=attempts if attempts.count(1) != len(attempts) else None,
        keys=keys,
        headers=headers,
    )
