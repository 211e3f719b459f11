"""Step 5 of :mod:`marq.consumer.receiver`: outcomes of messages, written in batches.

One task writes; all others only append. The next batch grows while a write is in progress, so batches are large under
load and small when a call waits. A message stays in flight until its outcome is written, so ``max_in_flight`` bounds
the batcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from marq.client.background import failure_of
from marq.consumer.one_per_key import Lines
from marq.kafka.marker_writer import MarkerWriter, marker_records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.leases.failure_log import FailureLog
from marq.leases.held import HeldBatch, Released, Renewed
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import ANY_QUEUE, LAST, Ack, Reject, Release, Renew, Source

#: How long an ack waits for others if no call waits for it, and how long a call waits for others in a shared batcher.
LINGER_S, SHARED_LINGER_S = 0.005, 0.01
#: Pause after a failed write, doubled each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 2.0
#: Time limit of one write.
WRITE_LIMIT_S = 15.0

_Batch = Ack | Release | Reject | Renew


class AckBatcher:
    """Collects outcomes and writes them.

    It calls ``finished(queue, count)`` when messages are no longer held, and ``failed(error)`` when an error stops it
    from writing. ``wall`` is seconds since 1970, for display only. If many programs share it (``shared``), a call that
    arrives during a write waits ``SHARED_LINGER_S`` for others.
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
        shared: bool = False,
    ) -> None:
        self.clock = clock
        self.wall = wall
        #: The state that the lifespans of the process yielded, for :attr:`Message.state`.
        self.state: Any = None
        #: Logs what happens to messages that fail.
        self.failures = FailureLog(clock)
        self._writer = writer
        self._markers_partitions = markers_partitions
        self._limit_bytes = limit_bytes
        self._finished = finished
        self._failed = failed
        self._shared = shared
        self._dirty: list[HeldBatch] = []
        self._foreign: list[_Batch] = []
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._settled: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._not_written = RepeatedWarning("outcomes not written, retrying: batches=%d error=%s")

    def start(self) -> None:
        self._task = asyncio.create_task(self._write_until_closed(), name="marq-acks")
        self._task.add_done_callback(self._ended)

    async def stop(self, limit_s: float) -> bool:
        """Write the remaining outcomes for at most ``limit_s``; return whether all were written."""
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
        """Whether an outcome is not durable yet, and will be."""
        writes = self._task is not None and not self._task.done()
        return writes and bool(self._dirty or self._foreign or self._writing)

    def touch(self, lease: HeldBatch) -> None:
        """Note that a batch has something to write."""
        if lease.dirty:
            return
        lease.dirty = True
        self._dirty.append(lease)
        if lease.lines is not None and lease.lines.waiting:
            # Messages wait until its outcomes are durable.
            self.flush_soon()
        else:
            self._flush_later()

    def settle_foreign(self, batch: _Batch) -> None:
        """Queue an outcome or a RENEW of messages that this consumer does not hold."""
        self._foreign.append(batch)
        self._flush_for_call()

    def _flush_for_call(self) -> None:
        """Write on behalf of a call that waits."""
        if self._shared and self._writing is not None and not self._closing:
            self._flush_later()
        elif self._timer is None or not self._shared:
            self.flush_soon()

    def _flush_later(self) -> None:
        if self._timer is None and not self._due.is_set():
            self._timer = asyncio.get_running_loop().call_later(
                SHARED_LINGER_S if self._shared else LINGER_S, self.flush_soon
            )

    def flush_soon(self) -> None:
        """Write now: no more outcomes will come soon, or a call waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.set()

    async def settled(self) -> None:
        """Return when all queued outcomes are durable.

        Raises:
            BrokerUnavailable: the consumer was stopped before that.
        """
        if not (self._dirty or self._foreign):
            if self._writing is not None:
                await asyncio.shield(self._writing)
            return
        if self._task is None or self._task.done():
            raise BrokerUnavailable("the consumer is stopped: later outcomes were not written")
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        self._flush_for_call()
        await asyncio.shield(self._settled)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (error := failure_of(task, stopping=self._closing)) is not None:
            self._fail_waiters()
            self._failed(error)

    async def _write_until_closed(self) -> None:
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
        batches: list[_Batch] = [*_joined(self._foreign), *_ack_batches(dirty, self.clock()), *_collect(dirty)]
        self._foreign = []
        renewals = [(lease, lease.take_renewals()) for lease in dirty if lease.renewed]
        settled = [
            Settled(lease.lines, lease, tuple(lease.acked), lease.released, lease.rejected)
            for lease in dirty
            if lease.lines is not None
        ]
        for lease in dirty:
            self._settle(lease)
        partitions, limit_bytes = self._markers_partitions, self._limit_bytes
        records = [record for batch in batches for record in marker_records(batch, partitions, limit_bytes)]
        pause_s = FIRST_RETRY_S
        while True:
            now_s = self.clock()
            try:
                await self._writer.write(records, WRITE_LIMIT_S)
                break
            except BrokerUnavailable as error:
                # Some markers may have been written. Writing them twice changes nothing, so all are written again.
                self._not_written.write(self.clock(), len(records), error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_RETRY_S)
        self._extend(renewals, now_s)
        _settle(settled)

    def _settle(self, lease: HeldBatch) -> None:
        """Remove the messages with outcomes from a batch: they are no longer held."""
        lease.dirty = False
        before = len(lease.open)
        if lease.acked:
            lease.open.difference_update(lease.acked)
        if lease.released:
            lease.open.difference_update([released.offset for released in lease.released])
        if lease.rejected:
            lease.open.difference_update([offset for offset, _ in lease.rejected])
        count = before - len(lease.open)
        if lease.lines is not None:
            ended = [*lease.acked, *(each.offset for each in lease.released), *(offset for offset, _ in lease.rejected)]
            count = lease.lines.left(lease, ended)
        lease.forget_outcomes()
        if count:
            self._finished(lease.queue, count)

    def _extend(self, renewals: Iterable[tuple[HeldBatch, list[Renewed]]], sent_s: float) -> None:
        """Change leases whose own RENEW is durable, counted from before it was sent; a late RENEW has no effect."""
        now_s = self.clock()
        for lease, renewed in renewals:
            for offset, lease_ms, exactly in renewed:
                until_s, before_s = sent_s + lease_ms / 1000, lease.expiry_s(offset)
                if before_s > now_s and (exactly or until_s > before_s):
                    lease.renewed_until(offset, until_s)

    def _fail_waiters(self) -> None:
        for waiter in (self._settled, self._writing):
            if waiter is not None and not waiter.done():
                waiter.set_exception(
                    BrokerUnavailable("the consumer stopped before the broker confirmed: unknown whether it is written")
                )
                waiter.exception()


def _joined(foreign: Sequence[_Batch]) -> Iterator[_Batch]:
    """Merge the ACKs of each queue, holder and source into one; the other batches keep their order."""
    acked: dict[tuple[str, int, Source], set[int]] = {}
    for batch in foreign:
        if isinstance(batch, Ack):
            acked.setdefault((batch.queue, batch.holder, batch.source), set()).update(batch.offsets)
        else:
            yield batch
    for place, offsets in acked.items():
        yield Ack(*place, sorted(offsets))


def _collect(dirty: Sequence[HeldBatch]) -> Iterator[_Batch]:
    """Return the batches of all kinds except ACK, by queue, holder and source; offsets are sorted and unique."""
    groups: dict[tuple[str, int, Source], list[HeldBatch]] = {}
    for lease in dirty:
        if lease.released or lease.rejected or lease.renewed:
            groups.setdefault((lease.queue, lease.holder, lease.source), []).append(lease)
    for (queue, holder, source), leases in groups.items():
        released = {each.offset: each for lease in leases for each in lease.released}
        if released:
            yield from _releases(queue, holder, source, released)
        rejected = {offset: reason for lease in leases for offset, reason in lease.rejected}
        if rejected:
            yield Reject(queue, holder, source, sorted(rejected), [rejected[offset] for offset in sorted(rejected)])
        for (lease_ms, exactly), offsets in _by_lease([each for lease in leases for each in lease.renewed]):
            yield Renew(queue, holder, source, offsets, lease_ms, exactly=exactly)


def _ack_batches(dirty: Sequence[HeldBatch], now_s: float) -> Iterator[Ack]:
    """Return one ACK for each holder and source partition, for all queues together.

    If the leases have ended there is one ACK for each queue, because the tracker counts late ACKs by queue.
    """
    groups: dict[tuple[int, Source, str], list[HeldBatch]] = {}
    for lease in dirty:
        if lease.acked:
            # In a queue's own topic, other queues may have messages at the same places.
            queue = lease.queue if lease.own_topic or now_s >= lease.expires_s else ANY_QUEUE
            groups.setdefault((lease.holder, lease.source, queue), []).append(lease)
    for (holder, source, queue), leases in groups.items():
        acked = {offset for lease in leases for offset in lease.acked}
        alone = leases[0].queue if len({lease.queue for lease in leases}) == 1 else queue
        yield Ack(alone, holder, source, sorted(acked))


def _releases(queue: str, holder: int, source: Source, released: dict[int, Released]) -> Iterator[Release]:
    def kind(each: Released) -> tuple[bool, bool]:
        return each.counted, each.delay_ms == LAST

    ordered = sorted(released.values(), key=lambda each: (kind(each), each.offset))
    for (counted, _), group in groupby(ordered, key=kind):
        members = list(group)
        offsets = [each.offset for each in members]
        delays, errors = [each.delay_ms for each in members], [each.error for each in members]
        yield Release(queue, holder, source, offsets, delays, counted, errors)


def _by_lease(renewed: Sequence[Renewed]) -> Iterator[tuple[tuple[int, bool], list[int]]]:
    """Return the leases with their offsets; several RENEWs of a message become one with their effect."""
    leases: dict[int, tuple[int, bool]] = {}
    for offset, lease_ms, exactly in renewed:
        before_ms, to_the_point = leases.get(offset, (0, False))
        leases[offset] = (lease_ms, True) if exactly else (max(lease_ms, before_ms), to_the_point)
    groups: dict[tuple[int, bool], list[int]] = {}
    for offset in sorted(leases):
        groups.setdefault(leases[offset], []).append(offset)
    yield from groups.items()


class Settled(NamedTuple):
    """The outcomes in one batch that are being written."""

    lines: Lines
    held: HeldBatch
    acked: Sequence[int]
    released: Sequence[Released]
    rejected: Sequence[tuple[int, str]]


def _settle(settled: Sequence[Settled]) -> None:
    """Tell the lines which outcomes are durable."""
    for each in settled:
        each.lines.settled(each)
    for feed in {id(each.lines.feed): each.lines.feed for each in settled}.values():
        feed.settled()
