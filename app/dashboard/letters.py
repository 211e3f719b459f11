"""The dead letters as pages count them: read once, and from then on only what is new.

So a page costs what has come since the last one, and what it says is exact: what was redriven, deleted or removed by
retention is not counted. Of each letter some twenty bytes are kept (:mod:`marq.letter_survey`).
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

from marq.connection import to_its_end
from marq.core.dead_letters import kind_of
from marq.core.errors import MarqError
from marq.dead_letter import DeadLetter, time_of
from marq.dead_letters import Kind
from marq.letter_log import LetterLog, letter_log
from marq.letter_survey import Group, Spot, Survey, letters_at
from marq.settings import ClientSettings

log = logging.getLogger("marq.web")

#: How long counts are good for.
FRESH_S = 5.0
#: Records that are read at a time for a page of letters, and for counts.
MAX_UNREAD, MAX_UNREAD_FOR_COUNTS = 1_000_000, 50_000


class TooManyLetters(MarqError):
    """So many have to be read that no page does."""


class LetterIndex:
    """What stands in the dead-letters topic, as far as it was read."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._limit_s = client.request_timeout_ms / 1000
        self._survey = Survey(client.names.dead_letters, lambda queue, record: True, kind_of)
        self._read_s = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._counts: Counter[str] | None = None
        #: When it was read, in seconds since 1970; None: never to its end.
        self.read_at: float | None = None

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def counts(self) -> Counter[str] | None:
        """Return how many dead letters each queue had when they were last read; None: not known yet.

        They are read again meanwhile, if they are not too many, for whoever asks the next time.
        """
        if self._reading is None and time.monotonic() - self._read_s >= FRESH_S:
            self._begin(MAX_UNREAD_FOR_COUNTS)
        return self._counts

    async def kinds(self, fits: Callable[[Group], bool]) -> list[Kind]:
        """Return what the letters of some groups died of, the most frequent first; raises as :meth:`read`."""
        await self.read()
        kinds = [
            Kind(group.queue, group.reason, letters, time_of(first_ms), time_of(last_ms))
            for group, (letters, first_ms, last_ms) in self._survey.spans().items()
            if fits(group)
        ]
        return sorted(kinds, key=lambda kind: (-kind.letters, kind))

    async def letters(self, fits: Callable[[Group], bool], limit: int) -> list[DeadLetter]:
        """Return the letters of some groups that died first; raises as :meth:`read`."""
        await self.read()
        groups = self._survey.groups
        wanted = {number for number, group in enumerate(groups) if fits(group)}
        spots = (spot for spot in self._survey.spots() if spot.group in wanted)
        chosen = sorted(heapq.nsmallest(limit, spots, key=lambda spot: (spot.died_at_ms, *spot[:2])))
        found = {(spot.partition, spot.offset): groups[spot.group].queue for spot in chosen}
        return await self._letters_at(iter(chosen), found)

    async def read(self) -> None:
        """Read what is new.

        Who stops waiting does not stop the reading: whoever asks next finds it further.

        Raises:
            TooManyLetters: there are so many that no page reads them.
            BrokerUnavailable: they could not be read.
        """
        if self._reading is not None:
            # It may have begun before what its reader wants to see.
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
        async with self._open() as letters:
            unread = self._survey.unread(await letters.ranges())
            if unread > limit:
                raise TooManyLetters(
                    f"{unread:,} records of dead letters would have to be read, and a page reads at most {limit:,}: use"
                    " faust -A app dead --count, or the pipeline"
                )
            await self._survey.make(letters, self._limit_s)
        self._read_s, self.read_at = time.monotonic(), time.time()
        self._counts = Counter()
        for group, letters_left in self._survey.counts().items():
            self._counts[group.queue] += letters_left

    async def _letters_at(self, spots: Iterator[Spot], queues: dict[tuple[int, int], str]) -> list[DeadLetter]:
        found: list[DeadLetter] = []
        async with self._open() as letters:
            async for records in letters_at(letters, spots, self._limit_s):
                found += [
                    DeadLetter(each, queues[each.partition, each.offset], self._client.names.dead_letters, None)
                    for each in records
                ]
        return found

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[LetterLog]:
        letters = letter_log(self._client)
        await letters.start()
        try:
            yield letters
        finally:
            await to_its_end(letters.stop())
