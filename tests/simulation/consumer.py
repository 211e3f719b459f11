"""A consumer, step by step: 1 fetch, 2 write ACQUIRE, 3 commit, 4 hand out; outcomes.py has step 5, and starting.py
what becomes of 2 and 3 when they are one transaction.

ACQUIRE comes before the commit: the other way round, a crash between the two loses messages, for nobody reads them
again and no tracker knows of them. An ACQUIRE or a commit that did not certainly succeed hands nothing out; the
consumer reads again from the committed offset. Which records are whose, and where each queue goes on, is decided by
marq's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from marq.core.copies import deliver_at_ms, origin
from marq.core.markers import NOW, Acquire, Columns, Payload, Source, spans
from marq.offsets import Committed, Search
from marq.positions import Progress
from marq.records import Records
from proof import history
from tests.simulation.actor import Actor
from tests.simulation.group import Commit, Group
from tests.simulation.log import Record, TransactionalId
from tests.simulation.outcomes import Outcomes, Sent
from tests.simulation.starting import Cycle, Starting

if TYPE_CHECKING:
    from tests.simulation.world import World

POLL_MS = 40
MAX_HELD = 12


class Reading:
    """One partition in one assignment."""

    def __init__(self, source: Source, holder: int, generation: int) -> None:
        self.source = source
        self.holder = holder
        self.generation = generation
        self.position = self.start = 0
        self.revoked = False
        self.taking: list[Record] = []
        #: Per queue, the offset after its last ACQUIRE in this read.
        self.after: dict[str, int] = {}

    def again_from(self, offset: int) -> None:
        """Begin a new read."""
        self.position = self.start = offset
        self.after = {}


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
            reading.revoked = True
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
                reading.revoked = True
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
            world.rosters,
            room_bytes=world.metadata_room_bytes,
            new_id=lambda: f"roster-{next(world.roster_numbers)}",
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
                    search.consider(group.kafka_name, group.committed, self.world.rosters)
        for source, place in search.places().items():
            if place.roster is not None:
                self.world.rosters[place.roster.id] = place.roster
                self.world.stats["rosters"] += 1
            reading = Reading(source, self.world.rng.getrandbits(64), generation)
            reading.again_from(place.start)
            self.readings[source] = reading
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
        return self.outcomes.busy or any(reading.taking for reading in self.readings.values())

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
        by_offset = {record.offset: record for record in read}
        own = {
            queue: [by_offset[offset] for offset in records.offsets]
            for source, some in unmet.items()
            for queue, records in self.serving.own(source, some)
        }
        reading.taking = [record for records in own.values() for record in records]
        if own:
            self._acquire(reading, own, end)
        else:
            self._commit(reading, own, end, 0, {})

    def _skip(self, reading: Reading, start: int) -> None:
        """Retention was faster: what is gone is said, and reading goes on where the log begins."""
        source = history.log_name(reading.source)
        self.world.history.add(self.name, "ok", "skipped", source=source, start=reading.position, end=start)
        self.world.stats["skipped"] += 1
        reading.again_from(start)

    # --- 2 write ACQUIRE ----------------------------------------------------------------------------------------------

    def _acquire(self, reading: Reading, own: dict[str, list[Record]], end: int) -> None:
        batches: list[Acquire] = []
        after = dict(reading.after)
        # The one that the marker says is the one to count by, also when the settings change meanwhile.
        leases_ms = {queue: self.lease_ms(queue) for queue in own}
        for queue, records in own.items():
            limit = self.world.rng.choice([1, 3, 100])
            for span in spans([1] * len(records), limit):
                offsets = [record.offset for record in records[span]]
                batches.append(
                    Acquire(
                        queue,
                        reading.holder,
                        reading.source,
                        offsets,
                        leases_ms[queue],
                        after.get(queue, reading.start),
                        self._payloads(reading.source, queue, records[span]),
                        _dues_ms(records[span]),
                    )
                )
                after[queue] = offsets[-1] + 1
        began_ms = self.monotonic_ms()
        self._note("invoke", reading)
        if self.starting is not None:
            self.starting.begin(Cycle(reading, own, end, began_ms, leases_ms, batches, after))
            return
        results: list[Sent] = []

        def written(result: Sent) -> None:
            results.append(result)
            if len(results) < len(batches):
                return
            if any(each is not Sent.OK for each in results):
                self.again(reading, "acquire")
            else:
                reading.after = after
                self._commit(reading, own, end, began_ms, leases_ms)

        faults = self.world.faults
        for batch in batches:
            # A batch that is late or fails holds the others up.
            self.outcomes.write(batch, written, faults.acquire_failed, faults.acquire_unknown)

    def lease_ms(self, queue: str) -> int:
        return self.world.definitions.of(self).settings(queue).lease_ms

    def _payloads(self, source: Source, queue: str, records: list[Record]) -> Sequence[Payload]:
        """A writer may give its payloads one by one or as columns: the bytes are the same."""
        payloads = [_payload(source, record) for record in records]
        if self.world.rng.random() < 0.5:
            return payloads
        timestamps, attempts, keys, headers, values = zip(*payloads, strict=True)
        return Columns(queue.encode(), timestamps, values, attempts=attempts, keys=keys, headers=headers)

    def again(self, reading: Reading, why: str) -> None:
        """Hand nothing out; what the tracker knows of comes back, what it does not is read again."""
        world = self.world
        world.stats[f"{why}_not_certain"] += 1
        self._note("unknown", reading)
        reading.taking = []
        if not reading.revoked:
            # Where it began: what is open already is taken over.
            reading.again_from(reading.position)
            self.later(world.rng.randint(5, 60), self._fetch, reading)

    def _note(self, type_: str, reading: Reading, **fields: int) -> None:
        """How a cycle begins and ends: from the ACQUIRE to the commit."""
        if reading.taking:
            holder, source = history.holder_name(reading.holder), history.log_name(reading.source)
            offsets = [record.offset for record in reading.taking]
            self.world.history.add(self.name, type_, "commit", holder=holder, source=source, offsets=offsets, **fields)

    # --- 3 commit -----------------------------------------------------------------------------------------------------

    def _commit(
        self, reading: Reading, own: dict[str, list[Record]], end: int, began_ms: int, leases_ms: dict[str, int]
    ) -> None:
        world = self.world
        after = self.progress.after(self.serving, {reading.source: end})
        if reading.revoked or reading.source not in after or world.hit(world.faults.commit_failed):
            self.again(reading, "commit")
            return
        committed = Committed(end, after[reading.source].encode(end))
        outcome = self.group.commit(reading.source, committed, reading.generation, self)
        if outcome is Commit.REFUSED:
            world.stats["commits_refused"] += 1
        if outcome is Commit.REFUSED or world.hit(world.faults.commit_unknown):
            self.again(reading, "commit")
            return
        self.progress.take(after)
        self.later(world.rng.randint(0, 3), self.hand_out, reading, own, end, began_ms, leases_ms)

    # --- 4 hand out ---------------------------------------------------------------------------------------------------

    def hand_out(
        self, reading: Reading, own: dict[str, list[Record]], end: int, began_ms: int, leases_ms: dict[str, int]
    ) -> None:
        """Also when the partition has just been revoked: it was committed, so nobody else reads it."""
        self._note("ok", reading, took_ms=self.monotonic_ms() - began_ms)
        reading.position = end
        reading.taking = []
        for queue, records in own.items():
            lost_at_ms = began_ms + leases_ms[queue]
            if self.monotonic_ms() >= lost_at_ms:
                # Nobody has it in hand, so the tracker brings it back.
                self.world.stats["late_hand_outs"] += 1
                continue
            for record in records:
                if _due_ms(record) != NOW:
                    # The tracker delivers it when its time has come.
                    self.world.stats["delayed_by_header"] += 1
                    continue
                self.outcomes.handle(reading.holder, reading.source, queue, record, lost_at_ms)
        self.later(self.world.rng.randint(0, 5), self._fetch, reading)


def _due_ms(record: Record) -> int:
    return deliver_at_ms(record.timestamp, record.headers, 0)


def _dues_ms(records: list[Record]) -> list[int] | None:
    dues_ms = [_due_ms(record) for record in records]
    return None if dues_ms.count(NOW) == len(dues_ms) else dues_ms


def _payload(source: Source, record: Record) -> Payload:
    attempt = origin(source, record.offset, record.timestamp, record.headers).attempt
    return Payload(record.timestamp, attempt, record.key, record.headers, record.value)
