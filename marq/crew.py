"""Tasks that call one handler: what is the same whether they take messages one by one or in batches.

A handler whose message's lease is over must end: somebody else may have the message by now. So the worker's task is
cancelled while it waits in the handler, takes the cancellation back afterwards, and goes on with the next message. A
shutdown cancels the same tasks; the task counts the cancellations, and one that is left over is the shutdown's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from marq.breaker import Call
from marq.codecs import Codec
from marq.core.errors import LeaseLost
from marq.lease import Lease
from marq.message import Message
from marq.outbox import Outbox
from marq.outcomes import Outcome
from marq.shelf import Shelf

log = logging.getLogger("marq")

#: How long handlers may take to clean up once they are cancelled by a stop.
CLEAN_UP_S = 2.0

#: What a handler is called with: a message, or a list of them.
Work = TypeVar("Work")


class Crew(ABC, Generic[Work]):
    """``concurrency`` workers, which want to have ``demand`` messages at hand.

    ``codecs`` decode the values of some queues instead of what the consumer has for them.
    """

    def __init__(
        self,
        shelf: Shelf,
        outbox: Outbox,
        handler: Callable[[Work], Any],
        concurrency: int,
        demand: int,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        self._shelf = shelf
        self._outbox = outbox
        self._demand = demand
        self._codecs = codecs or {}
        self._pool: ThreadPoolExecutor | None = None
        self._concurrency = concurrency
        self._handler = handler if is_coroutine_function(handler) else self._threaded(handler)
        self._tasks: list[asyncio.Task[None]] = []
        #: What each worker has called the handler with; None in between.
        self._current: list[Work | None] = [None] * concurrency
        #: Workers that were cancelled because a lease is over, and have not taken that back yet.
        self._interrupted: set[int] = set()
        self._stopping = False
        self._hurried = False
        #: The wait for handlers that may end within the grace.
        self._grace: asyncio.Future[Any] | None = None

    @abstractmethod
    async def _work(self, index: int) -> None:
        """Take work from the shelf and call the handler, until the stop."""

    @abstractmethod
    def _messages(self, work: Work) -> Sequence[Message]:
        """Return the messages that a handler was called with."""

    def _threaded(self, handler: Callable[[Work], Any]) -> Callable[[Work], Awaitable[None]]:
        self._pool = pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="marq-handler")

        async def call(work: Work) -> None:
            result = await asyncio.get_running_loop().run_in_executor(pool, handler, work)
            if inspect.isawaitable(result):
                await result

        return call

    def start(self) -> None:
        self._shelf.standing += self._demand
        self._shelf.on_lost.append(self._lose)
        self._shelf.crews.append(self)
        self._tasks = [asyncio.create_task(self._work(index)) for index in range(self._concurrency)]

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        return self._tasks

    @property
    def at_work(self) -> Sequence[asyncio.Task[None]]:
        """The tasks that are in a handler now."""
        pairs = zip(self._tasks, self._current, strict=True)
        return [task for task, work in pairs if work is not None and not task.done()]

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
        self._shelf.standing -= self._demand
        self._shelf.wake_all()
        if self._tasks and grace_s > 0 and not self._hurried:
            self._grace = asyncio.ensure_future(asyncio.wait(self._tasks, timeout=grace_s))
            await asyncio.wait([self._grace])
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, going_on = await asyncio.wait(self._tasks, timeout=CLEAN_UP_S)
            self._leave(going_on)
        if self._pool is not None:
            # A thread can't be cancelled: its message was released, and its work is not waited for.
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._shelf.on_lost.remove(self._lose)
        self._shelf.crews.remove(self)

    def hurry(self) -> None:
        """Let a stop give no more grace."""
        self._hurried = True
        if self._grace is not None:
            self._grace.cancel()

    def _leave(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Release what handlers have that take no notice of being cancelled; they are not waited for."""
        for task, work in zip(self._tasks, self._current, strict=True):
            if task in tasks and work is not None:
                messages = self._messages(work)
                log.warning("handler goes on although it was cancelled: %s", _place(messages))
                for message in messages:
                    message._fail(asyncio.CancelledError())

    # --- leases that are over -----------------------------------------------------------------------------------------

    def _lose(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Cancel the handlers that work on messages of a lease which is over for them."""
        lost = set(offsets) - lease.decided
        for index, work in enumerate(self._current):
            if work is not None:
                found = [each for each in self._messages(work) if each._lease is lease and each.offset in lost]
                if found:
                    self._interrupt(index, found)

    def _interrupt(self, index: int, lost: Sequence[Message]) -> None:
        task = self._tasks[index]
        if self._pool is not None:
            log.warning("lease lost; its handler runs in a thread and can't be cancelled: %s", _place(lost))
        # Cancelled before: it is about to end. By a stop, then that decides what becomes of the messages.
        elif not (task.done() or task.cancelling()):
            log.warning("lease lost, its handler is cancelled: %s", _place(lost))
            self._interrupted.add(index)
            task.cancel(f"the lease ran out: {_place(lost)}")

    def _resumed(self, index: int) -> bool:
        """Take back that a worker was cancelled for a lease; return whether it was."""
        if index not in self._interrupted:
            return False
        self._interrupted.remove(index)
        self._tasks[index].uncancel()
        return True

    # --- handlers that fail -------------------------------------------------------------------------------------------

    def _failed(self, index: int, messages: Sequence[Message], error: BaseException) -> None:
        """Queue what an exception means for the messages that the handler was called with."""
        lost = self._resumed(index)
        stopping = self._tasks[index].cancelling() > 0
        cancelled = isinstance(error, asyncio.CancelledError) and not stopping
        if cancelled:
            # Not by a stop: for a lease that is over, or something that the handler waited for was cancelled.
            replaced = LeaseLost(f"of {_place(messages)}") if lost else RuntimeError("CancelledError in the handler")
            replaced.__cause__, error = error, replaced
        decided = sum([each.offset in each._lease.decided for each in messages])
        call = Call(messages)
        for each in messages:
            # A lease that is over has nothing to release.
            if stopping or not lost or each.offset in each._lease.open:
                each._fail(error, call)
            else:
                call.counts(each._lease.breaker)
        if not isinstance(error, Exception):
            raise error
        if not (isinstance(error, Outcome) or (lost and cancelled)):
            # The traceback shows code, never values: payloads stay out of the log.
            log.error("handler failed: %s decided=%d error=%s", _place(messages), decided, _text(error), exc_info=error)


def is_coroutine_function(handler: object) -> bool:
    """Whether a call gives a coroutine, also for objects with an async ``__call__``."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def _place(messages: Sequence[Message]) -> str:
    first = messages[0]
    text = (
        f"queue={first.queue} id={first.id} partition={first.partition} offset={first.offset} attempt={first.attempt}"
    )
    return text if len(messages) == 1 else f"{text} messages={len(messages)}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
