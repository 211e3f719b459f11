"""Writes a history of many messages to Kafka, with the markers of consumers and trackers, and the correct audit of it.

It writes straight to the topics, without a worker, so millions of messages take minutes. The history follows Marq's own
rules: Marq's code decides between redelivery and dead letter, and builds the record. Only the consumers act at random,
from a seed. Times are compressed: a lease expires as soon as it is due.

One idempotent producer writes everything, so it knows the offset of each record before the broker does. Only unfinished
messages are in memory; :class:`Truth` has the totals.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition

from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction, resolve_due
from marq.core.storage.rows import LeaseRow, State
from marq.settings.queue import QueueSettings
from marq.wire import markers
from marq.wire.marker_codec import encode
from marq.wire.markers import Headers, Payload, Source
from marq.wire.names import Names, markers_partition, synthetic_topic

_PRODUCER = {
    "enable.idempotence": True,
    "linger.ms": 20,
    "batch.size": 1_000_000,
    "message.max.bytes": 1_100_000,
    # What it buffers while it waits for the broker.
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 128 * 1024,
    "log_level": 3,  # no warnings about a broker that has just started
}
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
#: Shares of messages whose lease is renewed; and of delayed messages, those that are cancelled or rescheduled.
_RENEWED, _CANCELLED, _RESCHEDULED = 0.12, 0.1, 0.1


class Fate(NamedTuple):
    """The outcome of a delivery; a message that has failed once fails more often.

    ``at_first`` and ``again`` are its probabilities. The other fields are those of the lease when it is due.
    """

    at_first: float
    again: float
    state: State = State.LEASED
    counted: bool = True
    text: str = ""


#: Also an uncounted RELEASE, no marker until the lease ends, and an ACK after that.
ACK, LET_EXPIRE, ACK_LATE = Fate(0.925, 0.70), Fate(0.015, 0.055), Fate(0.008, 0.02)
RELEASE = Fate(0.04, 0.20, State.RELEASED, text="ConnectionError: the mail server did not answer")
GIVE_BACK = Fate(0.005, 0.005, State.RELEASED, counted=False)
REJECT = Fate(0.007, 0.02, State.REJECTED, text="ValueError: no such address")
FATES = (ACK, RELEASE, GIVE_BACK, LET_EXPIRE, ACK_LATE, REJECT)


@dataclass
class Truth:
    """The correct audit: counts for each queue, and the number of rows of each table."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    causes: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Story:
    """A message that has not ended."""

    queue: str
    payload: Payload
    #: Whether an ACK came after a lease had ended.
    late: bool = False
    #: How the last lease ended, and how those ended that led to another delivery.
    cause: str = ""
    causes: Counter[str] = field(default_factory=Counter)


class SyntheticHistory:
    """Writes the history of a number of messages, a multiple of :data:`TURN`; it must be the topics' only writer."""

    def __init__(
        self, servers: str, names: Names, partitions: int, markers_partitions: int, value_bytes: int, seed: int = 1
    ) -> None:
        self._servers = servers
        self._producer = Producer({"bootstrap.servers": servers, **_PRODUCER})
        self._names = names
        self._markers_partitions = markers_partitions
        self._chance = np.random.default_rng(seed)
        self._sources = [Source(names.messages, number) for number in range(partitions)]
        self._delays = [Source(synthetic_topic(self._number(60)), number) for number in range(markers_partitions)]
        self._delayed: Counter[Source] = Counter()
        self._holder = {(queue, source): self._number(62) for queue in QUEUES for source in self._sources}
        self._tracker = self._number(62)
        self._padding = b"x" * (value_bytes - 8)
        self._sent = self._dead_letters = 0
        #: Ends of logs; how far consumers have read each source; and the messages behind that, with their offsets.
        self._ends: Counter[tuple[str, int]] = Counter()
        self._read_to: Counter[Source] = Counter()
        self._unread: dict[Source, list[tuple[int, _Story]]] = defaultdict(list)
        self.truth = Truth()

    def write(self, messages: int) -> None:
        """Write the history of this number of messages until all have ended.

        Raise SystemExit if records were not written, or the topics' end offsets are wrong.
        """
        for turn in range(messages // TURN):
            source = self._sources[turn % len(self._sources)]
            self._send(source)
            self._consume(source)
            self._delay(turn)
            if turn % TICK_EVERY == 0:
                self._tick()
        while any(self._unread.values()):
            for source in self._sources:
                self._consume(source)
        self._tick()
        left = self._producer.flush(_FLUSH_SECONDS)
        reader = Consumer({"bootstrap.servers": self._servers, "group.id": "bench-history"})
        ends = {place: reader.get_watermark_offsets(TopicPartition(*place), 60.0)[1] for place in self._ends}
        reader.close()
        if left or ends != dict(self._ends):
            raise SystemExit(f"bench: {left} records were not written; ends are {ends}, expected {dict(self._ends)}")

    def _number(self, bits: int) -> int:
        return int(self._chance.integers(1, 2**bits))

    def _append(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, headers: Headers = (), at_ms: int = 0
    ) -> int:
        """Write a record and return its offset."""
        while True:
            try:
                self._producer.produce(topic, value, key, partition, timestamp=at_ms, headers=list(headers))
                break
            except BufferError:
                self._producer.poll(0.05)
        self._ends[topic, partition] += 1
        return self._ends[topic, partition] - 1

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self, source: Source) -> None:
        """Send messages to one or two queues, interleaved."""
        now_ms = _now_ms()
        queues = self._chance.choice(QUEUES, size=int(self._chance.integers(1, 3)), replace=False)
        for queue in self._chance.choice(queues, SENT).tolist():
            value, key = self._sent.to_bytes(8, "big") + self._padding, queue.encode()
            self._sent += 1
            offset = self._append(*source, value, key, at_ms=now_ms)
            self._unread[source].append((offset, _Story(queue, Payload(now_ms, 1, key, (), value))))
            self.truth.counts[queue]["sent"] += 1
        self.truth.rows["messages"] += SENT

    def _delay(self, turn: int) -> None:
        """Delay messages of one queue: reschedule some, cancel some, and deliver all but the cancelled ones."""
        source, queue = self._delays[turn % len(self._delays)], QUEUES[turn % len(QUEUES)]
        start, now_ms = self._delayed[source], _now_ms()
        self._delayed[source] += DELAYED
        offsets = range(start, start + DELAYED)
        values = [offset.to_bytes(8, "big") + self._padding for offset in offsets]
        payloads = [Payload(now_ms, 1, queue.encode(), (), value) for value in values]
        frame = (queue, self._number(62), source)
        self._mark(markers.Delay(*frame, offsets, [1_000] * DELAYED, True, None, payloads))
        self.truth.counts[queue]["sent"] += DELAYED
        draw = self._chance.random(DELAYED)
        if moved := (np.flatnonzero(draw > 1 - _RESCHEDULED) + start).tolist():
            self._mark(markers.Reschedule(*frame, moved, [500] * len(moved), True))
            self._mark(markers.Answer(*frame, moved, [markers.RequestOutcome.DONE] * len(moved)))
        if cancelled := (np.flatnonzero(draw < _CANCELLED) + start).tolist():
            self._mark(markers.Cancel(*frame, cancelled))
            lease = LeaseRow(queue, 0, 1, 0, 0, State.CANCELLED)
            self._tell([resolve_due(source, offset, lease, SETTINGS) for offset in cancelled])
            self.truth.counts[queue]["cancelled"] += len(cancelled)
        lease = LeaseRow(queue, 0, 1, now_ms, now_ms, State.DELAYED)
        due = [(offset, _Story(queue, payload)) for offset, payload in zip(offsets, payloads, strict=True)]
        self._fire(source, [(offset, story, lease) for offset, story in due if offset not in cancelled])

    # --- consuming ----------------------------------------------------------------------------------------------------

    def _consume(self, source: Source) -> None:
        """Let the consumers of all queues read a partition to its end."""
        unread, self._unread[source] = self._unread[source], []
        for queue in QUEUES:
            messages = [(offset, story) for offset, story in unread if story.queue == queue]
            size, from_offset = int(self._chance.integers(LEAST_BATCH, MOST_BATCH)), self._read_to[source]
            for start in range(0, len(messages), size):
                batch = messages[start : start + size]
                self._handle((queue, self._holder[queue, source], source), from_offset, batch)
                from_offset = batch[-1][0] + 1
        self._read_to[source] = self._ends[source]

    def _handle(self, frame: tuple[str, int, Source], from_offset: int, batch: Sequence[tuple[int, _Story]]) -> None:
        """Acquire a batch, write an outcome for each message, and send the messages that are due then."""
        offsets, payloads = np.asarray([offset for offset, _ in batch]), [story.payload for _, story in batch]
        self._mark(markers.Acquire(*frame, offsets.tolist(), SETTINGS.lease_ms, from_offset, payloads))
        if renewed := offsets[self._chance.random(len(batch)) < _RENEWED].tolist():
            self._mark(markers.Renew(*frame, renewed, SETTINGS.lease_ms))
        chances = zip(*[fate[:2] for fate in FATES], strict=True)
        first, again = (self._chance.choice(len(FATES), len(batch), p=chance) for chance in chances)
        drawn = np.where([payload.attempt == 1 for payload in payloads], first, again)
        said = {fate: offsets[drawn == number].tolist() for number, fate in enumerate(FATES)}
        if said[ACK]:
            self._mark(markers.Ack(*frame, said[ACK]))
        for fate in (RELEASE, GIVE_BACK):
            if count := len(said[fate]):
                waits, texts = [markers.BACKOFF] * count, [fate.text] * count
                self._mark(markers.Release(*frame, said[fate], waits, fate.counted, texts))
        if said[REJECT]:
            self._mark(markers.Reject(*frame, said[REJECT], [REJECT.text] * len(said[REJECT])))
        due = []
        for (offset, story), number in zip(batch, drawn.tolist(), strict=True):
            fate = FATES[number]
            if fate is ACK:
                self._end(story, acked=True)
                continue
            story.late |= fate is ACK_LATE
            story.cause = "acked late" if fate is ACK_LATE else "ended while held"
            # As its consumer left it.
            lease = LeaseRow(story.queue, 0, story.payload.attempt, 0, 0, fate.state)
            lease.counted, lease.text = fate.counted, fate.text
            due.append((offset, story, lease))
        self._fire(frame[2], due)
        if said[ACK_LATE]:
            self._mark(markers.Ack(*frame, said[ACK_LATE]))

    def _end(self, story: _Story, *, acked: bool = False, dead: bool = False) -> None:
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
        fires = [resolve_due(source, offset, lease, SETTINGS) for offset, _, lease in due]
        for fire, (_, story, _) in zip(fires, due, strict=True):
            now_ms = _now_ms()
            made = redelivery(fire, story.payload, now_ms, own_topic=False)
            assert made.value is not None
            record = (made.value, made.key, made.headers, now_ms)
            if fire.destination is Destination.DEAD_LETTERS:
                self._append(self._names.dead_letters, self._dead_letters % len(self._sources), *record)
                self._dead_letters += 1
                self.truth.rows["dead_letters"] += 1
                self._end(story, dead=True)
                continue
            target = self._sources[(fire.source.partition + 1) % len(self._sources)]
            offset = self._append(target.topic, target.partition, *record)
            self.truth.rows["messages"] += 1
            self.truth.counts[story.queue]["redelivered"] += fire.lease.state is not State.DELAYED
            if fire.lease.state is State.LEASED:
                story.causes[story.cause] += 1
            story.payload = Payload(now_ms, fire.attempt, made.key, made.headers, made.value)
            self._unread[target].append((offset, story))
        self._tell(fires)

    def _tell(self, fires: Sequence[DueAction]) -> None:
        """Write the facts, a batch for each kind."""
        for kind in sorted({fire.fact_kind for fire in fires}):
            told = [fire for fire in fires if fire.fact_kind is kind]
            attempts, causes = [fire.attempt for fire in told], [fire.cause for fire in told]
            frame = (kind, told[0].lease.queue, self._tracker, told[0].source)
            self._mark(markers.Fact(*frame, [fire.offset for fire in told], attempts, causes))

    def _tick(self) -> None:
        tick = encode(markers.Tick(self._tracker, time.monotonic_ns() // 1_000_000))
        for partition in range(self._markers_partitions):
            self._append(self._names.markers, partition, tick)
        self.truth.rows["markers"] += self._markers_partitions

    def _mark(self, batch: markers.Batch) -> None:
        assert not isinstance(batch, markers.Tick)
        partition = markers_partition(*batch.source, self._markers_partitions)
        self._append(self._names.markers, partition, encode(batch))
        self.truth.rows["markers"] += len(batch.offsets)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
