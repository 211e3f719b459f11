"""The producer of ``handler.send``: a worker's for its handlers, elsewhere the one started in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from marq.client.lifecycle import Client
from marq.wire.errors import MarqError

_shared: ContextVar[HandlersProducer] = ContextVar("marq_producer")
#: The event loop of each producer that a program has started itself.
_started: WeakKeyDictionary[Client, asyncio.AbstractEventLoop] = WeakKeyDictionary()


class HandlersProducer:
    """The producer of a worker's handlers, opened at its first use, in the event loop that made this object."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._producer: Client | None = None
        self._stopped = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the tasks that are created in this block use it."""
        token = _shared.set(self)
        try:
            yield
        finally:
            _shared.reset(token)

    async def started(self, handler: str) -> Client:
        """Start it for the ``send`` of a handler if it is not started, and return it."""
        # A plain function runs in a thread, with the context of its task. With asyncio.run() it would open the producer
        # of all handlers in an event loop that ends with the call.
        if asyncio.get_running_loop() is not self._loop:
            raise MarqError(
                f"{handler}.send() was called outside the worker's event loop: nothing was sent. In a plain function"
                " use marq.SyncProducer, or make it `async def`"
            )
        # A handler may keep running after the stop; it must not open the producer again.
        if self._stopped:
            raise MarqError(f"{handler}.send(): nothing was sent, because the worker is stopping")
        if self._producer is None:
            self._producer = self._make()
        await self._producer.start()
        return self._producer

    async def stop(self) -> None:
        self._stopped = True
        if self._producer is not None:
            await self._producer.stop()


def note_started(producer: Client) -> None:
    """Note that a program has started a producer in this event loop."""
    _started[producer] = asyncio.get_running_loop()


def note_stopped(producer: Client) -> None:
    _started.pop(producer, None)


async def current_producer(handler: str) -> Any:
    """Return the producer of a handler's ``send``.

    Raises:
        MarqError: none is started in this event loop, or several; or this is not the worker's event loop.
        BrokerUnavailable, ConfigError: a worker's producer can't be started.
    """
    shared = _shared.get(None)
    if shared is not None:
        return await shared.started(handler)
    loop = asyncio.get_running_loop()
    producers = [producer for producer, started_in in _started.items() if started_in is loop]
    if len(producers) != 1:
        count = f"{len(producers)} producers are" if producers else "no producer is"
        raise MarqError(
            f"{handler}.send(): {count} started in this event loop, and it needs exactly one; use `async with"
            " marq.Producer()`, or name the producer: producer.send(handler, value)"
        )
    return producers[0]
