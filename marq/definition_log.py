"""The queues topic as a log that is read from its start to its end, followed, and now and then written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    KafkaTimeoutError,
    TopicAuthorizationFailedError,
)

from marq.connection import abandon_producer, client_options, started, stop_consumer, stop_producer
from marq.core.errors import BrokerUnavailable
from marq.rights import missing_right
from marq.settings import MEMORY_SCHEME, ClientSettings
from marq.topics import ensure_topics

#: The broker answers after so long without news: an idle client costs about one request a second.
FETCH_WAIT_MS = 1_000
#: How long a read waits; it ends at the first record.
READ_WAIT_MS = 5_000
STOP_CLIENT_S = 2.0
_PAUSE_S = 0.1


class Entry(NamedTuple):
    """One record of the topic."""

    offset: int
    key: bytes | None
    value: bytes | None


class DefinitionLog(Protocol):
    """Where definitions are written, and read by everybody in the same order."""

    async def make(self) -> None:
        """Make the topics that are missing; raises as :func:`marq.topics.ensure_topics`."""

    async def start(self) -> int:
        """Begin at the start of the log and return where it ends now.

        Raises:
            BrokerUnavailable: no broker answered in time, or it refused.
            ConfigError: the right to read is missing.
        """

    async def stop(self) -> None: ...

    async def read(self) -> tuple[Sequence[Entry], int]:
        """Return the next records, after a while without any nothing, and the offset to read next.

        The offset moves on past records that compaction took away, so that it, and no count, says where the end is.

        Raises:
            BrokerUnavailable: reading failed; it may be tried again.
            ConfigError: the right to read is missing.
        """

    async def end(self) -> int:
        """Return where the log ends now; raises as :meth:`read`, and may take as long as a broker is away."""

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        """Write and return, when all are durable, their offsets by key.

        Raises:
            BrokerUnavailable: not known to be durable in time, or refused.
            ConfigError: the right to write is missing.
        """


class KafkaDefinitionLog:
    """Reads without a consumer group, so that no right on a group is needed and nothing is committed."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._partition = TopicPartition(settings.names.queues, 0)
        self._consumer: AIOKafkaConsumer | None = None

    async def make(self) -> None:
        await ensure_topics(self._settings)

    async def start(self) -> int:
        async def close(consumer: AIOKafkaConsumer) -> None:
            await stop_consumer(consumer, 0)

        self._consumer = consumer = await started(self._reader, self._settings, close)
        consumer.assign([self._partition])
        return await self.end()

    async def stop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer, STOP_CLIENT_S)

    async def read(self) -> tuple[Sequence[Entry], int]:
        assert self._consumer is not None
        try:
            fetched = await self._consumer.getmany(self._partition, timeout_ms=READ_WAIT_MS)
            position = int(await self._consumer.position(self._partition))
        except KafkaError as error:
            raise self._failed("Read", error) from error
        records = fetched.get(self._partition, ())
        return [Entry(record.offset, record.key, record.value) for record in records], position

    async def end(self) -> int:
        assert self._consumer is not None
        while True:
            try:
                return int((await self._consumer.end_offsets([self._partition]))[self._partition])
            except KafkaError as error:
                # A topic that was just made has no leader for a moment; whoever waits for us has a limit.
                if not (error.retriable or isinstance(error, KafkaTimeoutError)):
                    raise self._failed("Read", error) from error
            await asyncio.sleep(_PAUSE_S)

    async def write(self, records: Mapping[bytes, bytes | None]) -> dict[bytes, int]:
        limit_s = self._settings.request_timeout_ms / 1000
        # For a change now and then no connection is kept.
        producer = await started(self._writer, self._settings, abandon_producer, writes=self._partition.topic)
        try:
            async with asyncio.timeout(limit_s):
                sent = [await producer.send(*self._partition[:1], value, key, 0) for key, value in records.items()]
                written = await asyncio.gather(*sent)
                return {key: int(record.offset) for key, record in zip(records, written, strict=True)}
        except (KafkaError, TimeoutError) as error:
            raise self._failed("Write", error) from error
        finally:
            await stop_producer(producer, STOP_CLIENT_S)

    def _reader(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._settings),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            # Nobody writes transactions here; an open one of somebody else's must not hold everybody up.
            isolation_level="read_uncommitted",
        )

    def _writer(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(**client_options(self._settings), enable_idempotence=True, linger_ms=0)

    def _failed(self, operation: str, error: BaseException) -> Exception:
        topic = self._partition.topic
        if isinstance(error, TopicAuthorizationFailedError | ClusterAuthorizationFailedError):
            return missing_right(self._settings, operation, topic)
        return BrokerUnavailable(
            f"topic {topic} at {self._settings.bootstrap_servers}: it could not be"
            f" {'read' if operation == 'Read' else 'written'} ({str(error) or type(error).__name__})"
        )


def definition_log(settings: ClientSettings) -> DefinitionLog:
    """Return the log at the settings' address."""
    if settings.bootstrap_servers.startswith(MEMORY_SCHEME):
        # Not at the top: a service that never tests never loads it.
        from marq.testing import memory_definition_log

        return memory_definition_log(settings)
    return KafkaDefinitionLog(settings)
