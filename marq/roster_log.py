"""The rosters topic: rosters are written before a commit names them, read where one is named, and taken away later.

A record's key is ``ID TOPIC/PARTITION GROUP``, its value a roster (:mod:`marq.rosters`), or nothing: taken away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError

from marq.connection import abandon_producer, client_options, started, stop_consumer, stop_producer
from marq.core.markers import Source
from marq.core.topic_rules import ROSTER_LIMIT_BYTES
from marq.rights import missing_right
from marq.rosters import Roster, roster_named
from marq.settings import ClientSettings
from marq.topics import roster_topic

log = logging.getLogger("marq")

#: A roster that its partition's commit does not name is taken away when it is so much older than the newest one. It is
#: named within seconds of its writing or not at all: who wrote it must have been thrown out of the group by then.
UNNAMED_MS = 3_600_000
_READ_WAIT_MS = 1_000
_STOP_S = 2.0


class RosterKey(NamedTuple):
    """What a record of the topic is about."""

    id: str
    source: Source
    group: str

    def encode(self) -> bytes:
        return f"{self.id} {self.source.topic}/{self.source.partition} {self.group}".encode()

    @classmethod
    def decode(cls, key: bytes | None) -> RosterKey | None:
        """Return the key, None for a record of somebody else."""
        parts = (key or b"").decode(errors="replace").split(" ", 2)
        topic, slash, partition = parts[1].rpartition("/") if len(parts) == 3 else ("", "", "")
        return cls(parts[0], Source(topic, int(partition)), parts[2]) if slash and partition.isdecimal() else None


def left_over(written: Mapping[RosterKey, int], group: str, committed: Mapping[Source, str | None]) -> list[RosterKey]:
    """Return which rosters of a group nobody names any more; ``written``: when, by the broker, in ms.

    ``committed`` has the roster that the group's commit names, for partitions that are ours in the group now.
    """
    now_ms = max(written.values(), default=0)
    return [
        key
        for key, written_ms in written.items()
        if key.group == group
        and key.source in committed
        and committed[key.source] != key.id
        and written_ms < now_ms - UNNAMED_MS
    ]


class RosterLog:
    """Reads the topic from its start to its end where a roster is wanted, and keeps no connection."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._partition = TopicPartition(settings.names.rosters, 0)

    async def read(
        self, wanted: Iterable[str], group: str = "", committed: Mapping[Source, Any] | None = None
    ) -> dict[str, Roster]:
        """Return rosters by their ids; one that is not there is left out.

        With ``committed``, the commits of a group in partitions that are ours, what is left over of them is taken away.

        Raises:
            KafkaError: the broker did not answer, or refused.
            UnknownPositions: a roster can't be read.
            Forbidden: the right to read is missing.
        """
        ids = set(wanted)
        if not ids or not await roster_topic(self._settings, make=False):
            return {}
        values, written = await self._read(ids)
        named = {source: roster_named(each.metadata) for source, each in (committed or {}).items()}
        if gone := left_over(written, group, named):
            await self._write({key.encode(): None for key in gone})
        return {each: Roster.decode(each, value) for each, value in values.items()}

    async def write(self, group: str, rosters: Mapping[Source, Roster]) -> None:
        """Write rosters of a group's partitions; they are durable on return.

        Raises:
            KafkaError: that is not known.
            ConfigError: the right to write is missing, or to make the topic.
        """
        if rosters:
            await roster_topic(self._settings, make=True)
            await self._write(
                {RosterKey(each.id, source, group).encode(): each.encode() for source, each in rosters.items()}
            )

    async def _read(self, ids: set[str]) -> tuple[dict[str, bytes], dict[RosterKey, int]]:
        """Return the values of some, and the times of all."""
        values: dict[str, bytes] = {}
        written: dict[RosterKey, int] = {}
        consumer = await started(self._reader, self._settings, lambda each: stop_consumer(each, 0))
        try:
            consumer.assign([self._partition])
            end = (await consumer.end_offsets([self._partition]))[self._partition]
            while await consumer.position(self._partition) < end:
                for record in (await consumer.getmany(timeout_ms=_READ_WAIT_MS)).get(self._partition, ()):
                    key = RosterKey.decode(record.key)
                    if key is None:
                        log.warning("%s/0/%s is no roster and is passed over", self._partition.topic, record.offset)
                    elif record.value is None:
                        written.pop(key, None)
                        values.pop(key.id, None)
                    else:
                        written[key] = record.timestamp
                        if key.id in ids:
                            values[key.id] = record.value
        except TopicAuthorizationFailedError as error:
            raise missing_right(self._settings, "Read", self._partition.topic) from error
        finally:
            await stop_consumer(consumer, _STOP_S)
        return values, written

    async def _write(self, records: Mapping[bytes, bytes | None]) -> None:
        topic = self._partition.topic
        producer = await started(self._writer, self._settings, abandon_producer, writes=topic)
        try:
            async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                sent = [await producer.send(topic, value, key, 0) for key, value in records.items()]
                await asyncio.gather(*sent)
        except TopicAuthorizationFailedError as error:
            raise missing_right(self._settings, "Write", topic) from error
        finally:
            await stop_producer(producer, _STOP_S)

    def _reader(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **client_options(self._settings),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_uncommitted",
            max_partition_fetch_bytes=ROSTER_LIMIT_BYTES,
        )

    def _writer(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            **client_options(self._settings),
            enable_idempotence=True,
            linger_ms=0,
            # Names are alike, and Python has it built in.
            compression_type="gzip",
            max_request_size=ROSTER_LIMIT_BYTES,
        )
