"""Tasks that call one handler, message by message or batch by batch.

Messages share tasks: a coroutine handler runs in one of the pool's tasks, a plain function in a thread. When the lease
of a message expires, another consumer may have the message, so the task is cancelled while it waits in the handler. It
then undoes the cancellation and continues with the next message. A shutdown cancels the same tasks, and so may user
code. Only a cancellation by the shutdown ends a task.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import attrgetter
from typing import Any

from marq.client.codecs import Codec
from marq.client.outcomes import Outcome, Retry
from marq.consumer.prefetch import PrefetchBuffer
from marq.consumer.receiver import Receiver
from marq.handlers import middleware
from marq.handlers.middleware import Middleware
from marq.handlers.parameters import is_coroutine_function, name_of
from marq.handlers.typed import HandlersByType
from marq.leases.circuit_breaker import HandlerCall
from marq.leases.failure_log import Consequence
from marq.leases.held import LeasedBatch
from marq.leases.message import INTERRUPTIONS, Message, put_back, shown_error
from marq.wire.errors import LeaseLost, error_text
from marq.wire.markers import BACKOFF

log = logging.getLogger("marq")

BatchHandler = Callable[[list[Message]], Awaitable[Any]] | Callable[[list[Message]], Any]

#: How long cancelled handlers may clean up during a stop.
CLEAN_UP_S = 2.0
#: Ids in a line about messages that a stop releases.
MAX_LOGGED_IDS = 10
#: A task yields to others after this many messages or this much time.
MAX_BURST, BURST_S = 256, 0.005
#: Defaults of :meth:`marq.Consumer.run_batch`.
DEFAULT_BATCH_MESSAGES, DEFAULT_BATCH_CONCURRENCY = 1_000, 1

#: Of a call whose messages were settled before it failed, or whose leases had ended.
_WITHOUT_CONSEQUENCE = Consequence("handler failed after its message was settled, or its lease had ended")

#: Errors of a call that was cancelled: by an operator, because another of its messages lost its lease, or not by Marq.
CANCELLED_BY_OPERATOR = "cancelled by an operator"
_LOST_TOGETHER = "the lease of another message of this call expired: use a longer lease, or renew() in time"
_CANCELLED = "CancelledError in the handler: catch it where the handler awaits a cancelled task, or raise marq.Retry"

_batch: Callable[[Message], LeasedBatch] = attrgetter("_batch")


class HandlerPool(ABC):
    """``concurrency`` tasks that take up to ``room`` messages; ``demand`` messages are kept prefetched for them.

    ``chain`` is the middleware around the handler.
    """

    def __init__(
        self,
        buffer: PrefetchBuffer,
        receiver: Receiver,
        handler: Callable[[Any], Any] | HandlersByType,
        concurrency: int,
        demand: int,
        room: int,
        chain: Sequence[Middleware] = (),
    ) -> None:
        self._buffer = buffer
        self._writer, self._starts, self._next_turns = receiver.writer, receiver.starts, receiver.next_turns
        self._demand, self._room = demand, room
        self._threads: ThreadPoolExecutor | None = None
        self._concurrency = concurrency
        self._function = handler
        call = handler.calls(self._call_of) if isinstance(handler, HandlersByType) else self._call_of(handler)
        self._handler = middleware.surround(call, chain)
        self.tasks: list[asyncio.Task[None]] = []
        #: The messages of each task's current call; none between calls.
        self._current: list[Sequence[Message]] = [()] * concurrency
        #: The current calls, by task, that lost a lease or that an operator has cancelled. A lost lease cancels only
        #: calls of coroutine functions.
        self._interrupted: dict[int, HandlerCall] = {}
        #: When each task began its current call.
        self._begun_s = [0.0] * concurrency
        self._stopping = False
        #: Whether a stop has cancelled the tasks.
        self._cancelled = False
        self._hurried = False
        #: The wait for running handlers during a stop.
        self._waiting: asyncio.Future[Any] | None = None

    @abstractmethod
    async def _work(self, index: int) -> None:
        """Take work from the buffer and call the handler until the pool stops."""

    def _call_of(self, handler: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
        """Return a handler that is a coroutine function, or a coroutine function that calls it in a thread."""
        if is_coroutine_function(handler):
            return handler
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="marq-handler")
        threads = self._threads

        def run_handler(work: Any) -> Any:
            try:
                return handler(work)
            except (StopIteration, GeneratorExit) as error:
                # asyncio can't pass them on: with the first, the task would wait forever, and with the second, Python
                # would close its coroutine, and the consumer would fail.
                raise RuntimeError(f"{type(error).__name__} in the handler: {error_text(error)}") from error

        async def call(work: Any) -> Any:
            # Context variables of middleware, such as a span, are visible in the thread.
            run = contextvars.copy_context().run
            result = await asyncio.get_running_loop().run_in_executor(threads, run, run_handler, work)
            return await result if inspect.isawaitable(result) else result

        return call

    def start(self) -> None:
        self._buffer.handler_demand += self._demand
        self._buffer.pools.append(self)
        self.tasks = [asyncio.create_task(self._run(index)) for index in range(self._concurrency)]

    async def _run(self, index: int) -> None:
        """Work until the pool stops, even if user code cancels the task between two calls."""
        while True:
            try:
                return await self._work(index)
            except asyncio.CancelledError:
                if self._cancelled:
                    raise
                log.warning("a handler task was cancelled although its consumer is not stopping; it continues")
                self._forget_cancellations(index)
            except GeneratorExit:
                # The handler has awaited a future that failed with this exception: it closes all coroutines up to here.
                if not self._is_running(index):
                    raise
                self._current[index] = ()

    async def _wait(self) -> None:
        """Wait for messages, unless there are some whose turns come now."""
        self._next_turns()
        if not self._buffer.ready:
            self._writer.flush_soon()
            await self._buffer.wait()

    async def _started(self, messages: list[Message]) -> list[Message]:
        """Return the messages with which the handler may be called now.

        It is asked right before the call, so that a crash abandons only messages that a handler was about to process.
        """
        started = await self._starts.started(messages)
        if self._stopping:
            # A stop waits only for handlers that are already running.
            put_back(started)
            return []
        return started

    def _forget_cancellations(self, index: int) -> None:
        """Undo cancellations that user code did not undo; otherwise, a TaskGroup in a later call would be cancelled."""
        task = self.tasks[index]
        while task.cancelling() and not self._cancelled:
            task.uncancel()

    @property
    def queue(self) -> str:
        """The queue, or the group, whose messages it takes."""
        return self._buffer.queue

    @property
    def busy_tasks(self) -> Sequence[asyncio.Task[None]]:
        """The tasks that are in a handler now."""
        pairs = zip(self.tasks, self._current, strict=True)
        return [task for task, messages in pairs if messages and not task.done()]

    @property
    def running(self) -> list[Message]:
        """The messages that handlers have now."""
        return [message for messages in self._current for message in messages]

    @property
    def idle(self) -> int:
        """How many more messages handlers can take now."""
        return 0 if self._stopping else max(0, self._room - sum(map(len, self._current)))

    def _function_of(self, message: Message) -> Callable[[Any], Any]:
        """Return the handler that is called with a message."""
        function = self._function
        return function.handler_of(message) if isinstance(function, HandlersByType) else function

    def cancellable(self, message: Message) -> bool:
        """Return whether the call with a message can be cancelled: plain functions run in threads, which can't be."""
        return is_coroutine_function(self._function_of(message))

    def calls(self) -> list[tuple[Message, float]]:
        """Return the messages that handlers have now, and for how many seconds; may be called in any thread."""
        now_s, pairs = self._writer.now_s(), zip(self._current, self._begun_s, strict=True)
        return [(message, max(0.0, now_s - begun_s)) for messages, begun_s in pairs for message in messages]

    def cancel(self, message_id: str, *, counted: bool) -> None:
        """Cancel the call that has a message, if it still runs, as an operator wants; ``counted``: it is a failure."""
        for index, messages in enumerate(self._current):
            if self._cancelled or index in self._interrupted or self.tasks[index].done():
                continue
            if any(message.id == message_id for message in messages) and self.cancellable(messages[0]):
                log.warning("handler is cancelled by an operator: %s", _describe(messages))
                self._interrupted[index] = call = HandlerCall(messages)
                call.cancelled = counted
                self.tasks[index].cancel(CANCELLED_BY_OPERATOR)

    async def done(self) -> None:
        """Return when all tasks have ended, by stop() or because the buffer was closed, or when one has failed."""
        ended, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            # stop() cancels tasks; any other exception is a bug in Marq.
            if not task.cancelled():
                task.result()

    async def stop(self, shutdown_s: float) -> None:
        """Take no more work; cancel handlers that still run after ``shutdown_s`` and release their messages."""
        if self._stopping:
            return
        self._stopping = True
        self._buffer.handler_demand -= self._demand
        self._buffer.wake_all()
        # The other tasks wait, perhaps for a broker that is gone.
        if (busy := self.busy_tasks) and shutdown_s > 0 and not self._hurried:
            self._log_running(logging.INFO, f"waiting up to {shutdown_s:g} s for running handlers")
            self._waiting = asyncio.ensure_future(asyncio.wait(busy, timeout=shutdown_s))
            await asyncio.wait([self._waiting])
            self._log_running(
                logging.WARNING,
                "handlers have not ended in time, their messages are released"
                + ("; threads can't be cancelled and continue" if self._threads is not None else ""),
                ids=True,
            )
        self._cancelled = True
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            _, running = await asyncio.wait(self.tasks, timeout=CLEAN_UP_S)
            self._abandon(running)
        if self._threads is not None:
            # A thread can't be cancelled: its message was released, and the stop does not wait for it.
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._buffer.pools.remove(self)

    def _log_running(self, level: int, text: str, *, ids: bool = False) -> None:
        messages = self.running
        if messages:
            queues = ",".join(sorted({message.queue for message in messages}))
            handlers = ",".join(sorted({name_of(self._function_of(message)) for message in messages}))
            shown = f" ids={','.join(message.id for message in messages[:MAX_LOGGED_IDS])}" if ids else ""
            log.log(level, "%s: queue=%s handler=%s messages=%d%s", text, queues, handlers, len(messages), shown)

    def hurry(self) -> None:
        """Stop waiting for running handlers."""
        self._hurried = True
        if self._waiting is not None:
            self._waiting.cancel()

    def _abandon(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Release the messages of handlers that ignore their cancellation."""
        for task, messages in zip(self.tasks, self._current, strict=True):
            if task in tasks and messages:
                log.warning("handler continues although it was cancelled: %s", _describe(messages))
                for message in messages:
                    message._fail(asyncio.CancelledError())

    # --- ended leases -------------------------------------------------------------------------------------------------

    def lose(self, batch: LeasedBatch, offsets: Sequence[int]) -> None:
        """Cancel the handlers of messages whose lease has ended."""
        lost = set(offsets) - batch.decided
        for index, messages in enumerate(self._current):
            if members := [one for one in messages if one._batch is batch and one._offset in lost]:
                self._interrupt(index, messages, members)

    def _interrupt(self, index: int, messages: Sequence[Message], lost: Sequence[Message]) -> None:
        """Count a call as failed, and cancel it unless it runs in a thread."""
        task = self.tasks[index]
        # If a stop has cancelled the task, the stop settles the messages.
        if task.done() or self._cancelled:
            return
        if index not in self._interrupted:
            self._interrupted[index] = HandlerCall(messages)
            if self.cancellable(messages[0]):
                log.warning("lease lost, its handler is cancelled: %s", _describe(lost))
                task.cancel(f"the lease expired: {_describe(lost)}")
            else:
                log.warning("lease lost; its handler runs in a thread and can't be cancelled: %s", _describe(lost))
        # At once, because the thread may never return. When it does, its result does not count.
        self._interrupted[index].failed(lost[0]._batch.breaker)

    def _resumed(self, index: int) -> HandlerCall | None:
        """Return a task's call if it was interrupted, and undo the cancellation."""
        call = self._interrupted.pop(index, None)
        if call is not None and self.cancellable(self._current[index][0]):
            self.tasks[index].uncancel()
        return call

    # --- failed handlers ----------------------------------------------------------------------------------------------

    def _failed(self, index: int, error: BaseException) -> None:
        """Settle the messages of a call that raised."""
        messages, call, stopping = self._current[index], self._resumed(index), self._cancelled
        by_operator = None if call is None else call.cancelled
        lost = call is not None and by_operator is None
        self._forget_cancellations(index)
        cancelled = isinstance(error, asyncio.CancelledError) and not stopping
        if cancelled and by_operator is not None:
            _settle_cancelled(messages, counted=by_operator)
            return
        if cancelled:
            # Not cancelled by a stop: a lease expired, or something that the handler awaited was cancelled.
            replaced = LeaseLost(_LOST_TOGETHER) if lost else RuntimeError(_CANCELLED)
            replaced.__cause__, error = error, replaced
        elif isinstance(error, SystemExit) or (isinstance(error, GeneratorExit) and self._is_running(index)):
            # sys.exit() in the handler or a library: it would end the event loop, and with it all other handlers.
            replaced = RuntimeError(f"{type(error).__name__} in the handler: {error_text(error)}")
            replaced.__cause__, error = error, replaced
        call = call or HandlerCall(messages)
        followed: dict[Message, Consequence] = {}
        for message in messages:
            if lost and not stopping and message._offset not in message._batch.open:
                # Its lease has ended, so there is nothing to release.
                call.failed(message._batch.breaker)
            elif (consequence := message._fail(error, call)) is not None:
                followed[message] = consequence
        if isinstance(error, INTERRUPTIONS):
            raise error
        if not (lost and cancelled):
            self._log_failure(messages, followed, error)
        if isinstance(error.__cause__, GeneratorExit):
            # A coroutine that is closed must not wait again.
            raise error.__cause__

    def _log_failure(
        self, messages: Sequence[Message], followed: Mapping[Message, Consequence], error: BaseException
    ) -> None:
        """Log a failed call in one line, with what follows for its first message that was open."""
        # A traceback shows code but no values, so payloads stay out of the log.
        traceback = not isinstance(error, Outcome)
        if followed:
            consequence = next(iter(followed.values()))
            # Without a line if the handler asked for a retry.
            if consequence.final or not isinstance(error, Retry):
                self._writer.failures.write([*followed], consequence, shown_error(error), traceback=traceback)
        elif traceback:
            self._writer.failures.write(messages, _WITHOUT_CONSEQUENCE, error, traceback=True)

    def _is_running(self, index: int) -> bool:
        """Return whether a task is running, so that nothing closes its coroutine, as the end of the event loop does."""
        try:
            return asyncio.current_task() is self.tasks[index]
        except RuntimeError:
            return False


class HandlerTasks(HandlerPool):
    """``concurrency`` tasks of a handler that takes one message.

    ``codecs`` returns a queue's codec, or None for the consumer's.
    """

    def __init__(
        self,
        buffer: PrefetchBuffer,
        receiver: Receiver,
        handler: Callable[[Message], Any] | HandlersByType,
        concurrency: int,
        codecs: Callable[[str], Codec | None] | None = None,
        chain: Sequence[Middleware] = (),
    ) -> None:
        # Twice the concurrency, so that the next message is ready when a handler returns.
        super().__init__(buffer, receiver, handler, concurrency, 2 * concurrency, concurrency, chain)
        self._codecs = codecs
        #: The task that began last.
        self._latest = -1

    async def _work(self, index: int) -> None:
        buffer, writer, handler = self._buffer, self._writer, self._handler
        made, make = buffer.ready.made, buffer.ready.make
        current, begun, interrupted, codecs = self._current, self._begun_s, self._interrupted, self._codecs
        clock, pop, finish, taken = writer.now_s, made.popleft, _finish, self._starts.taken
        burst = 1
        while not (self._stopping or buffer.closed):
            if not (made or make()):
                await self._wait()
                continue
            begun_s = clock()
            taken()
            left = burst
            self._latest = index
            while left and (made or make()) and not (self._stopping or buffer.closed):
                left -= 1
                message = pop()
                batch = message._batch
                now_s = clock()
                if batch.expires_s <= now_s:
                    continue
                if batch.starts_first:
                    # The previous message is finished: the end of its lease must not cancel this wait.
                    current[index] = ()
                    if not await self._started([message]):
                        continue
                    # The starts of the next messages of this burst are noted only if something asks for a look.
                    taken()
                if codecs is not None:
                    batch.codec = codecs(batch.queue) or batch.codec
                begun[index] = now_s
                current[index] = (message,)
                try:
                    await handler(message)
                except BaseException as error:
                    self._failed(index, error)
                else:
                    if interrupted:
                        self._resumed(index)
                    finish(message)
            current[index] = ()
            self._forget_cancellations(index)
            took_s = clock() - begun_s
            # If the handler waited and another task began in the meantime, other tasks have had their turn.
            yielded = burst == 1 and self._latest != index
            burst = min(burst * 2, MAX_BURST) if took_s < BURST_S else max(1, burst // 2)
            if not yielded:
                await asyncio.sleep(0)


class BatchHandlerTasks(HandlerPool):
    """``concurrency`` tasks of a handler that takes up to ``max_messages``; at most ``most`` are prefetched.

    A batch contains the messages that are available. The next one is prefetched while the handler works, so batches are
    full if there is a backlog.
    """

    def __init__(
        self,
        buffer: PrefetchBuffer,
        receiver: Receiver,
        handler: BatchHandler,
        concurrency: int,
        max_messages: int,
        most: int,
    ) -> None:
        room = concurrency * max_messages
        super().__init__(buffer, receiver, handler, concurrency, min(2 * room, most), min(room, most))
        self._max_messages = max_messages

    async def _work(self, index: int) -> None:
        buffer, writer = self._buffer, self._writer
        while not (self._stopping or buffer.closed):
            batch = buffer.take_many(self._max_messages, writer.now_s())
            if not batch:
                await self._wait()
                continue
            batch = await self._started(batch)
            if not batch:
                continue
            self._begun_s[index] = writer.now_s()
            self._current[index] = batch
            self._starts.taken()
            try:
                # A copy: the handler may remove messages from its list, and they are acked anyway.
                await self._handler(batch.copy())
            except BaseException as error:
                self._failed(index, error)
            else:
                _finish_all(batch, self._resumed(index))
            self._current[index] = ()
            self._forget_cancellations(index)
            await asyncio.sleep(0)


def _finish(message: Message) -> None:
    """Ack a message whose handler returned, unless it has an outcome. This is a hot path.

    It records no decision: only code that keeps the message could decide later, and the writer drops a second ACK.
    """
    batch, offset = message._batch, message._offset
    if not batch.decided or offset not in batch.decided:
        if batch.acked:
            batch.acked.append(offset)
        else:
            batch.acked = [offset]
        if not batch.dirty:
            batch.touch()
        if batch.breaker is not None and offset in batch.open:
            batch.breaker.succeeded([message])


def _finish_all(messages: Sequence[Message], call: HandlerCall | None) -> None:
    """Ack the messages of a call of a batch handler that returned, unless they have outcomes.

    ``call`` is None unless the call was interrupted.
    """
    for breaker in {message._batch.breaker for message in messages}:
        if breaker is not None and not (call is not None and call.has_failed(breaker)):
            breaker.succeeded(messages)
    for batch, members in groupby(messages, _batch):
        offsets = [message._offset for message in members]
        if batch.decided:
            offsets = [offset for offset in offsets if offset not in batch.decided]
        if offsets:
            if batch.acked:
                batch.acked += offsets
            else:
                batch.acked = offsets
            batch.touch()


def _settle_cancelled(messages: Sequence[Message], *, counted: bool) -> None:
    """Settle the messages of a call that an operator has cancelled: as failed attempts, or as interrupted ones.

    The circuit breaker does not learn of it, because it says nothing about the service that handlers need.
    """
    for message in messages:
        batch, offset = message._batch, message._offset
        if offset not in batch.open:
            continue
        if not counted or batch.at_most_once:
            message._fail(asyncio.CancelledError())
        elif batch.decide(offset):
            batch.release(offset, BACKOFF, error=CANCELLED_BY_OPERATOR)


def _describe(messages: Sequence[Message]) -> str:
    first = messages[0]
    text = (
        f"queue={first.queue} id={first.id} partition={first.partition} offset={first.offset} attempt={first.attempt}"
    )
    return text if len(messages) == 1 else f"{text} messages={len(messages)}"
