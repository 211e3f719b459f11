"""One seed is one world: its topics, its processes, its faults, and the order in which things happen.

``random.Random(seed)`` is the only source of choice. A phase with faults is followed by one without, in which every
message must end in bounded simulated time. All events go into a history, which lab/proof/checker.py judges. While the
world runs, oracle.py checks the state that no history shows.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from lab.proof import history
from lab.proof.checker import check
from lab.proof.findings import Finding, Report
from lab.proof.fold import Fold
from lab.proof.history import History
from marq.core import lease_book, tracker
from marq.kafka.queue_positions import MAX_METADATA_BYTES, OffsetSnapshot
from marq.leases.message import Message
from marq.owner import engine
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.marker_codec import encode
from marq.wire.markers import Batch, Source
from marq.wire.names import Names, markers_partition
from tests.simulation import ending, swarm
from tests.simulation.actor import Actor
from tests.simulation.chance import Chance
from tests.simulation.consumer import Consumer
from tests.simulation.definitions import QueuesTopic
from tests.simulation.delaying import Delayer
from tests.simulation.expiring import Expiring
from tests.simulation.group import Group
from tests.simulation.log import Partition, Record, TransactionalId
from tests.simulation.loop import Loop
from tests.simulation.nemesis import OWN_TOPIC, Nemesis
from tests.simulation.oracle import Violation
from tests.simulation.ordering import Ordering
from tests.simulation.producer import Producer
from tests.simulation.purging import Purger
from tests.simulation.sending import simulated_modules
from tests.simulation.table import LocalTable
from tests.simulation.tracker import Owner

MAX_EVENTS = 200_000
#: Hosts of trackers, each with its own disk.
HOSTS = 2
#: Faults by which an at-most-once queue, too, delivers messages twice: causes 8, 9 and 11 of docs/guarantees.md; and a
#: consumer that does not learn that its transaction was committed reads the messages again, perhaps when their leases
#: have ended.
_DOUBLING = ("offsets_lost_every_ms", "move_every_ms", "suspended", "commit_unknown")


@dataclass
class Result:
    """The result of one seed; ``failed`` is empty if all is well."""

    seed: int
    failed: str = ""
    check: str = ""
    events: int = 0
    duplicates: int = 0
    stats: Counter[str] = field(default_factory=Counter)
    causes: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Plan:
    """Settings of a world besides its seed: faults that it does not have, or the only ones that it has.

    ``blind``: only the history is checked, as in a run on a real broker.
    """

    without: frozenset[str] = frozenset()
    faults: swarm.Rare | None = None
    messages: int | None = None
    #: How many messages are delayed by their sender.
    delayed: int | None = None
    #: Whether some of them have deduplication ids.
    ids: bool = True
    blind: bool = False
    #: How many worlds purge queues.
    purges: float = 0.1
    #: How many messages expire, and how many queues let them; None: drawn for each world.
    expires: float | None = None
    #: Priorities of the queues, in turn; without any, some are drawn for few worlds.
    priorities: tuple[int, ...] = ()


class World:
    """Everything that one seed simulates."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        plan = plan or Plan()
        self.rng = rng = Chance(seed)
        self.now_ms = 0
        self.events = 0
        self.faulty = True
        self.blind = plan.blind
        self.has_ids = plan.ids
        self.fault_count = 0
        self.stats: Counter[str] = Counter()
        self.history = History()
        self._agenda: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        faults = swarm.choose(rng, plan.without)
        self.faults = plan.faults or faults
        self.faults_end_ms = rng.randint(2_000, 5_000)
        self.flush_share = rng.choice([0.1, 0.4, 1.0])
        self.loose_ticks = rng.random() < 0.25
        self.release_share = rng.choice([0.0, 0.1, 0.3])
        self.reject_share = rng.choice([0.0, 0.05])
        # Drawn separately, so that worlds without such consumers stay as they were.
        self._start_lots = random.Random(f"start {seed}")
        #: How many consumers acquire and commit in one transaction.
        self.transactional_share = self._start_lots.choice([0.0, 0.0, 0.5, 1.0])
        # Likewise for worlds in which nothing is delayed.
        self._delay_lots = random.Random(f"delay {seed}")
        #: How many records are to be delivered later by a header.
        self.deliver_at_share = self._delay_lots.choice([0.0, 0.0, 0.1, 0.5])
        #: Snapshots of groups, how much room their commits have for names without one, and for differences from one.
        self.snapshots: dict[str, OffsetSnapshot] = {}
        self.snapshot_numbers = itertools.count()
        room_lots = random.Random(f"room {seed}")
        self.plain_metadata_bytes = room_lots.choice([1, 40, MAX_METADATA_BYTES])
        self.metadata_room_bytes = room_lots.choice([1, 64, 72, MAX_METADATA_BYTES])
        #: Whether one queue delivers at most once.
        self.at_most_once = random.Random(f"once {seed}").random() < 0.25
        if self.at_most_once and plan.faults is None:
            self.faults = replace(self.faults, **dict.fromkeys(_DOUBLING, 0.0))
        self.at_most_once &= not any(getattr(self.faults, name) for name in _DOUBLING)
        #: How many slow handlers renew their messages themselves, and how many handlers are slow.
        self.renew_share = random.Random(f"renew {seed}").choice([0.0, 0.0, 0.5])
        self.slow_share = random.Random(f"slow {seed}").choice([0.1, 0.1, 0.5])
        #: Whether queues may share a topic.
        self.shares_topic = random.Random(f"topic {seed}").random() < 0.5
        #: Whether some messages of queues' own topics do not fit into a marker.
        self.has_large = random.Random(f"large {seed}").random() < 0.5
        #: After how long the handler of the message that ends its process does so.
        self.killer_ms = random.Random(f"killer {seed}").choice([0, 60, 300])
        self.ordering = Ordering(seed)
        #: Messages of queues that go by keys whose handlers have not returned.
        self.running: dict[Message, Consumer] = {}
        self.expiring = Expiring(seed, plan.expires)
        #: Drawn separately, so that worlds without purges stay as they were.
        self._purge_lots = random.Random(f"purge {seed}")
        #: For deduplication ids, and how long queues remember them: often for less than the time of a seed.
        self.id_lots = random.Random(f"ids {seed}")
        self.window_s = self.id_lots.choice([0.3, 1.0, 3.0, 60.0])
        self._copies_at_once = random.Random(f"copies {seed}").choice([1, 3, 2_000])
        self._set_limits()
        self._make_topics()
        self._make_queues(plan)
        self._make_processes(plan)
        self.nemesis = Nemesis(self)

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _set_limits(self) -> None:
        """Set small limits in many seeds, or no seed would come near them."""
        self._limits = (
            self.rng.choice([1, 3, 2_000]),
            self.rng.choice([0, 5, 200_000]),
            self.rng.choice([1, 2, 1_000]),
        )
        # The shared topic accepts less than a queue's own, and less than the trackers know: copies may be refused.
        self.limit_bytes, self.shared_limit_bytes = 3_000, 2_000

    def _make_topics(self) -> None:
        self._start_ms = 1_700_000_000_000
        self.names = Names("marq")
        self.shared_sources = [Source(self.names.messages, number) for number in range(self.rng.randint(2, 3))]
        self.own_sources = [Source(OWN_TOPIC, number) for number in range(2)]
        self.sources = self.shared_sources + self.own_sources
        limits = {self.names.messages: self.shared_limit_bytes, OWN_TOPIC: self.limit_bytes}
        self.messages = {s: Partition(history.log_name(s), self.wall_ms, limits[s.topic]) for s in self.sources}
        self.history.add(self.names.messages, "ok", "limit", log=self.names.messages, bytes=self.shared_limit_bytes)
        # Quiet partitions: in some worlds all messages go to one.
        quiet = self.rng.random() < 0.2
        self.busy_sources = [self.shared_sources[0], self.own_sources[0]] if quiet else self.sources
        count = self.rng.randint(2, 3)
        self.markers = [Partition(f"{self.names.markers}/{number}", self.wall_ms) for number in range(count)]
        self.changelogs = [self.new_changelog(number) for number in range(count)]
        self.transactional_ids = [TransactionalId() for _ in range(count)]
        self.dead_letters = Partition(f"{self.names.dead_letters}/0", self.wall_ms)
        self.quarantine = Partition(f"{self.names.quarantine}/0", self.wall_ms)
        self.disks = [[LocalTable() for _ in range(count)] for _ in range(HOSTS)]
        #: Committed offsets of the trackers' group; and the last marker records whose rows are in the changelogs.
        self.tracker_offsets = [0] * count
        self.durable_applied = [-1] * count
        self.halted: set[int] = set()
        self.upgraded = False
        self._marker_events: dict[tuple[str, int], history.Event] = {}

    def new_changelog(self, number: int) -> Partition:
        return Partition(f"{self.names.changelog}/{number}", self.wall_ms)

    def _make_queues(self, plan: Plan) -> None:
        rng = self.rng
        self.lease_ms = rng.choice([400, 600, 2_000])
        self.queues = ["a", "b", "ü"][: rng.randint(2, 3)]
        self._living: list[Actor] = []
        self.definitions = QueuesTopic(self)
        documents = {queue: self.document() for queue in self.queues}
        # Two queues are served with one read; the third has a group of its own.
        for queue in self.queues[:2]:
            documents[queue]["group"] = "g"
        if rng.random() < 0.5:
            documents[self.queues[-1]]["topic"] = OWN_TOPIC
            if self.shares_topic:
                self._share_topic(documents)
        if self.at_most_once:
            documents[rng.choice(self.queues)]["delivery"] = AT_MOST_ONCE
        self.ordering.choose(documents, plan.priorities)
        self.expiring.choose(documents)
        self.definitions.begin({"lease": self.lease_ms / 1000}, documents)

    def _share_topic(self, documents: dict[str, dict[str, Any]]) -> None:
        """Let another queue, in another group, name the topic of the last one."""
        last, other = documents[self.queues[-1]], documents[self.queues[-2]]
        other["topic"] = OWN_TOPIC
        if "group" in last:
            del other["group"]
        self.stats["subscriptions"] += 1

    def document(self) -> dict[str, Any]:
        """Return settings of a queue."""
        rng = self.rng
        chance = rng.random()
        backoff: Any = {"base": 0.05, "factor": 2.0, "max": 0.4, "jitter": chance < 0.5}
        if chance > 0.85:
            backoff = {"delays": [0.05, 0, 0.4], "jitter": chance > 0.95}
        return {
            "max_attempts": rng.randint(1, 5),
            "dead_letter": rng.random() < 0.9,
            "backoff": backoff,
            "deduplication_window": self.window_s,
        }

    def _make_processes(self, plan: Plan) -> None:
        self._numbers: Counter[str] = Counter()
        self._loops: list[Loop] = []
        self.groups = [Group(self, name="g"), *[Group(self, queue=queue) for queue in self.queues]]
        if self.faults.move_every_ms:
            self.groups.append(Group(self, name="h"))
        for group in self.groups:
            group.members = [self._consumer(group) for _ in range(self.rng.randint(1, 3))]
            group.rebalance()
        count = self.rng.randint(6, 24)
        self.producer = Producer(self, count if plan.messages is None else plan.messages)
        delayed = self._delay_lots.choice([0, 0, self._delay_lots.randint(1, 20)])
        delayed = delayed if plan.delayed is None else plan.delayed
        self.delayer = Delayer(self, delayed, self._delay_lots) if delayed else None
        self.owners: list[Owner] = []
        self.hosts = [self.rng.randrange(HOSTS) for _ in self.markers]
        self.former_owners: list[Owner] = []
        for partition in range(len(self.markers)):
            self.owners.append(self._owner(partition))
        lots = self._purge_lots
        self.purger = Purger(self, lots) if lots.random() < plan.purges else None
        self._living.append(self.producer)
        if self.purger is not None:
            self._living.append(self.purger)
        if self.delayer is not None:
            self._living.append(self.delayer)

    def _consumer(self, group: Group, transactional_id: TransactionalId | None = None) -> Consumer:
        self._numbers["consumer"] += 1
        if transactional_id is None and self._start_lots.random() < self.transactional_share:
            transactional_id = TransactionalId()
        consumer = Consumer(self, group, f"consumer-{self._numbers['consumer']}", transactional_id)
        self._living.append(consumer)
        self._loops.append(consumer.loop)
        return consumer

    def _owner(self, partition: int) -> Owner:
        self._numbers["tracker"] += 1
        table = self.disks[self.hosts[partition]][partition]
        owner = Owner(self, partition, table, f"tracker-{self._numbers['tracker']}")
        self._living.append(owner)
        return owner

    def living(self) -> list[Actor]:
        """All processes that have not ended."""
        self._living = [actor for actor in self._living if actor.alive]
        return self._living

    # --- time and chance ----------------------------------------------------------------------------------------------

    def schedule(self, delay_ms: int, step: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._agenda, (self.now_ms + delay_ms, self._sequence, step, arguments))

    def hit(self, chance: float) -> bool:
        """Draw whether a fault of this chance happens now."""
        if chance <= 0 or not self.faulty or self.rng.random() >= chance:
            return False
        self.fault_count += 1
        return True

    def wall_ms(self) -> int:
        return self._start_ms + self.now_ms

    def run(self) -> None:
        """Process all scheduled events, and return when all is done."""
        limits = lease_book.MAX_FIRING, lease_book.MAX_STALE_HINTS, tracker.MAX_FACT_MARKERS
        lease_book.MAX_FIRING, lease_book.MAX_STALE_HINTS, tracker.MAX_FACT_MARKERS = self._limits
        copies = engine.MAX_COPIES
        engine.MAX_COPIES = self._copies_at_once
        try:
            with simulated_modules():
                self._run()
        finally:
            lease_book.MAX_FIRING, lease_book.MAX_STALE_HINTS, tracker.MAX_FACT_MARKERS = limits
            engine.MAX_COPIES = copies
            for loop in self._loops:
                loop.close()

    def _run(self) -> None:
        self.schedule(self.faults_end_ms, self._end_faults)
        inspector = ending.Inspector(self)
        agenda = self._agenda
        while not inspector.drained:
            self.now_ms, _, step, arguments = heappop(agenda)
            self.events += 1
            if self.events > MAX_EVENTS:
                raise Violation("stuck", f"{self.events} events and no end")
            step(*arguments)

    def _end_faults(self) -> None:
        self.faulty = False
        self.upgraded = True
        for former in self.former_owners:
            former.alive = False
        for partition, owner in enumerate(self.owners):
            if owner.waiting:
                self.start_owner(partition)
        # Pauses end by themselves.
        for group in self.groups:
            if self.fault_count:
                group.rebalance()

    # --- topics -------------------------------------------------------------------------------------------------------

    def markers_of(self, source: Source) -> Partition:
        return self.markers[markers_partition(source.topic, source.partition, len(self.markers))]

    def append_marker(self, log: Partition, batch: Batch) -> None:
        log.append(encode(batch), about=batch)

    def marker_event(self, log: Partition, record: Record) -> history.Event:
        """Return the event of a record of a markers log, from what its writer meant: the codec is not trusted."""
        place = (log.name, record.offset)
        event = self._marker_events.get(place)
        if event is None:
            event = history.marker(log.name, record.offset, record.timestamp, record.about, record.value)
            self._marker_events[place] = event
        return event

    def marker_events(self, partition: int, end: int) -> Iterator[history.Event]:
        """Yield the committed events of a markers log up to an offset, even if retention has removed their records."""
        log = self.markers[partition]
        for record in log.records[:end]:
            if record is not None and record.committed:
                yield self.marker_event(log, record)

    def plain_fold(self, partition: int, applied: int) -> Fold:
        """Fold the raw log of a markers partition from its beginning."""
        plain = Fold(self.definitions.settings_of)
        for event in self.marker_events(partition, applied + 1):
            plain.fold(event)
        # Kafka's own records count as read, too.
        plain.applied = applied
        return plain

    # --- processes ----------------------------------------------------------------------------------------------------

    def add_consumer(self, group: Group, transactional_id: TransactionalId | None = None) -> None:
        group.join(self._consumer(group, transactional_id))

    def start_owner(self, partition: int) -> None:
        """Make the assigned host own the partition; this ends what an earlier owner on the same host is doing."""
        table = self.disks[self.hosts[partition]][partition]
        for former in [*self.former_owners, self.owners[partition]]:
            if former.table is table:
                former.alive = False
        self.owners[partition] = self._owner(partition)

    def crash_owner(self, owner: Owner) -> None:
        """Kill -9 an owner, with its disk or without; its transaction stays open until a new producer fences it."""
        owner.crash()
        self.stats["tracker_crashes"] += 1
        if self.hit(self.faults.table_lost):
            owner.table.discard()
        self.owner_fenced(owner)

    def owner_fenced(self, owner: Owner) -> None:
        if self.owners[owner.partition] is owner:
            self.schedule(self.rng.randint(1, 300), self._restart_owner, owner)

    def _restart_owner(self, owner: Owner) -> None:
        if self.owners[owner.partition] is owner:
            self.start_owner(owner.partition)

    def halt(self, partition: int) -> None:
        self.halted.add(partition)


def simulate(seed: int, plan: Plan | None = None) -> Result:
    """Run one seed to its end."""
    with _without_collections():
        result, _, world = inspect(seed, plan)
        # Its processes refer to it and to each other: without this, only the garbage collector could free its history.
        vars(world).clear()
    return result


def inspect(seed: int, plan: Plan | None = None) -> tuple[Result, list[Finding], World]:
    """Run one seed to its end; return what was found, and the world with its history."""
    with _without_collections():
        return _inspect(seed, plan)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn garbage collection off while a world grows: it ends soon, and only then is there garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _inspect(seed: int, plan: Plan | None) -> tuple[Result, list[Finding], World]:
    world = World(seed, plan)
    result = Result(seed, stats=world.stats)
    report = Report()
    try:
        world.run()
        ending.check_blame(world)
        if not world.blind:
            ending.check_end(world)
    except Violation as violation:
        result.failed, result.check = str(violation), violation.check
    except Exception as error:  # The core raised: a seed that fails, not a simulator that stops.
        result.failed, result.check = f"raised: {type(error).__name__}: {error}", "raised"
    if result.check in ("", "stuck"):
        # The checker may know the cause if the world did not drain.
        ending.read_logs(world)
        report = check(world.history.events)
        _judge(result, report, world)
    world.stats["calm"] += not world.fault_count
    result.events = world.events
    return result, report.findings, world


def _judge(result: Result, report: Report, world: World) -> None:
    result.duplicates = report.duplicates
    result.causes = report.causes
    for name in ("lost", "expired_unread", "message_expired", "stranded", "deduplicated", "purged"):
        world.stats[name] += getattr(report, name)
    told = [each for each in report.findings if not result.failed or each.property not in _UNFINISHED]
    if told:
        result.failed, result.check = str(told[0]), told[0].property
    elif report.duplicates and not world.fault_count:
        result.failed, result.check = f"unexplained: {report.duplicates} duplicates and no fault", "unexplained"


#: Findings that are expected in every world that was stopped in the middle.
_UNFINISHED = {"lost", "not-drained", "quarantine", "transaction"}
