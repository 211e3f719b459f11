"""Step 5 of a consumer: what its handlers do with messages, what is written of it, and the renewal of leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from marq.consumer.held_batch import HeldBatch
from marq.kafka.records import Row
from marq.wire.marker_codec import encode
from marq.wire.markers import (
    BACKOFF,
    MIXED_QUEUES,
    Ack,
    Acquire,
    Reject,
    Release,
    Renew,
    Source,
)
from marq.wire.record_headers import origin
from proof import history
from tests.simulation.driving import drive

if TYPE_CHECKING:
    from marq.consumer.receiver import Receiver
    from tests.simulation.consumer import Consumer

#: The first byte of markers of a version that workers do not know before the faults have ended.
NEWER_VERSION = b"\x02"
Batch = Acquire | Ack | Release | Reject | Renew
#: How long a client waits for a write before it takes its outcome for unknown.
PATIENCE_MS = 300


class Sent(Enum):
    """What a client knows of a write."""

    OK = 1
    FAILED = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a message: ``shared`` is what one batch has in common, ``own`` what it says of this one."""

    shared: tuple[Any, ...]
    offset: int
    own: Any
    lost_at_ms: int


class Outcomes:
    """Of one consumer; leases do not end with an assignment, so what is held is known by its holder."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._world = consumer.world
        self._held: dict[tuple[int, Source, int], HeldBatch] = {}
        self.unwritten: list[Outcome] = []
        #: Outcomes that were sent and not confirmed yet.
        self._on_their_way = 0

    @property
    def busy(self) -> bool:
        return bool(self._held) or not self.written

    @property
    def written(self) -> bool:
        """Whether all that was decided is known to be durable."""
        return not (self.unwritten or self._on_their_way)

    def held_count(self, holder: int) -> int:
        return sum(each[0] == holder for each in self._held)

    def give_all_back(self) -> None:
        for holder, source, offset in list(self._held):
            self._give_back(holder, source, offset, 0, counted=False, error="")

    # --- handlers -----------------------------------------------------------------------------------------------------

    def handle(self, held: HeldBatch, record: Row) -> None:
        """Deliver a message."""
        consumer, world, rng = self._consumer, self._world, self._world.rng
        offset, holder, source, queue = record.offset, held.holder, held.source, held.queue
        place = (holder, source, offset)
        self._held[place] = held
        attempt = origin(source, offset, record.timestamp, record.headers).attempt
        name = history.name_of(source, offset)
        world.history.add(
            consumer.name, "ok", "deliver", group=consumer.group.kafka_name,
            holder=history.holder_name(holder), record=name, queue=queue,
            attempt=attempt, content=history.content(queue, record.key, record.value, record.headers),
        )  # fmt: skip
        world.stats["handed_out"] += 1
        if consumer.stopping:
            self._give_back(*place, 0, counted=False, error="")
            return
        lease_ms = consumer.lease_ms(queue)
        if world.hit(world.faults.forgotten):
            # The handler hangs, and nobody renews its lease; it may still finish much later.
            held.renewed_until(offset, held.expires_s)
            held.open.discard(offset)
            world.history.add(consumer.name, "ok", "hang", record=name)
            consumer.later(rng.randint(1, 4) * lease_ms, self._finish, *place)
            return
        choice = rng.random() if world.faulty else 1.0
        taken_ms = rng.randint(0, 60)
        if choice < world.release_share:
            delay_ms = rng.choice([0, 0, rng.randint(1, 400), BACKOFF])
            error = f"error {offset}" + "!" * rng.choice([0, 0, 0, 900])
            consumer.later(taken_ms, self._give_back, *place, delay_ms, rng.random() < 0.7, error)
        elif choice < world.release_share + world.reject_share:
            consumer.later(taken_ms, self._reject, *place)
        elif choice < world.release_share + world.reject_share + 0.1:
            consumer.later(rng.randint(lease_ms, 3 * lease_ms), self._finish, *place)
        else:
            consumer.later(taken_ms, self._finish, *place)

    def _finish(self, holder: int, source: Source, offset: int) -> None:
        held = self._held.pop((holder, source, offset), None)
        if held is not None:
            held.open.discard(offset)
            # Also after the lease is lost: the work is done, and the tracker may not have noticed yet.
            self._put(Outcome((Ack, holder, source, held.queue), offset, None, _lost_at_ms(held, offset)))

    def _give_back(self, holder: int, source: Source, offset: int, delay_ms: int, counted: bool, error: str) -> None:
        held = self._still_held(holder, source, offset)
        if held is not None:
            self._world.stats["released"] += 1
            shared = (Release, holder, source, held.queue, counted)
            self._put(Outcome(shared, offset, (delay_ms, error if counted else ""), _lost_at_ms(held, offset)))

    def _reject(self, holder: int, source: Source, offset: int) -> None:
        held = self._still_held(holder, source, offset)
        if held is not None:
            self._world.stats["rejected"] += 1
            self._put(Outcome((Reject, holder, source, held.queue), offset, "no good", _lost_at_ms(held, offset)))

    def _still_held(self, holder: int, source: Source, offset: int) -> HeldBatch | None:
        """Take a message out of its handler's hand, unless its lease is over: what it says would not count."""
        held = self._held.pop((holder, source, offset), None)
        if held is None:
            return None
        held.open.discard(offset)
        if self._consumer.monotonic_ms() >= _lost_at_ms(held, offset):
            self._world.stats["leases_lost"] += 1
            return None
        return held

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _put(self, outcome: Outcome) -> None:
        if not self.unwritten:
            self._consumer.later(self._world.rng.randint(1, 15), self._flush)
        self.unwritten.append(outcome)

    def _flush(self) -> None:
        groups: dict[tuple[Any, ...], dict[int, Outcome]] = {}
        for outcome in self.unwritten:
            shared = outcome.shared
            if shared[0] is Ack and self._world.acks_of_several:
                shared = (*shared[:3], MIXED_QUEUES)
            groups.setdefault(shared, {})[outcome.offset] = outcome
        self.unwritten = []
        for shared, members in groups.items():
            self._flush_group(shared, [members[offset] for offset in sorted(members)])

    def _flush_group(self, shared: tuple[Any, ...], members: list[Outcome]) -> None:
        kind, holder, source, queue = shared[:4]
        offsets = [member.offset for member in members]
        batch: Ack | Release | Reject
        if kind is Ack:
            batch = Ack(queue, holder, source, offsets)
        elif kind is Release:
            delays, errors = zip(*(member.own for member in members), strict=True)
            batch = Release(queue, holder, source, offsets, delays, shared[4], errors)
        else:
            batch = Reject(queue, holder, source, offsets, [member.own for member in members])

        self._on_their_way += 1

        def written(result: Sent) -> None:
            self._on_their_way -= 1
            if result is not Sent.OK:
                for member in members:
                    self._put(member)

        faults = self._world.faults
        self.write(batch, written, faults.marker_failed, faults.marker_unknown, members)

    def renew(self, receiver: Receiver) -> None:
        """Renew the leases of one assignment again and again; they go on after it, as long as messages are held."""

        def renewed(done: bool) -> None:
            if receiver._reader.revoked and not receiver.renewal.holders(1):  # type: ignore[attr-defined]
                return
            interval_ms = receiver.renewal._shortest_lease_ms() // 3
            self._consumer.later(interval_ms if done else interval_ms // 4, self.renew, receiver)

        drive(receiver.renewal.renew(), renewed)

    # --- the wire -----------------------------------------------------------------------------------------------------

    def write(
        self,
        batch: Batch,
        then: Callable[[Sent], None],
        failed: float,
        unknown: float,
        members: Iterable[Outcome] = (),
    ) -> None:
        """Write a batch, and note what the client knows of it."""
        began_ms = self._consumer.monotonic_ms()
        self.note("invoke", batch)

        def over(result: Sent) -> None:
            now_ms = self._consumer.monotonic_ms()
            lost = [member.offset for member in members if now_ms >= member.lost_at_ms]
            self.note(TYPES[result], batch, took_ms=now_ms - began_ms, lost=lost)
            then(result)

        self.send(batch, encode(batch), over, failed, unknown, PATIENCE_MS * 1_000)

    def send(
        self, batch: Batch, data: bytes, over: Callable[[Sent], None], failed: float, unknown: float, limit_ms: int
    ) -> None:
        """Send a batch; it reaches the log after a while, whatever has become of its sender by then."""
        world, rng, consumer = self._world, self._world.rng, self._consumer
        if world.hit(failed):
            consumer.later(rng.randint(5, 50), over, Sent.FAILED)
            return
        travel_ms = rng.randint(1, 5)
        if world.hit(world.faults.marker_slow):
            travel_ms = rng.randint(20, 1_200)
        result = Sent.OK
        if world.hit(unknown):
            result = Sent.UNKNOWN
            world.stats["markers_unknown"] += 1
        if world.hit(world.faults.newer_marker):
            # A client that is newer than the workers: the other way round than it should be.
            data = NEWER_VERSION + data[1:]
            world.stats["newer_markers"] += 1
        world.schedule(travel_ms, self._append, batch, data)
        # Nobody waits for ever; and what a client has given up may still arrive.
        waited_ms = min(travel_ms, PATIENCE_MS) if result is Sent.UNKNOWN else travel_ms
        if waited_ms > limit_ms:
            waited_ms, result = limit_ms, Sent.UNKNOWN
        consumer.later(waited_ms + rng.randint(1, 3), over, result)

    def note(self, type_: str, batch: Batch, **fields: Any) -> None:
        holder, source = history.holder_name(batch.holder), history.log_name(batch.source)
        offsets = list(batch.offsets)
        op = type(batch).__name__.lower()
        self._world.history.add(self._consumer.name, type_, op, holder=holder, source=source, offsets=offsets, **fields)

    def _append(self, batch: Batch, data: bytes) -> None:
        self._world.markers_of(batch.source).append(data, about=batch)


def _lost_at_ms(held: HeldBatch, offset: int) -> int:
    return round(held.expiry_s(offset) * 1000)


TYPES = {Sent.OK: "ok", Sent.FAILED: "fail", Sent.UNKNOWN: "unknown"}
