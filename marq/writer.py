"""Writes marker batches and waits until they are durable."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from marq.connection import abandon_producer, client_options, started, stop_producer
from marq.core.errors import BrokerUnavailable
from marq.rights import refused
from marq.settings import ClientSettings

log = logging.getLogger("marq")

#: What Kafka's framing adds to a batch of one record, at the most.
FRAME_BYTES = 512
#: So many records of a partition are sent as a batch: each alone costs more, and a batch waits for what is before it.
LEAST_OF_BATCH = 8


class MarkerRecord(NamedTuple):
    """One record for the markers topic."""

    partition: int
    value: bytes


class MarkerWriter(Protocol):
    """Where markers go to. A write that raises may have happened, wholly or in part."""

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        """Write and return when all are durable.

        Raises:
            BrokerUnavailable: not known to be durable after ``limit_s``, or refused.
        """


class KafkaMarkerWriter:
    """Writes with an idempotent producer, and with a new one after an error that aiokafka does not get over itself.

    A producer whose write ran out of time is given up too: it would hold on to the batch, retry it for ever, and a
    later write would wait behind it.
    """

    def __init__(self, settings: ClientSettings, limit_bytes: int) -> None:
        self._settings = settings
        self._topic = settings.names.markers
        self._limit_bytes = limit_bytes
        self._producer: AIOKafkaProducer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        await self._running()

    async def stop(self, limit_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await stop_producer(producer, limit_s)

    async def write(self, records: Sequence[MarkerRecord], limit_s: float) -> None:
        producer = None
        try:
            async with asyncio.timeout(limit_s):
                producer = await self._running()
                await self._sent(producer, records)
        except (TimeoutError, KafkaError, AssertionError) as error:
            if producer is not None:
                await self._give_up(producer)
            cause = refused(self._settings, error, "Write", self._topic) or str(error) or type(error).__name__
            raise BrokerUnavailable(
                f"{len(records)} marker batches for {self._topic} are not known to be written at"
                f" {self._settings.bootstrap_servers} after {limit_s:g} s at most: {cause}"
            ) from error

    async def _sent(self, producer: AIOKafkaProducer, records: Sequence[MarkerRecord]) -> None:
        """Send all and wait for all; many for one partition as batches, each with one future for all of them."""
        values: dict[int, list[bytes]] = {}
        for partition, value in records:
            values.setdefault(partition, []).append(value)
        alone = [
            await producer.send(self._topic, value, partition=partition)
            for partition, few in values.items()
            if len(few) < LEAST_OF_BATCH
            for value in few
        ]
        # At the same time: each waits until what its partition has to send before is on its way.
        batched = [
            self._sent_as_batches(producer, partition, many)
            for partition, many in values.items()
            if len(many) >= LEAST_OF_BATCH
        ]
        await asyncio.gather(*alone, *batched)

    async def _sent_as_batches(self, producer: AIOKafkaProducer, partition: int, values: Sequence[bytes]) -> None:
        left = deque(values)
        while left:
            batch = producer.create_batch()
            while left and batch.append(key=None, value=left[0], timestamp=None) is not None:
                left.popleft()
            if not batch.record_count():
                # Larger than a batch may be: the producer says so.
                await producer.send_and_wait(self._topic, left.popleft(), partition=partition)
            else:
                await (await producer.send_batch(batch, self._topic, partition=partition))

    async def _running(self) -> AIOKafkaProducer:
        if self._producer is not None:
            return self._producer
        async with self._lock:
            if self._producer is None:
                self._producer = await started(
                    self._make, self._settings, abandon_producer, writes=self._settings.names.markers
                )
            return self._producer

    def _make(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            **client_options(self._settings),
            enable_idempotence=True,
            linger_ms=0,
            # The topic's limit holds for a whole batch of records, so a batch must never be larger.
            max_batch_size=self._limit_bytes,
            max_request_size=self._limit_bytes + FRAME_BYTES,
        )

    async def _give_up(self, producer: AIOKafkaProducer) -> None:
        if self._producer is producer:
            self._producer = None
            await abandon_producer(producer)
