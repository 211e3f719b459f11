"""Simulates a sender that delays messages, and cancels and reschedules them; its messages begin as DELAY markers.

If the outcome of a DELAY is unknown, a sender that states `from_offset` writes it again. Other senders report the error
to their users, who send the message again as a new one. To cancel or reschedule a message, a client reads the markers
from a position before its request until a marker decides it, and repeats the request from time to time
(docs/protocol.md, "Cancel or reschedule a message").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.proof import history
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage.rows import WAITING
from marq.wire.errors import CorruptMarker
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import (
    ANY_QUEUE,
    Answer,
    Batch,
    Cancel,
    Delay,
    Fact,
    Kind,
    Payload,
    RequestOutcome,
    Reschedule,
    Source,
)
from marq.wire.names import (
    DEDUPLICATION_ID_HEADER,
    ORDERING_KEY_HEADER,
    deduplicating_partition,
    source_partition,
    synthetic_topic,
)
from tests.simulation.actor import Actor
from tests.simulation.sending import NEWER_VERSION, PATIENCE_MS, Sent

if TYPE_CHECKING:
    from tests.simulation.log import Partition
    from tests.simulation.world import World

#: The longest delay.
LONGEST_MS = 2_500
#: Partitions of the sender's own source, and how many more it has for messages with deduplication ids.
PARTITIONS, MOST_PARTITIONS = 2, 3
POLL_MS, AGAIN_MS = 40, 400


@dataclass(frozen=True)
class Call:
    """A message as its user passed it to the sender."""

    message: str
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    #: The ordering key of a message with a deduplication id, or without a key the id.
    place: bytes | None = None

    def said(self, queue: str) -> dict[str, str]:
        content = history.content(queue, queue.encode(), self.value, self.headers)
        return {"message": self.message, "queue": queue, "content": content}


@dataclass
class Asking:
    """A question that waits for its answer."""

    question: Cancel | Reschedule
    log: Partition
    position: int
    asked_ms: int = 0


class Delayer(Actor):
    """Delays ``count`` messages at random moments of the phase of faults, and asks about others' messages, too."""

    def __init__(self, world: World, count: int, lots: random.Random) -> None:
        super().__init__(world, "delayer")
        self._topic = synthetic_topic(lots.getrandbits(128))
        self._numbers = [0] * MOST_PARTITIONS
        #: Per partition, the numbers of batches that were written but not confirmed.
        self._unconfirmed: list[set[int]] = [set() for _ in range(MOST_PARTITIONS)]
        #: How many messages have deduplication ids, and how many ids there are.
        self._id_share = world.id_lots.choice([0.0, 0.0, 0.5, 1.0]) if world.has_ids else 0.0
        self._ids = world.id_lots.choice([1, 3, 20])
        self._repeats = lots.random() < 0.5
        self._ask_share = lots.choice([0.0, 0.4, 0.8])
        self.unsent = count
        #: Number of requests that are neither answered nor abandoned.
        self.asking = 0
        #: Decoded batches, by the values of their records.
        self._batches: dict[bytes | None, Batch | None] = {}
        number = 0
        while number < count:
            together = min(lots.choice([1, 1, 2, 3, 20]), count - number)
            self.later(lots.randint(0, world.faults_end_ms - 500), self._choose, range(number, number + together))
            number += together
        if lots.random() < 0.5:
            self.later(lots.randint(0, 500), self._ask_about_others)

    @property
    def done(self) -> bool:
        return self.unsent <= 0 and not self.asking

    # --- delay --------------------------------------------------------------------------------------------------------

    def _choose(self, numbers: range) -> None:
        rng = self.world.rng
        calls = []
        for number in numbers:
            headers: tuple[tuple[str, bytes | None], ...] = (("tenant", b"acme"), ("n", b"%d" % number))
            headers = (*headers[: rng.randint(0, 2)], *self.world.expiring.header(self.world.wall_ms()))
            value = None if rng.random() < 0.05 else b"delayed %d" % number
            calls.append(Call(f"delayed {number}", value, headers))
        queue = rng.choice(self.world.queues)
        if not self._id_share:
            self._delay(queue, calls)
            return
        groups: dict[int | None, list[Call]] = {}
        for call in calls:
            with_id = self._with_id(queue, call)
            groups.setdefault(self._wanted(queue, with_id), []).append(with_id)
        for group in groups.values():
            self._delay(queue, group)

    def _with_id(self, queue: str, call: Call) -> Call:
        lots = self.world.id_lots
        if lots.random() >= self._id_share:
            return call
        own_id = b"id %d" % lots.randrange(self._ids)
        headers, place = (*call.headers, (DEDUPLICATION_ID_HEADER, own_id)), own_id
        if queue in self.world.ordering.queues and lots.random() < 0.7:
            place = b"key %d" % lots.randrange(3)
            headers = (*headers, (ORDERING_KEY_HEADER, place))
        return Call(call.message, call.value, headers, place)

    def _wanted(self, queue: str, call: Call) -> int | None:
        """Return the markers partition of a message, None for any."""
        return None if call.place is None else deduplicating_partition(queue, call.place, len(self.world.markers))

    def _delay(self, queue: str, calls: list[Call]) -> None:
        world, rng = self.world, self.world.rng
        wanted = self._wanted(queue, calls[0])
        if wanted is None:
            partition = rng.randrange(PARTITIONS)
        else:
            partition = source_partition(self._topic, wanted, len(world.markers))
        first = self._numbers[partition]
        self._numbers[partition] += len(calls)
        relative, times = self._times(len(calls))
        payloads = [Payload(self.wall_ms(), 1, queue.encode(), call.headers, call.value) for call in calls]
        batch = Delay(
            queue, 1, Source(self._topic, partition), range(first, first + len(calls)), times, relative,
            self._known_from(partition, first), payloads,
        )  # fmt: skip
        self._unconfirmed[partition].add(first)
        for call in calls:
            world.history.add(self.name, "invoke", "send", **call.said(queue))
        self._write_delay(batch, calls)

    def _times(self, count: int) -> tuple[bool, list[int]]:
        """Return random times, some of them the same, and whether they are relative."""
        rng = self.world.rng
        relative = rng.random() < 0.5
        since_ms = 0 if relative else self.world.wall_ms()
        same_ms = rng.randint(0, LONGEST_MS)
        delays = [rng.choice([same_ms, same_ms, rng.randint(0, LONGEST_MS), 0]) for _ in range(count)]
        return relative, [since_ms + each for each in delays]

    def _known_from(self, partition: int, first: int) -> int | None:
        if not self._repeats:
            return None
        # A lower number is also right if nothing is in doubt there.
        return first if self._unconfirmed[partition] else self.world.rng.randint(0, first)

    def _write_delay(self, batch: Delay, calls: list[Call]) -> None:
        faults = self.world.faults
        result = self._write(batch, faults.send_failed, faults.send_unknown)
        self.later(self._waited_ms(result), self._delayed, batch, calls, result)

    def _delayed(self, batch: Delay, calls: list[Call], result: Sent) -> None:
        world, rng = self.world, self.world.rng
        if result is not Sent.OK and self._repeats:
            world.stats["delays_repeated"] += 1
            self.later(rng.randint(5, 60), self._write_delay, batch, calls)
            return
        if result is not Sent.OK:
            type_ = "fail" if result is Sent.FAILED else "unknown"
            for call in calls:
                world.history.add(self.name, type_, "send", **call.said(batch.queue))
            self.later(rng.randint(10, 100), self._delay, batch.queue, calls)
            return
        self._unconfirmed[batch.source.partition].discard(batch.offsets[0])
        self.unsent -= len(calls)
        world.stats["delayed"] += len(calls)
        for call, number, time_ms in zip(calls, batch.offsets, batch.times_ms, strict=True):
            name = history.name_of(batch.source, number)
            world.history.add(self.name, "ok", "send", **call.said(batch.queue), record=name)
            due_in_ms = time_ms if batch.relative else time_ms - world.wall_ms()
            while rng.random() < self._ask_share and world.faulty:
                # Sometimes just when it is due.
                moment_ms = rng.choice([rng.randint(0, 300), due_in_ms + rng.randint(-30, 150)])
                self._ask_later(max(0, moment_ms), batch.queue, batch.source, number)

    # --- ask ----------------------------------------------------------------------------------------------------------

    def _ask_about_others(self) -> None:
        """Ask about records, which can also be moved and cancelled while they wait; most do not wait."""
        world, rng = self.world, self.world.rng
        if not world.faulty:
            return
        source = rng.choice(world.sources if world.shares_topic else world.shared_sources)
        records = [record for record in world.messages[source].records if record is not None]
        queues = world.definitions.of(self).queues_of_topic(source.topic)
        if records and (queues or source in world.shared_sources):
            record = rng.choice(records[-6:])
            queue = rng.choice(queues) if queues else (record.key or b"").decode()
            self._ask_later(0, queue, source, record.offset)
        self.later(rng.randint(50, 500), self._ask_about_others)

    def see(self, fires: Sequence[DueAction]) -> None:
        """Ask about messages while they are being sent: a random time would rarely hit that moment."""
        rng = self.world.rng
        for fire in fires:
            if self.world.faulty and fire.lease.state in WAITING and rng.random() < self._ask_share:
                queues = self.world.definitions.of(self).queues_of_topic(fire.source.topic) or [fire.lease.queue]
                queue = queues[0] if len(queues) == 1 else rng.choice(queues)
                self._ask_later(rng.randint(0, 15), queue, fire.source, fire.offset)

    def _ask_later(self, delay_ms: int, queue: str, source: Source, offset: int) -> None:
        self.asking += 1
        self.later(delay_ms, self._ask, queue, source, offset)

    def _ask(self, queue: str, source: Source, offset: int) -> None:
        rng = self.world.rng
        holder = rng.getrandbits(64) or 1
        if self.world.shares_topic and rng.random() < 0.3:
            queue = ANY_QUEUE
        question: Cancel | Reschedule = Cancel(queue, holder, source, [offset])
        if rng.random() < 0.6:
            relative, times = self._times(1)
            question = Reschedule(queue, holder, source, [offset], times, relative)
        log = self.world.markers_of(source)
        # Reads from before the question, because the deciding marker may come right after it.
        asking = Asking(question, log, log.end(committed=True))
        self._note("invoke", question)
        self._put(asking)
        self._listen(asking)

    def _put(self, asking: Asking) -> None:
        asking.asked_ms = self.monotonic_ms()
        faults = self.world.faults
        self._write(asking.question, faults.marker_failed, faults.marker_unknown)
        self.world.stats["questions"] += 1

    def _listen(self, asking: Asking) -> None:
        world = self.world
        log = asking.log
        if log.start > asking.position or int(log.name.rpartition("/")[2]) in world.halted:
            # The deciding marker may be gone, or never come.
            self._end(asking, None)
            return
        end = log.end(committed=True)
        if asking.position < end:
            end = world.rng.randint(asking.position, end)
        for record in log.read(asking.position, end, committed=True):
            decided = _decide(asking.question, self._decoded(record.value))
            if decided is not None:
                self._end(asking, decided)
                return
        asking.position = end
        if self.monotonic_ms() - asking.asked_ms > AGAIN_MS:
            world.stats["asked_again"] += 1
            self._put(asking)
        self.later(world.rng.randint(1, POLL_MS), self._listen, asking)

    def _decoded(self, value: bytes | None) -> Batch | None:
        """Decode a marker once, however many questions wait for an answer; None if it cannot be decoded."""
        if value not in self._batches:
            try:
                self._batches[value] = decode(value)
            except CorruptMarker:
                self._batches[value] = None
        return self._batches[value]

    def _end(self, asking: Asking, decided: RequestOutcome | None) -> None:
        self.asking -= 1
        if decided is None:
            self.world.stats["questions_given_up"] += 1
            self._note("unknown", asking.question)
            return
        op = "cancelled" if isinstance(asking.question, Cancel) else "moved"
        self.world.stats[op if decided is RequestOutcome.DONE else "asked_too_late"] += 1
        self._note("ok", asking.question, outcomes=[decided.name])

    def _note(self, type_: str, question: Cancel | Reschedule, **fields: Any) -> None:
        holder, source = history.holder_name(question.holder), history.log_name(question.source)
        offsets = list(question.offsets)
        op, queue = type(question).__name__.lower(), question.queue
        self.world.history.add(
            self.name, type_, op, holder=holder, queue=queue, source=source, offsets=offsets, **fields
        )

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _write(self, batch: Delay | Cancel | Reschedule, failed: float, unknown: float) -> Sent:
        """Write a marker; return what the sender learns of the outcome."""
        world, rng = self.world, self.world.rng
        if world.hit(failed):
            return Sent.FAILED
        result = Sent.UNKNOWN if world.hit(unknown) else Sent.OK
        if result is Sent.OK or rng.random() < 0.7:
            data = encode(batch)
            if world.hit(world.faults.newer_marker):
                data = NEWER_VERSION + data[1:]
                world.stats["newer_markers"] += 1
            slow = result is Sent.UNKNOWN and world.hit(world.faults.marker_slow)
            travel_ms = rng.randint(20, 1_200) if slow else 0
            world.schedule(travel_ms, self._append, batch, data)
        return result

    def _append(self, batch: Delay | Cancel | Reschedule, data: bytes) -> None:
        self.world.markers_of(batch.source).append(data, about=replace(batch))

    def _waited_ms(self, result: Sent) -> int:
        return self.world.rng.randint(1, 5) if result is Sent.OK else self.world.rng.randint(5, PATIENCE_MS)


def _decide(question: Cancel | Reschedule, batch: Batch | None) -> RequestOutcome | None:
    """Return what a marker batch says about the question's message, if it decides that."""
    if not isinstance(batch, Fact | Answer) or batch.source != question.source:
        return None
    offset = question.offsets[0]
    if offset not in batch.offsets:
        return None
    if isinstance(batch, Fact):
        cancelled = isinstance(question, Cancel) and batch.kind is Kind.CANCELLED
        if batch.queue != question.queue and (question.queue != ANY_QUEUE or not cancelled):
            # The fact is about another queue's message at this place, or about one of several.
            return None
        return RequestOutcome.DONE if cancelled else RequestOutcome.TOO_LATE
    if batch.holder != question.holder:
        return None
    return RequestOutcome(batch.outcomes[list(batch.offsets).index(offset)])
