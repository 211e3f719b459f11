"""The five steps of receiving messages, the same for every source of records.

1. **Fetch** a batch and keep the records of our own queues (:mod:`marq.kafka.queue_records`). Crash: nothing is lost.
2. **Acquire**: one marker batch for each queue and source partition, with the payloads; wait until all are durable.
   From here on, the tracker redelivers the messages unless they end. Crash: the next reader of the partition acquires
   them again, which takes over the lease; nothing is lost or duplicated.
3. **Commit** the offset after the last record read. The marker goes first: a crash between commit and marker would lose
   the messages. Both may be one transaction (:mod:`marq.kafka.acquire_strategies`).
4. **Deliver** to handlers and waiting calls (:mod:`marq.consumer.deliveries`), except messages that are due later. A
   cycle that fails before that delivers nothing and is retried. Crash: the lease expires; the tracker redelivers.
5. **Settle**: outcomes are written in batches of some milliseconds (:mod:`marq.consumer.settlement`,
   :mod:`marq.consumer.ack_batcher`). Crash before they are durable: a processed message is redelivered, which is the
   duplicate that at-least-once delivery allows.

While handlers work on one batch, the next cycles run (docs/decisions/0026), and leases are renewed. For queues with
ordering see :mod:`marq.consumer.ordered_receiving`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from marq.client.background import failure_of
from marq.consumer.ack_batcher import AckBatcher
from marq.consumer.acquisition import AcquiredOffsets, Acquisition
from marq.consumer.cycles import BeforeFailed, Cycle, Cycles, FetchedRecords, Taking, ended
from marq.consumer.deliveries import Deliveries
from marq.consumer.delivery_gate import DeliveryGate
from marq.consumer.fetching import Fetching
from marq.consumer.line_places import Reading
from marq.consumer.ordered_receiving import Ordering
from marq.consumer.prefetch import Prefetch, PrefetchBuffer
from marq.consumer.receiver_settings import ReceiverSettings
from marq.consumer.renewal import Renewal
from marq.consumer.resume_questions import TrackerQueries
from marq.consumer.settlement import put_back
from marq.consumer.starts import Starts
from marq.kafka.acquire_strategies import AcquireStrategy
from marq.kafka.group_reader import NotCommitted, Reader
from marq.kafka.marker_writer import MarkerWriter
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Source

log = logging.getLogger("marq")

#: Pause after a failed cycle, doubled each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
#: Maximum number of holders of messages in flight that a member reports to its group, newest first.
MAX_TOLD_HOLDERS = 16
#: How long a rebalance waits for cycles in progress.
REVOKE_LIMIT_S = 10.0


class Receiver:
    """Receives messages for one or more queues from one reader.

    ``strategy`` acquires and commits; ``writer`` writes all other markers, so that an ACQUIRE never waits behind acks.
    ``transactional`` acquires and commits for queues that deliver at most once, because with the marker first, a crash
    between ACQUIRE and commit duplicates messages. ``buffer`` is shared by all queues; without it each has its own.
    """

    def __init__(
        self,
        serving: Serving,
        reader: Reader,
        strategy: AcquireStrategy,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        *,
        transactional: AcquireStrategy | None = None,
        buffer: PrefetchBuffer | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        new_holder: Callable[[], int] = lambda: secrets.randbits(64),
        questions: TrackerQueries | None = None,
    ) -> None:
        self._serving = serving
        self._reader = reader
        self._strategy, self._transactional = strategy, transactional or strategy
        self._settings = settings
        self._clock, self._sleep, self._new_holder = clock, sleep, new_holder
        self.error: MarqError | None = None
        #: Set with the error.
        self.failed = asyncio.Event()
        self.prefetch = Prefetch(serving.queues, settings, clock, buffer)
        self.gate = DeliveryGate(
            settings.queue, settings.skipped, serving.queues, self.prefetch, clock, sleep, self.demand
        )
        self.acks = AckBatcher(
            writer,
            markers_partitions=settings.markers_partitions,
            limit_bytes=settings.limit_bytes,
            finished=self.finished,
            failed=self.fail,
            clock=clock,
            wall=wall,
        )
        self.renewal = Renewal(
            writer,
            settings,
            queues=lambda: self._serving.queues,
            finished=self.finished,
            before=self.prefetch.release_unwanted,
            lost=self.prefetch.lost,
            failed=self.fail,
            clock=clock,
            sleep=sleep,
        )
        self.starts = Starts(writer, settings, self.prefetch, failed=self.fail, clock=clock, sleep=sleep)
        self.deliveries = Deliveries(self, settings, clock)
        self.ordering = Ordering(
            settings,
            questions,
            deliver=self.deliveries.deliver_first,
            acquire=self._acquire_again,
            verify=reader.verify,
            changed=self.demand,
            resumed=self._resumed,
            failed=self.fail,
            clock=clock,
            sleep=sleep,
            new_holder=new_holder,
        )
        #: Where the last successful cycle of this assignment ended.
        self._committed_to: dict[Source, int] = {}
        self._holder = new_holder()
        #: The holders reported for the next assignment; its own holder comes first.
        self._next_holders: list[int] = []
        self._assignment = 0
        self._acquired = AcquiredOffsets()
        self._fetched = FetchedRecords(serving)
        self._pause_s = FIRST_RETRY_S
        self._cycles = Cycles(on_demand=not settings.prefetch)
        #: How many calls wait for the cycles to end; no other cycle may start meanwhile.
        self._held_up = 0
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._fetching = Fetching(reader, self._changed, lambda: self._assignment)
        self._stopping = False

    def start(self) -> None:
        self.apply_pauses()
        self.acks.start()
        self.renewal.start()
        self.starts.begin()
        self.ordering.start()
        self._reading = asyncio.create_task(self._run_cycles(), name="marq-receiver")
        self._reading.add_done_callback(self._reading_ended)

    async def stop_reading(self, limit_s: float, handlers: asyncio.Task[float] | None = None) -> None:
        """Stop fetching and dispatching; wait for cycles for up to ``limit_s``, and longer while ``handlers`` run."""
        self._stopping = True
        await self.starts.stop()
        await self.ordering.stop()
        self.gate.stop()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._fetching.stop()
        put_back(self.ordering.undelivered)
        if cycles := self._cycles.tasks:
            # A slow broker may write an ACQUIRE after its cycle was given up. Its lease would end and count an attempt
            # that no handler saw. A RELEASE does not help until the ACQUIRE is confirmed: it could be written first.
            _, left = await asyncio.wait(cycles, timeout=limit_s)
            while left and handlers is not None and not handlers.done():
                await asyncio.wait([*left, handlers], return_when=asyncio.FIRST_COMPLETED)
                left = {each for each in left if not each.done()}
            for task in left:
                task.cancel()
            await asyncio.gather(*cycles, return_exceptions=True)
            put_back(self.ordering.undelivered)

    async def stop(self, limit_s: float) -> bool:
        """Write the outcomes and end; return whether all were written within ``limit_s``."""
        self.prefetch.close()
        until_s = asyncio.get_running_loop().time() + limit_s
        # Leases must not end while their outcomes wait for a slow broker: the tracker would redeliver the messages.
        written = await self.acks.stop(limit_s)
        if self.ordering.moved and self._committed_to:
            with suppress(NotCommitted, TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await self._reader.commit(self._committed_to, self.ordering.behind((), self._committed_to))
        # A stop does not wait for a lease: the broker may be gone.
        await self.starts.end(max(until_s - asyncio.get_running_loop().time(), 0))
        await self.renewal.stop()
        return written

    def fail(self, error: BaseException) -> None:
        """Stop receiving for good; calls that wait for messages raise the error."""
        self.error = error if isinstance(error, MarqError) else MarqError(f"receiving stopped: {error!r}")
        if not self.failed.is_set():
            # Callers learn of it only when they receive again, or when their handlers have ended.
            log.error("consumer can no longer receive: queue=%s error=%s", ",".join(self.prefetch.buffers), self.error)
        self.failed.set()
        self._stopping = True
        self._changed.set()
        self.prefetch.close()

    def demand(self) -> None:
        """Check again whether there is room to fetch."""
        self._changed.set()

    def apply_pauses(self) -> None:
        """Pause and resume queues as their settings say, and drop messages that purges have ended."""
        self.gate.apply_pauses(self._serving.queues)
        self.ordering.serve(self._serving.queues)
        for queue in self.gate.apply_purges(self._serving.queues):
            self.ordering.purged(queue, self.gate.has_ended)

    # --- assignment ---------------------------------------------------------------------------------------------------

    async def serve(self, serving: Serving, begin: Callable[[Serving], None]) -> None:
        """Serve other queues; messages in flight of the former ones are finished as before.

        ``begin`` makes the reader drop its partitions and read for the new queues.
        """
        async with self._quiet(None):
            self._serving = serving
            self.prefetch.serve(serving.queues)
            self.apply_pauses()
            self._forget()
            self._fetched = FetchedRecords(serving)
            # Last, and without an await in between: all later fetches are for the new queues.
            begin(serving)

    async def revoked(self) -> None:
        """Let cycles in progress commit before partitions are revoked; after the limit they fail without a loss."""
        async with self._quiet(REVOKE_LIMIT_S):
            self._forget()

    @asynccontextmanager
    async def _quiet(self, limit_s: float | None) -> AsyncIterator[None]:
        """Enter when the cycles in progress have ended, or after the limit; no other cycle starts meanwhile."""
        self._held_up += 1
        try:
            if cycles := self._cycles.tasks:
                await asyncio.wait(cycles, timeout=limit_s)
            yield
        finally:
            self._held_up -= 1
            self._changed.set()

    def assigned(self) -> None:
        """Begin a new assignment with a new holder; messages in flight stay with the former one."""
        self._forget()
        self._holder = self._next_holders[0] if self._next_holders else self._new_holder()
        self._next_holders = []

    def holders(self) -> Sequence[int]:
        if not self._next_holders:
            # A repeated join request must report the same holders: other metadata would start another rebalance.
            self._next_holders = [self._new_holder(), *self.renewal.holders(MAX_TOLD_HOLDERS)]
        return self._next_holders

    def _forget(self) -> None:
        """Forget fetched records: reading begins again at the committed offsets."""
        self._assignment += 1
        self._acquired.clear()
        self._fetched.clear()
        self._committed_to.clear()
        put_back(self.ordering.give_up())
        for queue in self.ordering.queues:
            put_back(self.prefetch.take_of(queue))
        self._changed.set()

    def _reading_ended(self, task: asyncio.Task[None]) -> None:
        if (error := failure_of(task, stopping=self._stopping)) is not None:
            self.fail(error)

    async def _run_cycles(self) -> None:
        """Fetch the next batch while earlier cycles are in progress."""
        while not self._stopping:
            self._changed.clear()
            if self._cycles.have_to_end(self._fetched.count):
                await self._end_cycle()
                continue
            room = 0 if self._held_up else self._room()
            if not room:
                await self._fetching.wait()
            elif rest_s := self._cycles.rest_s(self._clock()):
                await self._sleep(rest_s)
            elif self._fetched:
                self._fetched.hold(self.ordering.unresumed(self._serving, self._fetched.records))
                if self._fetched:
                    self._start_cycle(room)
            else:
                await self._fetching.fetch(self._fetched)

    def _room(self) -> int:
        """Return how many messages to acquire now."""
        most, pending = self._settings.max_in_flight, self._cycles.pending
        waiting = self.ordering.waiting if self.prefetch.is_sated else 0  # Read on past them only for idle handlers.
        room = min(self.gate.room(most, pending + waiting), most - self.prefetch.in_flight - pending)
        return max(0, room) if self.ordering.has_room else 0

    def _start_cycle(self, room: int) -> None:
        records = self._fetched.cut(self.ordering.reads.step(room))
        self._begin_cycle(records, self._take(records), min(room, sum(map(len, records.values()))))

    def _begin_cycle(self, records: Mapping[Source, Records], taking: Taking, pending: int) -> Cycle:
        before = self._cycles[-1].task if self._cycles else None
        task = asyncio.create_task(self._cycle(records, taking, self._assignment, before), name="marq-cycle")
        self._cycles.begin(cycle := Cycle(records, self._assignment, pending, task), self._clock())
        return cycle

    async def _end_cycle(self) -> None:
        """Wait for the first cycle. If it failed, all that follow it fail, too: then pause, longer each time."""
        first = self._cycles[0]
        # Not `await first.task`, because a stop cancels this task, but the cycle must continue.
        await asyncio.wait([first.task])
        if first.task.result():
            self._cycles.popleft()
            self._pause_s = FIRST_RETRY_S
            return
        await asyncio.wait(self._cycles.tasks)
        self._cycles.clear()
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, MAX_RETRY_S)

    async def _cycle(
        self, records: Mapping[Source, Records], taking: Taking, assignment: int, before: asyncio.Task[bool] | None
    ) -> bool:
        """Take steps 2 to 4 for one fetched batch; return False if it will be read again.

        ``before`` is the previous cycle: ACQUIREs are written while it commits; nothing else overlaps.
        """
        try:
            if self._stopping:
                # No ACQUIRE has been written yet.
                return False
            sent_s = self._clock()
            try:
                await taking.strategy.acquire(taking.markers, taking.limit_s)
                await ended(before)
                # A rebalance gave up waiting for this cycle: another consumer may have the partitions.
                if assignment != self._assignment:
                    raise NotCommitted("the partitions were reassigned in the meantime")
                await self._commit(taking)
            except (BrokerUnavailable, NotCommitted) as error:
                # Some messages may be in flight now without a committed offset. They are read again, and acquiring
                # them again takes over their leases.
                if not isinstance(error, BeforeFailed):  # The previous cycle has logged the cause.
                    self._cycles.failed.write(self._clock(), taking, error)
                if self._stopping:
                    self.deliveries.release_ordered(taking, sent_s)
                # If the previous cycle fails, too, it goes back for both: this one would go back later, and less far.
                with suppress(BeforeFailed):
                    await ended(before)
                    self._go_back(records)
                return False
            self.deliveries.deliver(taking, sent_s)
            return True
        finally:
            self._changed.set()

    def _go_back(self, records: Mapping[Source, Records]) -> None:
        """Read again from where the cycle of these records began, at once: a call may wait for the next fetch."""
        # Later cycles go back, too.
        starts = self._fetched.clear() | self._cycles.starts(records, self._assignment)
        self._acquired.rewind(self._serving, starts)
        self._reader.rewind(starts)

    async def _commit(self, taking: Taking) -> None:
        """Step 3: commit the offsets after all records that were read, other queues' included."""
        offsets = taking.offsets or self._committed_to
        behind = self.ordering.behind(taking.readings, offsets, partial=bool(taking.offsets))
        try:
            await taking.strategy.commit(taking.markers, offsets, taking.limit_s, behind)
        except BaseException:
            self.ordering.uncommitted()
            raise
        self._committed_to.update(taking.offsets)

    def _take(self, records: Mapping[Source, Records]) -> Taking:
        readings: list[Reading] = []
        settings, serving = self._settings, self._serving
        taken = self._acquired.acquisitions(serving, records, self._holder, settings, self.ordering, readings)
        return self._taking(list(taken), {source: read.offsets[-1] + 1 for source, read in records.items()}, readings)

    def _taking(
        self, acquisitions: Sequence[Acquisition], ends: Mapping[Source, int], readings: Sequence[Reading]
    ) -> Taking:
        settings = self._settings
        at_most_once = any(settings.queue(each.queue).delivery == AT_MOST_ONCE for each in acquisitions)
        limit_s = min([each.lease_ms for each in acquisitions], default=settings.default_lease_ms) / 1000
        markers = [marker for each in acquisitions for marker in each.records()]
        # One strategy for both steps: some leave the ACQUIRE to the commit.
        strategy = self._transactional if at_most_once else self._strategy
        return Taking(strategy, acquisitions, markers, ends, limit_s, readings)

    async def _acquire_again(self, acquisitions: Sequence[Acquisition]) -> bool:
        """Acquire messages with a place in their lines; if there are none, only commit. Return whether it succeeded."""
        # Before an assignment's first commit, only messages of former ones can have ended: nothing to commit again.
        if self._held_up or self._stopping or not self._committed_to:
            return False
        cycle = self._begin_cycle({}, self._taking(acquisitions, {}, ()), 0)
        await asyncio.wait([cycle.task])
        return not cycle.task.cancelled() and cycle.task.result()

    def _resumed(self, source: Source) -> None:
        read_on = self._fetched.let_go(source)
        if read_on is not None:
            self._reader.rewind({source: read_on})
        self._changed.set()

    def finished(self, queue: str, count: int) -> None:
        self.prefetch.finished(queue, count)
        self.gate.finished(queue)
        self._changed.set()
