"""Messages that are leased and wait for somebody to take them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from marq.lease import Lease
from marq.message import Message
from marq.pace import Pace


class Crew(Protocol):
    """Tasks that take messages from a shelf."""

    @property
    def tasks(self) -> Collection[asyncio.Task[Any]]: ...

    @property
    def at_work(self) -> Collection[asyncio.Task[Any]]:
        """Those of them that are in a handler now."""


class Shelf:
    """Prefetched messages of a queue (or a group of queues), who waits for them, and how many are held in all.

    ``standing`` is the demand of handlers (what they want to have at hand all the time), ``asked`` that of calls which
    are waiting right now.
    """

    __slots__ = (
        "_takers",
        "asked",
        "closed",
        "crews",
        "held",
        "on_lost",
        "pace",
        "queue",
        "ready",
        "standing",
        "wanted_s",
    )

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.ready: deque[Message] = deque()
        self.held = 0
        self.standing = 0
        self.asked = 0
        self.pace = Pace()
        #: Whose handlers take messages from here.
        self.crews: list[Crew] = []
        #: Called with a lease and those of its offsets for which it is over.
        self.on_lost: list[Callable[[Lease, Sequence[int]], None]] = []
        #: When somebody last took a message or waited for one.
        self.wanted_s = 0.0
        self.closed = False
        self._takers: deque[asyncio.Future[None]] = deque()

    def put(self, messages: Sequence[Message], now_s: float) -> None:
        """Hand out leased messages, and wake as many takers."""
        self.hold(len(messages), now_s)
        self.show(messages)

    def hold(self, count: int, now_s: float) -> None:
        """Count messages that are leased, and that nobody may have yet."""
        self.held += count
        self.pace.busy(now_s)

    def show(self, messages: Sequence[Message]) -> None:
        """Hand out messages that were counted, and wake as many takers."""
        self.ready.extend(messages)
        self._wake(len(messages))

    def take(self, now_s: float) -> Message | None:
        """Return the next message whose lease is not over, or None."""
        ready = self.ready
        self.wanted_s = now_s
        while ready:
            message = ready.popleft()
            if message._lease.expires_s > now_s:
                return message
        return None

    def lose(self, lease: Lease, offsets: Sequence[int]) -> None:
        """Tell whoever works on messages that the lease is over for them."""
        for listener in tuple(self.on_lost):
            listener(lease, offsets)

    async def wait(self) -> None:
        """Return when something may have come, or the shelf was closed."""
        if self.ready or self.closed:
            return
        taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        try:
            await taker
        except asyncio.CancelledError:
            # Woken and cancelled at once: what it was woken for is for the next one.
            if taker.done() and not taker.cancelled() and self.ready:
                self._wake(1)
            raise

    def close(self) -> None:
        """Wake everybody: nothing comes any more."""
        self.closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Let everybody who waits look again."""
        self._wake(len(self._takers))

    def room(self, most: int, now_s: float) -> int:
        """Return how many more messages to fetch, and 0 where that is not worth a read yet."""
        window = self.pace.window(self.standing, most, now_s) if self.standing or self.held or self.asked else 0
        room = max(window - self.held, self.asked - len(self.ready))
        worth = 1 if self.asked or not self.ready else max(1, window // 4)
        return room if room >= worth else 0

    def _wake(self, count: int) -> None:
        takers = self._takers
        while takers and count > 0:
            taker = takers.popleft()
            if not taker.done():
                taker.set_result(None)
                count -= 1
