"""Advances virtual time: only on request, and never past work that can be done before.

Time passes for the calls of :class:`marq.testing.Broker`, for calls that wait for messages with a limit, and for the
test's own task while it iterates over a consumer. It moves from event to event, and everything settles in between: no
task of the event loop can continue, all outcomes are written, and no handler runs.

Handlers that do real I/O get a limited real time. Only that uses a real clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from marq.consumer.receiver import Receiver
from marq.testing.clock import Timer, VirtualClock
from marq.wire.errors import MarqError

#: The event loop is at rest after this many empty turns, or after this many turns if it does not show what is ready
#: (uvloop).
_EMPTY_TURNS, _TURNS = 2, 50
#: How long, in real seconds, a call that waits for messages waits for running handlers before time passes anyway.
_PATIENCE_S = 5.0
#: Interval in real seconds between two checks whether a handler is done.
_LOOK_S = 0.001
#: After this many waits without a message, each further one takes a pause in real seconds. Otherwise a loop that only
#: receives would keep the processor busy while the test waits for something else.
_FREE_WAITS, _PAUSE_S = 200, 0.01

log = logging.getLogger("marq.testing")

T = TypeVar("T")

#: One watcher for each event loop at a time, because two would mistake each other for work.
_watching: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class Unfinished(MarqError):
    """The awaited work did not end within its limit of real time."""


class Passage:
    """The passing of time in one event loop; ``awaits`` tells whether some message will be delivered as time passes."""

    def __init__(self, clock: VirtualClock, awaits: Callable[[], bool]) -> None:
        self._clock = clock
        self._awaits = awaits
        self._receivers: dict[object, Receiver] = {}
        #: The task of the test, if known.
        self._owner: asyncio.Task[Any] | None = None
        #: Tasks that have called the broker: they are not handlers of the messages they hold.
        self._owners: WeakSet[asyncio.Task[Any]] = WeakSet()
        #: Tasks that work for too long: virtual time passes without them.
        self._hanging: WeakSet[asyncio.Task[Any]] = WeakSet()
        #: Waits that let time pass: True if they have a limit, False if they only do so while messages are expected.
        self._waits: dict[object, bool] = {}
        self._waiting: set[asyncio.Task[Any]] = set()
        #: Tasks that received messages, and may be working on them now.
        self._served: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._fruitless = 0
        self._turn = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    def add(self, key: object, receiver: Receiver) -> None:
        """Wait for a consumer's handlers and outcomes from now on."""
        self._receivers[key] = receiver

    def remove(self, key: object) -> None:
        self._receivers.pop(key, None)

    def stir(self) -> None:
        """Look again: a marker was written, so some message may be delivered later."""
        self._stirred.set()

    def own(self) -> None:
        """Note that the current task uses the broker; the first one counts as the test's."""
        if self._owner is None or self._owner.done():
            self._owner = asyncio.current_task()

    # --- calls that wait for messages ---------------------------------------------------------------------------------

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        """Wait up to ``seconds`` of virtual time; raise TimeoutError after that."""
        self.own()
        task = asyncio.current_task()
        assert task is not None
        self._served.discard(task)
        key = object()
        if seconds is not None or task is self._owner:
            self._waits[key] = seconds is not None
        self._waiting.add(task)
        self._drive()
        timer: Timer | None = None
        try:
            async with asyncio.timeout(None) as limit:
                if seconds is not None:
                    loop = asyncio.get_running_loop()
                    timer = self._clock.after(seconds, lambda: self._end(limit), last=True, loop=loop)
                result = await waiting
        finally:
            if timer is not None:
                timer.cancel()
            self._waits.pop(key, None)
            self._waiting.discard(task)
            self._stirred.set()
        self._served.add(task)
        self._fruitless = 0
        return result

    def _end(self, limit: asyncio.Timeout) -> None:
        self._fruitless += 1
        limit.reschedule(asyncio.get_running_loop().time())

    def _drive(self) -> None:
        self._stirred.set()
        if self._waits and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._pass(), name="marq-memory-time")

    async def _pass(self) -> None:
        """Let time pass while any call waits."""
        patience = _Limit(_PATIENCE_S)
        while self._waits:
            self._stirred.clear()
            async with self._turn:
                await _quiet(None)
                busy = self._write() or self._works(patience)
                moved = not busy and self._move()
            if busy:
                await asyncio.sleep(_LOOK_S)
                continue
            patience = _Limit(_PATIENCE_S)
            if not moved:
                await self._stirred.wait()
            elif self._fruitless > _FREE_WAITS:
                await asyncio.sleep(_PAUSE_S)

    def _works(self, patience: _Limit) -> bool:
        """Whether to wait for tasks that work on messages."""
        busy = self._busy()
        self._hanging &= busy
        if patience.over and busy > self._hanging:
            log.warning("virtual time advances although handlers still run: %s", _names(busy))
            self._hanging |= busy
        return busy > self._hanging

    def _expects(self) -> bool:
        """Whether some message will be delivered as time passes."""
        return self._awaits() or any(receiver.ordering.awaits for receiver in self._receivers.values())

    def _move(self) -> bool:
        """Move to the next event if a call may wait for it."""
        next_ms = self._clock.next_ms
        if next_ms is None or not (any(self._waits.values()) or (self._waits and self._expects())):
            return False
        self._clock.move(next_ms)
        return True

    # --- calls of a test ----------------------------------------------------------------------------------------------

    async def settle(self, limit_s: float) -> None:
        """Return when everything has settled; raise Unfinished if a handler is still running after the limit."""
        async with self._seat():
            await self._settle(_Limit(limit_s))

    async def advance(self, by_ms: int, limit_s: float, *, settle: bool) -> None:
        """Let virtual time pass step by step; with ``settle`` everything settles before each step.

        Raises:
            Unfinished: a handler is still running after the limit, which is that of each step: a busy machine takes its
                time for many of them.
        """
        async with self._seat():
            to_ms = self._clock.now_ms + by_ms
            while True:
                limit = _Limit(limit_s)
                await (self._settle(limit) if settle else _quiet(limit))
                next_ms = self._clock.next_ms
                if next_ms is not None and next_ms <= to_ms:
                    self._clock.move(next_ms)
                elif self._clock.now_ms < to_ms:
                    self._clock.move(to_ms)
                else:
                    return

    async def until(self, left: Callable[[], str], limit_s: float, *, later: bool) -> None:
        """Return when everything has settled and ``left`` returns nothing; with ``later`` let time pass for that.

        Raises:
            Unfinished: something is left after the limit; the text says what.
        """
        async with self._seat():
            limit = _Limit(limit_s)
            while True:
                await self._settle(limit, left)
                if not (remains := left()):
                    return
                if later and self._expects() and (next_ms := self._clock.next_ms) is not None:
                    self._clock.move(next_ms)
                    limit.check(remains)
                else:
                    limit.check(remains)
                    await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[None]:
        """Let time pass only through the test's own call."""
        self._owner = task = asyncio.current_task()
        assert task is not None
        self._owners.add(task)
        self._fruitless = 0
        try:
            async with self._turn:
                yield
        finally:
            self._stirred.set()

    async def _settle(self, limit: _Limit, left: Callable[[], str] = lambda: "") -> None:
        while True:
            await _quiet(limit)
            if self._write():
                continue
            busy = self._busy()
            if not busy:
                return
            if limit.over:
                limit.check("; ".join(filter(None, [left(), f"at work: {_names(busy)}"])))
            await asyncio.sleep(_LOOK_S)

    def _write(self) -> bool:
        """Let outcomes be written now; return whether there were any."""
        unwritten = [receiver.writer for receiver in self._receivers.values() if receiver.writer.unwritten]
        for writer in unwritten:
            writer.flush_soon()
        return bool(unwritten)

    def _busy(self) -> set[asyncio.Task[Any]]:
        """Return the tasks that work on messages and do not wait for virtual time."""
        prefetches = [receiver.prefetch for receiver in self._receivers.values()]
        pools = [pool for prefetch in prefetches for pool in prefetch.pools]
        busy = {task for pool in pools for task in pool.busy_tasks}
        if any(prefetch.processing for prefetch in prefetches):
            workers = {task for pool in pools for task in pool.tasks}
            busy |= {task for task in self._served if not task.done() and task not in workers}
        return {task for task in busy - self._waiting if task is not self._owner and task not in self._owners}


class _Limit:
    """A limit in real time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    def check(self, remains: str) -> None:
        """Raise Unfinished if the time is over."""
        if self.over:
            raise Unfinished(f"not settled within {self._seconds:g} real seconds: {remains}")


async def _quiet(limit: _Limit | None) -> None:
    """Return when no task of the event loop can continue by itself."""
    loop = asyncio.get_running_loop()
    ready: Collection[Any] | None = getattr(loop, "_ready", None)
    async with _watching.setdefault(loop, asyncio.Lock()):
        still = 0
        while still < (_TURNS if ready is None else _EMPTY_TURNS):
            await asyncio.sleep(0)
            still = 0 if ready else still + 1
            if ready and limit is not None:
                limit.check("the event loop never becomes idle")


def _names(tasks: Collection[asyncio.Task[Any]]) -> str:
    return ", ".join(sorted(f"{task.get_name()} in {_location(task)}" for task in tasks))


def _location(task: asyncio.Task[Any]) -> str:
    """Return the functions that a task is in, outermost first."""
    names: list[str] = []
    coroutine: Any = task.get_coro()
    while (name := getattr(coroutine, "__qualname__", None)) is not None:
        names.append(name)
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
