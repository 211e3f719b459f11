"""Step 1 of :mod:`marq.consumer.receiver`: records are fetched, often enough to stay in the group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from marq.consumer.cycles import FetchedRecords
from marq.kafka.group_reader import Reader

#: Maximum number of records of one fetch.
MAX_CYCLE_RECORDS = 6_000


class Fetching:
    """The fetches of one receiver; ``assignment`` returns the number of its assignment."""

    def __init__(self, reader: Reader, changed: asyncio.Event, assignment: Callable[[], int]) -> None:
        self._reader = reader
        self._changed = changed
        self._assignment = assignment
        self._task: asyncio.Task[None] | None = None
        #: When to poll again at the latest, in the event loop's time; None before the first call.
        self._poll_by_s: float | None = None

    async def wait(self) -> None:
        """Wait until something has changed, and stay in the group."""
        if self._poll_by_s is None:
            self._poll_by_s = self._deadline_s()
        # Changes do not move the deadline: a consumer that is full and busy would leave its group.
        left_s = self._poll_by_s - asyncio.get_running_loop().time()
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            return
        await self._reader.keep_alive()
        self._poll_by_s = self._deadline_s()

    def _deadline_s(self) -> float:
        return asyncio.get_running_loop().time() + self._reader.keep_alive_s

    async def fetch(self, fetched: FetchedRecords) -> None:
        """Fetch and add records; return early if records that were kept back may be acquired."""
        await self._fetch_or_change(fetched)
        self._poll_by_s = self._deadline_s()

    async def _fetch_or_change(self, fetched: FetchedRecords) -> None:
        if self._task is None and not fetched.held:
            await self._fetch(fetched)
            return
        task = self._task = self._task or asyncio.create_task(self._fetch(fetched), name="marq-fetch")
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([task, changed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if task.done():
            self._task = None
            task.result()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _fetch(self, fetched: FetchedRecords) -> None:
        assignment = self._assignment()
        records = await self._reader.fetch(MAX_CYCLE_RECORDS)
        # After a reassignment, reading restarts at the committed offsets, so these records would arrive twice.
        if assignment == self._assignment():
            fetched.put(records)
