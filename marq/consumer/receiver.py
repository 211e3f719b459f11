"""The five steps of receiving messages, the same for every source of records.

1. **Fetch** a batch and keep the records of our own queues (:mod:`marq.kafka.queue_records`). Crash: nothing is lost.
2. **Acquire**: one marker batch for each queue and source partition, with the payloads; wait until all are durable.
   From here on, the tracker redelivers the messages unless they end. Crash: the next reader of the partition acquires
   them again, which takes over the lease; nothing is lost or duplicated.
3. **Commit** the offset after the last record read. The marker goes first: a crash between commit and marker would lose
   the messages. After a crash between marker and commit, the next reader takes the messages over; if their leases
   expire before that, the tracker redelivers them, and the records are delivered as well. Both may be one transaction
   (:mod:`marq.kafka.transactions`), so that a crash in between leaves no trace.
4. **Deliver** to handlers and waiting calls, except messages that are due later. A cycle that fails before that
   delivers nothing and is retried. Crash: the lease expires; the tracker redelivers.
5. **Settle**: outcomes are written in batches of some milliseconds (:mod:`marq.leases.held`,
   :mod:`marq.consumer.writer`). Crash before they are durable: a processed message is redelivered, which is the
   duplicate that at-least-once delivery allows.

While handlers work on one batch, the next cycles run (docs/decisions/0026), and leases are renewed. Which messages of
queues with ordering are delivered, asked about or acquired again is decided in :mod:`marq.consumer.ordering`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from typing import Any, cast

from marq.backend.cluster import Cluster
from marq.client.background import failure_of
from marq.consumer.acquire import AcquiredOffsets, Acquisition, acquire_records, acquisitions_again
from marq.consumer.delivery_gate import DeliveryGate
from marq.consumer.expiry import may_expire
from marq.consumer.ordering import (
    Acquired,
    Again,
    DeliveryRun,
    Ordering,
    RereadRecords,
    Steps,
    TrackerQuestion,
)
from marq.consumer.prefetch import Prefetch, PrefetchBuffer
from marq.consumer.starts import Starts, is_suspect
from marq.consumer.tracker_queries import TrackerQueries
from marq.consumer.turns import Turns
from marq.consumer.writer import Listener, OutcomeWriter
from marq.kafka.group_reader import NotCommitted, Reader, TransactionalReader
from marq.kafka.marker_writer import MarkerRecord, MarkerWriter
from marq.kafka.queue_records import Serving
from marq.kafka.records import Records
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.kafka.transactions import MarkerTransactions
from marq.leases.circuit_breaker import CLOSED
from marq.leases.held import Ended, LeasedBatch, Lost
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.settings.queue import AT_MOST_ONCE
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.markers import Resumed, Source
from marq.wire.names import EXPIRED_HEADER

log = logging.getLogger("marq")

#: Maximum number of records of one fetch.
MAX_CYCLE_RECORDS = 6_000
#: While this many records are kept back, further ones of their sources are dropped, and read again later.
MAX_HELD_RECORDS = 6_000
#: Maximum number of cycles: one writes its ACQUIREs while the previous one commits. More run only while
#: ``BUSY_RECORDS`` wait, because a small cycle costs as much as a large one.
MAX_CYCLES, MAX_CYCLES_BUSY, BUSY_RECORDS = 2, 4, 1_000
#: Without prefetching, cycles run one at a time and begin at least this many seconds apart: calls that arrive meanwhile
#: share the next cycle.
MAX_CYCLES_ON_DEMAND, ON_DEMAND_S = 1, 0.015
#: Pause after a failed cycle, doubled each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
#: Pause after a source could not be resumed.
RESUME_RETRY_S = 0.1
#: Maximum number of holders of messages in flight that a member reports to its group, newest first.
MAX_TOLD_HOLDERS = 16
#: How many records to read at a time of a queue with fairness, even if no handler wants a message.
READ_AHEAD = 1_000
#: How many seconds of work such a queue keeps ready, so that fast handlers get several turns at once.
READY_S = 0.001
#: How long a rebalance waits for cycles in progress.
REVOKE_LIMIT_S = 10.0


class Receiver(Listener):
    """Receives messages for one or more queues from one reader.

    ``acquirer`` writes ACQUIREs; ``writer`` writes all other markers, so that an ACQUIRE never waits behind acks.
    ``transactions`` write ACQUIREs and commit their offsets for queues that deliver at most once, because with the
    marker first, a crash between both duplicates messages; for all queues if there is no ``acquirer``. ``buffer`` is
    shared by all queues; without it each has its own.
    """

    def __init__(
        self,
        serving: Serving,
        reader: Reader,
        acquirer: MarkerWriter | None,
        writer: MarkerWriter,
        settings: ReceiverSettings,
        cluster: Cluster,
        *,
        transactions: MarkerTransactions | None = None,
        buffer: PrefetchBuffer | None = None,
    ) -> None:
        self._serving = serving
        self._reader = reader
        self._acquirer, self._transactions = acquirer, transactions
        self._settings = settings
        self._cluster, self._now_s = cluster, cluster.now_s
        self._queries = TrackerQueries(cluster, writer, settings.markers_partitions)
        self.error: MarqError | None = None
        #: Set with the error.
        self.failed = asyncio.Event()
        #: Set when there may be room to fetch.
        self._changed = asyncio.Event()
        self.prefetch = Prefetch(serving.queues, settings, cluster, self._changed, buffer)
        self.gate = DeliveryGate(settings, serving.queues, self.prefetch, cluster, self._changed)
        self.writer = OutcomeWriter(writer, settings, cluster, self)
        self.starts = Starts(self.writer, settings, self.prefetch)
        self.ordering = Ordering(settings)
        #: Where the last successful cycle of this assignment ended.
        self._committed_to: dict[Source, int] = {}
        self._holder = self._new_holder()
        #: The holders reported for the next assignment; its own holder comes first.
        self._next_holders: list[int] = []
        self._assignment = 0
        self._acquired = AcquiredOffsets()
        self._fetched = FetchedRecords(serving)
        self._pause_s = FIRST_RETRY_S
        self._cycles = Cycles(on_demand=not settings.prefetch)
        #: How many calls wait for the cycles to end; no other cycle may start meanwhile.
        self._held_up = 0
        self._reading: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        #: Unanswered questions to trackers.
        self._asking: set[asyncio.Task[None]] = set()
        #: When to poll again at the latest, in the event loop's time.
        self._poll_by_s = inf
        self._stopping = False

    def start(self) -> None:
        self.apply_settings()
        self.writer.start()
        self._reading = asyncio.create_task(self._run(), name="marq-receiver")
        self._reading.add_done_callback(self._ended)

    async def stop_reading(self, limit_s: float, handlers: asyncio.Task[float] | None = None) -> None:
        """Stop fetching and dispatching; wait for cycles for up to ``limit_s``, and longer while ``handlers`` run."""
        self._stopping = self.ordering.stopped = self.starts.stopped = True
        tasks = [task for task in (self._reading, self._fetching, *self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.ordering.release_waiting()
        if cycles := self._cycles.tasks:
            # A slow broker may write an ACQUIRE after its cycle was given up. Its lease would end and count an attempt
            # that no handler saw. A RELEASE does not help until the ACQUIRE is confirmed: it could be written first.
            _, left = await asyncio.wait(cycles, timeout=limit_s)
            while left and handlers is not None and not handlers.done():
                await asyncio.wait([*left, handlers], return_when=asyncio.FIRST_COMPLETED)
                left = {task for task in left if not task.done()}
            for cycle in left:
                cycle.cancel()
            await asyncio.gather(*cycles, return_exceptions=True)
            self.ordering.release_waiting()

    async def stop(self, limit_s: float) -> bool:
        """Write the outcomes and end; return whether all were written within ``limit_s``."""
        self.prefetch.close()
        self.starts.end()
        until_s = asyncio.get_running_loop().time() + limit_s
        written = await self.writer.stop(limit_s)
        if self.ordering.moved and self._committed_to:
            with suppress(NotCommitted, TimeoutError):
                async with asyncio.timeout_at(until_s):
                    lows = self.ordering.low_watermarks((), self._committed_to)
                    await self._reader.commit(self._committed_to, lows)
        return written

    def fail(self, error: BaseException) -> None:
        """Stop receiving for good; calls that wait for messages raise the error."""
        self.error = error if isinstance(error, MarqError) else MarqError(f"receiving stopped: {error!r}")
        if not self.failed.is_set():
            # Callers learn of it only when they receive again, or when their handlers have ended.
            log.error("consumer can no longer receive: queue=%s error=%s", ",".join(self.prefetch.buffers), self.error)
        self.failed.set()
        # A message that the ordering delivered now would stay leased: nothing takes its steps any longer.
        self._stopping = self.ordering.stopped = True
        self._changed.set()
        self.prefetch.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        # An assignment that ends cancels the questions of its sources.
        stopping = self._stopping or task in self._asking
        self._asking.discard(task)
        if (error := failure_of(task, stopping=stopping)) is not None:
            self.fail(error)

    def demand(self) -> None:
        """Check again whether there is room to fetch, and whose turn it is."""
        self._changed.set()
        self.next_turns()

    def next_turns(self) -> None:
        """Give handlers that have nothing to do the messages whose turns come next."""
        if self._turns_vary:
            self._take_steps()

    @property
    def _turns_vary(self) -> bool:
        """Whether turns depend on handlers and calls, or on a breaker, which admits more as time passes."""
        return self.ordering.sparing or not self.gate.breakers.keys().isdisjoint(self.ordering.turns)

    def apply_settings(self) -> None:
        """Apply changed settings: pauses, circuit breakers, limits; drop messages that purges have ended."""
        self.gate.apply_pauses(self._serving.queues)
        self._apply_shares()
        for queue in self.gate.apply_purges(self._serving.queues):
            self.ordering.purged(queue, self._now_s())
        self._take_steps()

    def _apply_shares(self) -> None:
        before = self.ordering.queues
        self.ordering.serve({queue: self._share(queue) for queue in self._serving.queues})
        # Prefetched before their queue was served by key, these would neither count for limits nor keep the order.
        for queue in self.ordering.queues - before:
            put_back(self.prefetch.take_of(queue))

    def _share(self, queue: str) -> float:
        """Return which share of a queue's partitions this receiver reads."""
        if not self._settings.queue(queue).by_key:
            return 1.0
        own = self._serving.own_topics.get(queue)
        assigned, count = self._reader.assigned_of(own or self._serving.messages)
        partitions = None if own else self._settings.partitions(queue)
        total = set(range(count)) if partitions is None else set(partitions)
        # Without any, there is nothing to share.
        return (len(total & set(assigned)) or len(total)) / len(total) if total else 1.0

    # --- assignment ---------------------------------------------------------------------------------------------------

    def served(self) -> Iterable[str]:
        """Return the queues that are served now."""
        return self._serving.queues

    async def serve(self, serving: Serving, begin: Callable[[Serving], None]) -> None:
        """Serve other queues; messages in flight of the former ones are finished as before.

        ``begin`` makes the reader drop its partitions and read for the new queues.
        """
        async with self._quiet(None):
            self._serving = serving
            self.prefetch.serve(serving.queues)
            self.apply_settings()
            self._forget()
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
        self._apply_shares()
        if self.ordering.turns:
            topics = [self._serving.messages, *self._serving.own_topics.values()]
            assigned = {Source(topic, number) for topic in topics for number in self._reader.assigned_of(topic)[0]}
            self.ordering.assigned(assigned, self._now_s())

    def _new_holder(self) -> int:
        return secrets.randbits(64)

    def holders(self) -> Sequence[int]:
        if not self._next_holders:
            # A repeated join request must report the same holders: other metadata would start another rebalance.
            self._next_holders = [self._new_holder(), *self.writer.held.holders(MAX_TOLD_HOLDERS)]
        return self._next_holders

    def _forget(self) -> None:
        """Forget fetched records: reading begins again at the committed offsets."""
        self._assignment += 1
        self._fetched, self._acquired, self._committed_to = FetchedRecords(self._serving), AcquiredOffsets(), {}
        self.ordering.give_up()
        for task in self._asking:
            task.cancel()
        for queue in self.ordering.queues:
            put_back(self.prefetch.take_of(queue))
        self._changed.set()

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Fetch the next batch while earlier cycles are in progress."""
        self._poll_by_s = self._deadline_s()
        while not self._stopping:
            self._changed.clear()
            self.next_turns()
            if self._cycles.have_to_end(self._fetched.count):
                await self._end_cycle()
                continue
            room = 0 if self._held_up else self._room()
            if not room:
                await self._stay_in_group()
            elif rest_s := self._cycles.rest_s(self._now_s()):
                await self._cluster.sleep(rest_s)
            elif self._fetched:
                self._fetched.hold(self.ordering.unresumed(self._serving, self._fetched.records))
                self._take_steps()
                if self._fetched:
                    self._start_cycle(room)
            else:
                await self._fetch_or_change()
                self._poll_by_s = self._deadline_s()

    def _room(self) -> int:
        """Return how many messages to acquire now."""
        most, pending = self._settings.max_in_flight, self._cycles.pending
        waiting = self.ordering.waiting if self.prefetch.is_sated else 0  # Read on past them only for idle handlers.
        room = min(self.gate.room(most, pending + waiting), most - self.prefetch.in_flight - pending)
        if self.ordering.reads_ahead and not self.gate.breakers:
            # The next turn may be that of a key whose messages come after many others.
            room = max(room, READ_AHEAD)
        return max(0, room) if self.ordering.has_room else 0

    async def _stay_in_group(self) -> None:
        """Wait until something has changed, and stay in the group."""
        # Changes do not move the deadline: a consumer that is full and busy would leave its group.
        left_s = self._poll_by_s - asyncio.get_running_loop().time()
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            return
        await self._reader.keep_alive()
        self._poll_by_s = self._deadline_s()

    def _deadline_s(self) -> float:
        return asyncio.get_running_loop().time() + self._reader.keep_alive_s

    def _start_cycle(self, room: int) -> None:
        records = self._fetched.cut(self.ordering.step(room))
        acquisitions, reread = self._acquisitions_of(records)
        pending = min(room, sum(map(len, records.values())))
        self._begin_cycle(acquisitions, records, reread, {}, pending)

    def _begin_cycle(
        self,
        acquisitions: Sequence[Acquisition],
        records: Mapping[Source, Records],
        reread: Sequence[RereadRecords],
        again: Again,
        pending: int,
    ) -> None:
        settings = self._settings
        at_most_once = any(settings.queue(taken.queue).delivery == AT_MOST_ONCE for taken in acquisitions)
        limit_s = min([taken.lease_ms for taken in acquisitions], default=settings.default_lease_ms) / 1000
        transactions = self._transactions if at_most_once or self._acquirer is None else None
        before = self._cycles[-1].task if self._cycles else None
        markers = acquire_records(acquisitions, settings)
        cycle = Cycle(
            transactions, acquisitions, markers, limit_s, records, reread, again, pending, self._assignment, before
        )  # fmt: skip
        cycle.task = asyncio.create_task(self._cycle(cycle), name="marq-cycle")
        self._cycles.begin(cycle, self._now_s())

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

    async def _cycle(self, cycle: Cycle) -> bool:
        """Take steps 2 to 4; return False if the records will be read again.

        ACQUIREs are written while the previous cycle commits; nothing else overlaps.
        """
        try:
            if self._stopping:
                # No ACQUIRE has been written yet.
                return False
            sent_s = self._now_s()
            try:
                await self._acquire(cycle)
                await ended(cycle.before)
                # A rebalance gave up waiting for this cycle: another consumer may have the partitions.
                if cycle.assignment != self._assignment:
                    raise NotCommitted("the partitions were reassigned in the meantime")
                await self._commit(cycle)
            except (BrokerUnavailable, NotCommitted) as error:
                # Some messages may be in flight now without a committed offset. They are read again, and acquiring
                # them again takes over their leases.
                if not isinstance(error, BeforeFailed):  # The previous cycle has logged the cause.
                    self._cycles.failed.write(self._now_s(), cycle, error)
                if self._stopping:
                    self._release_ordered(cycle, sent_s)
                # If the previous cycle fails, too, it goes back for both: this one would go back later, and less far.
                with suppress(BeforeFailed):
                    await ended(cycle.before)
                    self._go_back(cycle)
                self.ordering.not_acquired(cycle.again, self._now_s())
                self._take_steps()
                return False
            self._deliver_acquired(cycle, sent_s)
            return True
        finally:
            self._changed.set()

    # --- 1. fetch -----------------------------------------------------------------------------------------------------

    async def _fetch_or_change(self) -> None:
        """Fetch and add records; return early if records that were kept back may be acquired."""
        if self._fetching is None and not self._fetched.held:
            await self._fetch()
            return
        task = self._fetching = self._fetching or asyncio.create_task(self._fetch(), name="marq-fetch")
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([task, changed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if task.done():
            self._fetching = None
            task.result()

    async def _fetch(self) -> None:
        # A reassignment replaces this: reading restarts at the committed offsets, so these records will arrive again.
        fetched = self._fetched
        fetched.put(await self._reader.fetch(MAX_CYCLE_RECORDS))

    def _go_back(self, cycle: Cycle) -> None:
        """Read again from where a cycle began, at once: a call may wait for the next fetch."""
        # Later cycles go back, too.
        starts = self._fetched.clear() | self._cycles.starts(cycle, self._assignment)
        self._acquired.rewind(starts)
        self._reader.rewind(starts)

    # --- 2. acquire ---------------------------------------------------------------------------------------------------

    async def _acquire(self, cycle: Cycle) -> None:
        """Write the ACQUIREs, unless they are part of the commit's transaction; cycles may overlap here.

        Of two open transactions, the later one could not be committed first.

        Raises BrokerUnavailable if they are not known to be written in time, or were refused.
        """
        if cycle.transactions is None and cycle.markers:
            assert self._acquirer is not None, "without it, all cycles have transactions"
            await self._acquirer.write(cycle.markers, cycle.limit_s)

    def _acquisitions_of(
        self, records: Mapping[Source, Records]
    ) -> tuple[Sequence[Acquisition], Sequence[RereadRecords]]:
        return self._acquired.acquisitions(
            self._serving, records, self._holder, self._settings, self.ordering, self._cluster.broker_ms()
        )

    # --- 3. commit ----------------------------------------------------------------------------------------------------

    async def _commit(self, cycle: Cycle) -> None:
        """Commit the offsets after all records that were read, other queues' included.

        Raises NotCommitted if the group refused, or the outcome is unknown; BrokerUnavailable like :meth:`_acquire`.
        """
        # Not the next assignment's, if it begins meanwhile: another member may have these partitions then.
        committed_to, ends = self._committed_to, cycle.ends
        offsets = ends or committed_to
        lows = self.ordering.low_watermarks(cycle.reread, offsets, partial=bool(ends))
        try:
            if cycle.transactions is None or not cycle.markers:
                await self._reader.commit(offsets, lows)
            else:
                reader = cast("TransactionalReader", self._reader)
                # The current generation, in which we own the partitions: the group refuses it after a rebalance.
                commit = reader.commit_of(offsets, lows)
                await cycle.transactions.write(cycle.markers, commit, cycle.limit_s)
                reader.note_committed(commit)
        except BaseException:
            self.ordering.uncommitted(self._now_s())
            raise
        committed_to.update(ends)

    # --- 4. deliver ---------------------------------------------------------------------------------------------------

    def _deliver_acquired(self, cycle: Cycle, sent_s: float) -> None:
        """Deliver what a cycle has acquired; leases begin at ``sent_s``, which is before their ACQUIRE was sent."""
        now_s = self._now_s()
        ordered: list[Acquired] = []
        for taken in cycle.acquisitions:
            records = taken.messages
            if taken.keys is not None:
                again = taken.keys in cycle.again
                ordered.append(Acquired(taken.keys, self._hold(taken, records, sent_s), records, again))
            elif not records:
                continue
            elif now_s >= sent_s + taken.lease_ms / 1000:
                # The offsets are committed, so they are not read again: the tracker redelivers them.
                log.warning("the lease expired before the messages were acquired, they will be redelivered: %s", taken)
            else:
                self._deliver(DeliveryRun(self._hold(taken, records, sent_s), records.offsets, records.values))
        if ordered or cycle.reread:
            self.ordering.acquired(ordered, cycle.reread, now_s)
            self._take_steps()

    def _release_ordered(self, cycle: Cycle, sent_s: float) -> None:
        """Release messages of ordered queues that a failed cycle may have acquired; their attempts do not count.

        The next reader finds them open, even if their offsets are not committed. In other queues, the next reader reads
        messages with uncommitted offsets again and takes over their leases. After a RELEASE, it would deliver them
        twice.
        """
        for taken in cycle.acquisitions:
            if taken.keys is not None:
                records = taken.messages
                self._hold(taken, records, sent_s).put_back(records.offsets)

    def _hold(self, taken: Acquisition, records: Records, sent_s: float) -> LeasedBatch:
        settings = self._settings
        codec = settings.codecs.get(taken.queue, settings.codec)
        batch = LeasedBatch(
            self.writer, taken.queue, taken.source, taken.holder, records, sent_s, taken.lease_ms / 1000, codec,
            taken.own_topic,
        )  # fmt: skip
        if taken.keys is not None:
            batch.in_order, batch.waiting = True, set(batch.open)
        self.gate.apply(batch)
        self.prefetch.may_expire |= batch.may_expire and may_expire(records, batch.settings)
        batch.starts_first = batch.at_most_once or (settings.prefetch and records.has_header(EXPIRED_HEADER))
        self.writer.add(batch)
        return batch

    def _deliver(self, run: DeliveryRun) -> None:
        """Buffer the messages that may be delivered now; the others count as in flight until they are released."""
        batch, offsets, values = run
        gate, prefetch, count = self.gate, self.prefetch, len(offsets)
        messages: Iterable[Message] = map(Message, repeat(batch), offsets, values)
        if gate.restricts(batch):
            messages = gate.admitted(batch, list(messages))
            count = len(messages)
        if not batch.starts_first:
            prefetch.add(batch.queue, messages, count, len(offsets))
            return
        suspects, others = list[Message](), list[Message]()
        for message in messages:
            (suspects if is_suspect(message) else others).append(message)
        prefetch.add(batch.queue, others, len(others), len(offsets))
        prefetch.add_suspects(suspects)
        if suspects:
            self.writer.wake()

    # --- 5. settle ----------------------------------------------------------------------------------------------------

    def left(self, queue: str, count: int) -> None:
        """Note that messages are no longer in flight."""
        self.prefetch.finished(queue, count)
        self.gate.finished(queue)
        self._changed.set()

    def settled(self, ended: Sequence[Ended]) -> None:
        """Continue after outcomes of ordered messages have become durable."""
        self.ordering.settled(ended, self._now_s())
        self._take_steps()
        self._changed.set()

    def lost(self, lost: Lost) -> None:
        """Note that leases have ended."""
        batch, offsets, in_flight = lost
        self.ordering.lost(batch, offsets, self._now_s())
        self.prefetch.lost(batch, offsets)
        # Last: a breaker's test message that its handler lost is a failure; `left` would only admit another.
        if in_flight:
            self.left(batch.queue, in_flight)
        self._take_steps()

    def renewing(self, now_s: float) -> None:
        """Release messages that should not be renewed."""
        self.prefetch.release_unwanted(now_s)

    def hold(self, messages: Iterable[Message], lease_ms: int, *, ends: bool = False, started: bool = False) -> None:
        """Lease messages for ``lease_ms`` from now on, and renew them for as long again unless the lease ``ends``.

        ``started``: a program sees them when that is durable, so their attempts count.
        """
        parts: dict[LeasedBatch, list[Message]] = {}
        for message in messages:
            if message._offset in message._batch.open:
                parts.setdefault(message._batch, []).append(message)
        for batch, members in parts.items():
            offsets = [message._offset for message in members]
            part = batch.part(offsets, self._now_s(), lease_ms, started=started)
            part.ends = ends
            self.ordering.moved_to(batch, part, offsets)
            for message in members:
                message._batch = part
            self.writer.add(part)

    def detach(self, messages: Iterable[Message]) -> None:
        """Leave messages to the holders of their tokens: their leases are not renewed."""
        for message in messages:
            batch, offset = message._batch, message._offset
            if offset in batch.open:
                batch.open.discard(offset)
                self.left(batch.queue, 1)

    # --- ordering -----------------------------------------------------------------------------------------------------

    def pass_time(self, now_s: float) -> float:
        """Do what is due for starts, suspects, breakers and queues with ordering; return when something is due next."""
        self._take_steps()
        return min(self.starts.pass_time(now_s), self.prefetch.release_suspects(now_s), self.gate.end_pauses())

    def _take_steps(self) -> None:
        """Do what the ordering wants now."""
        if self._stopping:
            return
        if self._turns_vary:
            self._want()
        steps = self.ordering.next_steps(self._now_s())
        if steps is not None:
            for run in steps.deliver:
                self._deliver(run)
            # Apart: an answer about messages must not wait for the next attempt to resume a source.
            for questions in (steps.resume, steps.ask):
                if questions:
                    task = asyncio.create_task(self._ask_trackers(questions), name="marq-ask")
                    self._asking.add(task)
                    task.add_done_callback(self._ended)
            if steps.acquire or steps.commit:
                self._acquire_again(steps)
        self.writer.wake_at(self.ordering.next_due_s)

    def _want(self) -> None:
        """Say how many messages may have their turns now."""
        priorities, together = self.ordering.priorities, dict[str, Turns[Any]]()
        for queue, turns in self.ordering.turns.items():
            if turns.paused:
                continue
            breaker = self.gate.breakers.get(queue)
            turns.admitted = turns.wanted = inf
            if breaker is not None and breaker.state != CLOSED:
                turns.admitted = turns.running + breaker.room(1)
            if self.prefetch.is_shared and queue in priorities:
                together[queue] = turns
            elif turns.sparing:
                turns.wanted = turns.running + self._wanted({queue: turns})
        priorities.wanted = self._wanted(together) if together else inf

    def _wanted(self, queues: Mapping[str, Turns[Any]]) -> float:
        """Return how many more messages of queues with one buffer to give to handlers and calls.

        Those behind them might come first later.
        """
        buffer = self.prefetch.buffers[next(iter(queues))]
        idle = sum([pool.idle for pool in buffer.pools])
        ahead = int(buffer.window.recent * READY_S) if buffer.handler_demand else 0
        ready = len(buffer.ready) + self.ordering.undelivered(queues)
        # Other queues may share the buffer.
        if self.prefetch.is_shared:
            handled = sum([message.queue in queues for pool in buffer.pools for message in pool.running])
            ready = min(ready, max(0, sum(turns.running for turns in queues.values()) - handled))
        return max(idle + ahead, buffer.call_demand) - ready

    def _acquire_again(self, steps: Steps) -> None:
        """Acquire messages that keep their places; if there are none, only commit."""
        # Before an assignment's first commit, only messages of former ones can have ended: nothing to commit again.
        if self._held_up or not self._committed_to:
            self.ordering.not_acquired(steps.acquire, self._now_s())
            return
        settings = self._settings
        taken = [
            acquisition
            for keys, retries in steps.acquire.items()
            for acquisition in acquisitions_again(keys, retries, settings)
        ]
        self._begin_cycle(taken, {}, (), steps.acquire, 0)
        # The cycle must be waited for.
        self._changed.set()

    async def _ask_trackers(self, questions: Sequence[TrackerQuestion]) -> None:
        asked = [(marker, question) for question in questions for marker in question.markers(self._new_holder)]
        by_holder = {marker.holder: question for marker, question in asked}
        async for marker, parts in self._queries.answers([marker for marker, _ in asked]):
            question = by_holder[marker.holder]
            if question.keys is None:
                await self._resumed(question, parts)
            else:
                self.ordering.answered(question.keys, parts, self._now_s())
                self._take_steps()
                self._changed.set()

    async def _resumed(self, question: TrackerQuestion, parts: Sequence[Resumed]) -> None:
        answer: Sequence[Resumed] | None = parts
        now_s = self._now_s()
        if committing := [cycle.task for cycle in self._cycles if question.source in cycle.records]:
            # Otherwise the offset that verifies the membership could be older than theirs.
            await asyncio.wait(committing)
        try:
            # It also says that no other member reads the source, so the answer covers all earlier deliveries.
            await self._reader.verify({question.source})
        except NotCommitted as error:
            # It is asked again, unless the source belongs to another member by now.
            log.info("source not resumed: topic=%s partition=%d %s", *question.source, error)
            await self._cluster.sleep(RESUME_RETRY_S)
            answer = None
        if self.ordering.resumed(question, answer, self._new_holder(), now_s):
            read_on = self._fetched.let_go(question.source)
            if read_on is not None:
                self._reader.rewind({question.source: read_on})
            self._changed.set()


# --- cycles -----------------------------------------------------------------------------------------------------------


class BeforeFailed(NotCommitted):
    """The previous cycle failed, and reads again for both cycles."""


@dataclass(eq=False, slots=True)
class Cycle:
    """Steps 2 to 4 for some records, or for messages that are acquired ``again``: then no records were read.

    With ``transactions``, steps 2 and 3 are one. ``limit_s`` applies to each step. At most ``pending`` new messages
    will be delivered.
    """

    transactions: MarkerTransactions | None
    acquisitions: Sequence[Acquisition]
    markers: Sequence[MarkerRecord]
    limit_s: float
    records: Mapping[Source, Records]
    reread: Sequence[RereadRecords]
    again: Again
    pending: int
    assignment: int
    #: The previous cycle.
    before: asyncio.Task[bool] | None
    task: asyncio.Task[bool] = field(init=False)

    def __str__(self) -> str:
        return " ".join(f"partition={source.partition} end={offset}" for source, offset in self.ends.items())

    @property
    def ends(self) -> dict[Source, int]:
        """The offsets to commit."""
        return {source: read.offsets[-1] + 1 for source, read in self.records.items()}


class Cycles(deque[Cycle]):
    """Cycles in progress, in the order in which their records were read; ``on_demand``: nothing is prefetched."""

    def __init__(self, *, on_demand: bool = False) -> None:
        super().__init__()
        self._on_demand = on_demand
        #: When the last one began.
        self._began_s = -inf
        self.failed = RepeatedWarning("cycle failed, reading again: %s error=%s")

    def begin(self, cycle: Cycle, now_s: float) -> None:
        self._began_s = now_s
        self.append(cycle)

    def rest_s(self, now_s: float) -> float:
        """Return for how long no other cycle may begin."""
        return max(0.0, self._began_s + ON_DEMAND_S - now_s) if self._on_demand else 0.0

    @property
    def tasks(self) -> list[asyncio.Task[bool]]:
        return [cycle.task for cycle in self]

    @property
    def pending(self) -> int:
        """The maximum number of messages that will be delivered."""
        return sum([cycle.pending for cycle in self])

    def starts(self, first: Cycle, assignment: int) -> dict[Source, int]:
        """Return where the cycles of an assignment began to read: the ``first`` one, and all later ones."""
        starts: dict[Source, int] = {}
        # If several have read a partition, the earliest counts.
        for cycle in reversed(self):
            if cycle.assignment == assignment:
                starts |= {source: read.offsets[0] for source, read in cycle.records.items()}
            if cycle is first:
                break
        return starts

    def have_to_end(self, waiting: int) -> bool:
        """Whether the first cycle has ended, or must end before the ``waiting`` records get a cycle."""
        if self._on_demand:
            # Nothing is fetched meanwhile, either: the next fetch returns more records at once.
            return len(self) >= MAX_CYCLES_ON_DEMAND
        most = MAX_CYCLES_BUSY if waiting >= BUSY_RECORDS else MAX_CYCLES
        return bool(self) and (self[0].task.done() or (waiting > 0 and len(self) >= most))


async def ended(before: asyncio.Task[bool] | None) -> None:
    """Wait for the previous cycle.

    Raises:
        BeforeFailed: its records will be read again.
    """
    if before is None:
        return
    await asyncio.wait([before])
    if before.cancelled() or before.exception() is not None or not before.result():
        raise BeforeFailed("the records before it were not committed")


class FetchedRecords:
    """Records that were fetched and not yet acquired, in order for each source partition.

    They are neither leased nor committed, so the receiver may fetch far more than it has room for. This matters if most
    records of a topic belong to other queues; ``serving`` tells which ones are ours.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.records: dict[Source, Records] = {}
        #: Sources from which nothing may be acquired yet.
        self.held: set[Source] = set()
        #: Those whose later records were dropped, with the offset of the first dropped one.
        self._dropped: dict[Source, int] = {}

    def __bool__(self) -> bool:
        return not self.records.keys() <= self.held

    @property
    def count(self) -> int:
        """The number of records that are not kept back, including those of other queues."""
        return sum([len(read) for source, read in self.records.items() if source not in self.held])

    def put(self, records: Mapping[Source, Records]) -> None:
        """Add records that follow the present ones."""
        for source, read in records.items():
            before = self.records.get(source)
            if source in self._dropped or (source in self.held and self._is_full):
                self._dropped.setdefault(source, read.offsets[0])
            else:
                self.records[source] = Records.joined([before, read]) if before is not None else read

    def hold(self, sources: Iterable[Source]) -> None:
        """Keep back the records of these sources, and those that follow them."""
        for source in sources:
            if source not in self.held and self._is_full:
                self._dropped[source] = self.records.pop(source).offsets[0]
            self.held.add(source)

    @property
    def _is_full(self) -> bool:
        """Whether no more records are kept back: a source that can't be resumed for hours must not stop the others."""
        return sum([len(self.records.get(source, ())) for source in self.held]) >= MAX_HELD_RECORDS

    def let_go(self, source: Source) -> int | None:
        """Stop keeping back the records of a source; return the offset from which to read again, if any."""
        self.held.discard(source)
        return self._dropped.pop(source, None)

    def clear(self) -> dict[Source, int]:
        """Forget all records; return where reading has to continue."""
        starts = self._dropped | {source: read.offsets[0] for source, read in self.records.items()}
        self.records, self.held, self._dropped = {}, set(), {}
        return starts

    def cut(self, room: int) -> dict[Source, Records]:
        """Take records with at most ``room`` messages of ours, and the other records between and after them."""
        taken: dict[Source, Records] = {}
        left: dict[Source, Records] = {}
        for source, read in self.records.items():
            if source in self.held:
                left[source] = read
                continue
            count = len(read)
            end = count if count <= room else self._serving.end(source, read, room)
            if end:
                taken[source] = read if end == count else read[:end]
                room -= end if end == count <= room else self._serving.count(source, taken[source])
            if end < count:
                left[source] = read[end:]
        self.records = left
        return taken
