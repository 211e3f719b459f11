"""The owner of a markers partition: the shell around the core's Tracker, on a host that may keep its local table.

1 fence, 2 read the changelog to its end, 3 restore the book, 4 TICK, 5 read markers and write: rows, copies, facts and
TICKs, each through one transactional id. Fencing comes before the changelog: the other way round, rows that the former
owner still commits are missed, and a row whose ACK is then folded together with its ACQUIRE is never deleted.

Markers are delivered by a consumer with positions of its own, which begins where its group has committed. What an owner
has applied is a row of its table, so it goes on from there, whatever is delivered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.core.errors import UnknownVersion
from marq.core.leases import Fire
from marq.core.marker_codec import VERSION
from marq.core.markers import Tick
from marq.core.queue import QueueSettings
from marq.core.tracker import Tracker
from proof import history
from tests.simulation.actor import Actor
from tests.simulation.log import Fenced
from tests.simulation.oracle import Violation, difference, table_difference
from tests.simulation.outcomes import NEWER_VERSION
from tests.simulation.table import LocalTable
from tests.simulation.writing import Write, Writing

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long an owner waits for a TICK or a transaction before it takes the partition over again.
PATIENCE_MS = 200


class PositionLost(Exception):
    """The log no longer has the records after the applied offset."""


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
        self.tracker = Tracker(self.setting, world.rng.getrandbits(64))
        self.plain = world.plain_fold(partition, -1)
        #: What is read next, and what the consumer delivers next.
        self.position = 0
        self.delivered = 0
        self.epoch = 0
        self.fenced_at = 0
        self.working = False
        self.halted = False
        #: For a worker that knows the version of the marker that it stopped at.
        self.waiting = False
        self.starved_until_ms = 0
        self.writing = Writing(self)
        self.tick_sent_ms: int | None = None
        self.tick_awaited: Tick | None = None
        #: Where the newest TICK of its own stands that was read back.
        self.own_tick: int | None = None
        self.later(world.rng.randint(0, 20), self._take_over)

    def setting(self, queue: str) -> QueueSettings:
        return self.world.definitions.of(self).settings(queue)

    def hear(self, version: int) -> None:
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

    def _take_over(self) -> None:
        # 1. Fence.
        self._fence()
        self.table.prepare(self.world, self.changelog)
        self.later(self.world.rng.randint(0, 20), self._read_changelog)

    def _fence(self) -> None:
        self.epoch = self.transactions.fence()
        self.fenced_at = len(self.markers.records)
        self.world.stats["fencings"] += 1

    def _read_changelog(self) -> None:
        # 2. The changelog, to its end, in several fetches.
        end = self.changelog.end(committed=True)
        chunk = min(end, self.table.position + self.world.rng.choice([5, 50, 1_000]))
        self.table.replay(self.changelog, chunk, self.world.now_ms)
        if chunk < end:
            self.later(self.world.rng.randint(1, 10), self._read_changelog)
        else:
            self._restore()

    def _restore(self) -> None:
        # 3. The book, which must be the plain fold of the log up to its applied offset.
        self.tracker.book.restore(self.table.rows.items())
        applied = self.tracker.book.applied
        self.plain = self.world.plain_fold(self.partition, applied)
        if not self.world.blind and (wrong := table_difference(self.plain, self.table.rows)):
            raise Violation("table-differs", f"partition {self.partition}: {wrong}")
        self.world.stats["restores"] += 1
        self.position = applied + 1
        self.delivered = self.world.rng.choice([self.position, self.world.tracker_offsets[self.partition]])
        try:
            self._check_log()
        except PositionLost as error:
            self.halt(str(error))
            return
        self._note_owner(position=self.position)
        self._begin()

    def _note_owner(self, **fields: int) -> None:
        holder, log = history.holder_name(self.tracker.holder), self.markers.name
        self.world.history.add(self.name, "ok", "own", holder=holder, log=log, fenced_at=self.fenced_at, **fields)

    def _check_log(self) -> None:
        if self.markers.start > self.position:
            raise PositionLost(f"position {self.position}, the log begins at {self.markers.start}")

    def halt(self, reason: str) -> None:
        """Stop with an alarm: an owner that went on would not know what it has missed."""
        self.working = False
        self.halted = True
        self.world.halt(self.partition)
        self.world.stats["position_lost"] += 1
        self.world.history.add(self.name, "ok", "halt", log=self.markers.name, reason=reason)

    def _begin(self) -> None:
        self.working = True
        self._work()

    def _work(self) -> None:
        """One turn of the owner's loop."""
        if self.working:
            try:
                self._read()
            except PositionLost as error:
                self.halt(str(error))
                return
            except UnknownVersion:
                self._wait_for_upgrade()
                return
            if self.writing.write is None:
                self._begin_write()
            self._check_patience()
        self.later(self.world.rng.randint(1, 40), self._work)

    def _wait_for_upgrade(self) -> None:
        """Nothing of this partition is read, written or fired until a newer worker has it."""
        self.working = False
        self.waiting = True
        self.world.stats["unknown_versions"] += 1

    def _check_patience(self) -> None:
        if self.tick_sent_ms is None or self.writing.write is not None:
            return
        if self.monotonic_ms() - self.tick_sent_ms > PATIENCE_MS:
            self.fail()

    # --- read ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        world, tracker = self.world, self.tracker
        if self.starved_until_ms > world.now_ms and world.faulty:
            tracker.saw(self.monotonic_ms())
            return
        # A broker says so when what is to be read next is gone, also when nothing has come after it.
        self._check_log()
        start = max(self.delivered, self.markers.start)
        end = self.markers.end(committed=True)
        if start < end:
            end = min(end, start + world.rng.choice([1, 3, 10, 100]))
            if world.hit(world.faults.late_read):
                end = world.rng.randint(start, end)
            self.delivered = end
            if start > self.position:
                # Records were passed over: go back to where this owner is.
                self._check_log()
                world.stats["gaps"] += 1
                self.delivered = self.position
            elif world.hit(world.faults.delivery_lost):
                # A rebalance drops what is on its way; then the consumer begins again where its group has committed.
                self.later(world.rng.randint(1, 500), self._deliver_again)
            else:
                self._fold(start, end)
        tracker.saw(self.monotonic_ms())

    def _known(self, value: bytes | None) -> bytes | None:
        """A newer worker knows the newer version, which happens to be written like this one."""
        if self.world.upgraded and value is not None and value[:1] == NEWER_VERSION:
            return bytes([VERSION]) + value[1:]
        return value

    def _deliver_again(self) -> None:
        self.delivered = self.world.tracker_offsets[self.partition]

    def _fold(self, start: int, end: int) -> None:
        tracker = self.tracker
        for record in self.markers.read(start, end, committed=True):
            tracker.read(self._known(record.value), record.timestamp, record.offset)
            if record.offset > self.plain.applied:
                self.plain.fold(self.world.marker_event(self.markers, record))
            batch = record.about
            if isinstance(batch, Tick) and batch.holder == tracker.holder:
                self.own_tick = max(self.own_tick or 0, record.offset)
            if batch is not None and batch is self.tick_awaited:
                self.tick_sent_ms = self.tick_awaited = None
        self.position = max(self.position, end)
        tracker.book.passed(self.position)
        self.plain.applied = max(self.plain.applied, self.position - 1)

    # --- write --------------------------------------------------------------------------------------------------------

    def _begin_write(self) -> None:
        world, tracker, rng = self.world, self.tracker, self.world.rng
        # What is moved is not sent before its asker can know that it is.
        self.writing.answers += tracker.answers()
        fires = [] if self.writing.answers else self._due()
        tick = None
        if tracker.tick_in_ms(self.monotonic_ms()) == 0:
            tick = tracker.tick(self.monotonic_ms())
            self.tick_sent_ms, self.tick_awaited = self.monotonic_ms(), tick
        flush = (tracker.book.changed or bool(self.writing.pending)) and rng.random() < world.flush_share
        if not (fires or tick or flush or self.writing.answers):
            return
        if tick and world.hit(world.faults.tick_lost):
            tick = None
        if tick and world.loose_ticks:
            # Some shell may write its TICKs through another producer than its facts.
            world.schedule(rng.randint(1, 30), world.append_marker, self.markers, tick)
            tick = None
        try:
            self.writing.start(fires, tick, flush=flush)
        except Fenced:
            self.fenced()

    def _due(self) -> list[Fire]:
        fires = self.tracker.due()
        order = [(fire.lease.due_ms, fire.lease.since_ms, fire.source) for fire in fires]
        if not self.world.blind and order != sorted(order):
            raise Violation("order", f"partition {self.partition}: {order}")
        return fires

    def check_book(self) -> None:
        if not self.world.blind and (wrong := difference(self.plain, self.tracker.book)):
            raise Violation("book-differs", f"partition {self.partition}: {wrong}")

    # --- what becomes of a write --------------------------------------------------------------------------------------

    def acknowledge(self, write: Write) -> None:
        """The rows are in the changelog, so the markers that they contain need not be delivered again."""
        self.world.tracker_offsets[self.partition] = write.applied + 1

    def fail(self) -> None:
        """After a failed transaction, or a TICK that does not come: fence anew, and believe only what the log says."""
        self.writing.write = None
        self.tick_sent_ms = None
        self.working = False
        self.later(self.world.rng.randint(1, 100), self._take_over_again)

    def _take_over_again(self) -> None:
        former_epoch = self.epoch
        self._fence()
        if self._overtaken(former_epoch):
            # What this owner has pending belongs to an older table than the one that is there now.
            self.world.stats["overtaken"] += 1
            self.fenced()
            return
        self.tracker.take_over_again()
        self._note_owner()
        self.working = True

    def _overtaken(self, former_epoch: int) -> bool:
        """Whether another owner was there since: to find the own applied offset in the changelog is not enough."""
        return self.epoch != former_epoch + 1

    def fenced(self) -> None:
        self.alive = False
        self.world.stats["fenced"] += 1
        self.world.owner_fenced(self)
