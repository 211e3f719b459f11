"""Writes a history of many messages to Kafka, with the markers of consumers and trackers, and the correct audit of it.

It writes straight to the topics, without a worker, so millions of messages take seconds. The history follows Marq's own
rules: Marq's code decides between redelivery and dead letter, and builds the record. Only the consumers act at random
(:class:`Chances`), from a seed. Times are compressed: a lease expires as soon as it is due.

One idempotent producer writes everything, so it knows the offset of each record before the broker does. Only unfinished
messages are in memory; :class:`Truth` has the totals.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition

from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction, resolve_due
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import encode
from marq.wire.markers import (
    BACKOFF,
    Ack,
    Acquire,
    Answer,
    Batch,
    Cancel,
    Delay,
    Fact,
    Headers,
    Payload,
    Reject,
    Release,
    Renew,
    RequestOutcome,
    Reschedule,
    Source,
    Tick,
)
from marq.wire.markers_partitions import markers_partition
from marq.wire.names import Names, synthetic_topic
from marq.wire.payload_columns import Columns, encode_headers

#: Records, and KiB, that a producer buffers while it waits for the broker.
_WAITING, _WAITING_KIB = 200_000, 128 * 1024
_FLUSH_SECONDS = 300.0
QUEUES = ("emails", "invoices", "reports", "thumbnails")
SETTINGS = QueueSettings(lease_ms=5_000, max_attempts=3)
#: Messages in a turn: sent without a delay, and with one.
SENT, DELAYED = 1_920, 80
TURN = SENT + DELAYED
#: Messages per ACQUIRE: limits for a consumer that is nearly up to date, and for one that is far behind.
LEAST_BATCH, MOST_BATCH = 300, 2_000
#: Turns between two ticks.
TICK_EVERY = 5
ERROR = "ConnectionError: the mail server did not answer"
REASON = "ValueError: no such address"
#: Outcomes of a message.
_ACK, _RELEASE, _GIVE_BACK, _LET_EXPIRE, _ACK_LATE, _REJECT = range(6)


class Log:
    """Appends records to topics; it must be their only writer."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "batch.size": 1_000_000,
                "message.max.bytes": 1_100_000,
                "queue.buffering.max.messages": _WAITING,
                "queue.buffering.max.kbytes": _WAITING_KIB,
                "log_level": 3,  # no warnings about a broker that has just started
            }
        )
        self.ends: Counter[tuple[str, int]] = Counter()

    def write(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        at_ms: int = 0,
    ) -> int:
        """Write a record and return its offset."""
        self._produce(topic, value, key, partition, timestamp=at_ms, headers=list(headers))
        self.ends[topic, partition] += 1
        return self.ends[topic, partition] - 1

    def write_all(self, topic: str, partition: int, records: Sequence[tuple[bytes, bytes]], at_ms: int) -> int:
        """Write records without headers, keys and values; return the offset of the first."""
        for key, value in records:
            self._produce(topic, value, key, partition, timestamp=at_ms)
        self.ends[topic, partition] += len(records)
        return self.ends[topic, partition] - len(records)

    def _produce(self, *record: Any, **fields: Any) -> None:
        while True:
            try:
                self._producer.produce(*record, **fields)
            except BufferError:
                self._producer.poll(0.05)
            else:
                return

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            SystemExit: records were not written, or the topics' end offsets are wrong.
        """
        left = self._producer.flush(_FLUSH_SECONDS)
        reader = Consumer({"bootstrap.servers": self._servers, "group.id": "bench-history"})
        found = {place: reader.get_watermark_offsets(TopicPartition(*place), 60.0)[1] for place in self.ends}
        reader.close()
        if left or found != dict(self.ends):
            raise SystemExit(f"bench: {left} records were not written; ends are {found}, expected {dict(self.ends)}")


@dataclass(frozen=True)
class Chances:
    """Probabilities of consumers' actions; a message that has failed once fails more often."""

    #: ACK, RELEASE, uncounted RELEASE, no marker until the lease ends, ACK after the lease, REJECT.
    first: tuple[float, ...] = (0.925, 0.04, 0.005, 0.015, 0.008, 0.007)
    again: tuple[float, ...] = (0.70, 0.20, 0.005, 0.055, 0.02, 0.02)
    renewed: float = 0.12
    cancelled: float = 0.1
    rescheduled: float = 0.1


@dataclass
class Truth:
    """The correct audit: counts for each queue, and the number of rows of each table."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    causes: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Story:
    """A message that its first delivery did not finish."""

    queue: str
    payload: Payload
    #: Whether an ACK came after a lease had ended.
    late: bool = False
    #: How the last lease ended, and how those ended that led to another delivery.
    cause: str = ""
    causes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _PartitionState:
    """A partition of the messages topic: its end, and the redeliveries that are still unread."""

    source: Source
    read_to: int = 0
    copies: list[tuple[int, _Story]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """Messages of one queue that a consumer read from one partition; the first ones have ``stories``."""

    queue: str
    source: Source
    from_offset: int
    offsets: Sequence[int]
    stories: Sequence[_Story]
    values: Sequence[bytes]
    sent_ms: int

    def pieces(self, size: int) -> Iterator[_Read]:
        """Split the messages into batches."""
        known, begin = len(self.stories), self.from_offset
        for start in range(0, len(self.offsets), size):
            offsets = self.offsets[start : start + size]
            values = self.values[max(0, start - known) : max(0, start + size - known)]
            yield _Read(
                self.queue, self.source, begin, offsets, self.stories[start : start + size], values, self.sent_ms
            )
            begin = offsets[-1] + 1

    def story(self, index: int) -> _Story:
        if index < len(self.stories):
            return self.stories[index]
        value = self.values[index - len(self.stories)]
        return _Story(self.queue, Payload(self.sent_ms, 1, self.queue.encode(), (), value))

    def columns(self) -> Columns:
        key, fresh = self.queue.encode(), len(self.values)
        known = [story.payload for story in self.stories]
        if not known:
            return Columns(key, [self.sent_ms] * fresh, self.values)
        headers = [encode_headers(payload.headers) for payload in known]
        return Columns(
            key,
            [payload.timestamp_ms for payload in known] + [self.sent_ms] * fresh,
            [payload.value for payload in known] + list(self.values),
            attempts=[payload.attempt for payload in known] + [1] * fresh,
            headers=headers + [encode_headers(())] * fresh,
        )


class SyntheticHistory:
    """Writes the history of a number of messages, a multiple of :data:`TURN`, to existing empty topics."""

    def __init__(
        self, log: Log, names: Names, partitions: int, markers_partitions: int, value_bytes: int, seed: int = 1
    ) -> None:
        self._log = log
        self._names = names
        self._markers_partitions = markers_partitions
        self._chance = np.random.default_rng(seed)
        self._chances = Chances()
        self._lanes = [_PartitionState(Source(names.messages, number)) for number in range(partitions)]
        self._delays = [Source(synthetic_topic(self._number(60)), number) for number in range(markers_partitions)]
        self._delayed: Counter[Source] = Counter()
        self._holder = {(queue, lane.source): self._number(62) for queue in QUEUES for lane in self._lanes}
        self._tracker = self._number(62)
        self._padding = b"x" * (value_bytes - 8)
        self._sent = 0
        self._dead_letters = 0
        self.truth = Truth()

    def write(self, messages: int) -> None:
        """Write the history of this number of messages until all have ended."""
        for turn in range(messages // TURN):
            lane = self._lanes[turn % len(self._lanes)]
            self._send(lane)
            self._delay(turn)
            if turn % TICK_EVERY == 0:
                self._tick()
        while any(lane.copies for lane in self._lanes):
            for lane in self._lanes:
                self._consume(lane, {})
        self._tick()
        self._log.close()

    def _number(self, bits: int) -> int:
        return int(self._chance.integers(1, 2**bits))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, lane: _PartitionState) -> None:
        """Send messages to one or two queues, interleaved, and let the consumers read the partition to its end."""
        values = [number.to_bytes(8, "big") + self._padding for number in range(self._sent, self._sent + SENT)]
        self._sent += SENT
        queues = self._chance.choice(len(QUEUES), size=int(self._chance.integers(1, 3)), replace=False)
        of = queues[self._chance.integers(0, len(queues), SENT)]
        keys = [QUEUES[number].encode() for number in of.tolist()]
        now = _now_ms()
        start = self._log.write_all(lane.source.topic, lane.source.partition, list(zip(keys, values, strict=True)), now)
        fresh = {}
        for number in queues.tolist():
            chosen = np.flatnonzero(of == number)
            if len(chosen):
                fresh[QUEUES[number]] = ((chosen + start).tolist(), [values[index] for index in chosen.tolist()])
        for queue, (offsets, _) in fresh.items():
            self.truth.counts[queue]["sent"] += len(offsets)
        self.truth.rows["messages"] += SENT
        self._consume(lane, fresh, now)

    def _delay(self, turn: int) -> None:
        """Delay messages of one queue: reschedule some, cancel some, and deliver all but the cancelled ones."""
        source, queue = self._delays[turn % len(self._delays)], QUEUES[turn % len(QUEUES)]
        start, now = self._delayed[source], _now_ms()
        self._delayed[source] += DELAYED
        offsets = range(start, start + DELAYED)
        payloads = [
            Payload(now, 1, queue.encode(), (), offset.to_bytes(8, "big") + self._padding) for offset in offsets
        ]
        frame = (queue, self._number(62), source)
        self._mark(Delay(*frame, offsets, [1_000] * DELAYED, True, None, payloads))
        self.truth.counts[queue]["sent"] += DELAYED
        draw = self._chance.random(DELAYED)
        cancelled = draw < self._chances.cancelled
        moved = draw > 1 - self._chances.rescheduled
        self._ask_to_move(frame, np.flatnonzero(moved) + start)
        self._cancel(frame, np.flatnonzero(cancelled) + start)
        stories = [(offsets[index], _Story(queue, payloads[index])) for index in np.flatnonzero(~cancelled).tolist()]
        lease = LeaseRow(queue, 0, 1, now, now, State.DELAYED)
        self._fire(source, [(offset, story, lease) for offset, story in stories])

    def _ask_to_move(self, frame: tuple[str, int, Source], chosen: np.ndarray) -> None:
        if len(chosen):
            offsets = chosen.tolist()
            self._mark(Reschedule(*frame, offsets, [500] * len(offsets), True))
            self._mark(Answer(*frame, offsets, [RequestOutcome.DONE] * len(offsets)))

    def _cancel(self, frame: tuple[str, int, Source], chosen: np.ndarray) -> None:
        if len(chosen):
            queue, _, source = frame
            self._mark(Cancel(*frame, chosen.tolist()))
            lease = LeaseRow(queue, 0, 1, 0, 0, State.CANCELLED)
            self._tell([resolve_due(source, offset, lease, SETTINGS) for offset in chosen.tolist()])
            self.truth.counts[queue]["cancelled"] += len(chosen)

    # --- consuming ----------------------------------------------------------------------------------------------------

    def _consume(
        self, lane: _PartitionState, fresh: dict[str, tuple[list[int], list[bytes]]], sent_ms: int = 0
    ) -> None:
        """Let the consumers of all queues read a partition to its end."""
        copies, lane.copies = lane.copies, []
        for queue in QUEUES:
            known = [(offset, story) for offset, story in copies if story.queue == queue]
            offsets, values = fresh.get(queue, ([], []))
            read = _Read(
                queue,
                lane.source,
                lane.read_to,
                [offset for offset, _ in known] + offsets,
                [story for _, story in known],
                values,
                sent_ms,
            )
            for piece in read.pieces(int(self._chance.integers(LEAST_BATCH, MOST_BATCH))):
                self._handle(piece)
        lane.read_to = self._log.ends[lane.source]

    def _handle(self, read: _Read) -> None:
        """Acquire a batch, write an outcome for each message, and send the messages that are due then."""
        frame = (read.queue, self._holder[read.queue, read.source], read.source)
        offsets = np.asarray(read.offsets)
        self._mark(Acquire(*frame, read.offsets, SETTINGS.lease_ms, read.from_offset, read.columns()))
        renewed = offsets[self._chance.random(len(offsets)) < self._chances.renewed]
        if len(renewed):
            self._mark(Renew(*frame, renewed.tolist(), SETTINGS.lease_ms))
        fates = self._fates(len(read.stories), len(read.values))
        said = {fate: offsets[fates == fate].tolist() for fate in range(6)}
        if said[_ACK]:
            self._mark(Ack(*frame, said[_ACK]))
        for fate in (_RELEASE, _GIVE_BACK):
            if said[fate]:
                counted, count = fate == _RELEASE, len(said[fate])
                self._mark(Release(*frame, said[fate], [BACKOFF] * count, counted, [ERROR if counted else ""] * count))
        if said[_REJECT]:
            self._mark(Reject(*frame, said[_REJECT], [REASON] * len(said[_REJECT])))
        self._settle(read, fates, frame, said[_ACK_LATE])

    def _fates(self, known: int, fresh: int) -> np.ndarray:
        kinds = range(len(self._chances.first))
        return np.concatenate(
            [
                self._chance.choice(kinds, known, p=self._chances.again),
                self._chance.choice(kinds, fresh, p=self._chances.first),
            ]
        )

    def _settle(self, read: _Read, fates: np.ndarray, frame: tuple[str, int, Source], late: list[int]) -> None:
        known = len(read.stories)
        acked = fates == _ACK
        self.truth.counts[read.queue]["acked"] += int(acked[known:].sum())
        for index in np.flatnonzero(acked[:known]).tolist():
            self._end(read.stories[index], acked=True, dead=False)
        fires = []
        for index in np.flatnonzero(~acked).tolist():
            story, fate = read.story(index), int(fates[index])
            story.late |= fate == _ACK_LATE
            story.cause = "acked late" if fate == _ACK_LATE else "ended while held"
            fires.append((read.offsets[index], story, _lease(story, fate)))
        self._fire(read.source, fires)
        if late:
            self._mark(Ack(*frame, late))

    def _end(self, story: _Story, *, acked: bool, dead: bool) -> None:
        counts = self.truth.counts[story.queue]
        acked = acked or story.late
        counts["acked"] += acked
        counts["dead"] += dead
        counts["acked_and_dead"] += acked and dead
        counts["duplicates"] += story.causes.total()
        self.truth.causes.update(story.causes)

    # --- the tracker --------------------------------------------------------------------------------------------------

    def _fire(self, source: Source, due: Sequence[tuple[int, _Story, LeaseRow]]) -> None:
        """Send due messages to the queue or to its dead-letter queue, and record that."""
        fires = []
        for offset, story, lease in due:
            fire = resolve_due(source, offset, lease, SETTINGS)
            fires.append(fire)
            if fire.destination is Destination.DEAD_LETTERS:
                self._bury(fire, story)
            else:
                self._send_copy(fire, story)
        self._tell(fires)

    def _bury(self, fire: DueAction, story: _Story) -> None:
        now = _now_ms()
        made = redelivery(fire, story.payload, now, own_topic=False)
        partition = self._dead_letters % len(self._lanes)
        self._dead_letters += 1
        self._log.write(self._names.dead_letters, partition, made.value, made.key, made.headers, now)
        self.truth.rows["dead_letters"] += 1
        self._end(story, acked=False, dead=True)

    def _send_copy(self, fire: DueAction, story: _Story) -> None:
        now = _now_ms()
        made = redelivery(fire, story.payload, now, own_topic=False)
        lane = self._lanes[(fire.source.partition + 1) % len(self._lanes)]
        offset = self._log.write(*lane.source, made.value, made.key, made.headers, now)
        self.truth.rows["messages"] += 1
        delayed = fire.lease.state is State.DELAYED
        self.truth.counts[story.queue]["redelivered"] += not delayed
        if fire.lease.state is State.LEASED:
            story.causes[story.cause] += 1
        story.payload = Payload(now, fire.attempt, made.key, made.headers, made.value)
        lane.copies.append((offset, story))

    def _tell(self, fires: Sequence[DueAction]) -> None:
        """Write the facts, a batch for each kind."""
        kinds = sorted({fire.fact_kind for fire in fires})
        for kind in kinds:
            told = [fire for fire in fires if fire.fact_kind is kind]
            attempts, causes = [fire.attempt for fire in told], [fire.cause for fire in told]
            offsets = [fire.offset for fire in told]
            queue, source = told[0].lease.queue, told[0].source
            self._mark(Fact(kind, queue, self._tracker, source, offsets, attempts, causes))

    def _tick(self) -> None:
        tick = encode(Tick(self._tracker, time.monotonic_ns() // 1_000_000))
        for partition in range(self._markers_partitions):
            self._log.write(self._names.markers, partition, tick)
        self.truth.rows["markers"] += self._markers_partitions

    def _mark(self, batch: Batch) -> None:
        assert not isinstance(batch, Tick)
        partition = markers_partition(*batch.source, self._markers_partitions)
        self._log.write(self._names.markers, partition, encode(batch))
        self.truth.rows["markers"] += len(batch.offsets)


def _lease(story: _Story, fate: int) -> LeaseRow:
    """Return a message's lease as it is when due, in the state in which its consumer left it."""
    states = {_RELEASE: State.RELEASED, _GIVE_BACK: State.RELEASED, _REJECT: State.REJECTED}
    texts = {_RELEASE: ERROR, _REJECT: REASON}
    lease = LeaseRow(story.queue, 0, story.payload.attempt, 0, 0, states.get(fate, State.LEASED))
    lease.counted, lease.text = fate != _GIVE_BACK, texts.get(fate, "")
    return lease


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
