"""The owner of a markers partition on a host that may keep its local table: the shell around marq/owner/engine.py.

A consumer with its own positions delivers the markers, starting at the group's committed offset. The applied offset is
a row of the owner's table, so the owner continues from there, even if the consumer delivers earlier markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lab.proof import history
from marq.core.deliveries.schedule_planner import Planner
from marq.core.redeliver_or_dead_letter import DueAction
from marq.core.storage import rows
from marq.core.storage.rows import State
from marq.core.storage.table_image import Place
from marq.core.tracker import Tracker
from marq.kafka.queue_records import payloads_in
from marq.kafka.records import Records
from marq.owner.engine import OwnerEngine, PositionLost, Step
from marq.settings.cron import Times
from marq.settings.queue import QueueSettings
from marq.settings.schedule_definitions import ScheduleLayers
from marq.wire.errors import UnknownVersion
from marq.wire.marker_codec import VERSION
from marq.wire.markers import Payload, Source, Tick
from tests.simulation.actor import Actor
from tests.simulation.log import Fenced, Record
from tests.simulation.oracle import Violation, difference, table_difference
from tests.simulation.sending import NEWER_VERSION
from tests.simulation.table import LocalTable
from tests.simulation.writing import Writing

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long an owner waits for a TICK or a transaction before it takes the partition over again.
PATIENCE_MS = 200


class Owner(Actor):
    """A tracker in one assignment of one markers partition; alive until it crashes, is told to stop, or is fenced."""

    def __init__(self, world: World, partition: int, table: LocalTable, name: str) -> None:
        super().__init__(world, name)
        self.partition = partition
        self.markers = world.markers[partition]
        self.changelog = world.changelogs[partition]
        self.transactions = world.transactional_ids[partition]
        self.table = table
        # The definitions are read to their end before anything else.
        self.known = world.definitions.newest
        world.history.add(name, "ok", "settings", version=self.known)
        self.writing = Writing(self)
        # Nothing is scheduled.
        planner = Planner(partition, len(world.markers), ScheduleLayers, Times(), world.limit_bytes)
        source = Source(world.names.markers, partition)
        self.engine = OwnerEngine(source, self._new_tracker, planner, self, self.acknowledge, world.limit_bytes)
        self.plain = world.plain_fold(partition, -1)
        #: Offset of the marker that the consumer delivers next.
        self.delivered = 0
        self.epoch = 0
        self.fenced_at = 0
        self.working = False
        self.copying = False
        self.halted = False
        #: Whether it waits for a worker that knows the version of the marker at which it stopped.
        self.waiting = False
        self.starved_until_ms = 0
        self.tick_sent_ms: int | None = None
        self.tick_awaited: Tick | None = None
        #: Offset of its newest own TICK that was read back.
        self.own_tick: int | None = None
        self.later(world.rng.randint(0, 20), self._take_over)

    def _new_tracker(self) -> Tracker:
        return Tracker(self.setting, self.world.rng.getrandbits(64))

    @property
    def tracker(self) -> Tracker:
        return self.engine.tracker

    @property
    def position(self) -> int:
        """The offset of the next record to read."""
        return self.engine.position or 0

    def setting(self, queue: str) -> QueueSettings:
        return self.world.definitions.of(self).settings(queue)

    def hear(self, version: int) -> None:
        if self.engine.unsent:
            # Decisions rest on the former settings until they are sent, and the history has to say so.
            self.later(20, self.hear, version)
            return
        super().hear(version)
        self.world.history.add(self.name, "ok", "settings", version=self.known)

    # --- life ---------------------------------------------------------------------------------------------------------

    def suffers(self) -> bool:
        world = self.world
        if world.hit(world.faults.tracker_crash):
            world.crash_owner(self)
            return True
        if world.hit(world.faults.tracker_pause):
            # A recovery that takes longer than the changelog remembers deletions is not covered.
            self.pause(world.rng.choice([100, 600, 2_500] if self.working else [100]))
            world.stats["tracker_pauses"] += 1
            return True
        if world.hit(world.faults.starved):
            self.starved_until_ms = world.now_ms + world.rng.choice([100, 800, 3_000])
            world.stats["starved"] += 1
        return False

    # --- the table ----------------------------------------------------------------------------------------------------

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        found = [self.table.rows.get(key) for key in keys]
        for key, row in zip(keys, found, strict=True):
            if row is None:
                raise Violation("no-row", f"no row for {rows.parse_row_key(key)}")
        return found

    def write(self, changes: Mapping[bytes, bytes | None], position: int) -> None:
        self.table.write(changes, position, self.world.now_ms)

    def acknowledge(self, applied: int) -> None:
        """Commit the position of the consumer."""
        self.world.tracker_offsets[self.partition] = applied + 1

    # --- take over ----------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        self._steps = self.engine.take_over()
        self._take_step()

    def _take_step(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self._note_owner()
            self.working = True
        elif step is Step.FENCE:
            self._fence()
        elif step is Step.RECOVER:
            self.table.prepare(self.world, self.changelog)
            self.later(self.world.rng.randint(0, 20), self._read_changelog)
        else:
            self._seek()

    def _fence(self) -> None:
        self.epoch = self.transactions.fence()
        self.fenced_at = len(self.markers.records)
        self.world.stats["fencings"] += 1
        if self.engine.fenced((0, self.epoch), self.monotonic_ms()):
            self.later(self.world.rng.randint(0, 20), self._take_step)
        else:
            # Another host was assigned the partition meanwhile; if it comes back to this worker, it has a new owner.
            self.world.stats["overtaken"] += 1
            self.fenced()

    def _read_changelog(self) -> None:
        """Read the changelog, to its end, in several fetches."""
        end = self.changelog.end(committed=True)
        chunk = min(end, self.table.position + self.world.rng.choice([5, 50, 1_000]))
        self.table.replay(self.changelog, chunk, self.world.now_ms)
        if chunk < end:
            self.later(self.world.rng.randint(1, 10), self._read_changelog)
        else:
            self._restore()

    def _restore(self) -> None:
        """Restore the book, which must be the plain fold of the log up to its applied offset."""
        # In the order of their keys, as RocksDB has them.
        for _ in self.engine.restoring(sorted(self.table.rows.items())):
            pass
        self.plain = self.world.plain_fold(self.partition, self.tracker.book.applied)
        if not self.world.blind and (wrong := table_difference(self.plain, self.table.rows)):
            raise Violation("table-differs", f"partition {self.partition}: {wrong}")
        self.world.stats["restores"] += 1
        self.later(self.world.rng.randint(0, 20), self._take_step)

    def _seek(self) -> None:
        try:
            position = self.engine.begin(self.markers.start, len(self.markers.records), self.monotonic_ms())
        except PositionLost as error:
            self.halt(str(error))
            return
        self.delivered = self.world.rng.choice([position, self.world.tracker_offsets[self.partition]])
        self._note_owner(position=position)
        self.working = True
        self._work()

    def _note_owner(self, **fields: int) -> None:
        holder, log = history.holder_name(self.tracker.holder), self.markers.name
        self.world.history.add(self.name, "ok", "own", holder=holder, log=log, fenced_at=self.fenced_at, **fields)

    def _check_log(self) -> None:
        self.engine.check_log(self.markers.start, len(self.markers.records))

    def halt(self, reason: str) -> None:
        """Stop with an alarm: an owner that went on would not know what it has missed."""
        self.working = False
        self.halted = True
        self.world.halt(self.partition)
        self.world.stats["position_lost"] += 1
        self.world.history.add(self.name, "ok", "halt", log=self.markers.name, reason=reason)

    def _work(self) -> None:
        """One turn of the owner's loop."""
        if self.working:
            try:
                if not self.engine.unsent:
                    self._read()
            except PositionLost as error:
                self.halt(str(error))
                return
            except UnknownVersion:
                self._wait_for_upgrade()
                return
            if self.writing.attempt is None:
                self._begin_write()
            self._copy()
            self._check_patience()
        self.later(self.world.rng.randint(1, 40), self._work)

    def _wait_for_upgrade(self) -> None:
        """Read, write and fire nothing of this partition until a newer worker has it."""
        self.working = False
        self.waiting = True
        self.world.stats["unknown_versions"] += 1

    def _check_patience(self) -> None:
        if self.tick_sent_ms is None or self.writing.attempt is not None:
            return
        if self.monotonic_ms() - self.tick_sent_ms > PATIENCE_MS:
            self.fail()

    # --- read ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        world, tracker = self.world, self.tracker
        if self.starved_until_ms > world.now_ms and world.faulty:
            tracker.saw(self.monotonic_ms())
            return
        # A broker reports that the next record to read is gone, even if nothing has come after it.
        self._check_log()
        start = max(self.delivered, self.markers.start)
        end = self.markers.end(committed=True)
        if start < end:
            end = min(end, start + world.rng.choice([1, 3, 10, 100]))
            if world.hit(world.faults.late_read):
                end = world.rng.randint(start, end)
            self.delivered = end
            if world.hit(world.faults.delivery_lost):
                # A rebalance drops records on their way; then the consumer restarts at its group's committed offset.
                self.later(world.rng.randint(1, 500), self._deliver_again)
            elif not self._fold(start, end):
                # Records were skipped: go back to this owner's position.
                self._check_log()
                world.stats["gaps"] += 1
                self.delivered = self.position
        tracker.saw(self.monotonic_ms())

    def _known(self, record: Record) -> Record:
        """Return a record as a newer worker reads it: the newer version happens to be written like this one."""
        value = record.value
        if self.world.upgraded and value is not None and value[:1] == NEWER_VERSION:
            return replace(record, value=bytes([VERSION]) + value[1:])
        return record

    def _deliver_again(self) -> None:
        self.delivered = self.world.tracker_offsets[self.partition]

    def _fold(self, start: int, end: int) -> bool:
        records = [self._known(record) for record in self.markers.read(start, end, committed=True)]
        try:
            return self.engine.read(records, start, end)
        finally:
            self._fold_plainly(records)

    def _fold_plainly(self, records: list[Record]) -> None:
        """Fold the records that the engine reports as folded."""
        tracker, plain = self.tracker, self.plain
        for record in records:
            if record.offset > tracker.book.applied:
                break
            if record.offset > plain.applied:
                plain.fold(self.world.marker_event(self.markers, record))
            batch = record.about
            if isinstance(batch, Tick) and batch.holder == tracker.holder:
                self.own_tick = max(self.own_tick or 0, record.offset)
            if batch is not None and batch is self.tick_awaited:
                self.tick_sent_ms = self.tick_awaited = None
        plain.applied = max(plain.applied, self.position - 1)

    # --- copy ---------------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Copy payloads from the records of messages; an answer may be late, and incomplete."""
        if not self.copying and (left := self.engine.missing() or self.engine.outliving(self.monotonic_ms())):
            self.copying = True
            self.later(self.world.rng.choice([1, 10, 10, 700]), self._copied, left)

    def _copied(self, left: Mapping[Place, Payload]) -> None:
        world = self.world
        copied: dict[Place, Payload | None] = {}
        for place, payload in left.items():
            if world.rng.random() < 0.9:
                found = world.messages[place.source].read(place.offset, place.offset + 1, committed=False)
                copied[place] = dict(payloads_in(world.names, place.source, Records.of(found), {place: payload})).get(
                    place
                )
                world.stats["copied"] += 1
                world.stats["gone"] += copied[place] is None
        self.copying = False
        self.engine.supply(copied)

    # --- write --------------------------------------------------------------------------------------------------------

    def _begin_write(self) -> None:
        world, rng, engine = self.world, self.world.rng, self.engine
        write = engine.next_write(self.monotonic_ms())
        assert write is not None or not engine.unsent, "a shell reads markers while messages are decided"
        if write is None and engine.owes_rows and rng.random() < world.flush_share:
            self.check_book()
            write = engine.rows()
        if write is None:
            return
        self._check_order([fire for fire, _ in write.due])
        if write.tick is not None:
            self.tick_sent_ms, self.tick_awaited = self.monotonic_ms(), write.tick
            if world.hit(world.faults.tick_lost):
                return
            if world.loose_ticks:
                # Some shell may write its TICKs through another producer than its facts.
                world.schedule(rng.randint(1, 30), world.append_marker, self.markers, write.tick)
                return
        try:
            self.writing.start(write)
        except Fenced:
            self.fenced()

    def _check_order(self, fires: list[DueAction]) -> None:
        order = [
            (lease.due_ms, lease.since_ms, lease.holder if lease.state is State.DELAYED else 0, fire.source)
            for fire in fires
            for lease in [fire.lease]
        ]
        if not self.world.blind and order != sorted(order):
            raise Violation("order", f"partition {self.partition}: {order}")

    def check_book(self) -> None:
        if not self.world.blind and (wrong := difference(self.plain, self.tracker.book)):
            raise Violation("book-differs", f"partition {self.partition}: {wrong}")

    # --- what becomes of a write --------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Fence again after a failed transaction or a missing TICK, and continue from the state of the log."""
        self.writing.attempt = None
        self.tick_sent_ms = None
        self.working = False
        self.later(self.world.rng.randint(1, 100), self._take_over)

    def fenced(self) -> None:
        self.alive = False
        self.world.stats["fenced"] += 1
        self.world.owner_fenced(self)
