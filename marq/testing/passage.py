"""How virtual time passes: only when somebody asks for it, and never past work that can be done before.

Three ask: the test, by the calls of :class:`marq.testing.Broker`; whoever waits for messages with a limit, and so says
that this time may pass; and the test's own task where it iterates over a consumer. Time goes from one thing that
happens to the next, and in between everything settles: no task of the event loop can go on, what was decided is
written, and no handler works.

A handler that does real I/O is waited for in real time, for a limited one: that is the only use of a real clock here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from marq.core.errors import MarqError
from marq.testing.clock import Clock, Timer

#: Turns of the event loop in which nothing else was ready, after which it is at rest; and turns after which it is taken
#: for that where the loop does not show what is ready (uvloop).
_EMPTY_TURNS, _TURNS = 2, 50
#: How long, in real seconds, who waits for messages waits for the same handlers before time passes all the same.
_PATIENCE_S = 5.0
#: How often to look, in real seconds, whether a handler is done.
_LOOK_S = 0.001
#: Waits for messages that end without any: so many at once, then one after each pause, in real seconds. A loop that
#: does nothing but receive would else keep the processor busy while the test waits for something else.
_FREE_WAITS, _PAUSE_S = 200, 0.01

log = logging.getLogger("marq.testing")

T = TypeVar("T")

#: Who watches an event loop for quiet does so alone: two would take each other for work.
_watching: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class Unfinished(MarqError):
    """What was waited for did not come to an end within the real time that it was given."""


class Engine(Protocol):
    """What must be known of a consumer's engine, which is a :class:`marq.flow.Flow`."""

    @property
    def workers(self) -> Collection[asyncio.Task[Any]]:
        """Tasks that run handlers."""

    @property
    def at_work(self) -> Collection[asyncio.Task[Any]]:
        """Those of them that are in a handler now."""

    @property
    def taken(self) -> int:
        """Messages that somebody has taken and not finished."""

    @property
    def unwritten(self) -> bool:
        """Whether something was decided that is not written yet."""

    def write(self) -> None:
        """Write it at once."""


class Passage:
    """The passing of a clock's time in one event loop; ``awaits`` tells whether some message comes back by itself."""

    def __init__(self, clock: Clock, awaits: Callable[[], bool]) -> None:
        self._clock = clock
        self._awaits = awaits
        self._engines: dict[object, Engine] = {}
        #: The task of the test, as far as that is known.
        self._owner: asyncio.Task[Any] | None = None
        #: Tasks that have used the calls of a test: what they hold is not worked on.
        self._owners: WeakSet[asyncio.Task[Any]] = WeakSet()
        #: Tasks that have worked for so long that those who wait for messages do not wait for them any more.
        self._hanging: WeakSet[asyncio.Task[Any]] = WeakSet()
        #: Who makes time pass by waiting: True with a limit, False only as long as some message is to come.
        self._waits: dict[object, bool] = {}
        self._waiting: set[asyncio.Task[Any]] = set()
        #: Tasks that got messages by waiting for them, and may be working on them now.
        self._served: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._fruitless = 0
        self._turn = asyncio.Lock()
        self._stirred = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None

    def add(self, key: object, engine: Engine) -> None:
        """Take account of a consumer from now on."""
        self._engines[key] = engine

    def remove(self, key: object) -> None:
        self._engines.pop(key, None)

    def stir(self) -> None:
        """Note that a marker was written, by which some message may come back some time."""
        self._stirred.set()

    def own(self) -> None:
        """Note that the current task uses the broker: the first one that does is taken for the test's."""
        if self._owner is None or self._owner.done():
            self._owner = asyncio.current_task()

    # --- who waits for messages ---------------------------------------------------------------------------------------

    async def within(self, seconds: float | None, waiting: Awaitable[T]) -> T:
        """Wait for something, for so much virtual time at the most.

        Raises:
            TimeoutError: the time is over.
        """
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
                    timer = self._clock.after(seconds, lambda: self._end(limit), last=True)
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
        """Let time pass as long as somebody waits."""
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
        """Whether somebody works who is worth waiting for."""
        busy = self._busy()
        self._hanging &= busy
        if patience.over and busy > self._hanging:
            log.warning("virtual time passes although somebody still works: %s", _names(busy))
            self._hanging |= busy
        return busy > self._hanging

    def _move(self) -> bool:
        """Go on to what happens next, if somebody may still wait for it."""
        next_ms = self._clock.next_ms
        if next_ms is None or not (any(self._waits.values()) or (self._waits and self._awaits())):
            return False
        self._clock.move(next_ms)
        return True

    # --- what a test asks for -----------------------------------------------------------------------------------------

    async def settle(self, limit_s: float) -> None:
        """Return when everything that can happen now has happened.

        Raises:
            Unfinished: a handler still worked after so many real seconds.
        """
        async with self._seat():
            await self._settle(_Limit(limit_s))

    async def advance(self, by_ms: int, limit_s: float, *, settle: bool) -> None:
        """Let virtual time pass step by step; with ``settle`` wait before each step until everything has settled.

        Raises:
            Unfinished: a handler still worked after so many real seconds.
        """
        async with self._seat():
            limit = _Limit(limit_s)
            to_ms = self._clock.now_ms + by_ms
            while True:
                await (self._settle(limit) if settle else _quiet(limit))
                next_ms = self._clock.next_ms
                if next_ms is not None and next_ms <= to_ms:
                    self._clock.move(next_ms)
                elif self._clock.now_ms < to_ms:
                    self._clock.move(to_ms)
                else:
                    return

    async def until(self, left: Callable[[], str], limit_s: float, *, later: bool) -> None:
        """Return when everything has settled and nothing is ``left``; with ``later`` let time pass for that.

        Raises:
            Unfinished: something was left after so many real seconds; the text says what.
        """
        async with self._seat():
            limit = _Limit(limit_s)
            while True:
                await self._settle(limit, left)
                if not (remains := left()):
                    return
                if later and self._awaits() and (next_ms := self._clock.next_ms) is not None:
                    self._clock.move(next_ms)
                    limit.check(remains)
                else:
                    limit.check(remains)
                    await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[None]:
        """While the test's own call is under way, nobody else makes time pass."""
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
        """Let be written what waits for more; return whether something did."""
        unwritten = [engine for engine in self._engines.values() if engine.unwritten]
        for engine in unwritten:
            engine.write()
        return bool(unwritten)

    def _busy(self) -> set[asyncio.Task[Any]]:
        """Return who works on messages, and not just waits for virtual time to pass."""
        engines = list(self._engines.values())
        busy = {task for engine in engines for task in engine.at_work}
        if any(engine.taken for engine in engines):
            workers = {task for engine in engines for task in engine.workers}
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
        """Raise when the time is over."""
        if self.over:
            raise Unfinished(f"not settled within {self._seconds:g} real seconds: {remains}")


async def _quiet(limit: _Limit | None) -> None:
    """Return when no task of the event loop can go on by itself."""
    loop = asyncio.get_running_loop()
    ready: Collection[Any] | None = getattr(loop, "_ready", None)
    async with _watching.setdefault(loop, asyncio.Lock()):
        still = 0
        while still < (_TURNS if ready is None else _EMPTY_TURNS):
            await asyncio.sleep(0)
            still = 0 if ready else still + 1
            if ready and limit is not None:
                limit.check("the event loop never comes to rest")


def _names(tasks: Collection[asyncio.Task[Any]]) -> str:
    return ", ".join(sorted(f"{task.get_name()} in {_place(task)}" for task in tasks))


def _place(task: asyncio.Task[Any]) -> str:
    """Say where a task stands: its function, and which that awaits."""
    names: list[str] = []
    coroutine: Any = task.get_coro()
    while (name := getattr(coroutine, "__qualname__", None)) is not None:
        names.append(name)
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(names)
