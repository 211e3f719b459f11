"""A consumer, step by step: 1 fetch, 2 write ACQUIRE, 3 commit, 4 hand out, 5 write what became of it.

ACQUIRE comes before the commit: the other way round, a crash between the two loses messages, for nobody reads them
again and no tracker knows of them. An ACQUIRE or a commit that did not certainly succeed hands nothing out; the
consumer reads again from the committed offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from marq.core.copies import origin
from marq.core.markers import BACKOFF, Ack, Acquire, Columns, Payload, Reject, Release, Renew, Source, encode, spans
from tests.simulation.actor import Actor
from tests.simulation.group import Commit, Group
from tests.simulation.log import Record

if TYPE_CHECKING:
    from tests.simulation.world import World

POLL_MS = 40
MAX_HELD = 12


class Sent(Enum):
    """What a client knows of a write."""

    OK = 1
    FAILED = 2
    UNKNOWN = 3


class Held:
    """A message that has been handed out."""

    __slots__ = ("lost_at_ms", "queue", "renewed")

    def __init__(self, queue: str, lost_at_ms: int, renewed: bool) -> None:
        self.queue = queue
        self.lost_at_ms = lost_at_ms
        self.renewed = renewed


class Reading:
    """One partition in one assignment."""

    def __init__(self, source: Source, holder: int, start: int, generation: int) -> None:
        self.source = source
        self.holder = holder
        self.position = start
        self.start = start
        self.generation = generation
        self.revoked = False
        self.taking: list[Record] = []
        #: Per queue, the offset after its last ACQUIRE in this read.
        self.after: dict[str, int] = {}
        self.held: dict[int, Held] = {}
        #: What became of messages and is not written yet: (kind and what a batch shares, offset, what it does not).
        self.outbox: list[tuple[tuple[Any, ...], int, Any]] = []

    def again_from(self, offset: int) -> None:
        """Begin a new read."""
        self.position = self.start = offset
        self.after = {}


class Consumer(Actor):
    """One member of a group."""

    def __init__(self, world: World, group: Group) -> None:
        super().__init__(world)
        self.group = group
        self.readings: dict[Source, Reading] = {}
        #: Revoked, with messages in hand: leases do not end with the assignment.
        self.former: list[Reading] = []
        self.generation = 0
        self.stopping = False
        self.later(world.rng.randint(1, POLL_MS), self._renew)

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

    def hear(self, generation: int, sources: list[Source]) -> None:
        """Learn of an assignment."""
        if generation <= self.generation:
            return
        missed = generation > self.generation + 1
        self.generation = generation
        for source, reading in list(self.readings.items()):
            if source not in sources or missed or self.group.eager:
                reading.revoked = True
                self.former.append(self.readings.pop(source))
                if reading.taking:
                    self._excuse(reading, [record.offset for record in reading.taking], "rebalance")
            else:
                reading.generation = generation
        for source in sources:
            if source not in self.readings and not self.stopping:
                start = self.group.offsets.get(source, 0)
                reading = Reading(source, self.world.rng.getrandbits(64), start, generation)
                self.readings[source] = reading
                self.later(self.world.rng.randint(0, 5), self._fetch, reading)

    def crash(self) -> None:
        """Kill -9: what it held is nobody's now, and the group finds out after the session timeout."""
        super().crash()
        world = self.world
        world.checker.stats["consumer_crashes"] += 1
        self._excuse_all("crash")
        world.schedule(world.rng.randint(50, 600), self.group.leave, self)
        world.schedule(world.rng.randint(100, 900), world.add_consumer, self.group)

    def pause(self, duration_ms: int) -> None:
        super().pause(duration_ms)
        self.world.checker.stats["consumer_pauses"] += 1
        self._excuse_all("pause")
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
        self.world.checker.stats["consumer_stops"] += 1
        for reading in list(self.readings.values()) + self.former:
            for offset in list(reading.held):
                self._give_back(reading, offset, 0, counted=False, error="")
            if reading.taking:
                self._excuse(reading, [record.offset for record in reading.taking], "stop")
        self.later(30, self._leave)

    def _leave(self) -> None:
        if any(reading.outbox for reading in self.all_readings()):
            self.later(30, self._leave)
            return
        self.group.leave(self)
        self.alive = False
        self.world.schedule(self.world.rng.randint(10, 300), self.world.add_consumer, self.group)

    def all_readings(self) -> list[Reading]:
        return [*self.readings.values(), *self.former]

    def _excuse(self, reading: Reading, offsets: Sequence[int], why: str) -> None:
        self.world.checker.excuse([(reading.source, offset) for offset in offsets], why)

    def _excuse_all(self, why: str) -> None:
        for reading in self.all_readings():
            offsets = [*reading.held, *(record.offset for record in reading.taking)]
            self._excuse(reading, [*offsets, *(offset for _, offset, _ in reading.outbox)], why)

    # --- 1 fetch ------------------------------------------------------------------------------------------------------

    def _fetch(self, reading: Reading) -> None:
        if reading.revoked or self.stopping:
            return
        world, rng = self.world, self.world.rng
        partition = world.messages[reading.source]
        end = partition.end(committed=self.group.committed_reads)
        if reading.position >= end or len(reading.held) > MAX_HELD:
            self.later(POLL_MS, self._fetch, reading)
            return
        end = min(end, reading.position + rng.randint(1, 8))
        if world.hit(world.faults.late_read):
            end = rng.randint(reading.position, end)
        own = [
            record
            for record in partition.read(reading.position, end, committed=self.group.committed_reads)
            if record.key in self.group.keys
        ]
        reading.taking = own
        if own:
            self._acquire(reading, own, end)
        else:
            self._commit(reading, [], end)

    # --- 2 write ACQUIRE ----------------------------------------------------------------------------------------------

    def _acquire(self, reading: Reading, own: list[Record], end: int) -> None:
        batches: list[Acquire] = []
        after = dict(reading.after)
        for queue in self.group.queues:
            records = [record for record in own if record.key == queue.encode()]
            limit = self.world.rng.choice([1, 3, 100])
            for span in spans([1] * len(records), limit):
                offsets = [record.offset for record in records[span]]
                batches.append(
                    Acquire(
                        queue,
                        reading.holder,
                        reading.source,
                        offsets,
                        self.world.settings[queue].lease_ms,
                        after.get(queue, reading.start),
                        self._payloads(reading.source, queue, records[span]),
                    )
                )
                after[queue] = offsets[-1] + 1
        lost_at_ms = self.monotonic_ms()
        outcomes: list[Sent] = []

        def written(outcome: Sent) -> None:
            outcomes.append(outcome)
            if len(outcomes) < len(batches):
                return
            if any(each is not Sent.OK for each in outcomes):
                self._again(reading, own, "acquire")
            else:
                reading.after = after
                self._commit(reading, own, end, lost_at_ms)

        faults = self.world.faults
        for batch in batches:
            # A batch that is late or fails holds the others up.
            self._write(batch, written, faults.acquire_failed, faults.acquire_unknown, own)

    def _payloads(self, source: Source, queue: str, records: list[Record]) -> Sequence[Payload]:
        """A writer may give its payloads one by one or as columns: the bytes are the same."""
        payloads = [_payload(source, record) for record in records]
        if self.world.rng.random() < 0.5:
            return payloads
        timestamps, attempts, keys, headers, values = zip(*payloads, strict=True)
        return Columns(queue.encode(), timestamps, values, attempts=attempts, keys=keys, headers=headers)

    def _again(self, reading: Reading, own: list[Record], why: str) -> None:
        """Hand nothing out; what the tracker knows of comes back, what it does not is read again."""
        self.world.checker.stats[f"{why}_not_certain"] += 1
        self._excuse(reading, [record.offset for record in own], why)
        reading.taking = []
        reading.again_from(self.group.offsets.get(reading.source, 0))
        self.later(self.world.rng.randint(5, 60), self._fetch, reading)

    # --- 3 commit -----------------------------------------------------------------------------------------------------

    def _commit(self, reading: Reading, own: list[Record], end: int, acquired_ms: int = 0) -> None:
        world = self.world
        if world.hit(world.faults.commit_failed):
            self._again(reading, own, "commit")
            return
        outcome = self.group.commit(reading.source, end, reading.generation, self)
        if outcome is Commit.REFUSED:
            # Somebody else reads this partition, and the markers just written may have taken his messages over.
            world.checker.stats["commits_refused"] += 1
            self._excuse(reading, [record.offset for record in own], "refused")
            reading.taking = []
            self.later(POLL_MS, self._fetch_if_assigned, reading)
        elif world.hit(world.faults.commit_unknown):
            self._again(reading, own, "commit")
        else:
            self.later(world.rng.randint(1, 4), self._hand_out, reading, own, end, acquired_ms)

    def _fetch_if_assigned(self, reading: Reading) -> None:
        """Wait for the news of the rebalance; it may have been one that left this partition here."""
        reading.again_from(self.group.offsets.get(reading.source, 0))
        self._fetch(reading)

    # --- 4 hand out ---------------------------------------------------------------------------------------------------

    def _hand_out(self, reading: Reading, own: list[Record], end: int, acquired_ms: int) -> None:
        reading.taking = []
        reading.position = end
        for record in own:
            queue = self.group.keys[record.key or b""]
            lost_at_ms = acquired_ms + self.world.settings[queue].lease_ms
            if self.monotonic_ms() >= lost_at_ms:
                self._excuse(reading, [record.offset], "late hand-out")
                continue
            self.world.checker.handed_out(reading.source, record, self.group.committed_reads)
            self._handle(reading, record, queue, lost_at_ms)
        self.later(self.world.rng.randint(0, 5), self._fetch, reading)

    def _handle(self, reading: Reading, record: Record, queue: str, lost_at_ms: int) -> None:
        world, rng = self.world, self.world.rng
        offset = record.offset
        lease_ms = world.settings[queue].lease_ms
        reading.held[offset] = Held(queue, lost_at_ms, True)
        if self.stopping:
            self._give_back(reading, offset, 0, counted=False, error="")
            return
        if world.hit(world.faults.forgotten):
            # The handler hangs, and nobody renews its lease; it may still finish much later.
            reading.held[offset].renewed = False
            self._excuse(reading, [offset], "forgotten")
            self.later(rng.randint(1, 4) * lease_ms, self._finish, reading, offset)
            return
        choice = rng.random() if world.faulty else 1.0
        taken_ms = rng.randint(0, 60)
        if choice < world.release_share:
            delay_ms = rng.choice([0, 0, rng.randint(1, 400), BACKOFF])
            error = f"error {offset}"
            self.later(taken_ms, self._give_back, reading, offset, delay_ms, rng.random() < 0.7, error)
        elif choice < world.release_share + world.reject_share:
            self.later(taken_ms, self._reject, reading, offset)
        elif choice < world.release_share + world.reject_share + 0.1:
            self.later(rng.randint(lease_ms, 3 * lease_ms), self._finish, reading, offset)
        else:
            self.later(taken_ms, self._finish, reading, offset)

    # --- 5 write what became of it ------------------------------------------------------------------------------------

    def _finish(self, reading: Reading, offset: int) -> None:
        held = reading.held.pop(offset, None)
        if held is not None:
            # Also after the lease is lost: the work is done, and the tracker may not have noticed yet.
            self._put(reading, (Ack, held.queue), offset, None)

    def _give_back(self, reading: Reading, offset: int, delay_ms: int, counted: bool, error: str) -> None:
        held = reading.held.pop(offset, None)
        if held is None:
            return
        if self.monotonic_ms() >= held.lost_at_ms:
            self._excuse(reading, [offset], "release after the lease was lost")
            return
        self.world.checker.given_back[reading.source, offset] = error if counted else ""
        self.world.checker.stats["released"] += 1
        self._put(reading, (Release, held.queue, counted), offset, (delay_ms, error if counted else ""))

    def _reject(self, reading: Reading, offset: int) -> None:
        held = reading.held.pop(offset, None)
        if held is None:
            return
        if self.monotonic_ms() >= held.lost_at_ms:
            self._excuse(reading, [offset], "reject after the lease was lost")
            return
        self.world.checker.rejected[reading.source, offset] = "no good"
        self.world.checker.stats["rejected"] += 1
        self._put(reading, (Reject, held.queue), offset, "no good")

    def _put(self, reading: Reading, shared: tuple[Any, ...], offset: int, own: Any) -> None:
        if not reading.outbox:
            self.later(self.world.rng.randint(1, 15), self._flush, reading)
        reading.outbox.append((shared, offset, own))

    def _flush(self, reading: Reading) -> None:
        groups: dict[tuple[Any, ...], dict[int, Any]] = {}
        for shared, offset, own in reading.outbox:
            groups.setdefault(shared, {})[offset] = own
        reading.outbox = []
        for shared, members in groups.items():
            self._flush_group(reading, shared, dict(sorted(members.items())))

    def _flush_group(self, reading: Reading, shared: tuple[Any, ...], members: dict[int, Any]) -> None:
        kind, queue = shared[:2]
        offsets = list(members)
        batch: Ack | Release | Reject
        if kind is Ack:
            batch = Ack(queue, reading.holder, reading.source, offsets)
        elif kind is Release:
            delays, errors = zip(*members.values(), strict=True)
            batch = Release(queue, reading.holder, reading.source, offsets, delays, shared[2], errors)
        else:
            batch = Reject(queue, reading.holder, reading.source, offsets, list(members.values()))

        def written(outcome: Sent) -> None:
            if outcome is not Sent.OK:
                for offset, own in members.items():
                    self._put(reading, shared, offset, own)

        faults = self.world.faults
        self._write(batch, written, faults.marker_failed, faults.marker_unknown)

    def _renew(self) -> None:
        """One RENEW for each partition and queue, long before the leases run out."""
        faults = self.world.faults
        for reading in self.all_readings():
            groups: dict[str, list[int]] = {}
            for offset, held in reading.held.items():
                if held.renewed:
                    groups.setdefault(held.queue, []).append(offset)
            for queue, offsets in groups.items():
                lease_ms = self.world.settings[queue].lease_ms
                due_ms = self.monotonic_ms() + lease_ms
                batch = Renew(queue, reading.holder, reading.source, sorted(offsets), lease_ms)
                written = self._renewed(reading, offsets, due_ms)
                self._write(batch, written, faults.marker_failed, faults.marker_unknown)
        self.later(self.world.renew_ms, self._renew)

    def _renewed(self, reading: Reading, offsets: list[int], lost_at_ms: int) -> Callable[[Sent], None]:
        def written(outcome: Sent) -> None:
            for offset in offsets:
                held = reading.held.get(offset)
                if held is not None and outcome is Sent.OK:
                    held.lost_at_ms = lost_at_ms

        return written

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _write(
        self,
        batch: Acquire | Ack | Release | Reject | Renew,
        then: Callable[[Sent], None],
        failed: float,
        unknown: float,
        along: Sequence[Record] = (),
    ) -> None:
        """Write a batch; it reaches the log after a while, whatever has become of its sender by then."""
        world, rng = self.world, self.world.rng
        offsets = [record.offset for record in along] or batch.offsets
        keys = [(batch.source, offset) for offset in offsets]
        if world.hit(failed):
            world.checker.excuse(keys, "marker failed")
            self.later(rng.randint(5, 50), then, Sent.FAILED)
            return
        travel_ms = rng.randint(1, 5)
        if world.hit(world.faults.marker_slow):
            travel_ms = rng.randint(20, 1_200)
            world.checker.excuse(keys, "marker slow")
        outcome = Sent.OK
        if world.hit(unknown):
            outcome = Sent.UNKNOWN
            world.checker.stats["markers_unknown"] += 1
            world.checker.excuse(keys, "marker unknown")
        world.schedule(travel_ms, self._append, batch, encode(batch))
        # Nobody waits for ever; and what a client has given up may still arrive.
        waited_ms = min(travel_ms, 300) if outcome is Sent.UNKNOWN else travel_ms
        self.later(waited_ms + rng.randint(1, 3), then, outcome)

    def _append(self, batch: Acquire | Ack | Release | Reject | Renew, data: bytes) -> None:
        if isinstance(batch, Ack):
            self.world.checker.ack_written(batch.source, batch.offsets)
        self.world.markers_of(batch.source).append(data, about=batch)


def _payload(source: Source, record: Record) -> Payload:
    attempt = origin(source, record.offset, record.time_ms, record.headers).attempt
    return Payload(record.time_ms, attempt, record.key, record.headers, record.value)
