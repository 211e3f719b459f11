"""Reads a message and its markers for the dashboard.

A read starts when the message was sent, and reports if it reached its limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from marq.client.receipt import Receipt
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Records, Row
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.names import markers_partition
from marq.wire.record_headers import has_invalid_deliver_at, ordering_key, origin, record_id
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard.timeline import Timeline
from marq_worker.web.message_listing import SHOWN_BYTES, moment

#: Limits of a read: marker records, their bytes, seconds, and events of the message.
MAX_RECORDS, MAX_BYTES, MAX_SECONDS, MAX_EVENTS = 100_000, 64 << 20, 4.0, 200
#: Bytes of one round of fetches from all partitions. It is small, so that each partition advances before a limit is
#: reached; otherwise the next page would start where this one did.
_ROUND_BYTES = 4 << 20
#: Margin before the send time, because the sender's clock may be ahead of the brokers'.
_MARGIN_MS = 60_000
#: Records at the end of each partition to read if the send time is not known.
_LAST_RECORDS = 20_000
_AT_ONCE = 500


class TimelineReader:
    """Reads everything about one message, with limits.

    It shows no messages of topics outside the namespace. ``consumers`` returns the names of a queue's consumers by
    holder.
    """

    def __init__(
        self,
        client: ClientSettings,
        definitions: Definitions,
        markers_partitions: int,
        redaction: Redaction,
        consumers: Callable[[str], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._client = client
        self._definitions = definitions
        #: Their records have the queue as their key.
        self._topics_of_all = (client.names.messages, client.names.dead_letters)
        self._markers_partitions = markers_partitions
        self._redaction = redaction
        self._consumers = consumers

    async def message(self, message_id: str, queue: str, since_ms: int | None = None) -> dict[str, Any]:
        """Return a message by its id, or by the place of any of its records: ``events``, payload, and limits.

        ``queue``: the queue of the message, or "" for the only one of ``queues``. If that has several, the result has
        an empty ``queue`` and no events.

        ``since_ms``: where to start, by the log's clock, instead of its send time; ``cut``: where a limited read ended,
        else None; ``missing``: why markers from before the events that were read may be missing, else "".
        """
        receipt = Receipt.of(message_id)
        source = Source(receipt.topic, receipt.partition)
        fetched_bytes = _ROUND_BYTES // max(1, self._markers_partitions)
        async with LogReader(self._client, committed=True, max_partition_fetch_bytes=fetched_bytes) as reader:
            record, past = await self._record(reader, source, receipt.offset), None
            if record is not None:
                past = origin(source, receipt.offset, record.timestamp, record.headers)
            timeline = Timeline(message_id if past is None else past.id, queue)
            timeline.places.add((source, receipt.offset))
            sent_ms = None if past is None else past.first_sent_ms
            begin_ms = since_ms if since_ms is not None or sent_ms is None else sent_ms - _MARGIN_MS
            ranges, shortened = await self._ranges(reader, begin_ms)
            cut_ms = await self._read(reader, timeline, ranges, begin_ms)
        omitted_ms = timeline.keep(MAX_EVENTS)
        if omitted_ms is not None:
            cut_ms = omitted_ms if cut_ms is None else min(cut_ms, omitted_ms)
        missing = self._missing(timeline, sent_ms, begin_ms, shortened)
        return await self._found(timeline, source, record, sent_ms, cut_ms, missing)

    async def _record(self, reader: LogReader, source: Source, offset: int) -> Row | None:
        """Return the record at a place; None if there is none, or it is not a message's."""
        if not self._is_ours(source.log.topic) or not await reader.has_topic(source.topic):
            return None
        if offset not in (await reader.ranges(source.topic)).get(source, ()):
            return None
        async for fetched in reader.read({source: range(offset, offset + 1)}):
            return fetched[source][0]
        return None

    def _is_ours(self, topic: str) -> bool:
        return topic in self._topics_of_all or bool(self._definitions.queues_of_topic(topic))

    async def _read(
        self, reader: LogReader, timeline: Timeline, ranges: Mapping[Source, range], begin_ms: int | None
    ) -> int | None:
        """Read markers; return the time from which others may be unread if a limit ended the read, else None."""
        # Partitions advance independently: the time of the last record may be later than those of unread ones.
        read_ms = {source: begin_ms or 0 for source, span in ranges.items() if span}
        records, size = 0, 0
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_SECONDS):
                async for fetched in reader.read(ranges):
                    for source, row in _in_order(fetched):
                        if records >= MAX_RECORDS or size >= MAX_BYTES:
                            return _earliest(read_ms)
                        timeline.read(row, source.partition)
                        records, size, read_ms[source] = records + 1, size + len(row.value or b""), row.timestamp
                        if records % _AT_ONCE == 0:
                            # Yield to other tasks.
                            await asyncio.sleep(0)
                    for source, position in (await reader.positions()).items():
                        if position >= ranges[source].stop:
                            read_ms.pop(source, None)
                return None
        return _earliest(read_ms) if read_ms else None

    async def _ranges(self, reader: LogReader, begin_ms: int | None) -> tuple[dict[Source, range], set[Source]]:
        """Return the markers since a time, and the partitions whose retention may have removed some of them."""
        if not self._markers_partitions:
            return {}, set()
        ranges = await reader.ranges(self._client.names.markers)
        if begin_ms is None:
            return {source: span[-_LAST_RECORDS:] for source, span in ranges.items()}, set()
        starts = await reader.offsets_at(ranges, max(0, begin_ms))
        # If an earlier marker is left, all later ones are.
        shortened = {
            source for source, span in ranges.items() if span.start and (not span or starts.get(source) == span.start)
        }
        return {
            source: range(start, ranges[source].stop) for source, start in starts.items() if start is not None
        }, shortened

    def _missing(
        self, timeline: Timeline, sent_ms: int | None, begin_ms: int | None, shortened: Collection[Source]
    ) -> str:
        if not self._markers_partitions:
            return "the markers could not be read"
        if sent_ms is None or begin_ms is None:
            return "its send time is not known"
        if begin_ms > sent_ms - _MARGIN_MS:
            return "this page starts after it was sent"
        own = {markers_partition(*source, self._markers_partitions) for source, _ in timeline.places}
        if any(source.partition in own for source in shortened):
            return "retention has removed markers"
        return ""

    async def _found(
        self,
        timeline: Timeline,
        place: Source,
        record: Row | None,
        sent_ms: int | None,
        cut_ms: int | None,
        missing: str,
    ) -> dict[str, Any]:
        topic, readers = Receipt.of(timeline.id).topic, self._readers(timeline.id, place.log, record)
        queues = sorted(timeline.queues | readers)
        queue = timeline.queue or (queues[0] if len(queues) == 1 else "")
        events: list[dict[str, Any]] = []
        if queue or not queues:
            events = timeline.told(await self._consumers(queue) if queue and timeline.events else {}, sent_ms)
            for event in events:
                event["traceback"] = self._redaction.traceback(event["traceback"])
        # Only markers show to which queue a message was redriven.
        may_be_in_queue = not timeline.queue or timeline.queue in readers or cut_ms is not None
        message = timeline.payload or record
        key, value, headers = (None, None, ()) if message is None else (message.key, message.value, message.headers)
        settings = self._definitions.settings(queue)
        if not (settings.by_key and settings.topic == topic):
            key = ordering_key(headers)
        return {
            "id": timeline.id,
            "queue": queue,
            "queues": queues,
            "sent": None if sent_ms is None else moment(sent_ms),
            "sent_ms": sent_ms,
            "places": sorted(record_id(*place) for place in timeline.places),
            "events": events,
            "cut": None if cut_ms is None else moment(cut_ms),
            "cut_ms": cut_ms,
            "missing": missing,
            "known": bool(timeline.events) or (record is not None and may_be_in_queue),
            "bytes": len(value or b""),
            "forms": [form._asdict() for form in self._redaction.forms(value)],
            "invalid_deliver_at": has_invalid_deliver_at(headers),
            "ordering_key": self._redaction.ordering_key(key),
            "headers": self._redaction.headers(headers, SHOWN_BYTES),
        }

    def _readers(self, message_id: str, place: Source, record: Row | None) -> set[str]:
        """Return the queues that receive a message by the topic of its first record, or by the key of this record."""
        queues = set(self._definitions.queues_of_topic(Receipt.of(message_id).topic))
        if record is not None and record.key and place.topic in self._topics_of_all:
            queues.add(record.key.decode("utf-8", "replace"))
        return queues


def _earliest(read_ms: Mapping[Source, int]) -> int:
    """Return the earliest time up to which a partition was read; 0 stands for a partition without a known time."""
    return min(filter(None, read_ms.values()), default=0)


def _in_order(fetched: Mapping[Source, Records]) -> Iterator[tuple[Source, Row]]:
    for source, records in fetched.items():
        for row in records:
            yield source, row
