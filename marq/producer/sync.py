"""The synchronous producer, for code without an event loop and for any number of threads.

A daemon thread runs an event loop with a :class:`marq.Producer`; a call passes its work to that loop and waits. Calls
from several threads share batches.

A fork copies the memory but not the thread, and the sockets are the parent's. So each call first checks the process,
before it touches a lock, and raises in the child. The child never destroys the inherited objects: that would remove the
parent's sockets from the epoll that both processes share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, Unpack, cast, overload

from marq.client.codecs import Codec, V, check_codec
from marq.client.receipt import Receipt
from marq.client.send_options import SendManyOptions, SendOptions, TimeOptions
from marq.client.send_targets import Target, target_of
from marq.producer.producer import One, Producer, Several
from marq.producer.sending import encode
from marq.producer.thread import ProducerThread
from marq.settings.client import ClientOptions
from marq.settings.hints import Hinted
from marq.wire.errors import MarqError

T = TypeVar("T")


class SyncProducer(Hinted, Generic[V]):
    """Sends messages from code without an event loop; each call returns when its messages are durable.

    All threads of a process can share one. A call blocks its thread, so in an event loop, use :class:`marq.Producer`.
    After a fork, the child needs its own producer; one that was not started before the fork can be started in the
    child. If the program ends without :meth:`stop`, accepted messages are still sent for a few seconds.

    Args:
        bootstrap_servers: ``host:port``, several separated by commas (default MARQ_BOOTSTRAP_SERVERS).
        codec: encodes values in the calling thread (default: values are bytes).
        options: see :class:`marq.settings.client.ClientOptions`.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        codec: Codec[V] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._codec = check_codec(codec)
        # A producer belongs to the event loop that it was started in, so each start creates one. This one only checks
        # the settings.
        self._make = partial(Producer, bootstrap_servers, **options)
        self._make()
        self._changing = threading.RLock()
        #: The process in which it was started.
        self._pid: int | None = None
        self._thread: ProducerThread | None = None

    def start(self) -> None:
        """Connect, and create missing topics; does nothing if already started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or a broker refused.
            ConfigError: a topic's setting is wrong.
            MarqError: it was started before a fork, in the parent.
        """
        self._check_caller()
        with self._changing:
            if self._thread is None:
                self._pid = os.getpid()
                try:
                    thread = ProducerThread(self._make())
                    thread.connect()
                except BaseException:
                    self._pid = None
                    raise
                self._thread = thread

    def stop(self) -> None:
        """Wait a few seconds for messages that are being sent, then close; does nothing if stopped, or after a fork."""
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    @overload
    def send(self, queue: Target[T], value: T, **options: Unpack[SendOptions]) -> Receipt: ...

    # A str is a sequence of str, too.
    @overload
    def send(  # type: ignore[overload-overlap]
        self, queue: str, value: V, **options: Unpack[SendOptions]
    ) -> Receipt: ...

    @overload
    def send(self, queue: Sequence[str], value: V, **options: Unpack[SendOptions]) -> list[Receipt]: ...

    def send(
        self, queue: Target[Any] | str | Sequence[str], value: Any, **options: Unpack[SendOptions]
    ) -> Receipt | list[Receipt]:
        """Send one message, to one queue or to several, like :meth:`marq.Producer.send`; durable on return."""
        thread = self._started()
        codec: Codec | None = self._codec
        if not isinstance(queue, Sequence):
            queue, codec, options["type"] = target_of(queue, codec, options.get("type"))
        if codec is not None:
            value = encode(codec, queue, value)
        names = queue
        return thread.call(lambda producer: producer.send(names, value, **options))

    @overload
    def send_many(self, queue: Target[T], values: Iterable[T], **options: Unpack[SendManyOptions]) -> list[Receipt]: ...

    @overload
    def send_many(self, queue: str, values: Iterable[V], **options: Unpack[SendManyOptions]) -> list[Receipt]: ...

    def send_many(
        self, queue: Target[Any] | str, values: Iterable[Any], **options: Unpack[SendManyOptions]
    ) -> list[Receipt]:
        """Send messages, like :meth:`marq.Producer.send_many`; durable on return."""
        thread = self._started()
        name, codec = queue, cast("Codec | None", self._codec)
        if not isinstance(name, Sequence):
            name, codec, options["type"] = target_of(name, codec, options.get("type"))
        # Here and not in the loop: the iterable may belong to this thread, or be slow.
        items = list(values)
        if codec is not None:
            items = [encode(codec, name, value, item) for item, value in enumerate(items)]
        return thread.call(lambda producer: producer.send_many(name, items, **options))

    @overload
    def cancel(self, receipt: One) -> bool: ...

    @overload
    def cancel(self, receipt: Several) -> list[bool]: ...

    def cancel(self, receipt: One | Several) -> bool | list[bool]:
        """Cancel delayed messages, like :meth:`marq.Producer.cancel`."""

        async def ask(producer: Producer) -> bool | list[bool]:
            return await producer.cancel(receipt)

        return self._started().call(ask)

    @overload
    def reschedule(self, receipt: One, **time: Unpack[TimeOptions]) -> bool: ...

    @overload
    def reschedule(self, receipt: Several, **time: Unpack[TimeOptions]) -> list[bool]: ...

    def reschedule(self, receipt: One | Several, **time: Unpack[TimeOptions]) -> bool | list[bool]:
        """Deliver delayed messages at another time, like :meth:`marq.Producer.reschedule`."""

        async def ask(producer: Producer) -> bool | list[bool]:
            return await producer.reschedule(receipt, **time)

        return self._started().call(ask)

    def _started(self) -> ProducerThread:
        self._check_caller()
        if (thread := self._thread) is None:
            raise MarqError("the producer is not started: call start() or use `with`")
        return thread

    def _is_elsewhere(self) -> bool:
        pid = self._pid
        return pid is not None and pid != os.getpid()

    def _check_caller(self) -> None:
        if isinstance(threading.current_thread(), ProducerThread):
            raise MarqError(
                "a SyncProducer can't be used in its own thread, where it would wait for itself: a logging handler that"
                " sends, for example, must pass its records to another thread"
            )
        if self._is_elsewhere():
            raise MarqError(
                f"the producer was started in process {self._pid} and can't be used in its fork {os.getpid()}:"
                " create and start another SyncProducer in the child"
            )
