"""The five steps by which messages are received. One engine for every source of records.

1. **Fetch** a batch and keep the records of our own queues (:mod:`marq.serving`). Crash: nothing has happened.
2. **Acquire**: one marker batch for each queue and source partition, with the payloads; wait until all are durable.
   From here on the tracker brings the messages back unless they end. Crash: they are open but not committed. The
   next reader of the partition acquires them again, which takes the lease over; nothing is lost or doubled.
3. **Commit** the offset after the last record read. The marker goes first: a crash between commit and marker would lose
   the messages. Commit unknown: see 2, or they come back when the lease ends. Both may be one transaction
   (:mod:`marq.starts`), of which a crash in between leaves nothing.
4. **Hand out** to handlers and waiting calls what is not to be delivered later. Only now: a cycle that fails before
   hands nothing out, goes back to where it began and is tried again. Crash: the lease runs out and the tracker
   redelivers, with the next attempt. A message of a queue that delivers at most once is spent when it is taken
   (:mod:`marq.spending`).
5. **Settle** what was decided, batched by some milliseconds (:mod:`marq.outbox`). Crash before it is durable: the
   message was processed and is redelivered: that is the double which at-least-once delivery allows.

While handlers work on one batch the next cycles run, some at a time (docs/decisions/0026), and :mod:`marq.renewal`
keeps what is held alive.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

from marq.acquisition import Acquisition, acquisitions, unpurged
from marq.backlog import Backlog
from marq.breaker import QueueBreaker
from marq.core.errors import BrokerUnavailable, MarqError
from marq.core.markers import Ack, Source
from marq.core.queue import AT_MOST_ONCE
from marq.cycles import BeforeFailed, Cycle, Cycles, ended
from marq.flow_settings import FlowSettings
from marq.lease import Lease
from marq.message import Message
from marq.outbox import Outbox
from marq.reader import NotCommitted, Reader
from marq.records import Records
from marq.renewal import Renewal
from marq.rules import Rules
from marq.serving import Serving
from marq.shelf import Shelf
from marq.spending import Spending
from marq.starts import Start, Turn
from marq.token import Token
from marq.writer import MarkerWriter

log = logging.getLogger("marq")

#: Records of one fetch at the most.
MAX_CYCLE_RECORDS = 6_000
#: Between two attempts after a cycle that failed.
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0
#: Maximum number of holders of messages in flight that a member reports to its group, newest first.
MAX_TOLD_HOLDERS = 16
#: How long a rebalance waits for the cycle in progress.
REVOKE_LIMIT_S = 10.0


class Flow:
    """Receives messages for one or more queues from one reader.

    ``start`` acquires and commits; ``settler`` writes all other markers, so that an ACQUIRE never waits behind acks.
    ``once`` does what ``start`` does for queues that deliver at most once, since a marked start leaves a moment between
    ACQUIRE and commit in which a crash doubles messages. ``shelf``: one for the messages of all queues; without it each
    queue has its own.
    """

    def __init__(
        self,
        serving: Serving,
        reader: Reader,
        start: Start,
        settler: MarkerWriter,
        settings: FlowSettings,
        *,
        once: Start | None = None,
        shelf: Shelf | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        new_holder: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._serving = serving
        self._shelf = shelf
        #: Where the messages of each queue go; of a queue that is not served any more, too, while some are held.
        self.shelves = {queue: shelf or Shelf(queue) for queue in serving.queues}
        self.error: MarqError | None = None
        self.outbox = Outbox(
            settler,
            markers_partitions=settings.markers_partitions,
            limit_bytes=settings.limit_bytes,
            finished=self._finished,
            failed=self.fail,
            clock=clock,
            wall=wall,
        )
        self.renewal = Renewal(settler, settings, self._finished, clock, sleep, self._give_back_unwanted, self._lost)
        self._spending = Spending(settler, settings, clock, sleep)
        #: Queues that are paused, and those that are not.
        self._paused: frozenset[str] = frozenset()
        self._unpaused: Sequence[str] = serving.queues
        #: What becomes of messages that fail.
        self.rules = Rules(settings.queue, serving.queues, clock, self._opened)
        self._reader = reader
        self._start, self._once = start, once or start
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._pauses: set[asyncio.Task[None]] = set()
        self._new_holder = new_holder
        self._holder = new_holder()
        #: Holders reported for the next assignment, whose holder is the first of them.
        self._next_holders: list[int] = []
        self._held = 0
        #: The offset after the last ACQUIRE of this assignment, for each queue and source partition.
        self._acquired_to: dict[tuple[str, Source], int] = {}
        self._assignment = 0
        #: What was fetched and is in no cycle yet.
        self._backlog = Backlog(serving)
        self._pause_s = FIRST_RETRY_S
        #: Under way, in the order in which they were read.
        self._cycles = Cycles()
        #: How many wait for them to end, so that no other one may start.
        self._held_up = 0
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def distinct_shelves(self) -> set[Shelf]:
        """Each shelf once."""
        return {self._shelf} if self._shelf is not None else set(self.shelves.values())

    @property
    def held(self) -> int:
        """How many messages are leased and not finished."""
        return self._held

    @property
    def workers(self) -> list[asyncio.Task[Any]]:
        """Tasks that run handlers."""
        return [task for shelf in self.distinct_shelves for crew in shelf.crews for task in crew.tasks]

    @property
    def at_work(self) -> list[asyncio.Task[Any]]:
        """Those of them that are in a handler now."""
        return [task for shelf in self.distinct_shelves for crew in shelf.crews for task in crew.at_work]

    @property
    def taken(self) -> int:
        """How many messages somebody has taken and not finished."""
        return self._held - sum([len(shelf.ready) for shelf in self.distinct_shelves])

    @property
    def unwritten(self) -> bool:
        """Whether something was decided that is not written yet."""
        return self.outbox.unwritten

    def write(self) -> None:
        """Write at once what was decided: nobody decides more in the next moment."""
        self.outbox.flush_soon()

    def start(self) -> None:
        self.look_at_pauses()
        self.outbox.start()
        self.renewal.start()
        self._reading = asyncio.create_task(self._read(), name="marq-flow")

    async def stop_reading(self, limit_s: float) -> None:
        """Stop fetching and spending; wait at most ``limit_s`` for cycles in progress."""
        self._stopping = True
        await self._spending.stop()
        for pause in self._pauses:
            pause.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        cycles = self._cycles.tasks
        if cycles:
            await asyncio.wait(cycles, timeout=limit_s)
            for task in cycles:
                task.cancel()
            await asyncio.gather(*cycles, return_exceptions=True)

    def give_back(self) -> int:
        """Release all messages that nobody has taken, at once and uncounted; return how many."""
        now_s = self._clock()
        return sum([self._give_back_shelf(shelf, now_s) for shelf in self.distinct_shelves])

    def _give_back_shelf(self, shelf: Shelf, now_s: float) -> int:
        count = 0
        while (message := shelf.take(now_s)) is not None:
            message._lease.release(message.offset, 0, counted=False)
            count += 1
        return count

    def _give_back_unwanted(self, now_s: float) -> None:
        """Messages that were prefetched for calls which do not come any more are for others."""
        patience_s = self._settings.lease_ms / 1000
        for shelf in self.distinct_shelves:
            if shelf.standing or shelf.asked:
                shelf.wanted_s = now_s
                self._give_back_hoard(shelf, now_s)
            elif shelf.ready and now_s - shelf.wanted_s > patience_s:
                count = self._give_back_shelf(shelf, now_s)
                log.info(
                    "nobody asks for prefetched messages, gave them back: queue=%s messages=%d", shelf.queue, count
                )

    def _give_back_hoard(self, shelf: Shelf, now_s: float) -> None:
        """Of several queues that are read together a slow one is given more than it can do: no others would get any."""
        count, keep = 0, max(shelf.standing, shelf.asked)
        while len(shelf.ready) > keep:
            ready = shelf.ready.all()
            lease = ready[-1]._lease
            if now_s - lease.taken_s <= lease.lease_s:
                break
            lease.release(ready.pop().offset, int(lease.lease_s * 1000), counted=False)
            count += 1
        if count:
            log.info("handlers are slow, gave prefetched messages back: queue=%s messages=%d", shelf.queue, count)

    def look_at_pauses(self) -> None:
        """Do as settings say from now on: of a queue that is paused what nobody has taken is given back.

        It waits at the tracker then. Where all queues are paused nothing is read; else their messages are taken and
        left with the tracker (:mod:`marq.acquisition`), for others come behind them.
        """
        queues, before = self._serving.queues, self._paused
        self._paused = frozenset(queue for queue in queues if self._settings.queue(queue).paused)
        self._unpaused = [queue for queue in queues if queue not in self._paused]
        for queue in self._paused - before:
            for message in self.shelves[queue].ready.take_of(queue):
                message._lease.release(message.offset, 0, counted=False)
        self._changed.set()

    def _opened(self, queue: str) -> None:
        """A queue's breaker has opened: what nobody has begun waits for the end of the pause, and so does reading."""
        breaker = self.rules.breakers.get(queue)
        if breaker is None:
            return
        for message in self.shelves[queue].ready.take_of(queue):
            message._lease.release(message.offset, breaker.delay_ms(message), counted=False)
        pause = asyncio.create_task(self._end_pause(breaker), name="marq-pause")
        self._pauses.add(pause)
        pause.add_done_callback(self._pauses.discard)

    async def _end_pause(self, breaker: QueueBreaker) -> None:
        while left_s := breaker.pause_left_s:
            await self._sleep(left_s)
        self._changed.set()

    async def hold(self, messages: Sequence[Message], lease_ms: int) -> None:
        """Hold messages for so long from now on, and renew them by as much; durable on return."""
        now_s = self._clock()
        held: dict[Lease, list[Message]] = {}
        for message in messages:
            if message.offset in message._lease.open:
                held.setdefault(message._lease, []).append(message)
        for lease, members in held.items():
            part = lease.part([message.offset for message in members], now_s, lease_ms)
            for message in members:
                message._lease = part
            self.renewal.add(part)
        await self.outbox.settled(wait=True)

    def ack_by_token(self, token: Token) -> None:
        """Finish a message that may be held here or by somebody else."""
        lease = self.renewal.find(token.holder, token.source, token.offset)
        if lease is None:
            self.outbox.ack_foreign(Ack(token.queue, token.holder, token.source, [token.offset]))
        elif token.offset not in lease.decided:
            lease.decide(token.offset)
            lease.ack(token.offset)

    async def stop(self, limit_s: float) -> bool:
        """Write what was decided and end; return whether all was written within ``limit_s``."""
        for shelf in self.distinct_shelves:
            shelf.close()
        await self.renewal.stop()
        return await self.outbox.stop(limit_s)

    def demand(self) -> None:
        """Somebody wants messages: look whether there is room to fetch."""
        self._changed.set()

    # --- assignment ---------------------------------------------------------------------------------------------------

    async def serve(self, serving: Serving, begin: Callable[[Serving], None]) -> None:
        """Serve other queues from now on; what is held of queues that are not among them is finished as before.

        ``begin`` makes the reader drop its partitions and read for the new queues.
        """
        async with self._quiet(None):
            self._serving = serving
            for queue in serving.queues:
                if queue not in self.shelves:
                    self.shelves[queue] = self._shelf or Shelf(queue)
            self.look_at_pauses()
            self._forget()
            self._backlog = Backlog(serving)
            # Last, and without a wait in between: what is fetched from here on is fetched for the new queues.
            begin(serving)

    async def revoked(self) -> None:
        """Partitions go: let the cycles in progress commit first. After the limit they fail, and nothing is lost."""
        async with self._quiet(REVOKE_LIMIT_S):
            self._forget()

    @asynccontextmanager
    async def _quiet(self, limit_s: float | None) -> AsyncIterator[None]:
        """Begin when the cycles in progress have ended, or after the limit; no other one starts until the end."""
        self._held_up += 1
        try:
            if cycles := self._cycles.tasks:
                await asyncio.wait(cycles, timeout=limit_s)
            yield
        finally:
            self._held_up -= 1
            self._changed.set()

    def assigned(self) -> None:
        """Partitions have come: a new assignment has a new holder. What is held stays with the former one."""
        self._forget()
        self._holder = self._next_holders[0] if self._next_holders else self._new_holder()
        self._next_holders = []

    def holders(self) -> Sequence[int]:
        if not self._next_holders:
            # A repeated join request must report the same holders: changed metadata would start another rebalance.
            self._next_holders = [self._new_holder(), *self.renewal.holders(MAX_TOLD_HOLDERS)]
        return self._next_holders

    def _forget(self) -> None:
        """Reading begins anew at the committed offsets: what was fetched and not acquired will be fetched again."""
        self._assignment += 1
        self._acquired_to.clear()
        self._backlog.clear()
        self._changed.set()

    # --- the cycle ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            await self._read_for_ever()
        except MarqError as error:
            self.fail(error)
        except Exception as error:
            log.exception("reading ended by an error that marq did not expect")
            self.fail(error)

    async def _read_for_ever(self) -> None:
        """Fetch the next batch while the cycles of those before are under way."""
        while not self._stopping:
            self._changed.clear()
            if self._cycles.have_to_end(self._backlog.count):
                await self._end_cycle()
                continue
            room = 0 if self._held_up else self._room()
            if not room:
                await self._wait()
            elif not self._backlog:
                await self._fetch()
            else:
                self._start_cycle(room)

    def _start_cycle(self, room: int) -> None:
        records = self._backlog.cut(room)
        before = self._cycles[-1].task if self._cycles else None
        pending = min(room, sum(map(len, records.values())))
        task = asyncio.create_task(self._receive(records, self._assignment, before), name="marq-cycle")
        self._cycles.append(Cycle(records, self._assignment, pending, task))

    async def _fetch(self) -> None:
        assignment = self._assignment
        records = await self._reader.fetch(MAX_CYCLE_RECORDS)
        # Assigned anew meanwhile: reading begins again at the committed offsets, and this would be a second time.
        if assignment == self._assignment:
            self._backlog.put(records)

    async def _end_cycle(self) -> None:
        """Wait for the first cycle. When it failed, so do all that follow it: then pause, longer each time."""
        first = self._cycles[0]
        # Not `await first.task`: a stop cancels the reading, and the cycle is to end on its own.
        await asyncio.wait([first.task])
        if first.task.result():
            self._cycles.popleft()
            self._pause_s = FIRST_RETRY_S
            return
        await asyncio.wait(self._cycles.tasks)
        self._cycles.clear()
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, MAX_RETRY_S)

    def _room(self) -> int:
        """How many messages to acquire now."""
        most, now_s = self._settings.max_in_flight, self._clock()
        pending = self._cycles.pending
        if self.rules.breakers or (self._paused and self._shelf is None):
            rooms = {each: self.shelves[each].room(most, now_s, pending) for each in self._unpaused}
            wanted = max([self.rules.room(queue, room) for queue, room in rooms.items()], default=0)
        elif self._unpaused:
            wanted = max([shelf.room(most, now_s, pending) for shelf in self.distinct_shelves], default=0)
        else:
            wanted = 0
        return max(0, min(wanted, most - self._held - pending))

    async def _wait(self) -> None:
        """Wait until there may be room, and stay in the group meanwhile."""
        try:
            async with asyncio.timeout(self._reader.keep_alive_s):
                await self._changed.wait()
        except TimeoutError:
            await self._reader.keep_alive()

    async def _receive(
        self, records: Mapping[Source, Records], assignment: int, before: asyncio.Task[bool] | None
    ) -> bool:
        """Steps 2 to 4 for one fetched batch; return whether it was done with, else it is going to be read again.

        ``before`` is the cycle before: ACQUIREs are written while that one commits, and nothing else of it overlaps.
        """

        async def turn() -> None:
            await ended(before)
            # A rebalance did not wait any longer for this cycle: the partitions may be somebody else's by now.
            if assignment != self._assignment:
                raise NotCommitted("the partitions were assigned anew meanwhile")

        try:
            return assignment != self._assignment or await self._take_and_hand_out(records, turn)
        finally:
            self._changed.set()

    async def _take_and_hand_out(self, records: Mapping[Source, Records], turn: Turn) -> bool:
        acquired = list(self._own(records))
        sent_s = self._clock()
        try:
            # 2 and 3. Refused, or not known to be durable: some messages may be open now, and no offset says that they
            # are read. They are read again, and acquiring them again takes over what is open. Committed is all that was
            # read, for the records of other queues are not ours to keep.
            await self._start_of(acquired).take(
                [record for each in acquired for record in each.records()],
                {source: read.offsets[-1] + 1 for source, read in records.items()},
                min([each.lease_ms for each in acquired], default=self._settings.lease_ms) / 1000,
                turn,
            )
        except (BrokerUnavailable, NotCommitted) as error:
            log.warning(
                "nothing handed out, reading again: %s error=%s",
                " ".join(f"partition={s[1]} offsets={r.offsets[0]}-{r.offsets[-1]}" for s, r in records.items()), error,
            )  # fmt: skip
            if not isinstance(error, BeforeFailed):
                self._go_back(records)
            return False
        acquired = [each for each in acquired if each.messages]
        if acquired and self._clock() >= sent_s + min(each.lease_ms for each in acquired) / 1000:
            # Committed, so they are not read again: the tracker redelivers them, since nobody ends them.
            self._log_late(acquired)
        else:
            self._hand_out(acquired, sent_s)
        return True

    def _start_of(self, acquired: Sequence[Acquisition]) -> Start:
        only_once = any(self._settings.queue(each.queue).delivery == AT_MOST_ONCE for each in acquired)
        return self._once if only_once else self._start

    def _own(self, records: Mapping[Source, Records]) -> Iterator[Acquisition]:
        for source, read in records.items():
            for queue, own in self._serving.own(source, read):
                lane = (queue, source)
                own, known_to = unpurged(self._settings.purge(queue), source, own)
                if known_to:
                    self._acquired_to[lane] = max(self._acquired_to.get(lane, known_to), known_to)
                if not len(own):
                    continue
                # Not past the first: a topic that was made anew begins again.
                begin = min(self._acquired_to.get(lane, read.offsets[0]), own.offsets[0])
                self._acquired_to[lane] = own.offsets[-1] + 1
                own_topic = self._serving.is_own(source.topic)
                yield from acquisitions(lane, self._holder, own, begin, self._settings, own_topic=own_topic)

    def _go_back(self, records: Mapping[Source, Records]) -> None:
        """Read again from where the cycle of these records began, at once: somebody may wait for the next fetch."""
        # What was read after it goes back, too; where several have a partition, the earliest counts.
        starts = self._backlog.clear()
        for cycle in reversed(self._cycles):
            if cycle.assignment == self._assignment:
                starts |= {source: read.offsets[0] for source, read in cycle.records.items()}
            if cycle.records is records:
                break
        for source in starts:
            for queue in self._serving.queues_in(source.topic):
                self._acquired_to.pop((queue, source), None)
        self._reader.rewind(starts)

    def _log_late(self, acquired: Sequence[Acquisition]) -> None:
        for each in acquired:
            log.warning(
                "the lease was over before the messages were acquired, they will be redelivered:"
                " queue=%s partition=%d offsets=%d-%d",
                each.queue, each.source.partition, each.messages.offsets[0], each.messages.offsets[-1],
            )  # fmt: skip

    def _hand_out(self, acquired: Sequence[Acquisition], sent_s: float) -> None:
        """Step 4."""
        now_s = self._clock()
        for each in acquired:
            records = each.messages
            lease_s = each.lease_ms / 1000
            codec = self._settings.codecs.get(each.queue, self._settings.codec)
            lease = Lease(
                self.outbox,
                each.queue,
                each.source,
                each.holder,
                records,
                sent_s,
                lease_s,
                codec,
                each.own_topic,
            )
            self.rules.apply(lease)
            self.renewal.add(lease)
            self._held += len(records)
            messages: Iterable[Message] = map(Message, repeat(lease), records.offsets, records.values)
            shelf, count = self.shelves[each.queue], len(records)
            if each.queue in self._paused:
                # Acquired before that was known.
                for message in messages:
                    lease.release(message.offset, 0, counted=False)
                shelf.held += count
                continue
            if lease.breaker is not None:
                messages = self._admitted(lease.breaker, list(messages), shelf)
                count = len(messages)
            if self._settings.queue(each.queue).delivery == AT_MOST_ONCE:
                lease.spending = self._spending
            shelf.put(messages, count, now_s)

    def _admitted(self, breaker: QueueBreaker, messages: Sequence[Message], shelf: Shelf) -> Sequence[Message]:
        """Give back at once what the breaker does not let through."""
        count = breaker.admit(messages)
        for message in messages[count:]:
            message._lease.release(message.offset, breaker.delay_ms(message), counted=False)
        shelf.held += len(messages) - count
        return messages[:count]

    # --- accounts -----------------------------------------------------------------------------------------------------

    def _lost(self, lease: Lease, offsets: Sequence[int]) -> None:
        self.shelves[lease.queue].lose(lease, offsets)

    def _finished(self, queue: str, count: int) -> None:
        shelf = self.shelves[queue]
        shelf.held -= count
        self._held -= count
        if self.rules.breakers:
            self.rules.finished(queue)
        shelf.pace.finished(count, self._clock(), idle=shelf.held == 0)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more can be received: whoever waits gets the error."""
        self.error = error if isinstance(error, MarqError) else MarqError(f"receiving stopped: {error!r}")
        self._stopping = True
        self._changed.set()
        for shelf in self.distinct_shelves:
            shelf.close()
