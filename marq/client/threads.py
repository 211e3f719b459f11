"""Runs calls that may block forever in threads that do not delay the end of the program."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def harmless(error: BaseException) -> Exception:
    """Return an error of a thread as one that a future can pass on to the event loop."""
    # A SystemExit, with which a module may end its import, would end the event loop. A future refuses a StopIteration,
    # and would never complete.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(repr(error))


async def in_thread(work: Callable[[], T]) -> T:
    """Run a function in a separate thread; return its result, or raise its exception.

    At its end, ``asyncio.run`` waits for the threads of ``asyncio.to_thread``, for example half a minute for a name
    server that does not answer.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(harmless(error))

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        # A loop that was closed meanwhile accepts no calls, and nothing waits there.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="marq-thread", daemon=True).start()
    return await future
