"""The owner of a markers partition: the shell around the core's Tracker, on a host that may keep its local table.

1 fence, 2 read the changelog to its end, 3 restore the book, 4 TICK, 5 read markers and write: rows, copies, facts and
TICKs, each through one transactional id. Fencing comes before the changelog: the other way round, rows that the former
owner still commits are missed, and a row whose ACK is then folded together with its ACQUIRE is never deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.core import rows
from marq.core.copies import copy
from marq.core.leases import Destination, Fire
from marq.core.markers import Fact, Payload, Tick, encode
from marq.core.tracker import Tracker
from tests.simulation.actor import Actor
from tests.simulation.checker import Violation
from tests.simulation.log import Fenced, Outcome, Transaction
from tests.simulation.oracle import PlainFold

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long an owner waits for a TICK or a transaction before it takes the partition over again.
PATIENCE_MS = 200


class LocalTable:
    """The rows of one markers partition on one host's disk, and how much of the changelog they contain."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.position = 0

    def write(self, changes: dict[bytes, bytes | None], position: int) -> None:
        for key, row in changes.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        self.position = position


class Write:
    """One transaction on its way."""

    __slots__ = ("changes", "fires", "markers", "position", "quarantine", "stages", "tick", "transaction")

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.fires: list[Fire] = []
        self.markers: list[Fact | Tick] = []
        self.tick: Tick | None = None
        #: Where the changelog ends with these rows.
        self.position = 0
        self.changes: dict[bytes, bytes | None] = {}
        self.quarantine: list[tuple[int, bytes | None, str]] = []
        self.stages: list[str] = []


class Owner(Actor):
    """A tracker in one assignment of one markers partition; alive until it crashes, is told to stop, or is fenced."""

    def __init__(self, world: World, partition: int, table: LocalTable) -> None:
        super().__init__(world)
        self.partition = partition
        self.markers = world.markers[partition]
        self.changelog = world.changelogs[partition]
        self.transactions = world.transactional_ids[partition]
        self.table = table
        self.tracker = Tracker(world.setting, world.rng.getrandbits(64))
        self.plain = PlainFold(world.setting)
        self.position = 0
        self.epoch = 0
        self.fenced_at = 0
        self.working = False
        self.writing: Write | None = None
        self.tick_sent_ms: int | None = None
        self.tick_awaited: Tick | None = None
        #: Rows of a failed transaction: written again, under newer ones.
        self.pending: dict[bytes, bytes | None] = {}
        self.later(world.rng.randint(0, 20), self._take_over)

    # --- life ---------------------------------------------------------------------------------------------------------

    def suffers(self) -> bool:
        world = self.world
        if world.hit(world.faults.tracker_crash):
            world.crash_owner(self)
            return True
        if world.hit(world.faults.tracker_pause):
            self.pause(world.rng.choice([100, 600, 2_500]))
            world.checker.stats["tracker_pauses"] += 1
            return True
        return False

    def _take_over(self) -> None:
        # 1. Fence.
        self._fence()
        self.later(self.world.rng.randint(0, 20), self._read_changelog)

    def _fence(self) -> None:
        self.epoch = self.transactions.fence()
        self.fenced_at = len(self.markers.records)
        self.world.checker.stats["fencings"] += 1

    def _read_changelog(self) -> None:
        # 2. The changelog, to its end, in several fetches.
        end = self.changelog.end(committed=True)
        chunk = min(end, self.table.position + self.world.rng.choice([5, 50, 1_000]))
        found = self.changelog.read(self.table.position, chunk, committed=True)
        self.table.write({record.key or b"": record.value for record in found}, chunk)
        if chunk < end:
            self.later(self.world.rng.randint(1, 10), self._read_changelog)
        else:
            self._restore()

    def _restore(self) -> None:
        # 3. The book, which must be the plain fold of the log up to its applied offset.
        self.tracker.book.restore(self.table.rows.items())
        applied = self.tracker.book.applied
        self.plain = self.world.plain_fold(self.partition, applied)
        if difference := self.plain.table_difference(self.table.rows):
            raise Violation("table-differs", f"partition {self.partition}: {difference}")
        self.world.checker.stats["restores"] += 1
        self.position = max(0, applied + 1 - self.world.rng.choice([0, 0, 3]))
        self._begin()

    def _begin(self) -> None:
        self.working = True
        self._work()

    def _work(self) -> None:
        """One turn of the owner's loop."""
        rng = self.world.rng
        if self.working:
            self._read()
            if self.writing is None:
                self._begin_write()
            self._check_patience()
        self.later(rng.randint(1, 40), self._work)

    def _own_tick(self) -> tuple[int, int] | None:
        """The offset and clock of the newest own TICK that was read back."""
        return self.plain.ticks.get(self.tracker.holder)

    def _check_patience(self) -> None:
        if self.tick_sent_ms is None or self.writing is not None:
            return
        if self.monotonic_ms() - self.tick_sent_ms > PATIENCE_MS:
            self._fail()

    # --- read ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        world, tracker = self.world, self.tracker
        end = self.markers.end(committed=True)
        if end > self.position:
            end = min(end, self.position + world.rng.choice([1, 3, 10, 100]))
            if world.hit(world.faults.late_read):
                end = world.rng.randint(self.position, end)
            for record in self.markers.read(self.position, end, committed=True):
                tracker.read(record.value, record.time_ms, record.offset)
                if record.offset > self.plain.applied:
                    self.plain.fold(record.about, record.time_ms, record.offset)
                if record.about is not None and record.about is self.tick_awaited:
                    self.tick_sent_ms = self.tick_awaited = None
            self.position = end
        tracker.saw(self.monotonic_ms())

    # --- write --------------------------------------------------------------------------------------------------------

    def _begin_write(self) -> None:
        world, tracker, rng = self.world, self.tracker, self.world.rng
        fires = tracker.due()
        tick = None
        if tracker.tick_in_ms(self.monotonic_ms()) == 0:
            tick = tracker.tick(self.monotonic_ms())
            self.tick_sent_ms, self.tick_awaited = self.monotonic_ms(), tick
        flush = (tracker.book.changed or bool(self.pending)) and rng.random() < world.flush_share
        if not (fires or tick or flush):
            return
        if tick and world.hit(world.faults.tick_lost):
            tick = None
        if tick and world.loose_ticks:
            world.schedule(rng.randint(1, 30), self._append_tick, tick)
            tick = None
        try:
            self._start(fires, tick, flush)
        except Fenced:
            self._fenced()

    def _append_tick(self, tick: Tick) -> None:
        """Some shell may write its TICKs through another producer than its facts."""
        self.markers.append(encode(tick), about=tick)

    def _start(self, fires: list[Fire], tick: Tick | None, flush: bool) -> None:
        rng = self.world.rng
        write = Write(self.transactions.begin(self.epoch))
        self.writing = write
        checker = self.world.checker
        for fire in fires:
            checker.fires(fire, self.plain, self._own_tick(), self.fenced_at)
        write.fires, write.tick = fires, tick
        write.markers = list(self.tracker.facts(fires))
        if tick is not None:
            # A shell is free to write it before, among or after the facts.
            write.markers.insert(rng.randint(0, len(write.markers)), tick)
        write.stages = ["copies", "markers"]
        if flush:
            if difference := self.plain.difference(self.tracker.book):
                raise Violation("book-differs", f"partition {self.partition}: {difference}")
            self.pending.update(self.tracker.book.take_changes())
            write.changes = dict(self.pending)
            write.quarantine = list(self.tracker.unreadable)
            write.stages += ["changes", "quarantine"]
        rng.shuffle(write.stages)
        self._stage(write)

    def _stage(self, write: Write) -> None:
        """Write a part of the transaction; it may fail, or be fenced, between any two."""
        world = self.world
        try:
            if not write.stages:
                self._commit(write)
                return
            self.transactions.check(self.epoch)
            if world.hit(world.faults.flush_aborted):
                self.transactions.decide(write.transaction, Outcome.ABORTED)
                self._show(write.transaction)
                self._aborted(write)
                return
            stage = write.stages.pop()
            if stage == "copies":
                self._write_copies(write)
            elif stage == "markers":
                for batch in write.markers:
                    self.markers.append(encode(batch), about=batch, transaction=write.transaction)
            elif stage == "changes":
                for key, row in write.changes.items():
                    self.changelog.append(row, key=key, transaction=write.transaction)
                write.position = len(self.changelog.records)
            else:
                for offset, value, _ in write.quarantine:
                    world.quarantine.append(value, about=(self.partition, offset), transaction=write.transaction)
        except Fenced:
            self._fenced()
            return
        if world.rng.random() < 0.5:
            self._stage(write)
        else:
            self.later(world.rng.randint(1, 15), self._stage, write)

    def _write_copies(self, write: Write) -> None:
        world = self.world
        for fire in write.fires:
            if fire.destination is Destination.NOWHERE:
                continue
            payload = self._payload(fire)
            world.checker.payload(fire, payload)
            made = copy(fire, payload, self.tracker.book.clock.now_ms, None)
            source = None if made.destination is Destination.DEAD_LETTERS else world.rng.choice(world.sources)
            target = world.dead_letters if source is None else world.messages[source]
            record = target.append(made.value, key=made.key, headers=made.headers, transaction=write.transaction)
            world.checker.copied(fire, made, source, record, write.transaction)

    def _payload(self, fire: Fire) -> Payload:
        payload = self.tracker.book.fresh_payload(fire.source, fire.offset)
        if payload is not None:
            return payload
        key = rows.row_key(fire.source, fire.offset)
        row = self.pending.get(key) or self.table.rows.get(key)
        if row is None:
            raise Violation("no-row", f"no row for {fire.source} {fire.offset}")
        return rows.decode_payload(row)

    def _commit(self, write: Write) -> None:
        world = self.world
        if world.hit(world.faults.flush_unknown):
            world.checker.stats["commits_unknown"] += 1
            if world.rng.random() < 0.5:
                self._decide_committed(write)
            self.later(world.rng.randint(1, PATIENCE_MS), self._unknown, write)
            return
        self._decide_committed(write)
        self.later(world.rng.randint(0, 3), self._written, write)

    def _decide_committed(self, write: Write) -> None:
        self.transactions.decide(write.transaction, Outcome.COMMITTED)
        self.world.checker.committed(write.fires)
        for offset, value, _ in write.quarantine:
            self.world.checker.quarantined[self.partition, offset] += 1
            if self.world.checker.garbage.get((self.partition, offset), b"?") != value:
                raise Violation("quarantine", f"{self.partition} {offset}: {value!r}")
        self._show(write.transaction)

    def _show(self, transaction: Transaction) -> None:
        """The broker writes the control records: at once, or a little later."""
        world = self.world
        if world.hit(world.faults.slow_commit):
            world.schedule(world.rng.randint(1, 50), transaction.show)
        else:
            transaction.show()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _written(self, write: Write) -> None:
        if not write.transaction.shown:
            # The next transaction begins when the broker is done with this one.
            self.later(2, self._written, write)
            return
        self.writing = None
        if write.changes:
            # Only now: a local table that is ahead of the changelog would never bring the changelog up to itself.
            self.table.write(self.pending, write.position)
            self.pending = {}
            del self.tracker.unreadable[: len(write.quarantine)]

    def _aborted(self, write: Write) -> None:
        """Nothing was written, and that is certain."""
        self.world.checker.stats["aborted"] += 1
        if write.tick is not None or self.world.rng.random() < 0.3:
            self._fail()
            return
        self.tracker.book.unfire(write.fires)
        self.later(1, self._after_abort, write)

    def _after_abort(self, write: Write) -> None:
        if write.transaction.shown:
            self.writing = None
        else:
            self.later(2, self._after_abort, write)

    def _unknown(self, write: Write) -> None:
        self._fail()

    def _fail(self) -> None:
        """After a failed transaction, or a TICK that does not come: fence anew, and believe only what the log says."""
        self.writing = None
        self.tick_sent_ms = None
        self.working = False
        self.later(self.world.rng.randint(1, 100), self._take_over_again)

    def _take_over_again(self) -> None:
        former_epoch = self.epoch
        self._fence()
        if self._overtaken(former_epoch):
            # What this owner has pending belongs to an older table than the one that is there now.
            self.world.checker.stats["overtaken"] += 1
            self._fenced()
            return
        self.tracker.take_over_again()
        self.working = True

    def _overtaken(self, former_epoch: int) -> bool:
        """Whether another owner was there since: to find the own applied offset in the changelog is not enough."""
        return self.epoch != former_epoch + 1

    def _fenced(self) -> None:
        self.alive = False
        self.world.checker.stats["fenced"] += 1
        self.world.owner_fenced(self)
