"""Limits of a worker's web server: connections, and requests per address.

Each connection takes a file of the process, and the worker's Kafka clients and tables need theirs: idle or slow
visitors must not stop queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp.web import RequestHandler, Server

log = logging.getLogger("marq.web")

#: Connections in all and per address: a supervisor's health check must find room.
MAX_CONNECTIONS, MAX_OF_ADDRESS = 1_000, 250
#: Time limit for a request without its body, since the connection was made or the last answer was sent.
IDLE_S = 75.0
#: Interval between two log lines.
_SAID_S = 60.0


class Connections:
    """Closes excess connections as soon as they are made."""

    def __init__(self, most: int = MAX_CONNECTIONS, of_address: int = MAX_OF_ADDRESS) -> None:
        self._most = most
        self._of_address = of_address
        self._open: dict[RequestHandler, str] = {}
        self._addresses: Counter[str] = Counter()
        self._said_s = float("-inf")

    def limit(self, server: Server) -> None:
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            if not self._admits(handler, str((transport.get_extra_info("peername") or ("",))[0])):
                # Later, because it is still being made.
                asyncio.get_running_loop().call_soon(handler.force_close)

        def connection_lost(handler: RequestHandler, error: BaseException | None = None) -> None:
            address = self._open.pop(handler, None)
            if address is not None:
                self._addresses[address] -= 1
                if not self._addresses[address]:
                    del self._addresses[address]
            lost(handler, error)

        patched: Any = server
        patched.connection_made, patched.connection_lost = connection_made, connection_lost

    def _admits(self, handler: RequestHandler, address: str) -> bool:
        if len(self._open) < self._most and self._addresses[address] < self._of_address:
            self._open[handler] = address
            self._addresses[address] += 1
            return True
        if time.monotonic() - self._said_s > _SAID_S:
            self._said_s = time.monotonic()
            log.warning("connections are refused: open=%d address=%s", len(self._open), address)
        return False


#: Addresses to remember; beyond that, those that were quiet for longest are forgotten.
MAX_ADDRESSES = 1_024


class RateLimiter:
    """A token bucket per address: ``burst`` at once, and ``per_second`` in the long run."""

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        #: Remaining tokens and the time of that count, by address.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Return the time until the next request is allowed."""
        return max(0.0, (1.0 - self._tokens(address)) / self._per_second)

    def spend(self, address: str) -> None:
        self._add(address, -1.0)

    def give_back(self, address: str) -> None:
        self._add(address, 1.0)

    def _add(self, address: str, count: float) -> None:
        self._left[address] = self._tokens(address) + count, self._clock()
        self._left.move_to_end(address)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)

    def _tokens(self, address: str) -> float:
        left, then_s = self._left.get(address, (self._burst, self._clock()))
        return min(self._burst, left + (self._clock() - then_s) * self._per_second)
