"""A consumer: how it takes part in its group, and what it fetches.

Steps 2 to 4 and renewals are those of the shipped receiver (reading.py), with a transaction for both in starting.py;
outcomes.py has the handlers and step 5. Which records are whose, and where each queue goes on, is marq's own code, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marq.kafka.offsets import Search
from marq.kafka.positions import Progress
from marq.kafka.records import Records
from marq.wire.markers import Source
from proof import history
from tests.simulation.actor import Actor
from tests.simulation.driving import Answer, drive
from tests.simulation.group import Group
from tests.simulation.log import TransactionalId
from tests.simulation.outcomes import Outcomes
from tests.simulation.reading import Reading, Writer
from tests.simulation.starting import Starting

if TYPE_CHECKING:
    from tests.simulation.world import World

POLL_MS = 40
MAX_HELD = 12


class Consumer(Actor):
    """One member of a group."""

    def __init__(self, world: World, group: Group, name: str, transactional_id: TransactionalId | None) -> None:
        super().__init__(world, name)
        self.starting = None if transactional_id is None else Starting(self, transactional_id)
        self.group = group
        self.serving = group.serving(self)
        self.progress = Progress()
        self.readings: dict[Source, Reading] = {}
        self.outcomes = Outcomes(self)
        self.writer = Writer(self)
        self.generation = 0
        self.stopping = False

    def suffers(self) -> bool:
        world, faults = self.world, self.world.faults
        if world.hit(faults.consumer_crash):
            self.crash()
            return True
        if world.hit(faults.consumer_pause):
            self.pause(world.rng.choice([50, 500, 2_000]))
            return True
        if not self.stopping and world.hit(faults.consumer_stop):
            self.stop()
        return False

    # --- membership ---------------------------------------------------------------------------------------------------

    def hear(self, version: int) -> None:
        """Serve what the definitions say: a new subscription takes all partitions away, and joins the group anew."""
        super().hear(version)
        wanted = self.group.serving(self)
        if wanted == self.serving or self.stopping:
            return
        self.serving = wanted
        self._revoke_all()
        self.world.stats["served_anew"] += 1
        if self in self.group.members:
            self.group.rebalance()
            # What is on its way from before was dealt out for the former queues.
            self.generation = self.group.generation - 1
        else:
            self.generation = self.group.generation

    def _revoke_all(self) -> None:
        self.world.history.add("nemesis", "info", "revoke", target=self.name)
        for reading in self.readings.values():
            reading.revoke()
        self.readings.clear()
        self.progress.clear()

    def assigned(self, generation: int, sources: list[Source]) -> None:
        """Learn of an assignment."""
        if generation <= self.generation:
            return
        missed = generation > self.generation + 1
        self.generation = generation
        if missed or self.group.eager:
            self._revoke_all()
        for source, reading in list(self.readings.items()):
            if source in sources:
                reading.generation = generation
            else:
                self.world.history.add("nemesis", "info", "revoke", target=self.name)
                reading.revoke()
                del self.readings[source]
        self._place([source for source in sources if source not in self.readings], generation)

    def _place(self, sources: list[Source], generation: int) -> None:
        """Look up where the group is in each partition, and then where other groups are."""
        if not sources or self.stopping or generation != self.generation:
            return
        if self.group.pending.of(sources):
            # A former owner's transaction may still move an offset.
            self.world.stats["waited_for_transactions"] += 1
            self.later(self.world.rng.randint(5, 30), self._place, sources, generation)
            return
        search = self._search(sources)
        self.later(self.world.rng.randint(0, 5), self._begin, sources, search, generation, self.known)

    def _search(self, sources: list[Source]) -> Search:
        world, group = self.world, self.group
        return Search(
            world.names,
            group.kafka_name,
            self.serving,
            sources,
            dict(group.committed),
            world.snapshots,
            room_bytes=world.metadata_room_bytes,
            new_id=lambda: f"snapshot-{next(world.snapshot_numbers)}",
        )

    def _begin(self, sources: list[Source], search: Search, generation: int, known: int) -> None:
        if self.stopping or generation != self.generation:
            return
        if known != self.known:
            self._place(sources, generation)
            return
        if search.needs_others:
            # A queue that came from another group goes on where that one is.
            if any(group.pending.of(sources) for group in self.world.groups):
                self.later(self.world.rng.randint(5, 30), self._place, sources, generation)
                return
            for group in self.world.groups:
                if group is not self.group:
                    search.consider(group.kafka_name, group.committed, self.world.snapshots)
        for source, place in search.places().items():
            if place.snapshot is not None:
                self.world.snapshots[place.snapshot.id] = place.snapshot
                self.world.stats["snapshots"] += 1
            reading = Reading(self, source, self.world.rng.getrandbits(64), generation, place.start)
            self.readings[source] = reading
            self.later(self.world.rng.randint(1, 40), self.outcomes.renew, reading.receiver)
            self.progress.begin(source, place.positions, place.start)
            self.later(self.world.rng.randint(0, 5), self._fetch, reading)

    def crash(self) -> None:
        """Kill -9: what it held is nobody's now, and the group finds out after the session timeout."""
        super().crash()
        world = self.world
        world.stats["consumer_crashes"] += 1
        world.schedule(world.rng.randint(50, 600), self.group.leave, self)
        kept = None
        if self.starting is not None and world.rng.random() < 0.5:
            # It has a name, and starts again under it.
            kept = self.starting.transactional_id
        world.schedule(world.rng.randint(100, 900), world.add_consumer, self.group, kept)

    def pause(self, duration_ms: int) -> None:
        super().pause(duration_ms)
        self.world.stats["consumer_pauses"] += 1
        if self.world.rng.random() < 0.5 and len(self.group.members) > 1:
            # Longer than the session timeout: the others read its partitions meanwhile.
            self.world.schedule(self.world.rng.randint(1, duration_ms), self._expel)

    def _expel(self) -> None:
        self.group.leave(self)
        self.later(self.world.rng.randint(0, 50), self._rejoin)

    def _rejoin(self) -> None:
        if not self.stopping and self not in self.group.members:
            self.group.join(self)

    def stop(self) -> None:
        """Stop in good order: give back what is held, which does not count as an attempt, and leave."""
        self.stopping = True
        self.world.stats["consumer_stops"] += 1
        self.world.history.add("nemesis", "info", "stop", target=self.name)
        self.outcomes.give_all_back()
        self.later(30, self._leave)

    def _leave(self) -> None:
        if not self.outcomes.written:
            self.later(30, self._leave)
            return
        self.group.leave(self)
        self.alive = False
        self.world.schedule(self.world.rng.randint(10, 300), self.world.add_consumer, self.group)

    @property
    def busy(self) -> bool:
        return self.outcomes.busy or any(reading.taking is not None for reading in self.readings.values())

    # --- 1 fetch ------------------------------------------------------------------------------------------------------

    def _fetch(self, reading: Reading) -> None:
        if reading.revoked or self.stopping:
            return
        world, rng = self.world, self.world.rng
        partition = world.messages[reading.source]
        if reading.position < partition.start:
            self._skip(reading, partition.start)
        end = partition.end(committed=self.group.committed_reads)
        if reading.position >= end or self.outcomes.held_count(reading.holder) > MAX_HELD:
            self.later(POLL_MS, self._fetch, reading)
            return
        end = min(end, reading.position + rng.randint(1, 8))
        if world.hit(world.faults.late_read):
            end = rng.randint(reading.position, end)
        read = partition.read(reading.position, end, committed=self.group.committed_reads)
        unmet = self.progress.unmet(self.serving, {reading.source: Records.of(read)} if read else {})
        if not read:
            # Nothing but the ends of transactions.
            reading.position = end
            self.later(self.world.rng.randint(0, 5), self._fetch, reading)
            return
        reading.taking, reading.began_ms = unmet[reading.source], self.monotonic_ms()
        reading.note("invoke")
        receiver = reading.receiver

        def ended(delivered: bool) -> None:
            if delivered:
                reading.position = end
            else:
                world.stats["acquire_not_certain" if self.starting is None else "start_not_certain"] += 1
            reading.taking = None
            self.later(rng.randint(0, 5) if delivered else rng.randint(5, 60), self._fetch, reading)

        drive(receiver.cycle(unmet), ended)

    def lease_ms(self, queue: str) -> int:
        return self.world.definitions.of(self).settings(queue).lease_ms

    async def wait(self, delay_ms: int) -> None:
        answer = Answer()
        self.later(delay_ms, answer.give)
        await answer

    def _skip(self, reading: Reading, start: int) -> None:
        """Retention was faster: what is gone is said, and reading goes on where the log begins."""
        source = history.log_name(reading.source)
        self.world.history.add(self.name, "ok", "skipped", source=source, start=reading.position, end=start)
        self.world.stats["skipped"] += 1
        reading.position = start
