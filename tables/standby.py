"""Local copies of partitions that other workers own, so that a takeover does not read the whole changelog.

A takeover reads the changelog from where the local files end. Without local files that takes seconds for a million open
messages, so each worker follows the changelogs of the partitions that it does not own.

Copies decide nothing: a new owner fences the former one and then reads on to the end of the changelog
(:meth:`tables.leases.LeaseTable.recover`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from mode import Service

from marq.kafka.connection import stop_consumer
from marq.owner.engine import PositionLost
from marq_worker.tables.leases import RECORDS_AT_ONCE, STOP_CONSUMER_SECONDS, LeaseTable, changelog_reader

log = logging.getLogger("marq.tracker")

RETRY_SECONDS = 5.0
#: How often to check whether quiet copies are complete: far below marq_worker.tables.leases.MAX_LOCAL_AGE_SECONDS.
CHECK_SECONDS = 600.0


class Standby(Service):
    """Follows changelogs from one rebalance to the next; ``client``: arguments of every Kafka client."""

    def __init__(self, table: LeaseTable, client: Mapping[str, Any], partitions: int) -> None:
        super().__init__()
        self._table = table
        self._client = client
        self._all = range(partitions)
        self._following: asyncio.Task[None] | None = None

    def follow_all_but(self, owned: Collection[int]) -> None:
        """Start to follow all partitions but those that this worker owns."""
        followed = [partition for partition in self._all if partition not in owned]
        if followed:
            self._following = asyncio.create_task(self._keep_up(followed), name="standby")

    async def pause(self) -> None:
        """Stop following until :meth:`follow_all_but`; return when all writes have ended."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])

    async def on_stop(self) -> None:
        await self.pause()

    async def _keep_up(self, partitions: list[int]) -> None:
        while True:
            try:
                await self._follow(partitions)
            except (KafkaError, OSError, PositionLost) as error:
                # This only slows down a takeover.
                log.warning("local copies of markers partitions %s are not up to date: %r", partitions, error)
            except Exception:
                log.exception("local copies of markers partitions %s are not up to date", partitions)
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, partitions: list[int]) -> None:
        consumer = changelog_reader(self._client)
        await consumer.start()
        try:
            sources = [TopicPartition(self._table.changelog_topic_name, partition) for partition in partitions]
            positions = {source: await self._table.start_copying(consumer, source) for source in sources}
            consumer.assign(sources)
            for source, position in positions.items():
                consumer.seek(source, position)
            await self._copy(consumer, positions)
        finally:
            await stop_consumer(consumer, STOP_CONSUMER_SECONDS)

    async def _copy(self, consumer: AIOKafkaConsumer, positions: dict[TopicPartition, int]) -> None:
        behind, check_s = set(positions), 0.0
        while True:
            batches = await consumer.getmany(timeout_ms=1000, max_records=RECORDS_AT_ONCE)
            for source, records in batches.items():
                if records[0].offset < positions[source]:
                    # The consumer started again, because its position was missing: these are from a new changelog.
                    log.warning("%s was recreated: rebuilding its local copy", source)
                    return
                self._table.write_records(source.partition, records)
                positions[source] = records[-1].offset + 1
            if behind:
                ends = await consumer.end_offsets(list(behind))
                behind = {source for source in behind if await consumer.position(source) < ends[source]}
                if not behind:
                    partitions = sorted(source.partition for source in positions)
                    log.info("local copies of markers partitions %s: up to date", partitions)
            if time.monotonic() >= check_s:
                check_s = time.monotonic() + CHECK_SECONDS
                await self._note_current(consumer, positions)

    async def _note_current(self, consumer: AIOKafkaConsumer, sources: Collection[TopicPartition]) -> None:
        """Note which copies are complete. Otherwise, a copy without new records would seem to be cut off for days.

        Only the broker knows the ends: those that the consumer knows may be from before it was cut off.
        """
        # Before the request, because the answer may be late.
        asked_s = time.time()
        try:
            ends = await consumer.end_offsets(list(sources))
        except KafkaError as error:
            log.debug("local copies: the ends of their changelogs are unknown: %r", error)
            return
        for source in sources:
            if await consumer.position(source) == ends[source]:
                self._table.is_current(source.partition, asked_s)
