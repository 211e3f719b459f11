"""The dead-letters topic as a log that is read from any place on, without a consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from marq.connection import client_options, started, stop_consumer
from marq.core.errors import BrokerUnavailable
from marq.core.markers import Headers
from marq.log_ranges import log_ranges
from marq.rights import refused
from marq.settings import MEMORY_SCHEME, ClientSettings

#: How long a read waits; it ends at the first record.
READ_WAIT_MS = 1_000
#: The broker answers after so long without news.
FETCH_WAIT_MS = 100
STOP_CLIENT_S = 2.0


class Stored(NamedTuple):
    """A record where it stands."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class LetterLog(Protocol):
    """One reader; what trackers have not committed is not seen. Errors of all calls: BrokerUnavailable, Forbidden."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ranges(self) -> dict[int, range]:
        """Return for each partition the offsets that are there now."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Read only these partitions from now on, from these offsets."""

    async def read(self) -> Sequence[Stored]:
        """Return the next records, after a while without any nothing."""

    async def positions(self) -> dict[int, int]:
        """Return for each partition that is read the offset to read next."""


class KafkaLetterLog:
    """Reads with a consumer of its own, which commits nothing."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._topic = settings.names.dead_letters
        self._consumer: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        async def close(consumer: AIOKafkaConsumer) -> None:
            await stop_consumer(consumer, 0)

        self._consumer = await started(self._make, self._settings, close)

    async def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, STOP_CLIENT_S)

    async def ranges(self) -> dict[int, range]:
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                return await log_ranges(self._running(), self._topic)
        except (KafkaError, TimeoutError) as error:
            raise self._failed(error) from error

    def seek(self, positions: Mapping[int, int]) -> None:
        consumer = self._running()
        consumer.assign([TopicPartition(self._topic, number) for number in positions])
        for number, offset in positions.items():
            consumer.seek(TopicPartition(self._topic, number), offset)

    async def read(self) -> Sequence[Stored]:
        try:
            fetched = await self._running().getmany(timeout_ms=READ_WAIT_MS)
        except KafkaError as error:
            raise self._failed(error) from error
        return [
            Stored(each.partition, each.offset, each.timestamp, each.key, each.value, each.headers)
            for records in fetched.values()
            for each in records
        ]

    async def positions(self) -> dict[int, int]:
        consumer = self._running()
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                return {each.partition: await consumer.position(each) for each in consumer.assignment()}
        except (KafkaError, TimeoutError) as error:
            raise self._failed(error) from error

    def _running(self) -> AIOKafkaConsumer:
        assert self._consumer is not None
        return self._consumer

    def _make(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._settings),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
        )

    def _failed(self, error: BaseException) -> Exception:
        return refused(self._settings, error, "Read", self._topic) or BrokerUnavailable(
            f"topic {self._topic} at {self._settings.bootstrap_servers}: it could not be read"
            f" ({str(error) or type(error).__name__})"
        )


def letter_log(settings: ClientSettings) -> LetterLog:
    """Return a reader of the dead letters at the settings' address."""
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        # Not at the top: a service that never tests never loads it.
        from marq.testing import memory_letter_log

        return memory_letter_log(settings)
    return KafkaLetterLog(settings)
