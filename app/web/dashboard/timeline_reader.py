"""Reads a message and its markers for the dashboard.

A read starts when the message was sent, and reports if it reached its limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from marq.client.receipt import Receipt
from marq.kafka.log_reader import LogReader
from marq.kafka.records import Records, Row
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.markers import Source
from marq.wire.record_headers import has_invalid_deliver_at, ordering_key, origin, record_id
from marq_worker.agents.message_listing import SHOWN_BYTES, moment
from marq_worker.agents.redaction import Redaction
from marq_worker.app.web.dashboard.timeline import Timeline

#: Limits of a read: marker records, their bytes, seconds, and events of the message.
MAX_RECORDS, MAX_BYTES, MAX_SECONDS, MAX_EVENTS = 100_000, 64 << 20, 4.0, 200
#: Margin before the send time, because the sender's clock may be ahead of the brokers'.
_MARGIN_MS = 60_000
#: Records at the end of each partition to read if the send time is not known.
_LAST_RECORDS = 20_000
_AT_ONCE = 500


class Reading:
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
        else None.
        """
        receipt = Receipt.of(message_id)
        source = Source(receipt.topic, receipt.partition)
        async with LogReader(self._client, committed=True, max_partition_fetch_bytes=4 << 20) as reader:
            record, past = await self._record(reader, source, receipt.offset), None
            if record is not None:
                past = origin(source, receipt.offset, record.timestamp, record.headers)
            timeline = Timeline(message_id if past is None else past.id, queue)
            timeline.places.add((source, receipt.offset))
            begin_ms = since_ms if since_ms is not None else None if past is None else past.first_sent_ms - _MARGIN_MS
            cut_ms = await self._read(reader, timeline, begin_ms)
        return await self._found(timeline, source, record, None if past is None else past.first_sent_ms, cut_ms)

    async def _record(self, reader: LogReader, source: Source, offset: int) -> Row | None:
        """Return the record at a place; None if there is none, or it is not a message's."""
        if not self._is_ours(source.topic) or not await reader.has_topic(source.topic):
            return None
        if offset not in (await reader.ranges(source.topic)).get(source, ()):
            return None
        async for fetched in reader.read({source: range(offset, offset + 1)}):
            return fetched[source][0]
        return None

    def _is_ours(self, topic: str) -> bool:
        return topic in self._topics_of_all or bool(self._definitions.queues_of_topic(topic))

    async def _read(self, reader: LogReader, timeline: Timeline, begin_ms: int | None) -> int | None:
        """Read the markers since a time; return the time at which a limit ended the read, else None."""
        ranges = await self._ranges(reader, begin_ms)
        records, size, last_ms = 0, 0, begin_ms or 0
        try:
            async with asyncio.timeout(MAX_SECONDS):
                async for fetched in reader.read(ranges):
                    for source, row in _in_order(fetched):
                        if records >= MAX_RECORDS or size >= MAX_BYTES or len(timeline.events) >= MAX_EVENTS:
                            return last_ms
                        timeline.read(row, source.partition)
                        records, size, last_ms = records + 1, size + len(row.value or b""), row.timestamp
                        if records % _AT_ONCE == 0:
                            # Yield to other tasks.
                            await asyncio.sleep(0)
        except TimeoutError:
            return last_ms
        return None

    async def _ranges(self, reader: LogReader, begin_ms: int | None) -> dict[Source, range]:
        if not self._markers_partitions:
            return {}
        ranges = await reader.ranges(self._client.names.markers)
        if begin_ms is None:
            return {source: span[-_LAST_RECORDS:] for source, span in ranges.items()}
        starts = await reader.offsets_at(ranges, max(0, begin_ms))
        return {source: range(start, ranges[source].stop) for source, start in starts.items() if start is not None}

    async def _found(
        self, timeline: Timeline, place: Source, record: Row | None, sent_ms: int | None, cut_ms: int | None
    ) -> dict[str, Any]:
        topic, readers = Receipt.of(timeline.id).topic, self._readers(timeline.id, place, record)
        queues = sorted(timeline.queues | readers)
        queue = timeline.queue or (queues[0] if len(queues) == 1 else "")
        events: list[dict[str, Any]] = []
        if queue or not queues:
            events = timeline.told(await self._consumers(queue) if queue and timeline.events else {}, sent_ms)
        # Only markers show to which queue a message was redriven.
        may_be_in_queue = not timeline.queue or timeline.queue in readers or cut_ms is not None
        payload = timeline.payload
        value = payload.value if payload is not None else record.value if record is not None else None
        headers = payload.headers if payload is not None else record.headers if record is not None else ()
        key = payload.key if payload is not None else record.key if record is not None else None
        settings = self._definitions.settings(queue)
        if not (settings.ordered and settings.topic == topic):
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


def _in_order(fetched: Mapping[Source, Records]) -> Iterator[tuple[Source, Row]]:
    for source, records in fetched.items():
        for row in records:
            yield source, row
