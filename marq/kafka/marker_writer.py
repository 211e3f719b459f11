"""Writes marker batches, and occasionally a few other records, and waits until they are durable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from marq.kafka.broker_clock import BrokerClock
from marq.kafka.connection import abandon_producer, client_options, started, stop_producer
from marq.kafka.role_permissions import refused
from marq.settings.client import ClientSettings
from marq.wire.error_texts import error_of, most_bytes
from marq.wire.errors import BrokerUnavailable, reason_of
from marq.wire.marker_codec import encode
from marq.wire.markers import (
    MAX_BATCH_MARKERS,
    Ack,
    Cancel,
    Dispatch,
    MixedAcquire,
    Reject,
    Release,
    Renew,
    Request,
    Reschedule,
    spans,
)
from marq.wire.names import FRAME_BYTES, markers_partition

#: From this number on, records of a partition are sent as a batch: a single record costs more per record, but a batch
#: waits for the records before it.
LEAST_OF_BATCH = 8
_STOP_S = 2.0
#: Bytes of a message in a RELEASE or REJECT besides its text: offset, delay and length.
_TEXT_ENTRY_BYTES = 16
#: Fields of a batch with one item for each message.
_COLUMNS = ("offsets", "delays_ms", "errors", "reasons", "times_ms")


class MarkerRecord(NamedTuple):
    """One record for the markers topic."""

    partition: int
    value: bytes

    @classmethod
    def of(cls, batch: Request | MixedAcquire, partitions: int) -> MarkerRecord:
        """Return the record of a batch; ``partitions`` is the number of partitions of the markers topic."""
        return cls(markers_partition(*batch.source, partitions), encode(batch))


def marker_records(
    batch: Ack | Cancel | Dispatch | Reject | Release | Renew | Reschedule, partitions: int, limit_bytes: int
) -> Iterator[MarkerRecord]:
    """Return the record of a batch without payloads, or several if it does not fit into one of ``limit_bytes``.

    A traceback that does not fit is left out, because a marker that the broker refuses would hold up all others.
    """
    count = len(batch.offsets)
    room_bytes = limit_bytes - FRAME_BYTES - len(batch.queue) - len(batch.source.topic)
    if isinstance(batch, Release):
        batch = replace(batch, errors=[_fitting(error, room_bytes) for error in batch.errors])
        sizes = [most_bytes(error) + _TEXT_ENTRY_BYTES for error in batch.errors]
    elif isinstance(batch, Reject):
        batch = replace(batch, reasons=[_fitting(reason, room_bytes) for reason in batch.reasons])
        sizes = [most_bytes(reason) + _TEXT_ENTRY_BYTES for reason in batch.reasons]
    else:
        sizes = [12 if isinstance(batch, Reschedule) else 4] * count
    if count <= MAX_BATCH_MARKERS and sum(sizes) <= room_bytes:
        yield MarkerRecord.of(batch, partitions)
        return
    for part in spans(sizes, room_bytes):
        columns: dict[str, Any] = {name: getattr(batch, name)[part] for name in _COLUMNS if hasattr(batch, name)}
        yield MarkerRecord.of(replace(batch, **columns), partitions)


def _fitting(text: str, room_bytes: int) -> str:
    return text if most_bytes(text) + _TEXT_ENTRY_BYTES <= room_bytes else error_of(text)


class MarkerWriter(Protocol):
    """Writes markers. A write that raises may have happened, wholly or in part."""

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> Sequence[int]:
        """Write records; return their offsets when all are durable.

        Raises BrokerUnavailable if they are not known to be durable after ``limit_s``, or were refused.
        """


class KafkaMarkerWriter:
    """Writes with an idempotent producer, and with a new one after an error that aiokafka does not recover from.

    A producer whose write timed out is replaced, too: it would retry its batch forever, and later writes would wait
    behind it. Each write sets ``clock``.
    """

    def __init__(self, settings: ClientSettings, limit_bytes: int, clock: BrokerClock) -> None:
        self._settings = settings
        self._topic = settings.names.markers
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._producer: AIOKafkaProducer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        await self._running()

    async def stop(self, limit_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_producer(producer, limit_s)

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> Sequence[int]:
        producer = None
        try:
            async with asyncio.timeout(limit_s):
                producer = await self._running()
                return await self._sent(producer, records)
        except (TimeoutError, KafkaError, AssertionError) as error:
            if producer is not None and self._producer is producer:
                self._producer = None
                await abandon_producer(producer)
            cause = refused(self._settings, error, "Write", self._topic) or reason_of(error)
            raise BrokerUnavailable(
                f"{len(records)} marker batches for {self._topic} are not known to be written at"
                f" {self._settings.bootstrap_servers} after {limit_s:g} s at most: {cause}"
            ) from error

    async def _sent(self, producer: AIOKafkaProducer, records: Sequence[MarkerRecord]) -> list[int]:
        """Send all records and return their offsets; many records of one partition share a batch and its future."""
        by_partition: dict[int, list[int]] = {}
        for index, record in enumerate(records):
            by_partition.setdefault(record.partition, []).append(index)
        few = [index for indexes in by_partition.values() if len(indexes) < LEAST_OF_BATCH for index in indexes]
        many = {where: indexes for where, indexes in by_partition.items() if len(indexes) >= LEAST_OF_BATCH}
        alone = [
            await producer.send(self._topic, records[index].value, partition=records[index].partition) for index in few
        ]
        # Concurrently: each waits for the earlier records of its partition.
        batched = [
            self._sent_as_batches(producer, partition, [records[index].value for index in indexes])
            for partition, indexes in many.items()
        ]
        sent = await asyncio.gather(*alone, *batched)
        offsets = [0] * len(records)
        for index, metadata in zip(few, sent, strict=False):
            offsets[index] = metadata.offset
            self._clock.note(metadata)
        for indexes, found in zip(many.values(), sent[len(few) :], strict=True):
            for index, offset in zip(indexes, found, strict=True):
                offsets[index] = offset
        return offsets

    async def _sent_as_batches(self, producer: AIOKafkaProducer, partition: int, values: Sequence[bytes]) -> list[int]:
        left, offsets = deque(values), list[int]()
        while left:
            batch = producer.create_batch()
            count = len(left)
            # An empty batch takes a record of any size.
            while left and batch.append(key=None, value=left[0], timestamp=None) is not None:
                left.popleft()
            metadata = await (await producer.send_batch(batch, self._topic, partition=partition))
            self._clock.note(metadata)
            offsets += range(metadata.offset, metadata.offset + count - len(left))
        return offsets

    async def _running(self) -> AIOKafkaProducer:
        if self._producer is not None:
            return self._producer
        async with self._lock:
            if self._producer is None:
                self._producer = await started(self._make, self._settings, abandon_producer, writes=self._topic)
            return self._producer

    def _make(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            **client_options(self._settings), **batch_limits(self._limit_bytes), enable_idempotence=True, linger_ms=0
        )


def batch_limits(limit_bytes: int) -> dict[str, int]:
    """Return a producer's size limits; the topic's limit applies to a whole batch, so a batch must not be larger."""
    return {"max_batch_size": limit_bytes, "max_request_size": limit_bytes + FRAME_BYTES}


async def write_once(
    settings: ClientSettings, topic: str, records: Mapping[bytes, bytes | None], **options: Any
) -> dict[bytes, int]:
    """Write to partition 0 with a short-lived producer; return the offsets by key when all records are durable.

    Raises BrokerUnavailable if they are not known to be durable in time; Forbidden if the permission is missing.
    """

    def make() -> AIOKafkaProducer:
        return AIOKafkaProducer(**client_options(settings), enable_idempotence=True, linger_ms=0, **options)

    producer = await started(make, settings, abandon_producer, writes=topic)
    try:
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            sent = [await producer.send(topic, value, key, 0) for key, value in records.items()]
            written = await asyncio.gather(*sent)
            return {key: int(record.offset) for key, record in zip(records, written, strict=True)}
    except (KafkaError, TimeoutError) as error:
        raise refused(settings, error, "Write", topic) or BrokerUnavailable(
            f"topic {topic} at {settings.bootstrap_servers}: it could not be written ({reason_of(error)})"
        ) from error
    finally:
        await stop_producer(producer, _STOP_S)
