"""A source, a writer and a clock in memory; the test decides when they fail and what time it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest

from marq.consumer.handler_pool import BatchHandlerTasks, HandlerPool, HandlerTasks
from marq.consumer.prefetch import PrefetchBuffer
from marq.consumer.receiver import Receiver
from marq.kafka.group_reader import NotCommitted
from marq.kafka.log_reader import MarkersReader
from marq.kafka.marker_writer import MarkerRecord
from marq.kafka.queue_positions import NOT_BEHIND, LowWatermarks
from marq.kafka.queue_records import serving
from marq.kafka.records import Records
from marq.leases.message import Message
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.queue import QueueSettings
from marq.testing.cluster import MemoryWriter
from marq.wire.errors import BrokerUnavailable
from marq.wire.marker_codec import decode
from marq.wire.markers import Ack, Acquire, Batch, Reject, Release, Source, split

T = TypeVar("T")
LIMIT_S = 60.0
P0, P1 = Source("t", 0), Source("t", 1)


@dataclass(frozen=True)
class FakeRecord:
    offset: int
    key: bytes | None = b"q"
    value: bytes | None = b"v"
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp: int = 1_000


class HeldWrites:
    """The writes of some markers of clients in memory, from here on: all wait for ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kinds: type[Batch]) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        write = MemoryWriter.write

        async def held(writer: MemoryWriter, records: Sequence[MarkerRecord], limit_s: float) -> list[int]:
            if not kinds or any(isinstance(decode(record.value), kinds) for record in records):
                self.begun.set()
                await self.go_on.wait()
            return await write(writer, records, limit_s)

        monkeypatch.setattr(MemoryWriter, "write", held)


class Clock:
    """A clock that the test sets; only :meth:`advance` wakes sleepers."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now_s + seconds, woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Let time pass: each sleeper wakes at its own moment."""
        end_s = self.now_s + seconds
        while due := [each for each in self._sleeping if each[0] <= end_s]:
            first = min(due, key=lambda each: each[0])
            self._sleeping.remove(first)
            self.now_s = max(self.now_s, first[0])
            if not first[1].done():
                first[1].set_result(None)
                await spin()
        self.now_s = end_s


class Times:
    """The clocks of a process whose monotonic one the test sets."""

    def __init__(self, clock: Clock) -> None:
        self.now_s, self.wall_s, self.sleep = clock, time.time, clock.sleep

    def broker_ms(self) -> int | None:
        return None

    async def within(self, limit_s: float, waiting: Awaitable[T]) -> T:
        async with asyncio.timeout(LIMIT_S):
            return await waiting

    async def markers_reader(self, partitions: Collection[int]) -> MarkersReader:
        raise AssertionError("no tracker was asked")


@dataclass
class FakeReader:
    """The log of each partition, a position in it, and the committed offsets."""

    log: dict[Source, list[FakeRecord]] = field(default_factory=dict)
    keep_alive_s: float = 0.01
    positions: dict[Source, int] = field(default_factory=dict)
    committed: dict[Source, int] = field(default_factory=dict)
    #: The positions of queues with ordering.
    behind: dict[tuple[str, Source], int] = field(default_factory=dict)
    refuse_commits: int = 0
    kept_alive: asyncio.Event = field(default_factory=asyncio.Event)
    fetched: list[int] = field(default_factory=list)
    during_commit: Callable[[], None] | None = None
    #: Number of assignments so far.
    assignments: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def assigned_of(self, topic: str) -> tuple[Collection[int], int]:
        partitions = sorted({source.partition for source in self.log if source.topic == topic})
        return partitions, len(partitions)

    def add(self, source: Source, *records: FakeRecord) -> None:
        self.log.setdefault(source, []).extend(records)
        self._more.set()

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        self.fetched.append(max_records)
        assignment = self.assignments
        while not (found := self._next(max_records)):
            self._more.clear()
            await self._more.wait()
            if assignment != self.assignments:
                # Like all readers: the receiver would ignore records of an assignment that came during the fetch.
                return {}
        return found

    def reassign(self) -> None:
        """Assign all partitions once more: reading continues at the committed offsets."""
        self.assignments += 1
        self.positions = dict(self.committed)
        self._more.set()

    def _next(self, left: int) -> dict[Source, Records]:
        found: dict[Source, Records] = {}
        for source, log in self.log.items():
            records = [record for record in log if record.offset >= self.positions.get(source, 0)][:left]
            if records:
                found[source] = Records.of(records)
                self.positions[source] = records[-1].offset + 1
                left -= len(records)
        return found

    async def commit(self, offsets: Mapping[Source, int], behind: LowWatermarks = NOT_BEHIND) -> None:
        if not offsets:
            raise ValueError("aiokafka commits no empty offsets")
        self._check_commit()
        self.committed.update(offsets)
        self.behind.update(behind)

    def commit_of(
        self, offsets: Mapping[Source, int], behind: LowWatermarks
    ) -> tuple[Mapping[Source, int], LowWatermarks]:
        return offsets, behind

    def note_committed(self, commit: object) -> None: ...

    def _check_commit(self) -> None:
        if self.during_commit is not None:
            self.during_commit()
        if self.refuse_commits:
            self.refuse_commits -= 1
            raise NotCommitted("refused by the test")

    async def verify(self, sources: Collection[Source]) -> None:
        self._check_commit()

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        self.positions.update(offsets)
        self._more.set()

    async def keep_alive(self) -> None:
        self.kept_alive.set()


@dataclass
class FakeWriter:
    """Keeps what is written; a closed ``gate`` holds writes up, ``refuse`` makes some fail."""

    refuse: int = 0
    refuse_written: int = 0
    written: list[tuple[int, Batch]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        await self.gate.wait()
        if self.refuse:
            self.refuse -= 1
            self.changed.set()
            raise BrokerUnavailable("refused by the test")
        self.written += [(record.partition, decode(record.value)) for record in records]
        self.changed.set()
        if self.refuse_written:
            self.refuse_written -= 1
            raise BrokerUnavailable("the answer was lost")

    def of(self, kind: type[Any]) -> list[Any]:
        return [batch for _, written in self.written for batch in split(written) if isinstance(batch, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class FakeTransactions:
    """Writes records, then commits."""

    def __init__(self, writer: FakeWriter, reader: FakeReader) -> None:
        self._writer = writer
        self._reader = reader

    async def write(self, records: Sequence[MarkerRecord], commit: Any, limit_s: float) -> None:
        await self._writer.write(records, limit_s)
        await self._reader.commit(*commit)


class Hanging:
    """A handler that waits until the test lets it end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.finished = False

    async def __call__(self, work: object) -> None:
        self.begun.set()
        await self.go_on.wait()
        self.finished = True


class HangingEach:
    """A handler that hangs with each message until the test lets it end."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._begun = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.seen.append(message.offset)
        self.running.append(message.offset)
        self._begun.set()
        try:
            await self._ends.setdefault(message.offset, asyncio.Event()).wait()
        finally:
            self.running.remove(message.offset)

    async def end(self, offset: int) -> None:
        self._ends[offset].set()
        await spin(60)

    async def has_seen(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < count:
                self._begun.clear()
                await self._begun.wait()


AnyPool = TypeVar("AnyPool", bound=HandlerPool)


class NumberedReceiver(Receiver):
    """A receiver whose holders are 1, 2, 3, …"""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._holders = count(1)
        super().__init__(*arguments, **options)

    def _new_holder(self) -> int:
        return next(self._holders)


@dataclass
class Rig:
    """A receiver on fakes."""

    receiver: Receiver
    reader: FakeReader
    acquirer: FakeWriter
    settler: FakeWriter
    clock: Clock
    #: The acquisition for at-most-once queues.
    once: FakeWriter

    @property
    def buffer(self) -> PrefetchBuffer:
        return next(iter(self.receiver.prefetch.buffers.values()))

    def add(self, offsets: int | Iterable[int], source: Source = P0, **fields: Any) -> None:
        """Append records to the log of a partition: at these offsets, or this many from 0 on."""
        offsets = range(offsets) if isinstance(offsets, int) else offsets
        self.reader.add(source, *[FakeRecord(offset, **fields) for offset in offsets])

    @property
    def acquired(self) -> list[int]:
        return [offset for each in self.acquirer.of(Acquire) for offset in each.offsets]

    @property
    def acked(self) -> list[int]:
        return sorted(offset for each in self.settler.of(Ack) for offset in each.offsets)

    @property
    def released(self) -> dict[int, tuple[int, bool, str]]:
        """By offset: the delay in ms, whether the attempt counts, and the error."""
        return {
            offset: (delay_ms, each.counted, error)
            for each in self.settler.of(Release)
            for offset, delay_ms, error in zip(each.offsets, each.delays_ms, each.errors, strict=True)
        }

    @property
    def rejected(self) -> dict[int, str]:
        """The reason by offset."""
        return {
            offset: reason
            for each in self.settler.of(Reject)
            for offset, reason in zip(each.offsets, each.reasons, strict=True)
        }

    @property
    def ended(self) -> list[int]:
        return [*self.acked, *self.released, *self.rejected]

    def work(self, handler: Callable[[Any], Any], concurrency: int = 1, queue: str = "q") -> HandlerTasks:
        """Start workers of a handler that takes one message."""
        return self._started(HandlerTasks(self.receiver.prefetch.buffers[queue], self.receiver, handler, concurrency))

    def work_on_batches(
        self, handler: Callable[[Any], Any], concurrency: int = 1, max_messages: int = 100, most: int = 1_000
    ) -> BatchHandlerTasks:
        """Start workers of a handler that takes lists of messages."""
        return self._started(BatchHandlerTasks(self.buffer, self.receiver, handler, concurrency, max_messages, most))

    def _started(self, pool: AnyPool) -> AnyPool:
        pool.start()
        self.receiver.demand()
        return pool

    async def settled(self) -> None:
        """Return when all outcomes are written that were decided so far."""
        await self.receiver.writer.settled()

    async def take(self, count: int, queue: str = "q") -> list[Message]:
        """Take messages, as a waiting call does."""
        buffer, taken = self.receiver.prefetch.buffers[queue], []
        async with asyncio.timeout(LIMIT_S):
            while len(taken) < count:
                message = buffer.take(self.clock())
                if message is not None:
                    taken.append(message)
                    continue
                buffer.call_demand += count - len(taken)
                self.receiver.demand()
                missing = count - len(taken)
                await buffer.wait()
                buffer.call_demand -= missing
        return taken


def rig(
    queues: Sequence[str] = ("q",),
    leases_ms: Mapping[str, int] | None = None,
    *,
    buffer: PrefetchBuffer | None = None,
    **changes: Any,
) -> Rig:
    """Return a receiver that is not started; ``leases_ms`` may change while it runs. The queues may share a buffer."""
    if leases_ms is not None:
        changes |= {"lease_ms": None, "queue": lambda queue: QueueSettings(lease_ms=leases_ms[queue])}
    settings: dict[str, Any] = {
        "lease_ms": 30_000, "max_in_flight": 1_000, "max_lease_ms": 3_600_000, "markers_partitions": 4,
        "limit_bytes": 1_114_124, **changes,
    }  # fmt: skip
    reader, acquirer, settler, clock = FakeReader(), FakeWriter(), FakeWriter(), Clock()
    once = FakeWriter()
    receiver = NumberedReceiver(
        serving("t", queues, {}),
        reader,
        acquirer,
        settler,
        ReceiverSettings(**settings),
        Times(clock),  # type: ignore[arg-type]
        transactions=FakeTransactions(once, reader),  # type: ignore[arg-type]
        buffer=buffer,
    )
    return Rig(receiver, reader, acquirer, settler, clock, once)


async def spin(turns: int = 20) -> None:
    """Let everything that can run do so: only for asserting that something does not happen."""
    for _ in range(turns):
        await asyncio.sleep(0)
