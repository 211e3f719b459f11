"""Batches of the copies that one transaction sends to the messages topic."""

from __future__ import annotations

from typing import Any

from aiokafka import AIOKafkaProducer

from marq.core.copies import Copy

#: What Kafka's format adds to a record, and to each of its headers, at the most.
_RECORD_BYTES, _HEADER_BYTES = 32, 10


class CopyBatches:
    """Copies by partition; no batch of several is larger than the topic's limit for a batch."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, limit_bytes: int) -> None:
        self._producer = producer
        self._topic = topic
        self._limit_bytes = limit_bytes
        self._open: dict[int, Any] = {}
        self._full: list[tuple[int, Any]] = []

    def add(self, partition: int, copy: Copy, at_ms: int) -> None:
        """Put a copy into its partition's batch; a batch without any takes a copy of any size."""
        batch = self._open.get(partition)
        if batch is not None and batch.size() + _size_bytes(copy) <= self._limit_bytes and _put(batch, copy, at_ms):
            return
        if batch is not None:
            self._full.append((partition, batch))
        self._open[partition] = batch = self._producer.create_batch()
        _put(batch, copy, at_ms)

    async def send(self) -> list[Any]:
        """Send all; return what will have the outcome of each batch."""
        batches = [*self._full, *self._open.items()]
        return [await self._producer.send_batch(batch, self._topic, partition=where) for where, batch in batches]


def _put(batch: Any, copy: Copy, at_ms: int) -> bool:
    """Return whether there was room."""
    return batch.append(timestamp=at_ms, key=copy.key, value=copy.value, headers=copy.headers) is not None


def _size_bytes(copy: Copy) -> int:
    headers = sum(len(name.encode()) + len(value or b"") + _HEADER_BYTES for name, value in copy.headers)
    return len(copy.key or b"") + len(copy.value or b"") + headers + _RECORD_BYTES
