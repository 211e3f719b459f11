"""Fetched batches of markers that wait for the owner of their partition."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from aiokafka.structs import ConsumerRecord
from faust import Event

#: Batches that wait for an owner. Beyond that the agent waits, and Faust stops fetching.
MAX_INBOX_BATCHES = 16


class Inbox:
    """The batches of one partition, in the order in which they were fetched."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Event, Fetched]] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._batches)

    async def wait_for_room(self, waits: Callable[[], bool]) -> None:
        """Wait for room, as long as ``waits`` returns True."""
        while len(self._batches) >= MAX_INBOX_BATCHES and waits():
            self._room.clear()
            await self._room.wait()

    def put(self, event: Event) -> None:
        """Add a batch, or drop it if there is no room: the owner notices the gap and seeks back to its start."""
        if len(self._batches) < MAX_INBOX_BATCHES:
            self._batches.append((event, cast("Fetched", event.value)))
            self._arrived.set()

    def take(self) -> tuple[Event, Fetched]:
        batch = self._batches.popleft()
        self._room.set()
        return batch

    def drop(self) -> None:
        self._batches.clear()
        self.let_in()

    def let_in(self) -> None:
        """Wake the tasks that wait for room, because they hold up the batches of all partitions."""
        self._room.set()

    def wake(self) -> None:
        self._arrived.set()

    async def wait(self, limit_ms: int | None = None) -> None:
        """Wait for a batch or :meth:`wake`, at most ``limit_ms``."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(None if limit_ms is None else limit_ms / 1000):
                await self._arrived.wait()
        except TimeoutError:
            return


class Fetched(NamedTuple):
    """The records of one fetch of a partition; no record from ``start`` to before ``end`` is missing.

    Offsets between them belong to control records, aborted transactions, or records that retention or compaction
    removed.
    """

    start: int
    end: int
    records: list[ConsumerRecord[bytes, bytes]]
