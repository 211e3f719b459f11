"""Builds ACQUIREs: each takes messages of one queue from one source partition, and fits into one record.

Queues of which a read has only a few messages share a record, a MIXED_ACQUIRE.

A message that does not fit is acquired without its value, and the tracker makes a dead letter of it, so that the
messages behind it do not wait. Marq's producers send no such message, but a plain Kafka producer can: a topic limits
the compressed size.

A message that must not be delivered yet, because of a header or its queue's ``delay``, gets a due time in the ACQUIRE
instead of a holder; the tracker delivers it at that time. A redelivery is never delayed again. Messages of a paused
queue are left with the tracker in the same way, so that other queues of the group need not wait behind them: they are
due, but the tracker delivers nothing from the queue until it is resumed. And so are messages that seem to have expired:
the tracker ends them if they have (:mod:`marq.consumer.expiry`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from marq.consumer.expiry import expired
from marq.consumer.ordering import KeyQueues, Ordering, PendingRetry, RereadRecords
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.skipped_records import SkippedRecords
from marq.wire.large_messages import size_bytes, without_value
from marq.wire.marker_codec import Columns
from marq.wire.markers import (
    ANY_QUEUE,
    DUE_AT_ONCE,
    MAX_BATCH_MARKERS,
    NOW,
    Acquire,
    LeftPayloads,
    MixedAcquire,
    Payload,
    Payloads,
    Source,
    payload_bytes,
    spans,
)
from marq.wire.names import (
    ATTEMPT_HEADER,
    DELIVER_AT_HEADER,
    EXPIRES_AT_HEADER,
    FRAME_BYTES,
    ORDERING_KEY_HEADER,
    RESERVED_HEADER,
    TYPE_HEADER,
)
from marq.wire.record_headers import deliver_at_ms, origin, record_id

log = logging.getLogger("marq")

#: Maximum bytes of an ACQUIRE per message, besides its value, headers and key.
_COLUMNS_BYTES, _ALL_COLUMNS_BYTES = 24, 48
#: Marq's headers that do not prevent an ACQUIRE from leaving a payload in its record.
_LEFT_HEADERS = frozenset({TYPE_HEADER, ORDERING_KEY_HEADER, EXPIRES_AT_HEADER})
#: Bytes of the head of an ACQUIRE: queue, topic, numbers.
_HEAD_BYTES = 600
#: Most messages of one queue in a MIXED_ACQUIRE, which repeats the queue and a from_offset for each; and the bytes of a
#: message there, without the name of its queue.
FEW, _ROW_BYTES = 4, 22
#: Room that a message leaves in an ACQUIRE for the headers that it gets when it is acquired again or dead-lettered.
_ADDED_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One ACQUIRE and the records that it takes."""

    queue: str
    source: Source
    holder: int
    offsets: Sequence[int]
    from_offset: int
    taken: Records
    #: When each delayed message is due, NOW for the others; None if none is delayed.
    dues_ms: Sequence[int] | None
    #: The lease in the marker: settings may change before the messages are delivered.
    lease_ms: int
    #: True if the source is the queue's own topic, where senders choose the keys.
    own_topic: bool
    #: Where the messages of a queue with ordering wait for earlier ones with their keys.
    keys: KeyQueues | None = None
    #: False if the attempts count only when user code has the messages.
    counted: bool = False

    def __str__(self) -> str:
        first, last = self.offsets[0], self.offsets[-1]
        return f"queue={self.queue} partition={self.source.partition} offsets={first}-{last}"

    @property
    def messages(self) -> Records:
        """The messages to deliver now."""
        if self.dues_ms is None:
            return self.taken
        return self.taken.at([index for index, due_ms in enumerate(self.dues_ms) if due_ms == NOW])

    @property
    def marker(self) -> Acquire:
        # A delayed message waits so long that the tracker would copy its payload anyway.
        payloads = _payloads(self.queue, self.source, self.taken, self.own_topic, keeps=self.dues_ms is not None)
        return Acquire(
            self.queue, self.holder, self.source, self.offsets, self.lease_ms, self.from_offset, payloads, self.dues_ms,
            self.keys is not None, self.counted,
        )  # fmt: skip

    @property
    def may_be_mixed(self) -> bool:
        """Whether a MIXED_ACQUIRE can contain these messages."""
        few = len(self.taken) <= FEW and self.dues_ms is None and self.keys is None and not self.own_topic
        return few and _left(self.taken) is None


def acquire_records(acquisitions: Iterable[Acquisition], settings: ReceiverSettings) -> list[MarkerRecord]:
    """Return records of the markers topic for these ACQUIREs; those of a few messages each share a MIXED_ACQUIRE."""
    alone: list[Acquisition] = []
    small: dict[tuple[Source, int, int, bool], list[Acquisition]] = {}
    for taken in acquisitions:
        if taken.may_be_mixed:
            small.setdefault((taken.source, taken.holder, taken.lease_ms, taken.counted), []).append(taken)
        else:
            alone.append(taken)
    markers: list[Acquire | MixedAcquire] = []
    for (source, holder, lease_ms, counted), group in small.items():
        if len(group) == 1:
            alone += group
            continue
        rows = sorted(chain.from_iterable(map(_rows, group)))
        room = settings.limit_bytes - FRAME_BYTES - _HEAD_BYTES
        for part in spans([_ROW_BYTES + 4 * len(row[1]) for row in rows], room):
            offsets, queues, known, times_ms = zip(*rows[part], strict=True)
            markers.append(MixedAcquire(ANY_QUEUE, holder, source, offsets, lease_ms, queues, known, times_ms, counted))
    markers += [taken.marker for taken in alone]
    return [MarkerRecord.of(marker, settings.markers_partitions) for marker in markers]


def _rows(taken: Acquisition) -> Iterator[tuple[int, str, int, int]]:
    """Yield offset, queue, from_offset and timestamp of each message."""
    known = taken.from_offset
    for offset, time_ms in zip(taken.offsets, taken.taken.timestamps, strict=True):
        yield offset, taken.queue, known, time_ms
        known = offset + 1


class AcquiredOffsets:
    """Where the ACQUIREs of one assignment end, for each queue and source partition.

    An ACQUIRE contains all messages of its queue since the end of the previous ACQUIRE, or since the offset where
    reading began. So the tracker knows which messages it has not seen yet.
    """

    def __init__(self) -> None:
        self._ends: dict[Source, dict[str, int]] = {}

    def acquisitions(
        self,
        serving: Serving,
        records: Mapping[Source, Records],
        holder: int,
        settings: ReceiverSettings,
        ordering: Ordering,
        now_ms: int | None = None,
    ) -> tuple[list[Acquisition], list[RereadRecords]]:
        """Return the ACQUIREs for the next records, and the records of ordered messages that are open already.

        ``now_ms`` is the brokers' time, None if it is not known.
        """
        made: list[Acquisition] = []
        reread: list[RereadRecords] = []
        for source, read in records.items():
            ends = self._ends.setdefault(source, {})
            for queue, own in serving.own(source, read):
                keys = ordering.keys(queue, source)
                if keys is not None:
                    own, known = keys.select(own)
                own, known_to = unskipped(settings.skipped(queue), source, own) if len(own) else (own, 0)
                if known_to:
                    ends[queue] = max(ends.get(queue, known_to), known_to)
                if keys is not None:
                    first = min([*known.offsets[:1], *own.offsets[:1]], default=None)
                    reread.append(RereadRecords(keys, known, first))
                if not len(own):
                    continue
                # Not past the first message, because a recreated topic starts again at offset 0.
                begin = min(ends.get(queue, read.offsets[0]), own.offsets[0])
                ends[queue] = own.offsets[-1] + 1
                by, own_topic = holder if keys is None else keys.holder, serving.is_own(source.topic)
                made += acquisitions(
                    (queue, source), by, own, begin, settings, own_topic=own_topic, keys=keys, now_ms=now_ms
                )
        return made, reread

    def rewind(self, sources: Iterable[Source]) -> None:
        """Forget these partitions, because they are read again."""
        for source in sources:
            self._ends.pop(source, None)


def acquisitions(
    key: tuple[str, Source],
    holder: int,
    messages: Records,
    from_offset: int,
    settings: ReceiverSettings,
    *,
    own_topic: bool,
    keys: KeyQueues | None = None,
    again: bool = False,
    counted: bool = False,
    now_ms: int | None = None,
) -> Iterator[Acquisition]:
    """Split the messages of one queue and partition into ACQUIREs."""
    queue, source = key
    messages = _fitting(queue, source, messages)
    room = settings.limit_bytes - FRAME_BYTES - _HEAD_BYTES - _ADDED_BYTES
    lease_ms, rules = settings.lease_of(queue), settings.queue(queue)
    sizes = _sizes(messages, room, own_topic)
    # A message that is acquired again did fit before; the headers that it got since have their room.
    large = [] if again else [index for index, size in enumerate(sizes) if size > room]
    if large:
        messages = _without_values(queue, source, messages, large, room)
        sizes = _sizes(messages, room, own_topic)
    for part in spans(sizes, room) if sizes else [slice(0, len(messages))]:
        piece = messages if len(messages) == part.stop - part.start else messages[part]
        offsets = piece.offsets
        dues_ms = _dues_ms(piece, rules.delay_ms)
        left: Sequence[int] = ()
        if keys is None:
            left = range(len(piece)) if rules.paused else expired(piece, rules, now_ms)
        cut = [index - part.start for index in large if part.start <= index < part.stop]
        if left or cut:
            # Not the time of sending: if the sender's clock is ahead, a message would be late after a pause.
            before = dues_ms or [NOW] * len(piece)
            at_once = {*cut, *[index for index in left if before[index] == NOW]}
            dues_ms = [DUE_AT_ONCE if index in at_once else due_ms for index, due_ms in enumerate(before)]
        yield Acquisition(
            queue, source, holder, offsets, from_offset, piece, dues_ms, lease_ms, own_topic, keys,
            # Messages that calls poll are counted from the beginning, except those that wait for earlier ones.
            counted or not (settings.prefetch or keys is not None),
        )  # fmt: skip
        from_offset = offsets[-1] + 1


def _without_values(queue: str, source: Source, messages: Records, large: Iterable[int], room: int) -> Records:
    """Return the messages without the values of those that do not fit into an ACQUIRE."""
    rows = list(messages)
    for index in large:
        row = rows[index]
        payload = Payload(row.timestamp, 1, row.key, row.headers, row.value)
        place = record_id(source.log, row.offset)
        log.error(
            "message too large, so it becomes a dead letter without its value, which is only in its record: queue=%s"
            " record=%s bytes=%d limit=%d",
            queue, place, size_bytes(payload), room,
        )  # fmt: skip
        small = without_value(payload, place, f"a marker has room for {room}")
        rows[index] = row._replace(key=small.key, value=None, headers=small.headers)
    return Records.of(rows)


def _fitting(queue: str, source: Source, messages: Records) -> Records:
    """Return messages without the headers that do not fit into an ACQUIRE, so that these do not stop the consumer."""
    fitting = messages.with_fitting_headers()
    if fitting is messages:
        return messages
    for before, after in zip(messages, fitting, strict=True):
        if len(after.headers) < len(before.headers):
            log.warning(
                "headers dropped, because there are too many or their names are too long: queue=%s topic=%s"
                " partition=%d offset=%d headers=%d dropped=%d",
                queue, *source, before.offset, len(before.headers), len(before.headers) - len(after.headers),
            )  # fmt: skip
    return fitting


def acquisitions_again(
    keys: KeyQueues, retries: Iterable[PendingRetry], settings: ReceiverSettings
) -> Iterator[Acquisition]:
    """Return ACQUIREs for messages that keep their places."""
    ordered = sorted(retries, key=attrgetter("offset"))
    for last in (False, True):
        rows = [retry.row for retry in ordered if (retry.last is not None) is last]
        if rows:
            # The attempt of one that becomes a dead letter is used up.
            yield from acquisitions(
                (keys.queue, keys.source), keys.holder, Records.of(rows), rows[0].offset, settings,
                own_topic=keys.own_topic, keys=keys, again=True, counted=last,
            )  # fmt: skip


def unskipped(purge: SkippedRecords | None, source: Source, own: Records) -> tuple[Records, int]:
    """Return the records that a purge leaves, and the first offset that ACQUIREs may count as known, or 0.

    Purged records must not count as known: if the purge is not complete, nothing else tells which of them have ended.
    """
    end = 0 if purge is None else purge.ends.get(source, 0)
    if purge is None or own.offsets[0] >= end:
        return own, 0
    offsets, stamps = own.offsets, own.timestamps
    left = own.at([index for index in range(len(own)) if purge.left(source, offsets[index], stamps[index])])
    return left, min(end, left.offsets[0]) if len(left) else end


def _dues_ms(messages: Records, delay_ms: int) -> Sequence[int] | None:
    if not delay_ms and not messages.has_header(DELIVER_AT_HEADER):
        return None
    dues_ms = [deliver_at_ms(record.timestamp, record.headers, delay_ms) for record in messages]
    return None if dues_ms.count(NOW) == len(dues_ms) else dues_ms


def _sizes(messages: Records, room: int, own_topic: bool) -> list[int]:
    """Return how much of an ACQUIRE each message takes at most; nothing if all fit into one together."""
    count = len(messages)
    if count <= MAX_BATCH_MARKERS:
        total = sum([len(value or b"") for value in messages.values]) + messages.headers_bytes
        if own_topic:
            total += sum([len(key or b"") for key in messages.keys])
        if total + count * (_ALL_COLUMNS_BYTES if own_topic or messages.headers else _COLUMNS_BYTES) <= room:
            return []
    headers = messages.encoded_headers or [b""] * count
    return [
        payload_bytes(Payload(0, 1, record.key, (), record.value)) + len(own)
        for record, own in zip(messages, headers, strict=True)
    ]


def _left(messages: Records) -> Sequence[bool] | None:
    """Return which payloads an ACQUIRE leaves in their records; None for all of them.

    Those of messages with headers from Marq are kept: a message that was delivered before is likely to be again, and
    readers of the log follow it by its id.
    """
    keeping = {name for name in messages.header_names if name.startswith(RESERVED_HEADER)} - _LEFT_HEADERS
    if not keeping:
        return None
    return [keeping.isdisjoint([name for name, _ in headers]) for headers in messages.headers or ()]


def _kept_headers(messages: Records, left: Sequence[bool] | None) -> Sequence[bytes] | None:
    encoded = messages.encoded_headers
    if encoded is None or left is None:
        return encoded
    return [b"" if absent else headers for absent, headers in zip(left, encoded, strict=True)]


def _payloads(queue: str, source: Source, messages: Records, own_topic: bool, keeps: bool) -> Payloads:
    left = None
    if not keeps:
        left = _left(messages)
        if left is None:
            return LeftPayloads(messages.timestamps)
    keys = messages.keys if own_topic else None
    if messages.headers is None:
        return Columns(queue.encode(), messages.timestamps, messages.values, keys=keys, left=left)
    attempts = None
    if messages.has_header(ATTEMPT_HEADER):
        attempts = [
            origin(source, record.offset, record.timestamp, record.headers).attempt if record.headers else 1
            for record in messages
        ]
    return Columns(
        queue.encode(),
        messages.timestamps,
        messages.values,
        attempts=None if attempts is None or attempts.count(1) == len(attempts) else attempts,
        keys=keys,
        headers=_kept_headers(messages, left),
        left=left,
    )
