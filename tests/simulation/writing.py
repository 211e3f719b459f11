"""All that an owner writes: rows, copies, facts and TICKs, each time in one transaction that may fail at any step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from marq.core import rows
from marq.core.copies import copy, fitting, too_large
from marq.core.fires import Destination, Fire
from marq.core.marker_codec import encode
from marq.core.markers import Answer, Fact, Kind, Payload, Source, Tick
from proof import history
from tests.simulation.log import Fenced, Outcome, TooLarge, Transaction
from tests.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.simulation.tracker import Owner

#: How long an owner waits for the outcome of a transaction.
PATIENCE_MS = 200
#: After which the broker aborts a transaction that nobody ends: that of a dead owner, when its successor is at rest.
TIMEOUT_MS = 15_000


_STATS = {
    Kind.REDELIVERED: "redelivered",
    Kind.DEAD_LETTERED: "dead",
    Kind.DELIVERED: "delivered",
    Kind.CANCELLED: "cancelled_facts",
}


class Write:
    """One transaction on its way."""

    __slots__ = (
        *("applied", "changes", "fires", "markers", "payloads", "position", "quarantine", "stages", "tick"),
        "answers",
        "transaction",
    )

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.fires: list[Fire] = []
        #: As they were when it began: a shell folds no further marker before its copies are sent.
        self.payloads: dict[tuple[Source, int], Payload] = {}
        self.markers: list[Answer | Fact | Tick] = []
        #: How many of these are answers.
        self.answers = 0
        self.tick: Tick | None = None
        #: Where the changelog ends with these rows, and the last marker record that they contain.
        self.position = 0
        self.applied = -1
        self.changes: dict[bytes, bytes | None] = {}
        self.quarantine: list[tuple[int, bytes | None, str]] = []
        self.stages: list[str] = []


class Writing:
    """The one producer of an owner; ``write`` is what is on its way."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._world = owner.world
        self.write: Write | None = None
        #: Rows of a failed transaction: written again, under newer ones.
        self.pending: dict[bytes, bytes | None] = {}
        #: To be written before anything is fired, and not known to be.
        self.answers: list[Answer] = []
        #: Messages whose copies the broker refuses for their size.
        self._refused: set[tuple[Source, int]] = set()

    def start(self, fires: list[Fire], tick: Tick | None, *, flush: bool) -> None:
        """Begin a transaction.

        Raises:
            Fenced: somebody else owns the partition.
        """
        owner, rng = self._owner, self._world.rng
        write = Write(owner.transactions.begin(owner.epoch))
        self.write = write
        self._world.schedule(TIMEOUT_MS, owner.transactions.expire, write.transaction)
        write.payloads = {(fire.source, fire.offset): self._payload(fire) for fire in fires}
        write.fires, write.tick = [self._fitting(fire, write) for fire in fires], tick
        self._note("invoke", write.fires)
        if self._world.delayer is not None:
            self._world.delayer.see(write.fires)
        write.answers = len(self.answers)
        write.markers = [*self.answers, *owner.tracker.facts(write.fires)]
        if tick is not None:
            # A shell is free to write it before, among or after the facts.
            write.markers.insert(rng.randint(0, len(write.markers)), tick)
        write.stages = ["copies", "markers"]
        if flush:
            owner.check_book()
            self.pending.update(owner.tracker.book.take_changes())
            write.changes = dict(self.pending)
            write.applied = owner.tracker.book.applied
            write.quarantine = list(owner.tracker.unreadable)
            write.stages += ["changes", "quarantine"]
        rng.shuffle(write.stages)
        self._stage(write)

    def _fitting(self, fire: Fire, write: Write) -> Fire:
        if fire.destination is Destination.QUEUE and (fire.source, fire.offset) in self._refused:
            # Of one that was cancelled since, there is no copy.
            return too_large(fire)
        return fitting(fire, write.payloads[fire.source, fire.offset], self._world.limit_bytes)

    def _note(self, type_: str, fires: Sequence[Fire]) -> None:
        owner = self._owner
        holder, log = history.holder_name(owner.tracker.holder), owner.markers.name
        for fire in fires:
            self._world.history.add(
                owner.name, type_, "fire", holder=holder, source=history.log_name(fire.source), offset=fire.offset,
                kind=fire.fact_kind.name, attempt=fire.attempt, cause=fire.cause.name, log=log,
                applied=owner.tracker.book.applied, tick=owner.own_tick,
            )  # fmt: skip

    def _stage(self, write: Write) -> None:
        """Write a part of the transaction; it may fail, or be fenced, between any two."""
        owner, world = self._owner, self._world
        try:
            if not write.stages:
                self._commit(write)
                return
            owner.transactions.check(owner.epoch)
            if world.hit(world.faults.flush_aborted):
                self._abort(write)
                self._aborted(write)
                return
            self._write_stage(write, write.stages.pop())
        except TooLarge:
            # The broker refuses a copy for its size, so nothing of this transaction is written.
            self._abort(write)
            self._unfire(write)
            return
        except Fenced:
            owner.fenced()
            return
        if world.rng.random() < 0.5:
            self._stage(write)
        else:
            slow = world.hit(world.faults.slow_commit)
            owner.later(world.rng.randint(20, 150) if slow else world.rng.randint(1, 15), self._stage, write)

    def _write_stage(self, write: Write, stage: str) -> None:
        owner, world = self._owner, self._world
        if stage == "copies":
            for fire in write.fires:
                if fire.destination is not Destination.NOWHERE:
                    self._write_copy(write, fire)
        elif stage == "markers":
            for batch in write.markers:
                owner.markers.append(encode(batch), about=batch, transaction=write.transaction)
        elif stage == "changes":
            for key, row in write.changes.items():
                owner.changelog.append(row, key=key, transaction=write.transaction)
            write.position = len(owner.changelog.records)
        else:
            for offset, value, _ in write.quarantine:
                origin = f"{owner.markers.name}/{offset}"
                world.quarantine.append(value, about=origin, transaction=write.transaction)

    def _write_copy(self, write: Write, fire: Fire) -> None:
        owner, world = self._owner, self._world
        own_topic = owner.setting(fire.lease.queue).topic
        own_topic = own_topic if own_topic == fire.source.topic else None
        made = copy(fire, write.payloads[fire.source, fire.offset], owner.tracker.book.clock.now_ms, own_topic)
        if made.destination is Destination.DEAD_LETTERS:
            target = world.dead_letters
        elif made.own_topic:
            target = world.messages[fire.source]
        else:
            target = world.messages[world.rng.choice(world.shared_sources)]
        try:
            target.append(
                made.value, key=made.key, headers=made.headers, transaction=write.transaction, timestamp=owner.wall_ms()
            )
        except TooLarge:
            self._refused.add((fire.source, fire.offset))
            world.stats["copies_refused"] += 1
            raise
        world.stats["copies"] += 1

    def _payload(self, fire: Fire) -> Payload:
        owner = self._owner
        payload = owner.tracker.book.fresh_payload(fire.source, fire.offset)
        if payload is not None:
            return payload
        key = rows.row_key(fire.source, fire.offset)
        row = self.pending.get(key) or owner.table.rows.get(key)
        if row is None:
            raise Violation("no-row", f"no row for {fire.source} {fire.offset}")
        return rows.decode_payload(row)

    def _commit(self, write: Write) -> None:
        owner, world = self._owner, self._world
        if world.hit(world.faults.flush_unknown):
            world.stats["commits_unknown"] += 1
            if world.rng.random() < 0.5:
                self._decide_committed(write)
            self._note("unknown", write.fires)
            owner.later(world.rng.randint(1, PATIENCE_MS), owner.fail)
            return
        self._decide_committed(write)
        owner.later(world.rng.randint(0, 3), self._written, write)

    def _decide_committed(self, write: Write) -> None:
        owner, world = self._owner, self._world
        owner.transactions.decide(write.transaction, Outcome.COMMITTED)
        if write.changes:
            world.durable_applied[owner.partition] = write.applied
        for fire in write.fires:
            world.stats[_STATS[fire.fact_kind]] += 1
        self._show(write.transaction)

    def _abort(self, write: Write) -> None:
        self._owner.transactions.decide(write.transaction, Outcome.ABORTED)
        self._show(write.transaction)
        self._world.stats["aborted"] += 1

    def _show(self, transaction: Transaction) -> None:
        """The broker writes the control records: at once, or a little later."""
        world = self._world
        if world.hit(world.faults.slow_commit):
            world.schedule(world.rng.randint(1, 50), transaction.show)
        else:
            transaction.show()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _written(self, write: Write) -> None:
        owner = self._owner
        if not write.transaction.shown:
            # The next transaction begins when the broker is done with this one.
            owner.later(2, self._written, write)
            return
        self.write = None
        del self.answers[: write.answers]
        self._note("ok", write.fires)
        if write.changes:
            # Only now: a local table that is ahead of the changelog would never bring the changelog up to itself.
            owner.table.write(self.pending, write.position, self._world.now_ms)
            self.pending = {}
            del owner.tracker.unreadable[: len(write.quarantine)]
            owner.acknowledge(write)

    def _aborted(self, write: Write) -> None:
        """Nothing was written, and that is certain."""
        if write.tick is not None or self._world.rng.random() < 0.3:
            self._owner.fail()
        else:
            self._unfire(write)

    def _unfire(self, write: Write) -> None:
        """What was to be sent is to be sent still; a TICK that went with it is waited for in vain, and found out."""
        self._owner.tracker.book.unfire(write.fires)
        self._owner.later(1, self._after_abort, write)

    def _after_abort(self, write: Write) -> None:
        if write.transaction.shown:
            self.write = None
        else:
            self._owner.later(2, self._after_abort, write)
