"""An index of the dead letters for pages: read once, then only new records.

A page costs only the records since the last one, and is exact: redriven, deleted and removed ones do not count. Each
takes about twenty bytes (:mod:`marq.dead_letters.survey`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from marq.client.dead_letter import DeadLetter, time_of
from marq.client.lifecycle import to_its_end
from marq.core.deliveries.dead_letters import kind_of
from marq.dead_letters.dead_letters import Kind
from marq.dead_letters.log import DeadLetterLog, dead_letter_log
from marq.dead_letters.survey import Group, Spot, Survey, dead_letters_at
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError

log = logging.getLogger("marq.web")

FRESH_S = 5.0
#: Most records to read for a page, and for counts.
MAX_UNREAD, MAX_UNREAD_FOR_COUNTS = 1_000_000, 50_000


class TooManyDeadLetters(MarqError):
    """Too many records to read for a page."""


class DeadLetterIndex:
    """The dead-letters topic as far as it was read."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._limit_s = client.request_timeout_ms / 1000
        self._survey = Survey(client.names.dead_letters, lambda queue, record: True, kind_of)
        self._read_s = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._counts: Counter[str] | None = None
        #: When it was last read to its end, in seconds since 1970; None: never.
        self.read_at: float | None = None

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def counts(self) -> Counter[str] | None:
        """Return the number of dead letters of each queue at the last read; None if not known yet.

        Unless there are too many new ones, this starts to read them for the next call.
        """
        if self._reading is None and time.monotonic() - self._read_s >= FRESH_S:
            self._begin(MAX_UNREAD_FOR_COUNTS)
        return self._counts

    async def kinds(self, fits: Callable[[Group], bool]) -> list[Kind]:
        """Return the errors of some groups' dead letters, the most frequent first; raise as :meth:`read`."""
        await self.read()
        kinds = [
            Kind(group.queue, group.reason, count, time_of(first_ms), time_of(last_ms))
            for group, (count, first_ms, last_ms) in self._survey.spans().items()
            if fits(group)
        ]
        return sorted(kinds, key=lambda kind: (-kind.letters, kind))

    async def dead_letters(self, fits: Callable[[Group], bool], limit: int) -> list[DeadLetter]:
        """Return the oldest dead letters of some groups; raise as :meth:`read`."""
        await self.read()
        groups = self._survey.groups
        wanted = {number for number, group in enumerate(groups) if fits(group)}
        spots = (spot for spot in self._survey.spots() if spot.group in wanted)
        chosen = sorted(heapq.nsmallest(limit, spots, key=lambda spot: (spot.dead_lettered_at_ms, *spot[:2])))
        queues = {(spot.partition, spot.offset): groups[spot.group].queue for spot in chosen}
        return await self._dead_letters_at(iter(chosen), queues)

    async def read(self) -> None:
        """Read new records. Raises TooManyDeadLetters or BrokerUnavailable.

        A caller that stops waiting does not stop the reading: the next one finds it further.
        """
        if self._reading is not None:
            # It may have started before the records that the caller wants to see.
            await asyncio.wait([self._reading])
        await asyncio.shield(self._reading or self._begin(MAX_UNREAD))

    def _begin(self, limit: int) -> asyncio.Task[None]:
        self._reading = asyncio.create_task(self._read_on(limit), name="dead letters of pages")
        self._reading.add_done_callback(self._looked)
        return self._reading

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled() and task.exception() is not None:
            log.debug("the dead letters were not read: %r", task.exception())

    async def _read_on(self, limit: int) -> None:
        async with self._open() as stored:
            unread = self._survey.unread(await stored.ranges())
            if unread > limit:
                raise TooManyDeadLetters(
                    f"{unread:,} records of dead letters are unread, and a page reads at most {limit:,}: use"
                    " faust -A app dead --count, or the pipeline"
                )
            await self._survey.make(stored, self._limit_s)
        self._read_s, self.read_at = time.monotonic(), time.time()
        self._counts = Counter()
        for group, count in self._survey.counts().items():
            self._counts[group.queue] += count

    async def _dead_letters_at(self, spots: Iterator[Spot], queues: dict[tuple[int, int], str]) -> list[DeadLetter]:
        dead_letters: list[DeadLetter] = []
        async with self._open() as stored:
            async for records in dead_letters_at(stored, spots, self._limit_s):
                dead_letters += [
                    DeadLetter(record, queues[record.partition, record.offset], self._client.names.dead_letters, None)
                    for record in records
                ]
        return dead_letters

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[DeadLetterLog]:
        stored = dead_letter_log(self._client)
        await stored.start()
        try:
            yield stored
        finally:
            await to_its_end(stored.stop())
