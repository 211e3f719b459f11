"""Reads markers as they come, without a consumer group: for somebody who waits for what a tracker says."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from marq.connection import client_options, started, stop_consumer
from marq.core.errors import BrokerUnavailable
from marq.rights import refused
from marq.settings import ClientSettings

#: How long a read waits; it ends at the first record.
READ_WAIT_MS = 1_000


class MarkersReader(Protocol):
    """Some markers partitions, from when it was made on."""

    async def read(self) -> Sequence[bytes | None]:
        """Return the next markers, after a while without any nothing.

        Raises:
            BrokerUnavailable: reading failed.
            Forbidden: the right to read is missing.
        """

    async def stop(self, limit_s: float) -> None: ...


class KafkaMarkersReader:
    """Reads what trackers have committed, from the end of the partitions on."""

    def __init__(self, settings: ClientSettings, partitions: Collection[int]) -> None:
        self._settings = settings
        self._partitions = [TopicPartition(settings.names.markers, each) for each in partitions]
        self._consumer: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        """Go to the ends.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
            Forbidden: the right to read is missing.
        """

        async def close(consumer: AIOKafkaConsumer) -> None:
            await stop_consumer(consumer, 0)

        self._consumer = consumer = await started(self._make, self._settings, close)
        consumer.assign(self._partitions)
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                await consumer.seek_to_end(*self._partitions)
                for partition in self._partitions:
                    await consumer.position(partition)
        except (KafkaError, TimeoutError) as error:
            await self.stop(0)
            raise self._failed(error) from error

    async def stop(self, limit_s: float) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, limit_s)

    async def read(self) -> Sequence[bytes | None]:
        assert self._consumer is not None
        try:
            fetched = await self._consumer.getmany(timeout_ms=READ_WAIT_MS)
        except KafkaError as error:
            raise self._failed(error) from error
        return [record.value for records in fetched.values() for record in records]

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._settings),
            isolation_level="read_committed",
            auto_offset_reset="latest",
            enable_auto_commit=False,
        )

    def _failed(self, error: BaseException) -> Exception:
        topic = self._settings.names.markers
        return refused(self._settings, error, "Read", topic) or BrokerUnavailable(
            f"topic {topic} at {self._settings.bootstrap_servers}: it could not be read"
            f" ({str(error) or type(error).__name__})"
        )
