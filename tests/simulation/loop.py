"""The event loop of one simulated process: asyncio's tasks, timers and futures in the world's time.

A turn runs everything that is ready. Time passes only between turns, and then the process may pause or die. As in
asyncio, answers of brokers come before timers if both are due after a pause, and no timer is early by the clock of its
process.
"""

from __future__ import annotations

import asyncio
from asyncio import Handle, TimerHandle
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from math import ceil, inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.actor import Actor


class Loop(asyncio.AbstractEventLoop):
    """Runs the tasks of one process."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._ready: deque[Handle] = deque()
        #: Whether a turn is in progress or scheduled.
        self._turns = False
        self._closed = False

    def do(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back in a turn, and run all that follows from that."""
        if self._closed:
            return
        self._turns = True
        _set_running_loop(self)
        try:
            callback(*args)
            ready = self._ready
            while ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            _set_running_loop(None)
            self._turns = False

    def arrive(self, delay_ms: int, callback: Callable[..., object], *args: Any) -> None:
        """Call back when an answer comes, after ``delay_ms``."""
        self._actor.later(delay_ms, self.do, callback, *args)

    async def wait(self, delay_ms: int) -> None:
        """Wait for an answer."""
        answer = self.create_future()
        self.arrive(delay_ms, give, answer)
        await answer

    def close(self) -> None:
        """End all tasks where they are: their process is dead, or the world has ended."""
        self._closed = True
        self._ready.clear()
        _set_running_loop(self)
        try:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.get_coro().close()
        finally:
            _set_running_loop(None)

    # --- what asyncio requires ----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._actor.monotonic_ms() / 1000

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args, self, context)
        if not self._closed:
            self._ready.append(handle)
            if not self._turns:
                self._turns = True
                self._actor.later(0, self.do, int)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        if when < inf and not self._closed:
            self._set(handle)
        return handle

    def _set(self, handle: TimerHandle) -> None:
        left_ms = ceil((handle._when - self.time()) * 1000)
        self._actor.world.schedule(max(left_ms, 0), self._expire, handle)

    def _expire(self, handle: TimerHandle) -> None:
        if not handle._cancelled:
            self._actor._step(self._fire, (handle, False))

    def _fire(self, handle: TimerHandle, last: bool) -> None:
        actor = self._actor
        if handle._cancelled:
            return
        if handle._when > self.time():
            self._set(handle)
        elif actor.paused_until_ms == actor.world.now_ms and not last:
            actor.world.schedule(0, actor._step, self._fire, (handle, True))
        else:
            self.do(handle._run)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        return

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        task.add_done_callback(_check)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "handle" in context:
            raise context["exception"]


def _check(task: asyncio.Task[Any]) -> None:
    """Raise what a task raised: no task of the library or of the simulation should end like that."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def give(answer: asyncio.Future[Any], result: Any = None) -> None:
    """Let the task that waits for an answer go on, unless it was cancelled."""
    if not answer.done():
        answer.set_result(result)
