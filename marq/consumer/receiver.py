"""The five steps of receiving messages, the same for every source of records.

1. **Fetch** a batch and keep the records of our own queues (:mod:`marq.kafka.serving`). Crash: nothing has happened.
2. **Acquire**: one marker batch for each queue and source partition, with the payloads; wait until all are durable.
   From here on the tracker redelivers the messages unless they end. Crash: they are in flight but not committed. The
   next reader of the partition acquires them again, which takes the lease over; nothing is lost or doubled.
3. **Commit** the offset after the last record read. The marker goes first: a crash between commit and marker would lose
   the messages. Commit unknown: see 2, or they come back when the lease ends. Both may be one transaction
   (:mod:`marq.kafka.acquire_strategies`), of which a crash in between leaves nothing.
4. **Deliver** to handlers and waiting calls, except messages that are due later. A cycle that fails before delivers
   nothing and is tried again from its first record. Crash: the lease ends and the tracker redelivers, with the next
   attempt. If a queue delivers at most once, a message is dispatched when it is taken
   (:mod:`marq.consumer.at_most_once`).
5. **Settle**: outcomes are written in batches of some milliseconds (:mod:`marq.consumer.settlement`,
   :mod:`marq.consumer.ack_batcher`). Crash before they are durable: a processed message is redelivered, which is the
   duplicate that at-least-once delivery allows.

While handlers work on one batch the next cycles run (docs/decisions/0026), and :mod:`marq.consumer.renewal` renews the
leases of all messages in flight.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import repeat

from marq.consumer.ack_batcher import AckBatcher
from marq.consumer.acquisition import AcquiredOffsets, Acquisition
from marq.consumer.at_most_once import AtMostOnce
from marq.consumer.cycles import BeforeFailed, Cycle, Cycles, FetchedRecords, Taking, ended
from marq.consumer.held_batch import HeldBatch
from marq.consumer.message import Message
from marq.consumer.prefetch import Prefetch, PrefetchBuffer
from marq.consumer.receiver_settings import ReceiverSettings
from marq.consumer.renewal import Renewal
from marq.consumer.rules import Rules
from marq.kafka.acquire_strategies import AcquireStrategy
from marq.kafka.reader import NotCommitted, Reader
from marq.kafka.records import Records
from marq.kafka.serving import Serving
from marq.kafka.writer import MarkerWriter
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Source

log = logging.getLogger("marq")

#: Maximum number of records of one fetch.
MAX_CYCLE_RECORDS = 6_000
#: Pause after a failed cycle, doubled each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
#: Maximum number of holders of messages in flight that a member reports to its group, newest first.
MAX_TOLD_HOLDERS = 16
#: How long a rebalance waits for cycles in progress.
REVOKE_LIMIT_S = 10.0


class Receiver:
    """Receives messages for one or more queues from one reader.

    ``strategy`` acquires and commits; ``writer`` writes all other markers, so that an ACQUIRE never waits behind acks.
    ``transactional`` acquires and commits for queues that deliver at most once, because with the marker first a crash
    between ACQUIRE and commit doubles messages. ``buffer`` is shared by all queues; without it each has its own.
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
    ) -> None:
        self._serving = serving
        self._reader = reader
        self._strategy, self._transactional = strategy, transactional or strategy
        self._settings = settings
        self._clock = clock
        self._new_holder = new_holder
        self.error: MarqError | None = None
        self.prefetch = Prefetch(serving.queues, settings, clock, buffer)
        self.rules = Rules(settings.queue, serving.queues, self.prefetch, clock, sleep, self.demand)
        self.acks = AckBatcher(
            writer,
            markers_partitions=settings.markers_partitions,
            limit_bytes=settings.limit_bytes,
            finished=self._finished,
            failed=self.fail,
            clock=clock,
            wall=wall,
        )
        self.renewal = Renewal(
            writer,
            settings,
            queues=lambda: self._serving.queues,
            finished=self._finished,
            before=self.prefetch.release_unwanted,
            lost=self.prefetch.lost,
            clock=clock,
            sleep=sleep,
        )
        self._at_most_once = AtMostOnce(writer, settings, clock, sleep)
        self._holder = new_holder()
        #: The holders reported for the next assignment; its own holder comes first.
        self._next_holders: list[int] = []
        self._assignment = 0
        self._acquired = AcquiredOffsets()
        self._fetched = FetchedRecords(serving)
        self._pause_s = FIRST_RETRY_S
        self._cycles = Cycles()
        #: How many calls wait for the cycles to end; no other cycle may start meanwhile.
        self._held_up = 0
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        self.apply_pauses()
        self.acks.start()
        self.renewal.start()
        self._reading = asyncio.create_task(self._read(), name="marq-receiver")

    async def stop_reading(self, limit_s: float) -> None:
        """Stop fetching and dispatching; wait up to ``limit_s`` for cycles in progress."""
        self._stopping = True
        await self._at_most_once.stop()
        self.rules.stop()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        cycles = self._cycles.tasks
        if cycles:
            await asyncio.wait(cycles, timeout=limit_s)
            for task in cycles:
                task.cancel()
            await asyncio.gather(*cycles, return_exceptions=True)

    async def stop(self, limit_s: float) -> bool:
        """Write the outcomes and end; return whether all were written within ``limit_s``."""
        self.prefetch.close()
        # Leases must not end while their outcomes wait for a slow broker: the tracker would redeliver the messages.
        written = await self.acks.stop(limit_s)
        await self.renewal.stop()
        return written

    def fail(self, error: BaseException) -> None:
        """Stop receiving for good; calls that wait for messages raise the error."""
        self.error = error if isinstance(error, MarqError) else MarqError(f"receiving stopped: {error!r}")
        self._stopping = True
        self._changed.set()
        self.prefetch.close()

    def demand(self) -> None:
        """Check again whether there is room to fetch."""
        self._changed.set()

    def apply_pauses(self) -> None:
        """Pause and resume queues as their settings say."""
        self.rules.apply_pauses(self._serving.queues)

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
        self._changed.set()

    # --- cycles -------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._run_cycles()
        except MarqError as error:
            self.fail(error)
        except Exception as error:
            log.exception("reading stopped on an unexpected error")
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
                await self._wait()
            elif not self._fetched:
                await self._fetch()
            else:
                self._start_cycle(room)

    def _room(self) -> int:
        """Return how many messages to acquire now."""
        most, pending = self._settings.max_in_flight, self._cycles.pending
        return max(0, min(self.rules.room(most, pending), most - self.prefetch.in_flight - pending))

    async def _wait(self) -> None:
        """Wait until there may be room, and stay in the group."""
        try:
            async with asyncio.timeout(self._reader.keep_alive_s):
                await self._changed.wait()
        except TimeoutError:
            await self._reader.keep_alive()

    def _start_cycle(self, room: int) -> None:
        records = self._fetched.cut(room)
        before = self._cycles[-1].task if self._cycles else None
        pending = min(room, sum(map(len, records.values())))
        cycle = self._cycle(records, self._take(records), self._assignment, before)
        task = asyncio.create_task(cycle, name="marq-cycle")
        self._cycles.append(Cycle(records, self._assignment, pending, task))

    async def _end_cycle(self) -> None:
        """Wait for the first cycle. If it failed, all that follow it fail, too: then pause, longer each time."""
        first = self._cycles[0]
        # Not `await first.task`: a stop cancels this task, but the cycle must continue.
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

        ``before`` is the previous cycle: ACQUIREs are written while it commits; nothing else overlaps. A cycle ends
        after all previous ones, so none is started behind one that has failed: the reader would not go back for it.
        """
        try:
            sent_s = self._clock()
            try:
                await self._acquire(taking)
                await ended(before)
                # A rebalance gave up waiting for this cycle: another consumer may have the partitions.
                if assignment != self._assignment:
                    raise NotCommitted("the partitions were reassigned in the meantime")
                await self._commit(taking)
            except (BrokerUnavailable, NotCommitted) as error:
                # Some messages may be in flight now without a committed offset. They are read again, and acquiring
                # them again takes their leases over.
                log.warning("cycle failed, reading again: %s error=%s", taking, error)
                # If the cycle before fails, too, it goes back for both: this one would go back less far, after it.
                with suppress(BeforeFailed):
                    await ended(before)
                    self._go_back(records)
                return False
            self._deliver(taking.acquisitions, sent_s)
            return True
        finally:
            self._changed.set()

    def _go_back(self, records: Mapping[Source, Records]) -> None:
        """Read again from where the cycle of these records began, at once: a call may wait for the next fetch."""
        # Later cycles go back, too. If several have read a partition, the earliest counts.
        starts = self._fetched.clear()
        for cycle in reversed(self._cycles):
            if cycle.assignment == self._assignment:
                starts |= {source: read.offsets[0] for source, read in cycle.records.items()}
            if cycle.records is records:
                break
        self._acquired.rewind(self._serving, starts)
        self._reader.rewind(starts)

    # --- the five steps -----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Step 1."""
        assignment = self._assignment
        records = await self._reader.fetch(MAX_CYCLE_RECORDS)
        # After a reassignment reading begins again at the committed offsets; these records would come twice.
        if assignment == self._assignment:
            self._fetched.put(records)

    async def _acquire(self, taking: Taking) -> None:
        """Step 2."""
        await taking.strategy.acquire(taking.markers, taking.limit_s)

    async def _commit(self, taking: Taking) -> None:
        """Step 3: commit the offsets after all records that were read, other queues' included."""
        await taking.strategy.commit(taking.markers, taking.offsets, taking.limit_s)

    def _deliver(self, acquisitions: Sequence[Acquisition], sent_s: float) -> None:
        """Step 4; leases begin before their ACQUIRE was sent."""
        acquisitions = [each for each in acquisitions if each.messages]
        late = acquisitions and self._clock() >= sent_s + min(each.lease_ms for each in acquisitions) / 1000
        for each in acquisitions:
            if late:
                # The offsets are committed, so they are not read again: the tracker redelivers them.
                log.warning("the lease expired before the messages were acquired, they will be redelivered: %s", each)
            else:
                self._deliver_one(each, sent_s)

    async def settle(self) -> None:
        """Step 5: return when all outcomes so far are durable."""
        await self.acks.settled()

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def _take(self, records: Mapping[Source, Records]) -> Taking:
        acquisitions = list(self._acquired.acquisitions(self._serving, records, self._holder, self._settings))
        at_most_once = any(self._settings.queue(each.queue).delivery == AT_MOST_ONCE for each in acquisitions)
        return Taking(
            # One strategy for both steps: one may leave the ACQUIRE to the commit.
            self._transactional if at_most_once else self._strategy,
            acquisitions,
            [marker for each in acquisitions for marker in each.records()],
            {source: read.offsets[-1] + 1 for source, read in records.items()},
            min([each.lease_ms for each in acquisitions], default=self._settings.default_lease_ms) / 1000,
        )

    def _hold(self, acquisition: Acquisition, sent_s: float) -> HeldBatch:
        queue, records, settings = acquisition.queue, acquisition.messages, self._settings
        holder, source, lease_s = acquisition.holder, acquisition.source, acquisition.lease_ms / 1000
        codec = settings.codecs.get(queue, settings.codec)
        return HeldBatch(self.acks, queue, source, holder, records, sent_s, lease_s, codec, acquisition.own_topic)

    def _deliver_one(self, acquisition: Acquisition, sent_s: float) -> None:
        held, records = self._hold(acquisition, sent_s), acquisition.messages
        self.rules.apply(held)
        if self._settings.queue(held.queue).delivery == AT_MOST_ONCE:
            held.at_most_once = self._at_most_once
        self.renewal.add(held)
        messages: Iterable[Message] = map(Message, repeat(held), records.offsets, records.values)
        count = len(records)
        if self.rules.restricts(held):
            messages = self.rules.admitted(held, list(messages))
            count = len(messages)
        self.prefetch.put(held, messages, count)

    def _finished(self, queue: str, count: int) -> None:
        self.prefetch.finished(queue, count)
        self.rules.finished(queue)
        self._changed.set()
