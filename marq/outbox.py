"""Step 5 of the flow: what was decided about messages, written in batches.

One task writes, everybody else only appends: while one write is under way the next batch grows, so batches are large
when there is much to write and small when somebody waits. What was decided is kept until it is written, whatever
happens to the broker; as long as it is not, messages stay in flight, so reading stops and the outbox stays bounded by
``max_in_flight``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from marq.core import marker_codec
from marq.core.errors import BrokerUnavailable
from marq.core.marker_codec import MAX_TEXT_BYTES
from marq.core.markers import (
    MAX_BATCH_MARKERS,
    SEVERAL,
    Ack,
    Reject,
    Release,
    Renew,
    Source,
    spans,
)
from marq.core.names import markers_partition
from marq.lease import Lease, Released
from marq.writer import FRAME_BYTES, MarkerRecord, MarkerWriter

log = logging.getLogger("marq")

#: How long an ack that nobody waits for waits for others.
LINGER_S = 0.005
#: Between two attempts to write what could not be written.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 2.0
#: How long one attempt may take.
WRITE_LIMIT_S = 15.0

_Batch = Ack | Release | Reject | Renew


class Outbox:
    """Collects outcomes from leases and writes them.

    ``finished`` is told how many messages of a queue are no longer held, ``failed`` of an error that ends the writing.
    """

    def __init__(
        self,
        writer: MarkerWriter,
        *,
        markers_partitions: int,
        limit_bytes: int,
        finished: Callable[[str, int], None],
        failed: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        #: Seconds since 1970, as people count them; nothing is decided by it.
        self.wall = wall
        self._writer = writer
        self._markers_partitions = markers_partitions
        self._room_bytes = limit_bytes - FRAME_BYTES
        self._finished = finished
        self._failed = failed
        self._dirty: list[Lease] = []
        self._foreign: list[Ack] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="marq-outbox")

    async def stop(self, limit_s: float) -> bool:
        """Write what is there, for at most ``limit_s``; return whether all was written."""
        self._closing = True
        self.flush_soon()
        if self._task is None:
            return not self._dirty
        done, _ = await asyncio.wait([self._task], timeout=limit_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_waiters()
        return bool(done)

    @property
    def unwritten(self) -> bool:
        """Whether something was decided that is not durable yet, and will be."""
        writes = self._task is not None and not self._task.done()
        return writes and bool(self._dirty or self._foreign or self._writing)

    def touch(self, lease: Lease) -> None:
        """Note that a lease has something to write."""
        if lease.dirty:
            return
        lease.dirty = True
        self._dirty.append(lease)
        if self._timer is None and not self._due.is_set():
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.flush_soon)

    def ack_foreign(self, ack: Ack) -> None:
        """Queue an ACK for messages that this consumer does not hold."""
        self._foreign.append(ack)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Don't wait for more: nobody is going to decide anything in the next moment, or somebody waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.set()

    async def settled(self, *, wait: bool) -> None:
        """Return when all that was queued before is durable; at once without ``wait``.

        Raises:
            BrokerUnavailable: the consumer was stopped before that.
        """
        if not wait:
            return
        if not (self._dirty or self._foreign):
            if self._writing is not None:
                await asyncio.shield(self._writing)
            return
        if self._task is None or self._task.done():
            raise BrokerUnavailable("the consumer is stopped: what was decided since then was not written")
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        self.flush_soon()
        await asyncio.shield(self._settled)

    async def _run(self) -> None:
        try:
            await self._write_for_ever()
        except Exception as error:
            log.exception("writing outcomes ended by an error that marq did not expect")
            self._fail_waiters()
            self._failed(error)

    async def _write_for_ever(self) -> None:
        while not (self._closing and not self._dirty and not self._foreign):
            await self._due.wait()
            self._due.clear()
            if self._dirty or self._foreign:
                self._writing = self._settled or asyncio.get_running_loop().create_future()
                self._settled = None
                await self._write_all()
                self._writing.set_result(None)
                self._writing = None
            if self._closing:
                self._due.set()

    async def _write_all(self) -> None:
        dirty, self._dirty = self._dirty, []
        batches: list[_Batch] = [*self._foreign, *_acks(dirty, self.clock()), *_collect(dirty)]
        self._foreign = []
        renewals = [(lease, lease.take_renewals()) for lease in dirty if lease.renewed]
        for lease in dirty:
            self._settle(lease)
        records = [record for batch in batches for record in self._records(batch)]
        pause_s = FIRST_RETRY_S
        while True:
            now_s = self.clock()
            try:
                await self._writer.write(records, WRITE_LIMIT_S)
                break
            except BrokerUnavailable as error:
                # Perhaps written, perhaps not. A marker that is written twice counts once, so all are written again.
                log.warning("outcomes not written, trying again in %.2f s: batches=%d %s", pause_s, len(records), error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_RETRY_S)
        self._extend(renewals, now_s)

    def _settle(self, lease: Lease) -> None:
        """Take the outcomes out of a lease: its messages are no longer held."""
        lease.dirty = False
        before = len(lease.open)
        if lease.acked:
            lease.open.difference_update(lease.acked)
        if lease.released:
            lease.open.difference_update([released.offset for released in lease.released])
        if lease.rejected:
            lease.open.difference_update([offset for offset, _ in lease.rejected])
        lease.forget_outcomes()
        if before != len(lease.open):
            self._finished(lease.queue, before - len(lease.open))

    def _extend(self, renewals: Iterable[tuple[Lease, list[tuple[int, int]]]], sent_s: float) -> None:
        """A message's own RENEW is durable: judged from before it was sent, and never when it came too late."""
        now_s = self.clock()
        for lease, renewed in renewals:
            for offset, lease_ms in renewed:
                lease.renewing.discard(offset)
                if lease.expiry_s(offset) > now_s:
                    lease.renewed_until(offset, sent_s + lease_ms / 1000)

    def _records(self, batch: _Batch) -> Iterator[MarkerRecord]:
        source = batch.source
        partition = markers_partition(source.topic, source.partition, self._markers_partitions)
        for piece in self._pieces(batch):
            yield MarkerRecord(partition, marker_codec.encode(piece))

    def _pieces(self, batch: _Batch) -> Iterator[_Batch]:
        """Split a batch that would not fit into a record."""
        count = len(batch.offsets)
        size = MAX_TEXT_BYTES + 16 if isinstance(batch, Release | Reject) else 4
        if count <= MAX_BATCH_MARKERS and count * size <= self._room_bytes:
            yield batch
            return
        for part in spans([size] * count, self._room_bytes):
            yield _cut(batch, part)

    def _fail_waiters(self) -> None:
        for waiter in (self._settled, self._writing):
            if waiter is not None and not waiter.done():
                waiter.set_exception(
                    BrokerUnavailable("the consumer stopped before the broker confirmed: unknown whether it is written")
                )
                waiter.exception()


def _collect(dirty: Sequence[Lease]) -> Iterator[_Batch]:
    """Return one batch for each queue, source partition, holder and kind but ACK; offsets rise and occur once."""
    lanes: dict[tuple[str, int, Source], list[Lease]] = {}
    for lease in dirty:
        if lease.released or lease.rejected or lease.renewed:
            lanes.setdefault((lease.queue, lease.holder, lease.source), []).append(lease)
    for (queue, holder, source), leases in lanes.items():
        released = {each.offset: each for lease in leases for each in lease.released}
        if released:
            yield from _releases(queue, holder, source, released)
        rejected = {offset: reason for lease in leases for offset, reason in lease.rejected}
        if rejected:
            yield Reject(queue, holder, source, sorted(rejected), [rejected[offset] for offset in sorted(rejected)])
        renewed = {offset: lease_ms for lease in leases for offset, lease_ms in lease.renewed}
        for lease_ms, offsets in _by_lease(renewed):
            yield Renew(queue, holder, source, offsets, lease_ms)


def _acks(dirty: Sequence[Lease], now_s: float) -> Iterator[Ack]:
    """Return one ACK for each source partition and holder, of however many queues.

    Of leases that are over by now the queue is said, under which the tracker counts an ACK that came too late.
    """
    lanes: dict[tuple[int, Source], dict[str, list[Lease]]] = {}
    for lease in dirty:
        if lease.acked:
            queue = lease.queue if now_s >= lease.expires_s else SEVERAL
            lanes.setdefault((lease.holder, lease.source), {}).setdefault(queue, []).append(lease)
    for (holder, source), found in lanes.items():
        for queue, leases in found.items():
            acked = {offset for lease in leases for offset in lease.acked}
            alone = leases[0].queue if len({lease.queue for lease in leases}) == 1 else queue
            yield Ack(alone, holder, source, sorted(acked))


def _releases(queue: str, holder: int, source: Source, released: dict[int, Released]) -> Iterator[Release]:
    ordered = sorted(released.values(), key=lambda each: (each.counted, each.offset))
    for counted, group in groupby(ordered, key=lambda each: each.counted):
        members = list(group)
        offsets = [each.offset for each in members]
        delays, errors = [each.delay_ms for each in members], [each.error for each in members]
        yield Release(queue, holder, source, offsets, delays, counted, errors)


def _by_lease(renewed: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
    for lease_ms in set(renewed.values()):
        yield lease_ms, sorted(offset for offset, each in renewed.items() if each == lease_ms)


def _cut(batch: _Batch, part: slice) -> _Batch:
    queue, holder, source, offsets = batch.queue, batch.holder, batch.source, batch.offsets[part]
    if isinstance(batch, Release):
        return Release(queue, holder, source, offsets, batch.delays_ms[part], batch.counted, batch.errors[part])
    if isinstance(batch, Reject):
        return Reject(queue, holder, source, offsets, batch.reasons[part])
    if isinstance(batch, Renew):
        return Renew(queue, holder, source, offsets, batch.lease_ms)
    return Ack(queue, holder, source, offsets)
