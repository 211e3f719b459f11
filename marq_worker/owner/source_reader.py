"""Copies payloads of open messages from their records, because ACQUIREs leave them there.

It has its own connections, so that fetching markers never waits for it. A source that does not answer is skipped for a
while, so that the messages of other sources do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from time import monotonic

from marq.core.storage.table_image import Place
from marq.kafka.log_reader import LogReader
from marq.kafka.queue_records import payloads_in
from marq.kafka.repeated_warnings import RepeatedWarning
from marq.settings.client import ClientSettings
from marq.wire.errors import BrokerUnavailable, MarqError
from marq.wire.large_messages import size_bytes
from marq.wire.markers import Payload, Source
from marq.wire.names import incarnation_id

#: Bytes of payloads, and time, after which a copy ends; the next one continues.
MAX_BYTES, MAX_S = 8 << 20, 2.0
#: Maximum number of records between two messages that are read instead of skipped.
GAP = 100
#: Bytes of one fetch of a partition, which may be for a single record.
FETCH_BYTES = 128 << 10
#: A due message waits for the previous fetch, which may return nothing.
FETCH_WAIT_MS = 10
#: Time without progress after which a read ends, and time for which the sources that stopped it are skipped.
STUCK_MS, APART_S = 2_000, 10.0
#: Seconds for which a topic must be missing, or end before a record, until the record counts as removed. The end that
#: a new leader returns may be too low at first.
ABSENT_S = 60.0

Copied = dict[Place, Payload | None]


class SourceReader:
    """Reads the records of messages; :meth:`copy` may be called concurrently, but reads for one caller at a time."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = replace(settings, request_timeout_ms=min(settings.request_timeout_ms, STUCK_MS))
        self._reader: LogReader | None = None
        self._lock = asyncio.Lock()
        #: Until when a source is skipped.
        self._apart: dict[Source, float] = {}
        #: Since when a source is missing (None) or ends at an offset.
        self._absent: dict[Source, tuple[int | None, float]] = {}
        #: The warnings about each topic.
        self._failed: dict[str, RepeatedWarning] = {}

    async def stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.stop()

    async def copy(self, left: Mapping[Place, Payload]) -> Copied:
        """Return payloads of messages from their records, None for a record that was removed.

        If the answer lacks a message, ask again. Raises BrokerUnavailable or Forbidden if no source answers.
        """
        async with self._lock:
            copied: Copied = {}
            by_source: dict[Source, dict[Place, Payload]] = {}
            now_s = monotonic()
            for place, payload in left.items():
                if self._apart.get(place.source, 0.0) <= now_s:
                    by_source.setdefault(place.source, {})[place] = payload
            try:
                await self._copy(by_source, copied)
            except MarqError as error:
                failed = error
            else:
                return copied
            await self._one_by_one(by_source, copied)
            if not copied:
                raise failed
            return copied

    async def _one_by_one(self, by_source: Mapping[Source, Mapping[Place, Payload]], copied: Copied) -> None:
        """Read each remaining source separately; skip those that fail, and the rest of their topics, for a while."""
        failed: dict[str, list[Source]] = {}
        for source, places in by_source.items():
            if all(place in copied for place in places):
                continue
            # The only source has just failed, as the caller learns.
            if len(by_source) > 1:
                try:
                    if source.topic not in failed:
                        await self._copy({source: places}, copied)
                        continue
                except MarqError as error:
                    warning = RepeatedWarning("payloads in topic %s, partition %s can't be copied now: %s")
                    self._failed.setdefault(source.topic, warning).write(monotonic(), *source.log, error)
                # It would hold up the others.
                self._apart[source] = monotonic() + APART_S
            failed.setdefault(source.topic, []).append(source)
        for sources in failed.values():
            await self._examine({source: by_source[source] for source in sources}, copied)

    async def _copy(self, by_source: Mapping[Source, Mapping[Place, Payload]], copied: Copied) -> None:
        reader, room, until_s = await self._started(), MAX_BYTES, monotonic() + MAX_S
        wanted = {
            source: {place: payload for place, payload in places.items() if place not in copied}
            for source, places in by_source.items()
        }
        for ranges in rounds({source: [place.offset for place in places] for source, places in wanted.items()}):
            async for fetched in reader.read(ranges):
                payloads = {
                    source: dict(payloads_in(self._settings.names, source, records, wanted[source]))
                    for source, records in fetched.items()
                }
                # A topic that was created again may have a record with the same time at the same offset.
                own = [source for source in payloads if payloads[source] and incarnation_id(source.topic)]
                if own and (missing := await reader.missing(own)):
                    raise BrokerUnavailable(f"topic {min(missing).log.topic} was deleted and created again")
                for place, payload in chain.from_iterable(found.items() for found in payloads.values()):
                    copied[place] = payload
                    room -= size_bytes(payload)
                if room <= 0 or monotonic() > until_s:
                    return
            # All records of the ranges that exist have been read.
            for source, span in ranges.items():
                self._absent.pop(source, None)
                for place in wanted[source]:
                    if place.offset in span and place not in copied:
                        copied[place] = None

    async def _examine(self, by_source: Mapping[Source, Mapping[Place, Payload]], copied: Copied) -> None:
        """Find out whether partitions that do not answer are missing, or too short for their messages."""
        ends: dict[Source, int | None] = {}
        try:
            reader = await self._started()
            ends.update(dict.fromkeys(await reader.missing(by_source.keys()), None))
            if existing := by_source.keys() - ends.keys():
                async with asyncio.timeout(STUCK_MS / 1000):
                    ends.update(await reader.ends(existing))
        except (MarqError, TimeoutError):
            pass
        for source, places in by_source.items():
            if source in ends:
                self._note_end(source, ends[source], [place for place in places if place not in copied], copied)
            else:
                # Nothing is known about it.
                self._absent.pop(source, None)

    def _note_end(self, source: Source, end: int | None, places: Iterable[Place], copied: Copied) -> None:
        """Note that a source is missing, or where it ends; messages that it has lacked for a while are gone."""
        now_s = monotonic()
        former, since_s = self._absent.get(source, (end, now_s))
        # A topic that was created again may grow, but not shrink.
        if (end is None) != (former is None) or (end or 0) < (former or 0):
            since_s = now_s
        self._absent[source] = end, since_s
        lacked = [place for place in places if end is None or place.offset >= end]
        if lacked:
            # The next attempt would only hold up other owners.
            self._apart[source] = now_s + APART_S
        if now_s - since_s >= ABSENT_S:
            copied.update(dict.fromkeys(lacked))

    async def _started(self) -> LogReader:
        if self._reader is None:
            reader = LogReader(
                self._settings,
                committed=False,
                ends_apart=True,
                fetch_wait_ms=FETCH_WAIT_MS,
                max_partition_fetch_bytes=FETCH_BYTES,
            )
            await reader.start()
            self._reader = reader
        return self._reader


def rounds(offsets: Mapping[Source, Iterable[int]]) -> Iterator[dict[Source, range]]:
    """Yield ranges that together contain all offsets: at most one range of a partition at a time.

    A partition may have several sources, one for each incarnation of its topic.
    """
    by_log: dict[Source, list[tuple[Source, range]]] = {}
    for source, wanted in offsets.items():
        by_log.setdefault(source.log, []).extend((source, span) for span in _ranges(sorted(wanted)))
    for part in zip_longest(*by_log.values()):
        yield dict(entry for entry in part if entry is not None)


def _ranges(offsets: Sequence[int]) -> Iterator[range]:
    if not offsets:
        return
    first = last = offsets[0]
    for offset in offsets:
        if offset > last + GAP:
            yield range(first, last + 1)
            first = offset
        last = offset
    yield range(first, last + 1)
