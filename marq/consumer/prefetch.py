"""Messages in flight, and the buffers in which some of them wait until a handler or a call takes them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Protocol

from marq.client.background import Time
from marq.consumer.expiry import has_expired
from marq.leases.held import LeasedBatch
from marq.leases.message import Message, put_back
from marq.leases.receiver_settings import ReceiverSettings
from marq.wire.record_headers import uncounted

log = logging.getLogger("marq")

#: How many Message objects are made at once.
AT_ONCE = 64
#: How long suspects are released that can't wait here, doubled each time.
FIRST_AWAY_MS = 500
#: How long other messages wait behind a suspect that waits for its turn.
NEXT_S = 0.5
#: How many seconds of work to prefetch, and how fast the window forgets an earlier pace.
PREFETCH_S, MEMORY_S = 1.0, 1.0


class Pool(Protocol):
    """Tasks that take messages from a buffer."""

    tasks: list[asyncio.Task[None]]

    @property
    def busy_tasks(self) -> Sequence[asyncio.Task[None]]:
        """The tasks that are in a handler now."""

    @property
    def running(self) -> list[Message]:
        """The messages that handlers have now."""

    @property
    def idle(self) -> int:
        """How many more messages handlers can take now."""

    def lose(self, batch: LeasedBatch, offsets: Sequence[int]) -> None:
        """Cancel the handlers of messages whose leases have ended."""


class PrefetchWindow:
    """How many messages to hold: about as many as were recently finished per second.

    A prefetched message is leased, so no other consumer can have it: a slow handler must not hoard messages, and a fast
    one must not wait for the broker. Only time in which messages were held counts. The window adapts to a new handler
    at once and to a changed pace within about a second; between two calls it at most doubles. Times are seconds of a
    monotonic clock.
    """

    __slots__ = ("_busy_s", "_finished", "_seen_s", "_window")

    def __init__(self) -> None:
        self._finished = 0.0
        self._busy_s = 0.0
        self._seen_s: float | None = None
        self._window = 1

    def busy(self, now_s: float) -> None:
        """Start counting time, because messages are held."""
        if self._seen_s is None:
            self._seen_s = now_s

    def finished(self, count: int, now_s: float, *, idle: bool) -> None:
        """Count finished messages; ``idle`` if none is left."""
        self._pass(now_s)
        self._finished += count
        if idle:
            self._seen_s = None

    def disregard(self, count: int) -> None:
        """Do not count messages that will be released unhandled."""
        self._finished -= count

    @property
    def recent(self) -> int:
        """How many messages were last to be held: about those that are finished in a second."""
        return self._window

    def window(self, floor: int, most: int, now_s: float) -> int:
        """Return how many messages to hold now: at least ``floor``, at most ``most``."""
        self._pass(now_s)
        wanted = self._finished / self._busy_s * PREFETCH_S if self._busy_s > 0 else 0.0
        grown = max(floor, 2 * self._window)
        self._window = max(1, min(int(max(floor, wanted)), grown, most))
        return self._window

    def _pass(self, now_s: float) -> None:
        if self._seen_s is None:
            return
        passed_s = now_s - self._seen_s
        self._seen_s = now_s
        self._busy_s += passed_s
        if self._busy_s > MEMORY_S:
            keep = MEMORY_S / self._busy_s
            self._busy_s *= keep
            self._finished *= keep


class Ready:
    """Messages in order, of which only the first few are objects: ``made``, filled by :meth:`make`.

    Objects that are made shortly before use are gone soon after, so the garbage collector rarely visits them.
    """

    __slots__ = ("_left", "_runs", "made")

    def __init__(self) -> None:
        self.made: deque[Message] = deque()
        self._runs: deque[Iterator[Message]] = deque()
        self._left = 0

    def __len__(self) -> int:
        return len(self.made) + self._left

    def add(self, messages: Iterable[Message], count: int) -> None:
        """Add ``count`` messages at the end; iterating over them may create them."""
        if count == 1 and not self._left:
            # With thousands of queues nearly every run has one message, and its iterators would burden the collector.
            self.made.extend(messages)
        else:
            self._runs.append(iter(messages))
            self._left += count

    def make(self, count: int = AT_ONCE) -> bool:
        """Make some messages if none is made; return whether there is one to take."""
        made, runs = self.made, self._runs
        while not made and runs:
            made.extend(islice(runs[0], count))
            self._left -= len(made)
            if not made:
                runs.popleft()
        return bool(made)

    def take(self, most: int) -> list[Message]:
        """Take at most ``most`` messages."""
        taken: list[Message] = []
        while len(taken) < most and self.make(most - len(taken)):
            pop = self.made.popleft
            taken += [pop() for _ in range(min(len(self.made), most - len(taken)))]
        return taken

    def all(self) -> deque[Message]:
        """Make all messages and return them; the caller may remove some at both ends."""
        for run in self._runs:
            self.made.extend(run)
        self._runs.clear()
        self._left = 0
        return self.made

    def take_if(self, matches: Callable[[Message], bool]) -> list[Message]:
        """Take all messages that match."""
        made = self.all()
        taken = {message: None for message in made if matches(message)}
        if taken:
            kept = [message for message in made if message not in taken]
            made.clear()
            made.extend(kept)
        return list(taken)


class PrefetchBuffer:
    """Prefetched messages of one queue or group, the calls that wait for them, and how many are in flight.

    ``handler_demand`` is how many messages handlers want prefetched, ``call_demand`` how many the waiting calls want.
    Without ``ahead``, the buffer gets only as many messages as calls wait for.
    """

    __slots__ = (
        "_ahead", "_takers", "call_demand", "closed", "handler_demand", "in_flight", "pools", "queue", "ready",
        "wanted_s", "window",
    )  # fmt: skip

    def __init__(self, queue: str, *, ahead: bool = True) -> None:
        self.queue = queue
        self._ahead = ahead
        self.ready = Ready()
        self.in_flight = 0
        self.handler_demand = 0
        self.call_demand = 0
        self.window = PrefetchWindow()
        self.pools: list[Pool] = []
        #: When a handler or a call last took a message or waited for one.
        self.wanted_s = 0.0
        self.closed = False
        self._takers: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def put(self, messages: Iterable[Message], count: int) -> None:
        """Add ``count`` leased messages, and wake as many takers."""
        self.ready.add(messages, count)
        self.wake(count)

    def take(self, now_s: float) -> Message | None:
        """Return the next message whose lease has not ended, or None."""
        ready = self.ready
        self.wanted_s = now_s
        while ready.make():
            message = ready.made.popleft()
            if message._batch.expires_s > now_s:
                return message
        return None

    def take_many(self, most: int, now_s: float) -> list[Message]:
        """Return at most ``most`` messages whose leases have not ended."""
        self.wanted_s = now_s
        taken: list[Message] = []
        while messages := self.ready.take(most - len(taken)):
            taken += [message for message in messages if message._batch.expires_s > now_s]
        return taken

    def drop_expired(self, now_s: float) -> None:
        """Drop the first messages if their leases have ended; they no longer count as in flight."""
        ready = self.ready
        while ready.make() and ready.made[0]._batch.expires_s <= now_s:
            ready.made.popleft()

    async def wait(self) -> None:
        """Return when a message may be available, or the buffer was closed."""
        if self.ready or self.closed:
            return
        taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takers[taker] = None
        try:
            await taker
        except asyncio.CancelledError:
            # A call whose time is over must not leave its future here: polls of an empty queue would fill the memory.
            self._takers.pop(taker, None)
            # Woken and cancelled in the same turn of the event loop: wake the next taker instead.
            if taker.done() and not taker.cancelled() and self.ready:
                self.wake(1)
            raise

    def close(self) -> None:
        """Wake all takers: no message will come."""
        self.closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all takers to check again."""
        self.wake(len(self._takers))

    def room(self, most: int, now_s: float, pending: int, overtaken: int) -> int:
        """Return how many messages to fetch besides the ``pending`` ones, or 0 if that is not worth a fetch yet.

        Others may overtake ``overtaken`` of those in flight, so these take no room.
        """
        wanted = self._ahead and (self.handler_demand or self.in_flight or self.call_demand)
        window = self.window.window(self.handler_demand, most, now_s) if wanted else 0
        room = max(window - self.in_flight + overtaken, self.call_demand - len(self.ready)) - pending
        worth = 1 if self.call_demand or not self.ready else max(1, window // 4)
        return room if room >= worth else 0

    def wake(self, count: int) -> None:
        """Wake this many takers to check again."""
        takers = self._takers
        while takers and count > 0:
            taker, _ = takers.popitem(last=False)
            if not taker.done():
                taker.set_result(None)
                count -= 1


class Prefetch:
    """The buffer of each queue, or one ``shared`` by all."""

    def __init__(
        self,
        queues: Iterable[str],
        settings: ReceiverSettings,
        time: Time,
        changed: asyncio.Event,
        shared: PrefetchBuffer | None = None,
    ) -> None:
        self._settings = settings
        self._clock, self._broker_ms = time.now_s, time.broker_ms
        #: Set when there may be room to fetch.
        self._changed = changed
        self._shared = shared
        #: Includes queues that are no longer served while their messages are in flight.
        self.buffers: dict[str, PrefetchBuffer] = {}
        #: Whether a buffered message may have expired meanwhile.
        self.may_expire = False
        #: Suspects that wait for their turn, those that handlers have or get next, and whether that is one alone.
        self._suspects: deque[Message] = deque()
        self._suspects_here: list[Message] = []
        self._alone = False
        #: How many suspects with used-up attempts run together: one more for each that has ended here.
        self._group = 1
        self.serve(queues)

    def serve(self, queues: Iterable[str]) -> None:
        """Add a buffer for each of these queues."""
        for queue in queues:
            if queue not in self.buffers:
                self.buffers[queue] = self._shared or PrefetchBuffer(queue)

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    @property
    def distinct(self) -> set[PrefetchBuffer]:
        """Each buffer once."""
        return {self._shared} if self._shared is not None else set(self.buffers.values())

    @property
    def in_flight(self) -> int:
        """The number of messages in flight."""
        return sum([buffer.in_flight for buffer in self.distinct])

    @property
    def is_sated(self) -> bool:
        """Whether messages are ready for all handlers and calls."""
        return all(len(buffer.ready) >= buffer.handler_demand + buffer.call_demand for buffer in self.distinct)

    @property
    def processing(self) -> int:
        """How many messages were taken from the buffers and are not finished."""
        # Buffers may still have messages whose leases have ended, behind others.
        return max(0, self.in_flight - len(self._suspects) - sum([len(buffer.ready) for buffer in self.distinct]))

    @property
    def pools(self) -> list[Pool]:
        """The handler pools of all buffers."""
        return [pool for buffer in self.distinct for pool in buffer.pools]

    def add(self, queue: str, messages: Iterable[Message], count: int, in_flight: int) -> None:
        """Count messages as in flight, and buffer ``count`` of them."""
        buffer = self.buffers[queue]
        buffer.in_flight += in_flight
        buffer.window.busy(self._clock())
        if count:
            buffer.put(messages, count)

    def add_suspects(self, messages: Iterable[Message]) -> None:
        """Buffer messages, which are in flight already, when it is their turn.

        Calls get them at once: a program may keep what it has received, and ask for the next. Only as many wait as
        handlers may take. Those behind them are released, each time for longer, up to a lease.
        """
        for message in messages:
            if self.buffers[message.queue].handler_demand:
                self._suspects.append(message)
            else:
                self._begin(message)
        self._next_suspects()
        waiting = self._suspects
        while waiting and len(waiting) > self.buffers[waiting[-1].queue].handler_demand:
            message = waiting.pop()
            self.buffers[message.queue].window.disregard(1)
            lease_ms = int(message._batch.lease_s * 1000)
            put_back([message], min(lease_ms, FIRST_AWAY_MS << min(uncounted(message._record.headers), 20)))

    def overtaken(self, buffer: PrefetchBuffer) -> int:
        """Return how many suspects others may overtake, because these must not wait behind suspects for long."""
        waiting = self._suspects
        if not waiting or self._clock() < waiting[0]._batch.taken_s + NEXT_S:
            return 0
        return sum([self.buffers[message.queue] is buffer for message in waiting])

    def _next_suspects(self) -> None:
        """Buffer the suspects whose turn it is, in order."""
        waiting, here = self._suspects, self._suspects_here
        while waiting:
            message = waiting[0]
            if message._offset in message._batch.open:
                # With every suspect, so that ended ones do not fill the memory; from the end, because one step for each
                # message that ends must not pass all of them.
                while here and here[-1]._offset not in here[-1]._batch.open:
                    here.pop()
                    self._group += 1
                most = self._most_together(message)
                if here and (self._alone or len(here) >= most):
                    return
                here.append(message)
                self._alone = most == 1
                self._begin(message)
            waiting.popleft()
        if not self.in_flight:
            here.clear()
            self._group = 1

    def _most_together(self, message: Message) -> float:
        """Return how many suspects may run together if this is one of them.

        Without a limit if it has used up no attempt. The last attempt is always alone: otherwise suspects would use up
        their last attempts together whenever one of them ends the process. Of those in between, the first one is alone,
        and each that ends here lets more of them run together.
        """
        here, attempt = self._suspects_here, message.attempt
        if attempt >= self._settings.queue(message.queue).max_attempts:
            return 1
        if attempt == 1:
            return inf
        if len(here) >= self._group:
            left = [other for other in here if other._offset in other._batch.open]
            self._group += len(here) - len(left)
            here[:] = left
        return self._group

    def _begin(self, message: Message) -> None:
        """Buffer a suspect, before all other messages, because it has waited."""
        buffer = self.buffers[message.queue]
        buffer.ready.made.appendleft(message)
        buffer.wake(1)

    def take_of(self, queue: str) -> list[Message]:
        """Take all buffered messages of one queue."""
        return [*self.buffers[queue].ready.take_if(lambda message: message.queue == queue), *self._take_suspects(queue)]

    def _take_suspects(self, queue: str | None = None) -> list[Message]:
        waiting = self._suspects
        self._suspects = deque([message for message in waiting if queue not in (None, message.queue)])
        return [message for message in waiting if queue in (None, message.queue)]

    def finished(self, queue: str, count: int) -> None:
        """Count messages as no longer in flight."""
        buffer = self.buffers[queue]
        buffer.in_flight -= count
        buffer.window.finished(count, self._clock(), idle=buffer.in_flight == 0)
        if self._suspects:
            self._next_suspects()

    def lost(self, batch: LeasedBatch, offsets: Sequence[int]) -> None:
        """Tell the handler pools which leases have ended, and drop messages that no handler has begun."""
        buffer = self.buffers[batch.queue]
        buffer.drop_expired(self._clock())
        for pool in tuple(buffer.pools):
            pool.lose(batch, offsets)

    def close(self) -> None:
        for buffer in self.distinct:
            buffer.close()

    def release_suspects(self, now_s: float) -> float:
        """Release suspects that have waited for half a lease, as another process may have none.

        Return when to call again.
        """
        while self._suspects:
            batch = self._suspects[0]._batch
            next_s, until_s = batch.taken_s + NEXT_S, batch.taken_s + batch.lease_s / 2
            if now_s >= next_s:
                # Other messages may overtake them.
                self._changed.set()
            if now_s < until_s:
                return next_s if now_s < next_s < until_s else until_s
            put_back([self._suspects.popleft()], int(batch.lease_s * 1000))
            log.info("suspect has waited, released: queue=%s", batch.queue)
        return inf

    # --- releases -----------------------------------------------------------------------------------------------------

    def release(self) -> int:
        """Release all buffered messages, at once and uncounted; return how many."""
        now_s = self._clock()
        return put_back(self._take_suspects()) + sum([_release(buffer, now_s) for buffer in self.distinct])

    def release_unwanted(self, now_s: float) -> None:
        """Release messages that were not taken during a whole lease, and those that slow handlers do not get to.

        Messages that have expired meanwhile are released, too: the tracker ends them.
        """
        now_ms = self._broker_ms() if self.may_expire else None
        if now_ms is not None:
            for buffer in self.distinct:
                put_back(buffer.ready.take_if(lambda message: self._has_expired(message, now_ms)))
        patience_s = self._settings.default_lease_ms / 1000
        for buffer in self.distinct:
            if buffer.handler_demand or buffer.call_demand:
                buffer.wanted_s = now_s
                _release_excess(buffer, now_s)
            elif buffer.ready and now_s - buffer.wanted_s > patience_s:
                count = _release(buffer, now_s)
                log.info("prefetched messages were not received, released: queue=%s messages=%d", buffer.queue, count)

    def _has_expired(self, message: Message, now_ms: int) -> bool:
        record, rules = message._record, self._settings.queue(message.queue)
        return message._batch.may_expire and has_expired(record.timestamp, record.headers, rules, now_ms)


def _release(buffer: PrefetchBuffer, now_s: float) -> int:
    return put_back(buffer.take_many(len(buffer.ready), now_s))


def _release_excess(buffer: PrefetchBuffer, now_s: float) -> None:
    """Release messages that a slow queue's handlers have not begun within a lease: other queues share the room."""
    count, keep = 0, max(buffer.handler_demand, buffer.call_demand)
    while len(buffer.ready) > keep:
        ready = buffer.ready.all()
        batch = ready[-1]._batch
        if now_s - batch.taken_s <= batch.lease_s:
            break
        put_back([ready.pop()], int(batch.lease_s * 1000))
        count += 1
    if count:
        log.info("handlers are slow, released prefetched messages: queue=%s messages=%d", buffer.queue, count)
