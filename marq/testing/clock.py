"""Virtual time in whole milliseconds, which only moves on request.

The log's clock has no fractions. A client that counted them could trust a lease for a part of a millisecond in which
the tracker already redelivers the message.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from math import ceil

#: By how much the clients' clock runs fast. A sum of floats may be slightly too large, and a lease would then end later
#: for its holder than for the tracker.
_FAST = 1e-8
#: Time does not begin at 0, because 0 stands for "never" in some clients.
_BEGIN_MS = 1_000_000


class Timer:
    """A scheduled call, which may be cancelled; closing its ``loop``, if any, also cancels it."""

    __slots__ = ("_call", "_loop", "_order", "last", "when_ms")

    def __init__(
        self,
        when_ms: int,
        order: int,
        call: Callable[[], None],
        last: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.when_ms = when_ms
        self.last = last
        self._order = order
        self._call: Callable[[], None] | None = call
        self._loop = loop

    def cancel(self) -> None:
        self._call = None

    @property
    def cancelled(self) -> bool:
        return self._call is None or (self._loop is not None and self._loop.is_closed())

    def run(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()

    def __lt__(self, other: Timer) -> bool:
        return (self.when_ms, self.last, self._order) < (other.when_ms, other.last, other._order)


class VirtualClock:
    """The virtual time and its timers."""

    def __init__(self) -> None:
        self.now_ms = _BEGIN_MS
        #: The wall clock begins at the machine's time, so that messages have today's date.
        self._epoch_ms = int(time.time() * 1000) - _BEGIN_MS
        self._timers: list[Timer] = []
        self._order = 0

    @property
    def wall_ms(self) -> int:
        """The time as ms since 1970."""
        return self._epoch_ms + self.now_ms

    def now_s(self) -> float:
        """Return the seconds of the clients' monotonic clock."""
        return self.now_ms * (1 + _FAST) / 1000

    def after(
        self,
        seconds: float,
        call: Callable[[], None],
        *,
        last: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Timer:
        """Call back after ``seconds``; ``last``: after all other events of that moment; not once ``loop`` is closed."""
        return self.at(self.now_ms + ceil(seconds * 1000 * (1 - _FAST)), call, last=last, loop=loop)

    def at(
        self,
        when_ms: int,
        call: Callable[[], None],
        *,
        last: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Timer:
        """Call back at a time, or when time moves next if it is past."""
        self._order += 1
        timer = Timer(max(when_ms, self.now_ms), self._order, call, last, loop)
        heapq.heappush(self._timers, timer)
        return timer

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of virtual time."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = self.after(seconds, wake, loop=loop)
        try:
            await woken
        finally:
            timer.cancel()

    @property
    def next_ms(self) -> int | None:
        """The time of the next event, or None."""
        timers = self._timers
        while timers and timers[0].cancelled:
            heapq.heappop(timers)
        return timers[0].when_ms if timers else None

    def move(self, to_ms: int) -> None:
        """Let time pass to a moment not after :attr:`next_ms`, and run the first events of that moment.

        Events that come last in that moment are left for the next call.
        """
        self.now_ms = max(self.now_ms, to_ms)
        last = None
        while (next_ms := self.next_ms) is not None and next_ms <= self.now_ms:
            if last is not None and self._timers[0].last != last:
                return
            timer = heapq.heappop(self._timers)
            last = timer.last
            timer.run()
