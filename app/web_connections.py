"""How many connections a worker's web server keeps, and for how long an idle one.

Each takes a file of the process, and the worker's Kafka clients and tables need theirs: whoever only connects, and says
nothing or says it slowly, must not stop queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from aiohttp.web import RequestHandler, Server

log = logging.getLogger("marq.web")

#: At a time, in all and of one address: a supervisor that asks whether the worker lives must find room.
MAX_CONNECTIONS, MAX_OF_ADDRESS = 1_000, 250
#: For a request to come as a whole, but for its body, since the connection was made or the last answer was sent.
IDLE_S = 75.0
#: Between two lines of the log.
_SAID_S = 60.0


class Connections:
    """Closes what is too much as soon as it is made."""

    def __init__(self, most: int = MAX_CONNECTIONS, of_address: int = MAX_OF_ADDRESS) -> None:
        self._most = most
        self._of_address = of_address
        self._open: dict[RequestHandler, str] = {}
        self._addresses: Counter[str] = Counter()
        self._said_s = float("-inf")

    def limit(self, server: Server) -> None:
        """Be told of each connection of a server, before it is served."""
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            if not self._admits(handler, str((transport.get_extra_info("peername") or ("",))[0])):
                # Not at once: it is being made.
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
