"""Reads whole topics, as events of a history if needed, and deletes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, KafkaTimeoutError

from lab.program import RunError
from lab.proof import history
from lab.proof.history import Event
from lab.variants import readable
from marq.kafka.connection import admin_client, client_options, stop_consumer
from marq.settings.client import ClientSettings
from marq.wire.dead_letter_notes import is_note
from marq.wire.errors import CorruptMarker, MarqError
from marq.wire.marker_codec import decode
from marq.wire.markers import Batch, Source
from marq.wire.names import ORIGIN_HEADER

_FETCH_MS = 200
STOP_SECONDS = 1.0
DELETE_SECONDS = 30.0
#: Longest time without progress before the end of a topic. Without a broker, the client would wait forever.
STALLED_SECONDS = 120.0


class TopicScan:
    """Reads all partitions of a topic, without a group, from their begin or only what is ``new``.

    ``committed`` leaves out records of aborted transactions.
    """

    def __init__(self, settings: ClientSettings, topic: str, *, committed: bool = True, new: bool = False) -> None:
        self._topic = topic
        self._new = new
        self._consumer = AIOKafkaConsumer(
            topic,
            **client_options(settings),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed" if committed else "read_uncommitted",
            max_partition_fetch_bytes=4 << 20,
            fetch_max_wait_ms=50,
        )
        self._partitions: list[TopicPartition] = []

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        self._partitions = sorted(self._consumer.assignment())
        if not self._partitions:
            await stop_consumer(self._consumer, STOP_SECONDS)
            raise RunError(f"topic {self._topic} does not exist")
        if self._new:
            await self._consumer.seek_to_end(*self._partitions)
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_consumer(self._consumer, STOP_SECONDS)

    async def written(self) -> int:
        """Return the sum of the partitions' end offsets."""
        return sum((await self._consumer.end_offsets(self._partitions)).values())

    async def follow(self) -> AsyncIterator[Any]:
        """Iterate over all further records, and wait for more at the end."""
        while True:
            for records in (await self._consumer.getmany(timeout_ms=_FETCH_MS)).values():
                for record in records:
                    yield record

    async def to_end(self) -> AsyncIterator[Any]:
        """Iterate over the records that were not read yet, up to the current end.

        Raise KafkaTimeoutError if there is no progress for STALLED_SECONDS.
        """
        ends = await self._consumer.end_offsets(self._partitions)
        at, until_s = dict[TopicPartition, int](), 0.0
        while True:
            before, at = at, await self._positions(ends)
            if at == ends:
                return
            if at != before:
                until_s = time.monotonic() + STALLED_SECONDS
            elif time.monotonic() > until_s:
                raise self._stalled()
            for records in (await self._consumer.getmany(timeout_ms=_FETCH_MS)).values():
                for record in records:
                    yield record

    async def _positions(self, ends: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the position in each partition, up to its end.

        It passes records that are not returned: control records of transactions, and aborted records.
        """
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                return {tp: min(await self._consumer.position(tp), end) for tp, end in ends.items()}
        except TimeoutError:
            raise self._stalled() from None

    def _stalled(self) -> KafkaTimeoutError:
        return KafkaTimeoutError(f"topic {self._topic}: no progress for {STALLED_SECONDS:g} s before its end")


async def read_logs(settings: ClientSettings) -> list[Event]:
    """Return the events in the topics of a namespace."""
    names = settings.names
    events: list[Event] = []
    for topic, op in ((names.messages, "record"), (names.dead_letters, "dead")):
        committed = {(record.partition, record.offset) async for record in _records(settings, topic)}
        # Consumers do not wait for transactions to end, so they may receive a copy of an aborted one.
        async for record in _records(settings, topic, committed=False):
            log, whole = _log(record), (record.partition, record.offset) in committed
            if op == "dead" and is_note(record):
                events += [history.note(log, record.value)] if whole else []
                continue
            queue = (record.key or b"").decode()
            fields = (record.offset, record.timestamp, queue, record.key, record.value, record.headers)
            events.append(history.record(log, *fields, committed=whole, op=op))
    async for record in _records(settings, names.markers):
        batch = _decoded(record.value)
        events.append(history.marker(_log(record), record.offset, record.timestamp, batch, record.value))
    async for record in _records(settings, names.quarantine):
        origin = dict(record.headers)[ORIGIN_HEADER].decode()
        kept = {"origin": origin, "content": history.digest(record.value)}
        events.append({"process": _log(record), "type": "ok", "op": "quarantine", **kept})
    return events


async def _records(settings: ClientSettings, topic: str, *, committed: bool = True) -> AsyncIterator[Any]:
    async with TopicScan(settings, topic, committed=committed) as reader:
        async for record in reader.to_end():
            yield record


def _log(record: Any) -> str:
    return history.log_name(Source(record.topic, record.partition))


def _decoded(value: bytes) -> Batch | None:
    try:
        return decode(readable(value))
    except CorruptMarker:
        return None


async def delete_topics(settings: ClientSettings) -> str | None:
    """Delete all topics of a namespace; return an error text, or None."""
    prefixes = (f"{settings.names.prefix}.", f"{settings.names.prefix}-")
    try:
        async with asyncio.timeout(DELETE_SECONDS), admin_client(settings) as admin:
            names = [name for name in await admin.list_topics() if name.startswith(prefixes)]
            if names:
                await admin.delete_topics(names)
    except (MarqError, KafkaError, OSError, TimeoutError) as error:
        return f"topics {settings.names.prefix}.* could not be deleted: {error!r}"
    return None
