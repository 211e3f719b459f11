"""Background tasks that must not end silently.

An unexpected exception ends a task, and so does user code that cancels all tasks of its event loop. Nothing would do
the task's work from then on, so its owner has to fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Protocol

from marq.wire.errors import MarqError

log = logging.getLogger("marq")


class Time(Protocol):
    """The clocks of a process, and how it waits: real, or virtual in tests."""

    @property
    def now_s(self) -> Callable[[], float]:
        """Returns the seconds of a monotonic clock."""

    @property
    def wall_s(self) -> Callable[[], float]:
        """Returns the seconds since 1970, for display only."""

    @property
    def broker_ms(self) -> Callable[[], int | None]:
        """Returns the milliseconds since 1970 by the brokers' clock; None while it is unknown, so nothing expires."""

    @property
    def sleep(self) -> Callable[[float], Awaitable[None]]: ...


def failure_of(task: asyncio.Task[Any], *, stopping: bool) -> BaseException | None:
    """Return the error of a task that failed; None if it returned, or was cancelled while its owner was stopping."""
    if task.cancelled():
        text = f"code in this process has cancelled Marq's task {task.get_name()!r}: cancel only your own tasks"
        return None if stopping else MarqError(text)
    error = task.exception()
    if error is not None and not isinstance(error, MarqError):
        log.error("task stopped after an unexpected error: %s", task.get_name(), exc_info=error)
    return error


async def until_set(event: asyncio.Event, limit_s: float, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Return when the event is set, or after ``limit_s``."""
    waits = [asyncio.ensure_future(event.wait())]
    if limit_s < inf:
        waits.append(asyncio.ensure_future(sleep(limit_s)))  # type: ignore[arg-type]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
