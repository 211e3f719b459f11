"""The thread of a :class:`marq.SyncProducer`: an event loop with a producer, which other threads call."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from marq.producer.producer import Producer
from marq.wire.errors import BrokerUnavailable, MarqError

log = logging.getLogger("marq")

#: The threads that run. A forked child never removes them, so they are not destroyed there.
_running: set[ProducerThread] = set()

#: How long a stop waits for the thread; the producer in it ends by itself before that.
STOP_THREAD_S = 10.0
#: How long the thread waits for tasks that it has cancelled.
CANCEL_S = 1.0

T = TypeVar("T")


class _Call(Generic[T]):
    """A call that waits for its result."""

    __slots__ = ("context", "future", "send", "task")

    def __init__(self, send: Callable[[Producer], Coroutine[Any, Any, T]]) -> None:
        self.send = send
        #: The variables of the caller's context, such as its span.
        self.context = copy_context()
        self.future: Future[T] = Future()
        self.task: asyncio.Task[T] | None = None

    def answer(self, task: asyncio.Task[T]) -> None:
        error = _stopped() if task.cancelled() else task.exception()
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    def refuse(self, error: MarqError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def give_up(self) -> None:
        """Cancel the call, because its caller does not wait any longer."""
        if self.task is not None:
            self.task.cancel()


class ProducerThread(threading.Thread):
    """A daemon thread with an event loop and a producer; it can be started once."""

    def __init__(self, producer: Producer) -> None:
        super().__init__(name="marq-producer", daemon=True)
        self._pid = os.getpid()
        self._producer = producer
        self._connected: Future[None] = Future()
        #: Calls that the loop has not seen yet, and those in progress.
        self._waiting: deque[_Call[Any]] = deque()
        self._open: set[_Call[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ending = False
        self._ended = False

    def connect(self) -> None:
        """Start; return when the producer is started, or raise its error."""
        _running.add(self)
        atexit.register(self._exit)
        try:
            self.start()
            self._connected.result()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the producer send accepted messages, and end within a limit; may be called twice."""
        self._ending = True
        self._soon(self._stop_serving)
        if self.ident is not None:
            self.join(STOP_THREAD_S)
            if self.is_alive():
                log.warning("the producer's thread did not end within %g s; stopping without it", STOP_THREAD_S)
        _running.discard(self)
        atexit.unregister(self._exit)

    def call(self, send: Callable[[Producer], Coroutine[Any, Any, T]]) -> T:
        """Run a call of the producer in the thread, and return its result."""
        call = _Call(send)
        self._waiting.append(call)
        self._soon(self._begin)
        if self._ended:
            # The thread may have ended before it saw the call.
            self._refuse_waiting()
        try:
            return call.future.result()
        except BaseException:
            if not call.future.done():
                # Ctrl-C: unknown whether the message was sent.
                self._soon(call.give_up)
            raise

    def _soon(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            # If the loop is closed, all callers have been answered.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _exit(self) -> None:
        """Stop at the end of a program that did not call stop()."""
        if self._pid == os.getpid():
            self.end()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        # Not asyncio.run(): it starts a thread at its end, which fails at the end of the program.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(loop))
        except asyncio.CancelledError:
            pass  # by end()
        except BaseException as error:
            if self._connected.done():
                log.exception("the producer's thread stopped after an unexpected error")
            else:
                self._connected.set_exception(error)
        finally:
            self._refuse()
            loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._serving = serving = asyncio.current_task()
        self._loop = loop
        try:
            # end() may have been called before the loop existed.
            if not self._ending:
                async with self._producer:
                    self._connected.set_result(None)
                    await loop.create_future()
        finally:
            self._refuse()
            await _wind_up(asyncio.all_tasks() - {serving})

    def _begin(self) -> None:
        """Begin all waiting calls in the same turn, so that they share batches."""
        loop = asyncio.get_running_loop()
        while (call := self._take()) is not None:
            self._open.add(call)
            call.task = task = loop.create_task(call.send(self._producer), context=call.context)
            task.add_done_callback(partial(self._answer, call))

    def _answer(self, call: _Call[T], task: asyncio.Task[T]) -> None:
        self._open.discard(call)
        call.answer(task)

    def _stop_serving(self) -> None:
        # Accepted calls begin before the producer stops.
        self._begin()
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()

    def _refuse(self) -> None:
        """Answer all callers when the thread ends."""
        self._ended = True
        for call in list(self._open):
            call.refuse(_stopped())
        self._refuse_waiting()

    def _take(self) -> _Call[Any] | None:
        """Return the next waiting call; at the end several threads take them concurrently."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _refuse_waiting(self) -> None:
        while (call := self._take()) is not None:
            call.refuse(MarqError("the producer is stopped: nothing was sent"))


async def _wind_up(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_S)
    # Closed connections end in the loop's next turn.
    await asyncio.sleep(0)


def _stopped() -> BrokerUnavailable:
    return BrokerUnavailable(
        "the producer was stopped before the broker confirmed: unknown whether the message was sent; retry if"
        " duplicates are acceptable"
    )
