"""An index of the dead letters for pages: read once, then only new records.

A page costs only the records since the last one, and is exact: redriven, deleted and removed ones do not count. Each
takes about twenty bytes (:mod:`marq.dead_letters.selection`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from marq.client.dead_letter import DeadLetter
from marq.dead_letters.error_kinds import error_kind
from marq.dead_letters.filters import DeadLetterFilter, Filters
from marq.dead_letters.log import open_dead_letter_log
from marq.dead_letters.selection import CountKey, Spot, Survey, dead_letters_at
from marq.settings.client import ClientSettings
from marq.wire.errors import MarqError

log = logging.getLogger("marq.web")

FRESH_S = 5.0
#: Most records to read for a page, and for counts.
MAX_UNREAD, MAX_UNREAD_FOR_COUNTS = 1_000_000, 50_000


class TooManyDeadLetters(MarqError):
    """Too many records to read for a page."""


class KindOfError(NamedTuple):
    """Dead letters of one queue with the same kind of error."""

    group: CountKey
    dead_letters: int
    oldest: Spot
    newest: Spot


class DeadLetterIndex:
    """The dead-letter topic as far as it was read; ``describe`` returns a dead letter as pages show it."""

    def __init__(self, client: ClientSettings, describe: Callable[[DeadLetter], dict[str, Any]]) -> None:
        self._client = client
        self._describe = describe
        #: The samples of the last answer, by partition and offset.
        self._samples: dict[tuple[int, int], dict[str, Any]] = {}
        self._survey = Survey(client.names.dead_letters, lambda queue, record: True, error_kind)
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

    async def kinds(self, queue: str | None, filters: Filters) -> list[KindOfError]:
        """Return the kinds of errors of a queue (None: of all), the newest first; raise as :meth:`read`."""
        survey, fits = await self._surveyed(queue, filters)
        kinds = [KindOfError(group, *span) for group, span in survey.spans().items() if fits(group)]
        return sorted(kinds, key=lambda kind: _age(kind.newest), reverse=True)

    async def newest(self, queue: str | None, filters: Filters, limit: int) -> list[DeadLetter]:
        """Return the newest dead letters of a queue (None: of all), the newest first; raise as :meth:`read`."""
        survey, fits = await self._surveyed(queue, filters)
        groups = survey.groups
        wanted = {number for number, group in enumerate(groups) if fits(group)}
        chosen = heapq.nlargest(limit, (spot for spot in survey.spots() if spot.group in wanted), key=_age)
        queues = {spot[:2]: groups[spot.group].queue for spot in chosen}
        found = await self._dead_letters_at(sorted(chosen), queues)
        return [found[spot[:2]] for spot in chosen if spot[:2] in found]

    async def samples(self, kinds: Sequence[KindOfError]) -> list[dict[str, Any] | None]:
        """Return a description of the newest dead letter of each kind; None if it was removed meanwhile."""
        samples = {place: self._samples.get(place) for place in (kind.newest[:2] for kind in kinds)}
        missing: dict[int, list[KindOfError]] = {}
        for kind in kinds:
            if samples[kind.newest[:2]] is None:
                missing.setdefault(kind.newest.partition, []).append(kind)
        # One of each partition at a time, because everything between two places would be read.
        for some in zip_longest(*missing.values()):
            queues = {kind.newest[:2]: kind.group.queue for kind in some if kind is not None}
            spots = [kind.newest for kind in some if kind is not None]
            for place, dead_letter in (await self._dead_letters_at(spots, queues)).items():
                samples[place] = self._describe(dead_letter)
        self._samples = {place: sample for place, sample in samples.items() if sample is not None}
        return [samples[kind.newest[:2]] for kind in kinds]

    async def _surveyed(self, queue: str | None, filters: Filters) -> tuple[Survey, Callable[[CountKey], bool]]:
        """Return a survey, and which of its groups fit; only filters that tell apart the dead letters of one group need
        a survey of their own."""
        if filters.keys() - {"kind"}:
            checked = DeadLetterFilter.read("dead letters", filters, int(time.time() * 1000))
            survey = Survey(self._client.names.dead_letters, lambda _, record: checked.fits(record), error_kind)
            async with open_dead_letter_log(self._client) as stored:
                await survey.make(stored)
            return survey, lambda group: queue in (None, group.queue)
        await self.read()
        kind = filters.get("kind")
        return self._survey, lambda group: queue in (None, group.queue) and kind in (None, group.reason)

    async def read(self) -> None:
        """Read new records. Raises TooManyDeadLetters or BrokerUnavailable.

        A caller that stops waiting does not stop the reading: the next caller finds it further along.
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
        async with open_dead_letter_log(self._client) as stored:
            unread = self._survey.unread(await stored.ranges())
            if unread > limit:
                raise TooManyDeadLetters(
                    f"{unread:,} records of dead letters are unread, and a page reads at most {limit:,}: use"
                    " marq dead --count, or the pipeline"
                )
            await self._survey.make(stored)
        self._read_s, self.read_at = time.monotonic(), time.time()
        self._counts = Counter()
        for group, count in self._survey.counts().items():
            self._counts[group.queue] += count

    async def _dead_letters_at(
        self, spots: Sequence[Spot], queues: Mapping[tuple[int, int], str]
    ) -> dict[tuple[int, int], DeadLetter]:
        """Read the dead letters at these places, which have rising offsets in each partition."""
        # A reader that was used before may still return records of its former partitions.
        async with open_dead_letter_log(self._client) as stored:
            return {
                place: DeadLetter(record, queues[place], self._client.names.dead_letters, None)
                async for records in dead_letters_at(stored, iter(spots))
                for record in records
                if (place := (record.partition, record.offset))
            }


def _age(spot: Spot) -> tuple[int, int, int]:
    """Return the sort key of a dead letter by its time, and its place among those of the same millisecond."""
    return (spot.dead_lettered_at_ms, spot.partition, spot.offset)
