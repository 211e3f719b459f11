"""How clients start and stop: one call at a time, any number of times; a start that fails leaves nothing running."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, Self, TypeVar, Unpack

from marq.client.codecs import Codec, V, check_codec
from marq.settings.client import ClientOptions, ClientSettings
from marq.settings.hints import Hinted
from marq.wire.errors import MarqError

R = TypeVar("R")


class Client(Hinted, ABC):
    """A client that is started and stopped, directly or by ``async with``."""

    @abstractmethod
    async def start(self) -> None:
        """Connect, and create the topics that are missing; does nothing when started.

        Raises:
            BrokerUnavailable: no broker answered within the connect timeout, or it refused.
            ConfigError: a setting of a topic or a queue is wrong, or a permission is missing.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Finish pending operations within a bounded time, and close; does nothing if already stopped."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Lifecycle(Client, Generic[R]):
    """A client that is opened by :meth:`start` and closed by :meth:`stop`; ``R`` is what exists in between.

    Args:
        client: the client's name in errors, such as "the producer".
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._running: R | None = None
        self._stopped = False
        self._opened = AsyncExitStack()
        self._changing = asyncio.Lock()

    @abstractmethod
    async def _open(self, opened: AsyncExitStack) -> R:
        """Open the parts of the client, and push the close of each part onto ``opened`` as soon as it is open."""

    def _hurry(self, running: R) -> None:
        """Shorten a stop under way, because it was cancelled."""

    async def start(self) -> None:
        async with self._changing:
            if self._running is None:
                opened = AsyncExitStack()
                try:
                    self._running = await self._open(opened)
                except BaseException:
                    await to_its_end(opened.aclose())
                    raise
                self._opened = opened

    async def stop(self) -> None:
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        """Close while :attr:`_changing` is held."""
        running, self._running = self._running, None
        if running is not None:
            self._stopped = True
            await to_its_end(self._opened.aclose(), lambda: self._hurry(running))

    def _started(self) -> R:
        if (running := self._running) is None:
            raise MarqError(
                f"{self._client} is stopped: call start() to use it again"
                if self._stopped
                else f"{self._client} is not started: call start() or use `async with`"
            )
        return running


class CodecClient(Lifecycle[R], Generic[R, V]):
    """A client with the settings of its connection and a codec for values of type V."""

    #: Whether it is part of another client or of a worker.
    _internal = False

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | None = None,
        *,
        codec: Codec[V] | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._begin(ClientSettings.read(bootstrap_servers, options, owner=type(self).__name__), check_codec(codec))

    @classmethod
    def of(cls, settings: ClientSettings) -> Self:
        """Return a client without a codec for code that already has its settings."""
        client = cls.__new__(cls)
        client._internal = True
        client._begin(settings, None)
        return client

    @abstractmethod
    def _begin(self, settings: ClientSettings, codec: Codec[V] | None) -> None:
        """Initialize the client."""


async def to_its_end(ending: Coroutine[Any, Any, None], hurry: Callable[[], None] = lambda: None) -> None:
    """Await something that takes a bounded time, and finish it even when cancelled, because it cleans up.

    ``hurry`` is called at each cancellation.
    """
    task = asyncio.create_task(ending)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            # A second cancellation must not end the wait: the next start would begin while this stop is still closing.
            cancelled = error
            hurry()
    if cancelled is not None:
        if not task.cancelled():
            # Otherwise asyncio logs it when the task is collected.
            task.exception()
        raise cancelled
    task.result()
