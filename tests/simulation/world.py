"""One seed is one world: its topics, its processes, its faults, and the order in which things happen.

``random.Random(seed)`` is the only source of choice. First a phase of faults, then one without, in which everything
must come to its end in bounded simulated time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marq.core import leases, tracker
from marq.core.backoff import Backoff
from marq.core.markers import MAGIC, Source
from marq.core.names import markers_partition
from marq.core.queue import QueueSettings
from tests.simulation import swarm
from tests.simulation.checker import Checker, Violation
from tests.simulation.consumer import Consumer
from tests.simulation.group import Group
from tests.simulation.log import Partition, TransactionalId
from tests.simulation.oracle import PlainFold
from tests.simulation.producer import Producer
from tests.simulation.tracker import LocalTable, Owner

#: How long the world may take to drain after the last fault, in simulated time.
DRAIN_MS = 60_000
MAX_EVENTS = 200_000
#: How often it is asked whether it has.
INSPECT_MS = 250
#: Hosts of trackers, each with its own disk.
HOSTS = 2


@dataclass
class Result:
    """What became of one seed; ``failed`` is empty when all is well."""

    seed: int
    failed: str
    check: str
    events: int
    duplicates: int
    stats: Counter[str]


class World:
    """Everything that one seed simulates."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_ms = 0
        self.events = 0
        self.faulty = True
        self._agenda: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self.faults = swarm.choose(rng)
        self.jumps = rng.random() < swarm.JUMP_SHARE
        self.faults_end_ms = rng.randint(2_000, 5_000)
        self.flush_share = rng.choice([0.1, 0.4, 1.0])
        self.loose_ticks = rng.random() < 0.25
        self.release_share = rng.choice([0.0, 0.1, 0.3])
        self.reject_share = rng.choice([0.0, 0.05])
        self._set_limits()
        self._make_topics()
        self._make_queues()
        self.checker = Checker(self.settings)
        self._make_processes()
        self._schedule_faults()

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _set_limits(self) -> None:
        """Small limits in many seeds, or no seed would come near them."""
        leases.MAX_FIRING = self.rng.choice([1, 3, 2_000])
        leases.MAX_STALE_HINTS = self.rng.choice([0, 5, 200_000])
        tracker.MAX_FACT_MARKERS = self.rng.choice([1, 2, 1_000])

    def _make_topics(self) -> None:
        self._start_ms = 1_700_000_000_000
        count = self.rng.randint(2, 3)
        self.sources = [Source("marq.messages", number) for number in range(count)]
        self.messages = {source: Partition(self.wall_ms) for source in self.sources}
        markers = self.rng.randint(2, 3)
        self.markers = [Partition(self.wall_ms) for _ in range(markers)]
        self.changelogs = [Partition(self.wall_ms) for _ in range(markers)]
        self.transactional_ids = [TransactionalId() for _ in range(markers)]
        self.dead_letters = Partition(self.wall_ms)
        self.quarantine = Partition(self.wall_ms)
        self.disks = [[LocalTable() for _ in range(markers)] for _ in range(HOSTS)]

    def _make_queues(self) -> None:
        rng = self.rng
        lease_ms = rng.choice([400, 600, 1_000])
        self.renew_ms = lease_ms // 3
        self.queues = ["a", "b", "ü"][: rng.randint(2, 3)]
        self.settings = {
            queue: QueueSettings(
                lease_ms=lease_ms,
                max_attempts=rng.randint(1, 5),
                backoff=Backoff(50, 2.0, 400, rng.random() < 0.5),
                dead_letter=rng.random() < 0.9,
            )
            for queue in self.queues
        }

    def setting(self, queue: str) -> QueueSettings:
        return self.settings[queue]

    def _make_processes(self) -> None:
        # One group serves two queues with one read; the third queue has a group of its own.
        self.groups = [Group(self, self.queues[:2])]
        if len(self.queues) > 2:
            self.groups.append(Group(self, self.queues[2:]))
        for group in self.groups:
            group.members = [Consumer(self, group) for _ in range(self.rng.randint(2, 3))]
            group.rebalance()
        self.producer = Producer(self, self.rng.randint(6, 24))
        self.owners: list[Owner] = []
        self.hosts = [self.rng.randrange(HOSTS) for _ in self.markers]
        self.former_owners: list[Owner] = []
        for partition, host in enumerate(self.hosts):
            self.owners.append(Owner(self, partition, self.disks[host][partition]))

    def _schedule_faults(self) -> None:
        self.schedule(self.faults_end_ms, self._end_faults)
        for mean_ms, happen in (
            (self.faults.rebalance_every_ms, self._rebalance),
            (self.faults.tracker_rebalance_every_ms, self._move_owner),
            (50.0 if self.faults.clock_step else 0.0, self._step_clock),
            (100.0 if self.faults.garbage else 0.0, self._write_garbage),
            (1_500.0 if self.jumps else 0.0, self._jump_clock),
        ):
            if mean_ms:
                self._repeat(mean_ms, happen)

    def _repeat(self, mean_ms: float, happen: Callable[[], None]) -> None:
        self.schedule(int(self.rng.expovariate(1 / mean_ms)) + 1, self._happen, mean_ms, happen)

    def _happen(self, mean_ms: float, happen: Callable[[], None]) -> None:
        if self.faulty:
            self.checker.faults += 1
            happen()
            self._repeat(mean_ms, happen)

    # --- time and chance ----------------------------------------------------------------------------------------------

    def schedule(self, delay_ms: int, step: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (self.now_ms + delay_ms, self._sequence, step, arguments))

    def hit(self, chance: float) -> bool:
        """Draw whether a fault of this chance happens now."""
        if not (self.faulty and chance > 0 and self.rng.random() < chance):
            return False
        self.checker.faults += 1
        return True

    def wall_ms(self) -> int:
        return self._start_ms + self.now_ms

    def run(self) -> None:
        while True:
            self.now_ms, _, step, arguments = heapq.heappop(self._agenda)
            self.events += 1
            if self.events > MAX_EVENTS:
                raise Violation("stuck", f"{self.events} events and no end")
            step(*arguments)
            if step == self._inspect and self._drained():
                return

    # --- topics -------------------------------------------------------------------------------------------------------

    def markers_of(self, source: Source) -> Partition:
        return self.markers[markers_partition(source.topic, source.partition, len(self.markers))]

    def plain_fold(self, partition: int, applied: int) -> PlainFold:
        """Fold the raw log of a markers partition from its beginning."""
        plain = PlainFold(self.setting)
        for record in self.markers[partition].records[: applied + 1]:
            if record is not None and record.committed:
                plain.fold(record.about, record.time_ms, record.offset)
        return plain

    # --- what befalls the world ---------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        self.rng.choice(self.groups).rebalance()

    def _move_owner(self) -> None:
        """A markers partition gets another owner; the former one hears of it late."""
        partition = self.rng.randrange(len(self.markers))
        former = self.owners[partition]
        self.checker.stats["tracker_rebalances"] += 1
        self.hosts[partition] = (self.hosts[partition] + 1) % HOSTS
        self.former_owners.append(former)
        if self.rng.random() < 0.5:
            former.pause(self.rng.randint(10, 1_000))
        self.schedule(self.rng.randint(0, 1_500), self._stop_owner, former)
        self._start_owner(partition)

    def _stop_owner(self, owner: Owner) -> None:
        owner.alive = False

    def _start_owner(self, partition: int) -> None:
        """The assigned host owns the partition; what an earlier owner on the same host is doing ends with that."""
        host = self.hosts[partition]
        table = self.disks[host][partition]
        for former in self.former_owners:
            if former.table is table:
                former.alive = False
        self.owners[partition] = Owner(self, partition, table)

    def crash_owner(self, owner: Owner) -> None:
        """Kill -9, with the disk or without it; an open transaction stays open until somebody fences it."""
        owner.crash()
        self.checker.stats["tracker_crashes"] += 1
        if self.hit(self.faults.table_lost):
            owner.table.rows = {}
            owner.table.position = 0
        self.owner_fenced(owner)

    def owner_fenced(self, owner: Owner) -> None:
        if self.owners[owner.partition] is owner:
            self.schedule(self.rng.randint(1, 300), self._restart_owner, owner)

    def _restart_owner(self, owner: Owner) -> None:
        if self.owners[owner.partition] is owner:
            self._start_owner(owner.partition)

    def _step_clock(self) -> None:
        """A leader's wall clock is set a little forward or back."""
        if self.rng.random() < 0.3:
            self.rng.choice(self.markers).skew_ms = self.rng.randint(-60, 60)
            self.checker.stats["clock_steps"] += 1

    def _jump_clock(self) -> None:
        """A leader's clock is set by more than the log clock tolerates."""
        self.rng.choice(self.markers).skew_ms += self.rng.choice([-1, 1]) * self.rng.randint(5_500, 15_000)
        self.checker.excuse_all("clock jump")
        self.checker.stats["clock_jumps"] += 1

    def _write_garbage(self) -> None:
        number = self.rng.randrange(len(self.markers))
        value = self.rng.choice([None, b"", b"\x01" + MAGIC, b"???" + self.rng.randbytes(30)])
        record = self.markers[number].append(value)
        self.checker.garbage[number, record.offset] = value

    def add_consumer(self, group: Group) -> None:
        group.join(Consumer(self, group))

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end_faults(self) -> None:
        self.faulty = False
        for former in self.former_owners:
            former.alive = False
        # Pauses end by themselves.
        for group in self.groups:
            if self.checker.faults:
                group.rebalance()
        self.schedule(INSPECT_MS, self._inspect)

    def _inspect(self) -> None:
        if self.now_ms > self.faults_end_ms + DRAIN_MS:
            raise Violation("stuck", self._what_is_left())
        self.schedule(INSPECT_MS, self._inspect)

    def _drained(self) -> bool:
        return (
            self.producer.unsent <= 0
            and all(self._group_is_done(group) for group in self.groups)
            and all(self._owner_is_done(owner) for owner in self.owners)
        )

    def _group_is_done(self, group: Group) -> bool:
        ends = {source: partition.end(committed=group.committed_reads) for source, partition in self.messages.items()}
        busy = any(
            reading.held or reading.outbox or reading.taking
            for member in group.members
            for reading in member.all_readings()
        )
        return not busy and all(group.offsets.get(source, 0) >= end for source, end in ends.items())

    def _owner_is_done(self, owner: Owner) -> bool:
        book = owner.tracker.book
        return (
            owner.alive
            and owner.working
            and owner.writing is None
            and not owner.pending
            and not book.changed
            and len(book) == 0
            and owner.position >= len(owner.markers.records)
        )

    def _what_is_left(self) -> str:
        lags = [len(owner.markers.records) - owner.position for owner in self.owners]
        books = [len(owner.tracker.book) for owner in self.owners]
        offsets = [group.offsets for group in self.groups]
        return f"unsent {self.producer.unsent}, tracker lags {lags}, open {books}, offsets {offsets}"

    def check_end(self) -> int:
        """Check what must hold of the whole history; return the duplicates."""
        for partition, changelog in enumerate(self.changelogs):
            table = LocalTable()
            found = changelog.read(0, len(changelog.records), committed=True)
            table.write({record.key or b"": record.value for record in found}, 0)
            applied = self.owners[partition].tracker.book.applied
            if difference := self.plain_fold(partition, applied).table_difference(table.rows):
                raise Violation("table-differs", f"changelog of partition {partition}: {difference}")
            left = [key for key in table.rows if key[:1] in b"rs"]
            if left:
                raise Violation("rows-left", f"changelog of partition {partition}: {left[:3]}")
            if table.rows != self.owners[partition].table.rows:
                raise Violation("table-differs", f"local table of partition {partition} is not its changelog")
        self.checker.check_nothing_lost(
            {queue: group.committed_reads for group in self.groups for queue in group.queues}
        )
        stats = self.checker.stats
        self.checker.check_quarantine(certain=not (stats["commits_unknown"] or stats["aborted"] or stats["fenced"]))
        return self.checker.check_duplicates()


def simulate(seed: int) -> Result:
    """Run one seed to its end."""
    world = World(seed)
    failed = check = ""
    duplicates = 0
    try:
        world.run()
        duplicates = world.check_end()
    except Violation as violation:
        failed, check = str(violation), violation.check
    except Exception as error:  # The core raised: a seed that fails, not a simulator that stops.
        failed, check = f"raised: {type(error).__name__}: {error}", "raised"
    world.checker.stats["calm"] += not world.checker.faults
    return Result(seed, failed, check, world.events, duplicates, world.checker.stats)
