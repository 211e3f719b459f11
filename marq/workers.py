"""Runs handlers over the messages of one queue: a fixed number of tasks that take message after message.

There is no task for each message: a coroutine handler runs in its worker's own task, a plain function in a thread. A
worker whose handler never waits for anything steps aside now and then, so that acks, renewals and heartbeats get
their turn.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from marq.core.errors import ConfigError
from marq.flow import Flow
from marq.message import Message
from marq.outbox import Outbox
from marq.outcomes import Outcome
from marq.shelf import Shelf

log = logging.getLogger("marq")

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]

#: A worker steps aside after so many messages at most, or after so long.
MAX_BURST = 256
BURST_S = 0.005
#: Limits of the steps of a stop, so that it ends within 10 s whatever the broker does.
STOP_READING_S, STOP_OUTBOX_S, STOP_CLIENT_S = 1.0, 2.0, 1.0


def check_handler(handler: object) -> None:
    """Check that a handler can be called with a message.

    Raises:
        ConfigError: it can't.
    """
    if not callable(handler):
        raise ConfigError(f"handler={handler!r}: expected a function that takes a message")


class Workers:
    """``concurrency`` workers of one handler."""

    def __init__(self, shelf: Shelf, outbox: Outbox, handler: Handler, concurrency: int) -> None:
        self._shelf = shelf
        self._outbox = outbox
        self._concurrency = concurrency
        self._pool: ThreadPoolExecutor | None = None
        self._handler = handler if is_coroutine_function(handler) else self._threaded(handler)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def _threaded(self, handler: Handler) -> Callable[[Message], Awaitable[None]]:
        self._pool = pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="marq-handler")

        async def call(message: Message) -> None:
            result = await asyncio.get_running_loop().run_in_executor(pool, handler, message)
            if inspect.isawaitable(result):
                await result

        return call

    def start(self) -> None:
        # Twice as many as run, so that the next message is there when a handler is done.
        self._shelf.standing += 2 * self._concurrency
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]

    async def done(self) -> None:
        """Return when all workers have ended: by stop(), or because the shelf was closed."""
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            # A worker that was cancelled ended by stop(); any other end than the normal one is an error of ours.
            if not task.cancelled():
                task.result()

    async def stop(self, grace_s: float) -> None:
        """Take no more; cancel handlers that still run after the grace, whose messages are released uncounted."""
        if self._stopping:
            return
        self._stopping = True
        self._shelf.standing -= 2 * self._concurrency
        self._shelf.wake_all()
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pool is not None:
            # A thread can't be cancelled: its message was released, and its work is not waited for.
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        shelf, outbox, handler, ready = self._shelf, self._outbox, self._handler, self._shelf.ready
        clock, pop = outbox.clock, ready.popleft
        burst = 1
        while not (self._stopping or shelf.closed):
            if not ready:
                outbox.flush_soon()
                await shelf.wait()
                continue
            begun_s = clock()
            left = burst
            while ready and left and not self._stopping:
                left -= 1
                message = pop()
                lease = message._lease
                if lease.expires_s <= clock():
                    continue
                try:
                    await handler(message)
                except BaseException as error:
                    self._failed(message, error)
                else:
                    if not lease.decided or message._record.offset not in lease.decided:
                        # As Lease.ack, without the call.
                        lease.acked.append(message._record.offset)
                        if not lease.dirty:
                            outbox.touch(lease)
            took_s = clock() - begun_s
            burst = min(burst * 2, MAX_BURST) if took_s < BURST_S else max(1, burst // 2)
            await asyncio.sleep(0)

    def _failed(self, message: Message, error: BaseException) -> None:
        stopping = isinstance(error, asyncio.CancelledError) and _cancelled()
        if isinstance(error, asyncio.CancelledError) and not stopping:
            # Not us: something that the handler waited for was cancelled.
            error = RuntimeError("CancelledError in the handler")
        decided = message._lease.decided and message.offset in message._lease.decided
        message._fail(error)
        if not isinstance(error, Exception):
            raise error
        if not isinstance(error, Outcome):
            log.warning(
                "handler failed: queue=%s partition=%d offset=%d attempt=%d decided=%s error=%s",
                message.queue, message.partition, message.offset, message.attempt, bool(decided), _text(error),
            )  # fmt: skip


async def wind_down(flow: Flow, workers: Sequence[Workers], grace_s: float, *, release: bool) -> None:
    """End receiving: handlers may end within the grace, what was decided is written, the prefetch is given back."""
    for shelf in flow.distinct_shelves:
        shelf.close()
    await asyncio.gather(flow.stop_reading(STOP_READING_S), *[each.stop(grace_s) for each in workers])
    released = flow.give_back() if release else 0
    queues = ",".join(flow.shelves)
    if not await flow.stop(STOP_OUTBOX_S):
        log.warning("stopped before all outcomes were written: queue=%s; their leases will run out", queues)
    elif released:
        log.info("gave prefetched messages back: queue=%s messages=%d", queues, released)


def is_coroutine_function(handler: object) -> bool:
    """Whether a call gives a coroutine, also for objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
