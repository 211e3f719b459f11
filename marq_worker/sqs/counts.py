"""How many messages queues have, for GetQueueAttributes and moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

#: Maximum age of the numbers, and of incomplete ones.
MAX_AGE_S, INCOMPLETE_AGE_S = 5.0, 1.0


class MessageCounts(NamedTuple):
    """The numbers of waiting, in-flight and delayed messages of a queue.

    If not ``known``, they lack the messages of a tracker that has not counted yet, or did not answer.
    """

    waiting: int = 0
    in_flight: int = 0
    delayed: int = 0
    known: bool = False


class QueueCounts:
    """Counts messages.

    Args:
        statistics: returns the statistics of all queues.
    """

    def __init__(self, statistics: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._statistics = statistics
        self._queues: dict[str, Any] = {}
        self._known = False
        self._valid_s = float("-inf")
        self._counting = asyncio.Lock()

    async def of(self, queue: str) -> MessageCounts:
        """Return the counts of a queue, a few seconds old at most."""
        async with self._counting:
            if time.monotonic() >= self._valid_s:
                statistics = await self._statistics()
                self._known, self._queues = statistics["backlog"]["complete"], statistics["queues"]
                self._valid_s = time.monotonic() + (MAX_AGE_S if self._known else INCOMPLETE_AGE_S)
        metrics = self._queues.get(queue, {})
        waiting = metrics.get("waiting", 0) + metrics.get("waiting_for_redelivery", 0)
        in_flight, delayed = metrics.get("in_flight", 0), metrics.get("waiting_for_delivery", 0)
        return MessageCounts(int(waiting), int(in_flight), int(delayed), self._known)
