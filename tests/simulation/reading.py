"""One partition in one assignment of a consumer: the shipped receiver's steps 2 to 4, on simulated Kafka.

The receiver, its acquire strategies and its renewal are marq's own; what they ask of a reader and a writer is answered
here. Nothing of them runs by itself: :mod:`tests.simulation.consumer` drives a cycle at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from marq.consumer import acquisition, receiver, renewal
from marq.consumer.acquisition import Acquisition
from marq.consumer.cycles import Cycle
from marq.consumer.receiver import Receiver
from marq.consumer.receiver_settings import ReceiverSettings
from marq.kafka.acquire_strategies import AcquireStrategy, MarkerFirst, Transactional
from marq.kafka.offsets import Committed
from marq.kafka.positions import Positions
from marq.kafka.reader import NotCommitted
from marq.kafka.records import Records
from marq.kafka.writer import FRAME_BYTES, MarkerRecord
from marq.wire import marker_codec
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Acquire, Payload, Source, payload_bytes
from proof import history
from tests.simulation.driving import Answer
from tests.simulation.group import Commit
from tests.simulation.outcomes import TYPES, Batch, Sent

if TYPE_CHECKING:
    from tests.simulation.consumer import Consumer

#: For how many of the largest messages of a cycle an ACQUIRE has room: so that some cycles write several.
ROOMS = (1, 3, 100)
MAX_LEASE_MS = 3_600_000


class Encoded(bytes):
    """The bytes of a marker batch, and what their writer meant by them: the oracle does not believe the codec."""

    about: Batch


def _encode(batch: Batch) -> Encoded:
    encoded = Encoded(marker_codec.encode(batch))
    encoded.about = batch
    return encoded


@contextmanager
def simulated_modules() -> Iterator[None]:
    """Let the shipped modules encode so that records keep their batches, and log nothing about cycles that fail."""
    log, encodes = receiver.log, {module: vars(module)["encode"] for module in (acquisition, renewal)}
    disabled, log.disabled = log.disabled, True
    for module in encodes:
        vars(module)["encode"] = _encode
    try:
        yield
    finally:
        log.disabled = disabled
        for module, encode in encodes.items():
            vars(module)["encode"] = encode


class PartitionCommit(NamedTuple):
    """What a transaction commits in a group."""

    source: Source
    committed: Committed
    after: Mapping[Source, Positions]
    generation: int


class Reading:
    """One partition in one assignment, and the reader that its receiver has."""

    keep_alive_s = 3_600.0

    def __init__(self, consumer: Consumer, source: Source, holder: int, generation: int, position: int) -> None:
        self.source = source
        self.holder = holder
        self.generation = generation
        self.position = position
        self.revoked = False
        #: What the cycle in progress has read.
        self.taking: Records | None = None
        self.began_ms = 0
        self._consumer = consumer
        self.receiver = _Receiver(consumer, self)

    def revoke(self) -> None:
        self.revoked = True
        self.receiver._forget()

    # --- what the receiver asks its reader ----------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        raise AssertionError("cycles are driven one by one")

    async def keep_alive(self) -> None:
        return

    async def commit(self, offsets: Mapping[Source, int]) -> None:
        consumer, world = self._consumer, self._consumer.world
        source, committed, after, generation = self.commit_of(offsets)
        if world.hit(world.faults.commit_failed):
            raise NotCommitted("failed")
        outcome = consumer.group.commit(source, committed, generation, consumer)
        if outcome is Commit.REFUSED:
            world.stats["commits_refused"] += 1
        if outcome is Commit.REFUSED or world.hit(world.faults.commit_unknown):
            raise NotCommitted("refused or unknown")
        consumer.progress.take(after)
        await consumer.wait(world.rng.randint(0, 3))

    def commit_of(self, offsets: Mapping[Source, int]) -> PartitionCommit:
        [(source, end)] = offsets.items()
        after = self._consumer.progress.after(self._consumer.serving, offsets)
        if self.revoked or source not in after:
            raise NotCommitted("not assigned any more")
        return PartitionCommit(source, Committed(end, after[source].encode(end)), after, self.generation)

    def committed(self, commit: PartitionCommit) -> None:
        self._consumer.progress.take(commit.after)

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        self.position = offsets.get(self.source, self.position)

    # --- history ------------------------------------------------------------------------------------------------------

    def note(self, type_: str, **fields: int) -> None:
        """How a cycle begins and ends: from the ACQUIRE to the commit."""
        own = [] if self.taking is None else self._consumer.serving.own(self.source, self.taking)
        offsets = sorted(offset for _, records in own for offset in records.offsets)
        if offsets:
            holder, source = history.holder_name(self.holder), history.log_name(self.source)
            self._consumer.world.history.add(
                self._consumer.name, type_, "commit", holder=holder, source=source, offsets=offsets, **fields
            )


class _Receiver(Receiver):
    """The shipped receiver, which gives messages to the simulated handlers."""

    def __init__(self, consumer: Consumer, reading: Reading) -> None:
        world = consumer.world
        definitions = world.definitions
        strategy: AcquireStrategy = MarkerFirst(consumer.writer, reading)
        if consumer.starting is not None:
            strategy = Transactional(consumer.starting, reading)  # type: ignore[arg-type]
        settings = ReceiverSettings(
            max_in_flight=100,
            max_lease_ms=MAX_LEASE_MS,
            markers_partitions=len(world.markers),
            limit_bytes=world.limit_bytes,
            queue=lambda queue: definitions.of(consumer).settings(queue),
        )
        super().__init__(
            consumer.serving,
            reading,
            strategy,
            consumer.writer,
            settings,
            clock=lambda: consumer.monotonic_ms() / 1000,
            new_holder=lambda: reading.holder,
        )
        self._consumer = consumer
        self._partition = reading
        # Nothing is lost by a task: handlers look at the end of their lease themselves.
        self.renewal._watched_s = float("-inf")

    async def cycle(self, records: Mapping[Source, Records]) -> bool:
        """Take steps 2 to 4; return False if the records are to be read again."""
        rows = [row for read in records.values() for row in read]
        largest = max(payload_bytes(Payload(0, 1, row.key, row.headers, row.value)) for row in rows)
        room = largest * self._consumer.world.rng.choice(ROOMS)
        self._settings = replace(self._settings, limit_bytes=FRAME_BYTES + acquisition._HEAD_BYTES + room)
        # Cycles are not tasks here, and never overlap.
        self._cycles.append(Cycle(records, self._assignment, 0, None))  # type: ignore[arg-type]
        try:
            return await self._cycle(records, self._take(records), self._assignment, None)
        finally:
            self._cycles.clear()

    def _go_back(self, records: Mapping[Source, Records]) -> None:
        self._partition.note("unknown")
        super()._go_back(records)

    def _deliver(self, acquisitions: Sequence[Acquisition], sent_s: float) -> None:
        consumer, reading = self._consumer, self._partition
        reading.note("ok", took_ms=consumer.monotonic_ms() - reading.began_ms)
        consumer.world.stats["delayed_by_header"] += sum(len(each.taken) - len(each.messages) for each in acquisitions)
        super()._deliver(acquisitions, sent_s)

    def _deliver_one(self, acquisition: Acquisition, sent_s: float) -> None:
        held = self._hold(acquisition, sent_s)
        self.renewal.add(held)
        for record in acquisition.messages:
            self._consumer.outcomes.handle(held, record)


class Writer:
    """Writes the markers of receivers and their renewals: each batch has its own fate, and the client hears of all."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        consumer, faults, outcomes = self._consumer, self._consumer.world.faults, self._consumer.outcomes
        answer, results, began_ms = Answer(), list[Sent](), consumer.monotonic_ms()

        def over(result: Sent) -> None:
            results.append(result)
            if len(results) < len(records):
                return
            known = results[0] if len(set(results)) == 1 else Sent.UNKNOWN
            for _, value in records:
                outcomes.note(TYPES[known], value.about, took_ms=consumer.monotonic_ms() - began_ms, lost=[])
            answer.give(None if known is Sent.OK else BrokerUnavailable("not known to be written"))

        for _, value in records:
            outcomes.note("invoke", value.about)
            acquires = isinstance(value.about, Acquire)
            failed = faults.acquire_failed if acquires else faults.marker_failed
            unknown = faults.acquire_unknown if acquires else faults.marker_unknown
            # A batch that is late or fails holds the others up.
            outcomes.send(value.about, value, over, failed, unknown, int(limit_s * 1000))
        await answer
