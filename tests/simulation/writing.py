"""The writes of an owner: rows, redeliveries, facts and TICKs, in transactions that may fail at any step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.proof import history
from marq.core.deliveries.redelivery_records import redelivery
from marq.core.redeliver_or_dead_letter import Destination, DueAction
from marq.owner.engine import Due, OwnerTransaction
from marq.wire.marker_codec import encode
from marq.wire.markers import Kind
from marq.wire.names import ORDERING_KEY_HEADER
from tests.simulation.log import Fenced, Outcome, TooLarge, Transaction

if TYPE_CHECKING:
    from tests.simulation.tracker import Owner

#: How long an owner waits for the outcome of a transaction.
PATIENCE_MS = 200
#: Time after which the broker aborts an open transaction: a dead owner's, if its successor is idle.
TIMEOUT_MS = 15_000


_STATS = {
    Kind.REDELIVERED: "redelivered",
    Kind.DEAD_LETTERED: "dead",
    Kind.DELIVERED: "delivered",
    Kind.CANCELLED: "cancelled_facts",
    Kind.ABANDONED: "abandoned",
}


class Attempt:
    """One transaction in progress."""

    def __init__(self, write: OwnerTransaction, transaction: Transaction) -> None:
        self.write = write
        self.transaction = transaction
        self.fires = [fire for fire, _ in write.due]
        #: Where the changelog ends with these rows.
        self.position = 0
        self.stages = ["copies", "markers", *([] if write.rows is None else ["changes", "quarantine"])]


class Writing:
    """The one producer of an owner; ``attempt`` is the transaction in progress."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._world = owner.world
        self.attempt: Attempt | None = None

    def start(self, write: OwnerTransaction) -> None:
        """Begin a transaction.

        Raises:
            Fenced: another owner has taken over the partition.
        """
        owner = self._owner
        self.attempt = attempt = Attempt(write, owner.transactions.begin(owner.epoch))
        self._world.schedule(TIMEOUT_MS, owner.transactions.expire, attempt.transaction)
        self._note("invoke", attempt.fires)
        if self._world.delayer is not None:
            self._world.delayer.see(attempt.fires)
        self._world.rng.shuffle(attempt.stages)
        self._stage(attempt)

    def _note(self, type_: str, fires: Sequence[DueAction]) -> None:
        owner = self._owner
        holder, log = history.holder_name(owner.tracker.holder), owner.markers.name
        for fire in fires:
            self._world.history.add(
                owner.name, type_, "fire", holder=holder, queue=fire.lease.queue,
                source=history.log_name(fire.source), offset=fire.offset, kind=fire.fact_kind.name,
                attempt=fire.attempt, cause=fire.cause.name, log=log,
                applied=owner.tracker.book.applied, tick=owner.own_tick,
            )  # fmt: skip

    def _stage(self, attempt: Attempt) -> None:
        """Write a part of the transaction; it may fail, or be fenced, between any two."""
        owner, world = self._owner, self._world
        try:
            if not attempt.stages:
                self._commit(attempt)
                return
            owner.transactions.check(owner.epoch)
            if world.hit(world.faults.flush_aborted):
                self._abort(attempt)
                owner.fail()
                return
            self._write_stage(attempt, attempt.stages.pop())
        except TooLarge:
            # The broker refuses a copy for its size, so nothing of this transaction is written.
            self._abort(attempt)
            assert owner.engine.refused_for_size(attempt.write), "a dead letter of any size is taken"
            owner.later(1, self._after_abort, attempt)
            return
        except Fenced:
            owner.fenced()
            return
        if world.rng.random() < 0.5:
            self._stage(attempt)
        else:
            slow = world.hit(world.faults.slow_commit)
            owner.later(world.rng.randint(20, 150) if slow else world.rng.randint(1, 15), self._stage, attempt)

    def _write_stage(self, attempt: Attempt, stage: str) -> None:
        owner, world, write = self._owner, self._world, attempt.write
        if stage == "copies":
            for due in write.due:
                if due[0].destination is not Destination.NOWHERE:
                    self._write_copy(attempt, due)
        elif stage == "markers":
            for batch in write.markers:
                owner.markers.append(encode(batch), about=batch, transaction=attempt.transaction)
        elif stage == "changes":
            for key, row in (write.rows or {}).items():
                owner.changelog.append(row, key=key, transaction=attempt.transaction)
            attempt.position = len(owner.changelog.records)
        else:
            for offset, value, _ in write.quarantine:
                origin = f"{owner.markers.name}/{offset}"
                world.quarantine.append(value, about=origin, transaction=attempt.transaction)

    def _write_copy(self, attempt: Attempt, due: Due) -> None:
        owner, world, (fire, payload) = self._owner, self._world, due
        own_topic, settings = world.names.is_senders_topic(fire.source.topic), owner.setting(fire.lease.queue)
        made = redelivery(fire, payload, attempt.write.now_ms, own_topic=own_topic, ordered=settings.by_key)
        if made.destination is Destination.DEAD_LETTERS:
            target = world.dead_letters
        else:
            queue, topic = fire.lease.queue, world.names.messages
            ordering_key = next((value for name, value in made.headers if name == ORDERING_KEY_HEADER), None)
            target = world.messages[world.ordering.source(world, queue, topic, ordering_key, copy=True)]
        when_ms = owner.wall_ms()
        try:
            target.append(
                made.value, key=made.key, headers=made.headers, transaction=attempt.transaction, timestamp=when_ms
            )
        except TooLarge:
            world.stats["copies_refused"] += 1
            raise
        world.stats["copies"] += 1

    def _commit(self, attempt: Attempt) -> None:
        owner, world = self._owner, self._world
        if world.hit(world.faults.flush_unknown):
            world.stats["commits_unknown"] += 1
            if world.rng.random() < 0.5:
                self._decide_committed(attempt)
            self._note("unknown", attempt.fires)
            owner.later(world.rng.randint(1, PATIENCE_MS), owner.fail)
            return
        self._decide_committed(attempt)
        owner.later(world.rng.randint(0, 3), self._written, attempt)

    def _decide_committed(self, attempt: Attempt) -> None:
        owner, world = self._owner, self._world
        owner.transactions.decide(attempt.transaction, Outcome.COMMITTED)
        if attempt.write.rows is not None:
            world.durable_applied[owner.partition] = attempt.write.applied
        for fire in attempt.fires:
            world.stats[_STATS[fire.fact_kind]] += 1
        self._show(attempt.transaction)

    def _abort(self, attempt: Attempt) -> None:
        self._owner.transactions.decide(attempt.transaction, Outcome.ABORTED)
        self._show(attempt.transaction)
        self._world.stats["aborted"] += 1

    def _show(self, transaction: Transaction) -> None:
        """Let the broker write the control records: at once, or a little later."""
        world = self._world
        if world.hit(world.faults.slow_commit):
            world.schedule(world.rng.randint(1, 50), transaction.show)
        else:
            transaction.show()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _written(self, attempt: Attempt) -> None:
        owner = self._owner
        if not attempt.transaction.shown:
            # The next transaction begins when the broker is done with this one.
            owner.later(2, self._written, attempt)
            return
        self.attempt = None
        self._note("ok", attempt.fires)
        owner.engine.committed(attempt.write, owner.monotonic_ms(), position=attempt.position)

    def _after_abort(self, attempt: Attempt) -> None:
        if attempt.transaction.shown:
            self.attempt = None
        else:
            self._owner.later(2, self._after_abort, attempt)
