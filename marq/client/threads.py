"""Runs calls that may block forever in threads that do not delay the end of the program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from marq.wire.errors import error_text

T = TypeVar("T")


def begun_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a separate thread of this name; no waiter can cancel it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            future.set_exception(_harmless(error))
        else:
            future.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_thread(work: Callable[[], T]) -> T:
    """Run a function in a separate thread; return its result, or raise its exception.

    At its end, ``asyncio.run`` waits for the threads of ``asyncio.to_thread``, for example half a minute for a name
    server that does not answer.
    """
    return await asyncio.wrap_future(begun_in_thread(work, "marq-thread"))


def _harmless(error: BaseException) -> Exception:
    """Return an error of a thread as one that a future can pass on to the event loop."""
    # A SystemExit, with which a module may end its import, would end the event loop. A future refuses a StopIteration,
    # and would never complete. A CancelledError would look like a cancellation of the waiter.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    return RuntimeError(error_text(error, repr))
