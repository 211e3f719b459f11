"""Messages that are leased and wait for somebody to take them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from marq.lease import Lease
from marq.message import Message
from marq.pace import Pace

#: Messages that are made at a time.
AT_ONCE = 64


class Crew(Protocol):
    """Tasks that take messages from a shelf."""

    @property
    def tasks(self) -> Collection[asyncio.Task[Any]]: ...

    @property
    def at_work(self) -> Collection[asyncio.Task[Any]]:
        """Those of them that are in a handler now."""


class Ready:
    """Messages in order, of which only the first few are objects: ``made``, to take from when :meth:`make` says so.

    What is made shortly before it is taken is gone soon after, and no garbage collector looks through it meanwhile.
    """

    __slots__ = ("_left", "_runs", "made")

    def __init__(self) -> None:
        self.made: deque[Message] = deque()
        self._runs: deque[Iterator[Message]] = deque()
        self._left = 0

    def __len__(self) -> int:
        return len(self.made) + self._left

    def add(self, messages: Iterable[Message], count: int) -> None:
        """Add so many messages at the end; they may be made as they are iterated over."""
        if count == 1 and not self._left:
            # With thousands of queues nearly each run is such a one, and its iterators would be garbage to collect.
            self.made.extend(messages)
        else:
            self._runs.append(iter(messages))
            self._left += count

    def make(self, count: int = AT_ONCE) -> bool:
        """Return whether there is one to take, and make some if there is none."""
        made, runs = self.made, self._runs
        while not made and runs:
            made.extend(islice(runs[0], count))
            self._left -= len(made)
            if not made:
                runs.popleft()
        return bool(made)

    def take(self, most: int) -> list[Message]:
        """Take up to so many messages."""
        taken: list[Message] = []
        while len(taken) < most and self.make(most - len(taken)):
            pop = self.made.popleft
            taken += [pop() for _ in range(min(len(self.made), most - len(taken)))]
        return taken

    def all(self) -> deque[Message]:
        """Make all, and return them, to be looked at and taken from at both ends."""
        for run in self._runs:
            self.made.extend(run)
        self._runs.clear()
        self._left = 0
        return self.made

    def take_of(self, queue: str) -> list[Message]:
        """Take all messages of one queue."""
        made = self.all()
        found = [message for message in made if message.queue == queue]
        if found:
            kept = [message for message in made if message.queue != queue]
            made.clear()
            made.extend(kept)
        return found


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
        self.ready = Ready()
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

    def put(self, messages: Iterable[Message], count: int, now_s: float) -> None:
        """Hand out so many leased messages, and wake as many takers."""
        self.held += count
        self.pace.busy(now_s)
        self.ready.add(messages, count)
        self._wake(count)

    def take(self, now_s: float) -> Message | None:
        """Return the next message whose lease is not over, or None."""
        ready = self.ready
        self.wanted_s = now_s
        while ready.make():
            message = ready.made.popleft()
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

    def room(self, most: int, now_s: float, pending: int = 0) -> int:
        """Return how many more messages to fetch than are ``pending``, and 0 where that is not worth a read yet."""
        window = self.pace.window(self.standing, most, now_s) if self.standing or self.held or self.asked else 0
        room = max(window - self.held, self.asked - len(self.ready)) - pending
        worth = 1 if self.asked or not self.ready else max(1, window // 4)
        return room if room >= worth else 0

    def _wake(self, count: int) -> None:
        takers = self._takers
        while takers and count > 0:
            taker = takers.popleft()
            if not taker.done():
                taker.set_result(None)
                count -= 1
