"""Reads a message and its markers for the dashboard.

A read starts when the message was sent, and reports if it reached its limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from marq.client.receipt import Receipt
from marq.kafka.connection import client_options, started, stop_consumer
from marq.kafka.role_permissions import refused
from marq.settings.client import ClientSettings
from marq.settings.definitions import Definitions
from marq.wire.errors import BrokerUnavailable
from marq.wire.markers import Source
from marq.wire.record_headers import has_invalid_deliver_at, ordering_key, origin, record_id
from marq_worker.agents.message_listing import SHOWN_BYTES, moment
from marq_worker.agents.redaction import Redaction
from marq_worker.app.web.dashboard.groups import partitions_of
from marq_worker.app.web.dashboard.timeline import Timeline

#: Limits of a read: marker records, their bytes, seconds, and events of the message.
MAX_RECORDS, MAX_BYTES, MAX_SECONDS, MAX_EVENTS = 100_000, 64 << 20, 4.0, 200
#: Margin before the send time, because the sender's clock may be ahead of the brokers'.
_MARGIN_MS = 60_000
#: Records at the end of each partition to read if the send time is not known.
_LAST_RECORDS = 20_000
_READ_MS = 500
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
        self._partitions = [TopicPartition(client.names.markers, number) for number in range(markers_partitions)]
        self._redaction = redaction
        self._consumers = consumers
        self._until_s = 0.0

    async def message(self, message_id: str, queue: str, since_ms: int | None = None) -> dict[str, Any]:
        """Return a message by its id, or by the place of any of its records: ``events``, payload, and limits.

        ``queue``: the queue of the message, or "" for the only one of ``queues``. If that has several, the result has
        an empty ``queue`` and no events.

        ``since_ms``: where to start, by the log's clock, instead of its send time; ``cut``: where a limited read ended,
        else None.
        """
        receipt = Receipt.of(message_id)

        async def close(consumer: AIOKafkaConsumer) -> None:
            await stop_consumer(consumer, 0)

        consumer = await started(self._make, self._client, close)
        self._until_s = time.monotonic() + MAX_SECONDS
        try:
            record = await self._record(consumer, receipt)
            past = None
            if record is not None:
                source = Source(receipt.topic, receipt.partition)
                past = origin(source, receipt.offset, record.timestamp, record.headers)
            timeline = Timeline(message_id if past is None else past.id, queue)
            timeline.places.add((Source(receipt.topic, receipt.partition), receipt.offset))
            begin_ms = since_ms if since_ms is not None else None if past is None else past.first_sent_ms - _MARGIN_MS
            cut_ms = await self._read(consumer, timeline, begin_ms)
        except (KafkaError, TimeoutError) as error:
            topic = self._client.names.markers
            raise refused(self._client, error, "Read", topic) or BrokerUnavailable(
                f"topic {topic} at {self._client.bootstrap_servers}: message {message_id} could not be looked up"
                f" ({str(error) or type(error).__name__}); try again"
            ) from error
        finally:
            await stop_consumer(consumer, 0.5)
        return await self._found(timeline, record, None if past is None else past.first_sent_ms, cut_ms)

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._client),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=100,
            max_partition_fetch_bytes=4 << 20,
        )

    async def _record(self, consumer: AIOKafkaConsumer, receipt: Receipt) -> Any:
        """Return the record at a place; None if there is none, or it is not a message's."""
        tp = TopicPartition(receipt.topic, receipt.partition)
        if not self._is_ours(receipt.topic) or receipt.partition not in await partitions_of(consumer, receipt.topic):
            return None
        firsts, ends = await consumer.beginning_offsets([tp]), await consumer.end_offsets([tp])
        if not firsts[tp] <= receipt.offset < ends[tp]:
            return None
        consumer.assign([tp])
        consumer.seek(tp, receipt.offset)
        fetched = await consumer.getmany(timeout_ms=2 * _READ_MS, max_records=1)
        for record in fetched.get(tp, ()):
            return record if record.offset == receipt.offset else None
        return None

    def _is_ours(self, topic: str) -> bool:
        return topic in self._topics_of_all or bool(self._definitions.queues_of_topic(topic))

    async def _read(self, consumer: AIOKafkaConsumer, timeline: Timeline, begin_ms: int | None) -> int | None:
        ends = await consumer.end_offsets(self._partitions)
        starts = await self._starts(consumer, begin_ms, ends)
        left = {tp: end for tp, end in ends.items() if starts[tp] < end}
        if not left:
            return None
        consumer.assign(list(left))
        for tp in left:
            consumer.seek(tp, starts[tp])
        records, size, last_ms = 0, 0, begin_ms or 0
        while left:
            if records >= MAX_RECORDS or size >= MAX_BYTES or len(timeline.events) >= MAX_EVENTS or self._late():
                return last_ms
            fetched = await consumer.getmany(timeout_ms=_READ_MS, max_records=_AT_ONCE)
            # Yield to other tasks.
            await asyncio.sleep(0)
            for tp, record in _in_order(fetched):
                timeline.read(record, tp.partition)
                records, size, last_ms = records + 1, size + len(record.value or b""), record.timestamp
            for tp in list(left):
                if await consumer.position(tp) >= left[tp]:
                    del left[tp]
                    consumer.pause(tp)
        return None

    async def _starts(
        self, consumer: AIOKafkaConsumer, begin_ms: int | None, ends: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        firsts = await consumer.beginning_offsets(self._partitions)
        if begin_ms is None:
            return {tp: max(firsts[tp], ends[tp] - _LAST_RECORDS) for tp in self._partitions}
        offsets = await consumer.offsets_for_times(dict.fromkeys(self._partitions, max(0, begin_ms)))
        return {tp: ends[tp] if offsets.get(tp) is None else offsets[tp].offset for tp in self._partitions}

    def _late(self) -> bool:
        return time.monotonic() > self._until_s

    async def _found(self, timeline: Timeline, record: Any, sent_ms: int | None, cut_ms: int | None) -> dict[str, Any]:
        topic, readers = Receipt.of(timeline.id).topic, self._readers(timeline.id, record)
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

    def _readers(self, message_id: str, record: Any) -> set[str]:
        """Return the queues that receive a message by the topic of its first record, or by the key of this record."""
        queues = set(self._definitions.queues_of_topic(Receipt.of(message_id).topic))
        if record is not None and record.key and record.topic in self._topics_of_all:
            queues.add(record.key.decode("utf-8", "replace"))
        return queues


def _in_order(fetched: dict[TopicPartition, Sequence[Any]]) -> Iterator[tuple[TopicPartition, Any]]:
    for tp, records in fetched.items():
        for record in records:
            yield tp, record
