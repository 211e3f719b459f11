"""The synchronous producer: for code without an event loop, and for any number of threads.

It is no second producer. One daemon thread runs an event loop with a :class:`marq.Producer`; a call hands its work to
that loop and waits. Calls of several threads meet there and share their batches.

A fork copies the memory but not the thread: in the child nobody would answer, and the sockets are the parent's. So
each call first looks where it is, before it touches a lock, and raises in the child. What the child inherited is never
destroyed there: that would take the parent's sockets out of the epoll that both processes share.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from marq.codecs import Codec, check_codec
from marq.content import encode
from marq.core.errors import BrokerUnavailable, MarqError
from marq.durations import Duration
from marq.producer import Headers, Producer
from marq.receipt import Receipt
from marq.settings import ClientOptions
from marq.when import At, Delay
from marq.words import Unknown, missing

log = logging.getLogger("marq")

#: The threads that run. In a forked child nobody takes them out, so they are not destroyed there.
_running: set[_ProducerThread] = set()

#: How long a stop waits for the thread; the producer in it ends by itself before that.
STOP_THREAD_S = 10.0
#: How long the thread waits for tasks that it has cancelled.
CANCEL_S = 1.0

T = TypeVar("T")


class SyncProducer:
    """Sends messages from code without an event loop; each call returns when its messages are durable.

    All threads of a process may share one. A call blocks its thread: in an event loop take :class:`marq.Producer`.
    After a fork the child makes one of its own; one that is not started yet may be started there. What was accepted
    when the program ends without :meth:`stop` is sent, for a few seconds at the most.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas; else MARQ_BOOTSTRAP_SERVERS.
        codec: what makes bytes of values, in the calling thread; without it values are bytes.
        options: see :class:`marq.settings.ClientOptions`.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        codec: Codec | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._codec = check_codec(codec)
        # A producer belongs to the event loop that it was started in, so each start makes one. This one says at once
        # what is wrong with the settings.
        self._make = partial(Producer, bootstrap_servers, **options)
        self._make()
        self._changing = threading.RLock()
        #: The process that it was started in.
        self._pid: int | None = None
        self._thread: _ProducerThread | None = None

    def start(self) -> None:
        """Connect, and make the topics that are missing; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a topic's setting is wrong.
            MarqError: it was started before a fork, in the parent.
        """
        self._check_caller()
        with self._changing:
            if self._thread is None:
                self._pid = os.getpid()
                try:
                    thread = _ProducerThread(self._make())
                    thread.connect()
                except BaseException:
                    self._pid = None
                    raise
                self._thread = thread

    def stop(self) -> None:
        """Wait some seconds for what is on its way, then close; does nothing when stopped, or after a fork."""
        if self._is_elsewhere():
            return
        self._check_caller()
        with self._changing:
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.end()
                self._pid = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @overload
    def send(
        self,
        queue: str,
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> Receipt: ...

    @overload
    def send(
        self,
        queue: Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]: ...

    def send(
        self,
        queue: str | Sequence[str],
        value: Any,
        *,
        headers: Headers | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        **unknown: Unknown,
    ) -> Receipt | list[Receipt]:
        """Send one message, to one queue or to several; durable on return. As :meth:`marq.Producer.send`."""
        thread = self._started()
        if self._codec is not None:
            value = encode(self._codec, queue, value)
        return thread.call(lambda producer: producer.send(queue, value, headers=headers, delay=delay, at=at, **unknown))

    def send_many(
        self,
        queue: str,
        values: Iterable[Any],
        *,
        headers: Headers | None = None,
        delay: Delay | None = None,
        at: At | None = None,
        **unknown: Unknown,
    ) -> list[Receipt]:
        """Send messages; durable on return. As :meth:`marq.Producer.send_many`."""
        thread = self._started()
        # Here, not in the loop: what the values come from may belong to this thread, and may take its time.
        items = list(values)
        if (codec := self._codec) is not None:
            items = [encode(codec, queue, value, item) for item, value in enumerate(items)]
        return thread.call(
            lambda producer: producer.send_many(queue, items, headers=headers, delay=delay, at=at, **unknown)
        )

    @overload
    def cancel(self, receipt: Receipt | str) -> bool: ...

    @overload
    def cancel(self, receipt: Sequence[Receipt] | list[str]) -> list[bool]: ...

    def cancel(self, receipt: Receipt | str | Sequence[Receipt] | list[str]) -> bool | list[bool]:
        """Cancel delayed messages. As :meth:`marq.Producer.cancel`."""

        async def ask(producer: Producer) -> bool | list[bool]:
            return await producer.cancel(receipt)

        return self._started().call(ask)

    @overload
    def reschedule(
        self, receipt: Receipt | str, *, delay: Duration | None = None, at: datetime | None = None
    ) -> bool: ...

    @overload
    def reschedule(
        self, receipt: Sequence[Receipt] | list[str], *, delay: Duration | None = None, at: datetime | None = None
    ) -> list[bool]: ...

    def reschedule(
        self,
        receipt: Receipt | str | Sequence[Receipt] | list[str],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
    ) -> bool | list[bool]:
        """Deliver delayed messages at another time. As :meth:`marq.Producer.reschedule`."""

        async def ask(producer: Producer) -> bool | list[bool]:
            return await producer.reschedule(receipt, delay=delay, at=at)

        return self._started().call(ask)

    def __getattr__(self, name: str) -> Any:
        raise missing("SyncProducer", name)

    def _started(self) -> _ProducerThread:
        self._check_caller()
        if (thread := self._thread) is None:
            raise MarqError("the producer is not started: use `with` or call start()")
        return thread

    def _is_elsewhere(self) -> bool:
        pid = self._pid
        return pid is not None and pid != os.getpid()

    def _check_caller(self) -> None:
        if isinstance(threading.current_thread(), _ProducerThread):
            raise MarqError(
                "a SyncProducer can't be used in the thread of one, where it would wait for itself: a handler of"
                " logging that sends, for example, must pass its records to a thread of its own"
            )
        if self._is_elsewhere():
            raise MarqError(
                f"the producer was started in process {self._pid} and can't be used in its fork {os.getpid()}:"
                " make and start another SyncProducer in the child"
            )


class _Call(Generic[T]):
    """What one caller waits for."""

    __slots__ = ("future", "send", "task")

    def __init__(self, send: Callable[[Producer], Coroutine[Any, Any, T]]) -> None:
        self.send = send
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
        """The caller does not wait any more."""
        if self.task is not None:
            self.task.cancel()


class _ProducerThread(threading.Thread):
    """A daemon thread with an event loop and a producer, from its start to its end; it does not come back."""

    def __init__(self, producer: Producer) -> None:
        super().__init__(name="marq-producer", daemon=True)
        self._pid = os.getpid()
        self._producer = producer
        self._connected: Future[None] = Future()
        #: Calls that the loop has not seen yet, and those that it works on.
        self._waiting: deque[_Call[Any]] = deque()
        self._open: set[_Call[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ending = False
        self._ended = False

    def connect(self) -> None:
        """Start; return when the producer is started, or raise what it raised."""
        _running.add(self)
        atexit.register(self._exit)
        try:
            self.start()
            self._connected.result()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let the producer send what it has, and end; bounded, and without harm when called twice."""
        self._ending = True
        self._soon(self._stop_serving)
        if self.ident is not None:
            self.join(STOP_THREAD_S)
            if self.is_alive():
                log.warning("the producer's thread did not end within %g s; it is left behind", STOP_THREAD_S)
        _running.discard(self)
        atexit.unregister(self._exit)

    def call(self, send: Callable[[Producer], Coroutine[Any, Any, T]]) -> T:
        """Let the producer send; return what that returns, or raise what it raises."""
        call = _Call(send)
        self._waiting.append(call)
        self._soon(self._begin)
        if self._ended:
            # It may have ended before it saw the call.
            self._refuse_waiting()
        try:
            return call.future.result()
        except BaseException:
            if not call.future.done():
                # Ctrl-C: whether it was sent is unknown.
                self._soon(call.give_up)
            raise

    def _soon(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            # Closed: all who waited have been answered.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _exit(self) -> None:
        """The program ends and nobody has called stop()."""
        if self._pid == os.getpid():
            self.end()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        # Not asyncio.run(): it starts a thread at its end, which fails when that is the end of the program.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(loop))
        except asyncio.CancelledError:
            pass  # by end()
        except BaseException as error:
            if self._connected.done():
                log.exception("the producer's thread ended by an error that marq did not expect")
            else:
                self._connected.set_exception(error)
        finally:
            self._refuse()
            loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._serving = serving = asyncio.current_task()
        self._loop = loop
        try:
            # Else end() came before there was a loop.
            if not self._ending:
                async with self._producer:
                    self._connected.set_result(None)
                    await loop.create_future()
        finally:
            self._refuse()
            await _wind_up(asyncio.all_tasks() - {serving})

    def _begin(self) -> None:
        """Take up the calls that wait. All that came meanwhile begin in the same turn, so they share batches."""
        loop = asyncio.get_running_loop()
        while (call := self._take()) is not None:
            self._open.add(call)
            call.task = task = loop.create_task(call.send(self._producer))
            task.add_done_callback(partial(self._answer, call))

    def _answer(self, call: _Call[T], task: asyncio.Task[T]) -> None:
        self._open.discard(call)
        call.answer(task)

    def _stop_serving(self) -> None:
        # What was accepted goes out before the producer stops: its tasks run first.
        self._begin()
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()

    def _refuse(self) -> None:
        """Nobody must wait for ever, however the thread ends."""
        self._ended = True
        for call in list(self._open):
            call.refuse(_stopped())
        self._refuse_waiting()

    def _take(self) -> _Call[Any] | None:
        """Return the next call that waits. At the end several threads take them, so it may be gone any time."""
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
    # A connection that was closed is gone in the loop's next turn.
    await asyncio.sleep(0)


def _stopped() -> BrokerUnavailable:
    return BrokerUnavailable(
        "the producer was stopped before the broker confirmed: unknown whether the message was sent; send it again if"
        " twice is no harm"
    )
