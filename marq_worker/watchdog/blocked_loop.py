"""Warns about a blocked event loop, with the stack of the code that blocks it.

The watchdog's thread checks the loop, because a blocked loop can't. Code that never releases the GIL stops this thread,
too: then only the worker notices, because the process sends no reports (marq_worker/handlers/worker_pipes.py).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("marq.watchdog")

#: An event loop that has not run for this long is blocked.
BLOCKED_SECONDS = 2.0
#: Number of checks that must find it blocked: in the first check after a suspension, the loop has not run either.
_LOOKS = 2
#: Maximum number of frames in the log, those of the blocking call included.
MAX_FRAMES = 20

#: Describes the running task; None stands for code outside of tasks. Called in the watchdog's thread.
Describe = Callable[[asyncio.Task[Any] | None], str]


def describe_task(task: asyncio.Task[Any] | None) -> str:
    if task is None:
        return "code outside of tasks"
    coroutine = task.get_coro()
    return f"task {task.get_name()} ({getattr(coroutine, '__qualname__', type(coroutine).__name__)})"


class BlockedLoop:
    """Judges the event loop in which it is created; the watchdog's thread calls :meth:`look`."""

    def __init__(self, describe: Describe = describe_task) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._describe = describe
        self._turns = -1
        self._looks = 0
        self._still_s = 0.0
        #: What has blocked the loop, since the warning; "" if it is not blocked.
        self._blocker = ""

    def look(self, turns: int, passed_s: float) -> float:
        """Warn once when the loop is blocked, and once when it runs again; return for how long it has not run.

        ``turns`` increases while the loop runs; ``passed_s`` is the running time since the last check.
        """
        if turns != self._turns:
            if self._blocker:
                log.warning("the event loop runs again: %s blocked it for %.0f s", self._blocker, self._still_s)
            self._turns, self._looks, self._still_s, self._blocker = turns, 0, 0.0, ""
            return 0.0
        self._looks += 1
        self._still_s += passed_s
        if not self._blocker and self._looks >= _LOOKS and self._still_s >= BLOCKED_SECONDS:
            self._warn()
        return self._still_s

    def _warn(self) -> None:
        # A defect in the description must not occur again in each check, before that of the watchdog.
        self._blocker = "unknown code"
        task = asyncio.current_task(self._loop)
        self._blocker = self._describe(task)
        log.warning(
            "%s has blocked the event loop for %.0f s. Until it returns, this process renews no lease and runs no other"
            " coroutine. Write a handler that blocks as a plain function (def), or run the blocking call with"
            " asyncio.to_thread. Its stack, most recent call last:\n%s",
            self._blocker, self._still_s, self._stack(task),
        )  # fmt: skip

    def _stack(self, task: asyncio.Task[Any] | None) -> str:
        """Return the innermost frames of the loop's thread, without those that run the loop."""
        frame = sys._current_frames().get(self._thread)
        outermost = None if task is None else getattr(task.get_coro(), "cr_frame", None)
        frames: list[tuple[FrameType, int]] = []
        while frame is not None and len(frames) < MAX_FRAMES:
            frames.append((frame, frame.f_lineno))
            frame = None if frame is outermost else frame.f_back
        return "".join(traceback.StackSummary.extract(reversed(frames)).format()).rstrip()
