"""How a consumer starts messages in a transaction: ACQUIRE and the offset, both or none.

The group takes the offset only from the member of the generation in which the partition was given to it, and whoever
has the partition next waits until no open transaction can move its offset any more. So the messages are handed out by
one of the two. After anything that is not certain, a new producer takes the transactional id over: what the former one
left open is aborted, and the records are read again. What a dead one leaves open the broker aborts, or whoever starts
under its name; until then nobody reads the markers behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marq.core.marker_codec import encode
from marq.core.markers import Acquire
from marq.offsets import Committed
from marq.positions import Positions
from proof import history
from tests.simulation.group import Commit
from tests.simulation.log import Fenced, Outcome, Record, Transaction, TransactionalId
from tests.simulation.outcomes import NEWER_VERSION, Sent

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer, Reading

#: How long a transaction may be open, and how often the broker looks for such.
TIMEOUT_MS, LOOK_MS = 300, 400
#: How long a consumer waits for the outcome of a transaction.
PATIENCE_MS = 200
_TYPES = {Sent.OK: "ok", Sent.FAILED: "fail", Sent.UNKNOWN: "unknown"}


@dataclass
class Cycle:
    """What is read, acquired and committed together."""

    reading: Reading
    own: dict[str, list[Record]]
    end: int
    began_ms: int
    leases_ms: dict[str, int]
    batches: list[Acquire]
    #: Per queue, the offset after its last ACQUIRE, once these are written.
    after: dict[str, int]
    results: list[Sent] = field(default_factory=list)
    positions: Positions = field(default_factory=Positions)
    #: As it was when the transaction began: what the group judges by.
    generation: int = 0


class Starting:
    """The one producer of a consumer, with one transaction at a time."""

    def __init__(self, consumer: Consumer, transactional_id: TransactionalId) -> None:
        self.transactional_id = transactional_id
        self._consumer = consumer
        self._world = consumer.world
        self._epoch = transactional_id.fence()
        self._transaction: Transaction | None = None
        self._busy = False

    def begin(self, cycle: Cycle) -> None:
        """Write and commit; then the consumer hands out, or reads again."""
        consumer, reading = self._consumer, cycle.reading
        if self._busy or (self._transaction is not None and not self._transaction.shown):
            # The one before is not over, or the broker still ends it.
            consumer.later(2, self.begin, cycle)
            return
        after = consumer.progress.after(consumer.serving, {reading.source: cycle.end})
        if reading.revoked or reading.source not in after:
            consumer.again(reading, "commit")
            return
        cycle.positions, cycle.generation = after[reading.source], reading.generation
        self._busy = True
        try:
            self._transaction = transaction = self.transactional_id.begin(self._epoch)
        except Fenced:
            self._give_up(cycle, Sent.FAILED)
            return
        world = self._world
        world.stats["start_transactions"] += 1
        world.schedule(TIMEOUT_MS + world.rng.randint(0, LOOK_MS), self.transactional_id.expire, transaction)
        for batch in cycle.batches:
            self._write(cycle, transaction, batch)

    def _write(self, cycle: Cycle, transaction: Transaction, batch: Acquire) -> None:
        world, faults = self._world, self._world.faults
        self._note("invoke", batch)
        if world.hit(faults.acquire_failed):
            self._consumer.later(world.rng.randint(5, 50), self._written, cycle, transaction, Sent.FAILED)
            return
        travel_ms = world.rng.randint(20, 600) if world.hit(faults.marker_slow) else world.rng.randint(1, 5)
        result = Sent.UNKNOWN if world.hit(faults.acquire_unknown) else Sent.OK
        data = encode(batch)
        if world.hit(faults.newer_marker):
            data = NEWER_VERSION + data[1:]
            world.stats["newer_markers"] += 1
        world.schedule(travel_ms, self._append, transaction, batch, data)
        self._consumer.later(travel_ms + world.rng.randint(1, 3), self._written, cycle, transaction, result)

    def _append(self, transaction: Transaction, batch: Acquire, data: bytes) -> None:
        """At the broker, which takes nothing for a transaction that is over."""
        if self.transactional_id.accepts(transaction):
            self._world.markers_of(batch.source).append(data, about=batch, transaction=transaction)

    def _written(self, cycle: Cycle, transaction: Transaction, result: Sent) -> None:
        world, consumer, source = self._world, self._consumer, cycle.reading.source
        cycle.results.append(result if self.transactional_id.accepts(transaction) else Sent.FAILED)
        if len(cycle.results) < len(cycle.batches):
            return
        if any(each is not Sent.OK for each in cycle.results) or world.hit(world.faults.commit_failed):
            self._give_up(cycle, Sent.FAILED)
            return
        committed = Committed(cycle.end, cycle.positions.encode(cycle.end))
        outcome = consumer.group.commit_in(transaction, source, committed, cycle.generation, consumer)
        if outcome is Commit.REFUSED:
            world.stats["commits_refused"] += 1
            self._give_up(cycle, Sent.FAILED)
            return
        consumer.later(world.rng.randint(0, 3), self._decide, cycle, transaction)

    def _decide(self, cycle: Cycle, transaction: Transaction) -> None:
        world, consumer, reading = self._world, self._consumer, cycle.reading
        try:
            if world.hit(world.faults.commit_unknown):
                if world.rng.random() < 0.5:
                    self._commit(transaction)
                consumer.later(world.rng.randint(1, PATIENCE_MS), self._give_up, cycle, Sent.UNKNOWN)
                return
            self._commit(transaction)
        except Fenced:
            self._give_up(cycle, Sent.UNKNOWN)
            return
        self._busy = False
        for batch in cycle.batches:
            self._note("ok", batch, took_ms=consumer.monotonic_ms() - cycle.began_ms)
        consumer.progress.take({reading.source: cycle.positions})
        reading.after = cycle.after
        consumer.later(
            world.rng.randint(0, 3), consumer.hand_out, reading, cycle.own, cycle.end, cycle.began_ms, cycle.leases_ms
        )

    def _commit(self, transaction: Transaction) -> None:
        self.transactional_id.decide(transaction, Outcome.COMMITTED)
        # The broker tells the partitions and the group: at once, or a little later.
        if self._world.hit(self._world.faults.slow_commit):
            self._world.schedule(self._world.rng.randint(1, 50), transaction.show)
        else:
            transaction.show()

    def _give_up(self, cycle: Cycle, result: Sent) -> None:
        """Go on with a new producer, and read again: nothing of this was handed out."""
        self._busy = False
        self._epoch = self.transactional_id.fence()
        for batch in cycle.batches:
            self._note(_TYPES[result], batch, took_ms=self._consumer.monotonic_ms() - cycle.began_ms)
        self._consumer.again(cycle.reading, "start")

    def _note(self, type_: str, batch: Acquire, **fields: int) -> None:
        holder, source = history.holder_name(batch.holder), history.log_name(batch.source)
        offsets = list(batch.offsets)
        self._world.history.add(
            self._consumer.name, type_, "acquire", holder=holder, source=source, offsets=offsets, **fields
        )
