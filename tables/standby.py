"""Local copies of the partitions that other workers own, so that taking one over does not begin with its changelog.

A takeover reads the changelog from where the local files end. A worker without any would read all of it, for seconds
with a million open messages. So each worker follows the changelogs of the partitions that it does not own.

Nothing is decided by a copy: the owner that it becomes one day fences the former one first and then reads on to the
changelog's end (:meth:`tables.leases.LeaseTable.recover`), whatever the copy had got to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from marq.connection import stop_consumer
from tables.leases import RECORDS_AT_ONCE, STOP_CONSUMER_SECONDS, LeaseTable, changelog_reader

log = logging.getLogger("marq.tracker")

#: Between two attempts to follow.
RETRY_SECONDS = 5.0


class Standby:
    """Follows changelogs from one rebalance to the next; ``client`` are the arguments of every Kafka client."""

    def __init__(self, table: LeaseTable, client: Mapping[str, Any], partitions: int) -> None:
        self._table = table
        self._client = client
        self._all = range(partitions)
        self._task: asyncio.Task[None] | None = None

    def follow_all_but(self, owned: Collection[int]) -> None:
        """Begin to follow all partitions but those that this worker owns."""
        followed = [partition for partition in self._all if partition not in owned]
        if followed:
            self._task = asyncio.create_task(self._live(followed), name="standby")

    async def stop(self) -> None:
        """Return when nothing is written any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _live(self, partitions: list[int]) -> None:
        while True:
            try:
                await self._follow(partitions)
            except (KafkaError, OSError) as error:
                # Only a takeover gets slower by it.
                log.warning("local copies of markers partitions %s are not kept up to date: %r", partitions, error)
            except Exception:
                log.exception("local copies of markers partitions %s are not kept up to date", partitions)
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
        behind = set(positions)
        while True:
            found = await consumer.getmany(timeout_ms=1000, max_records=RECORDS_AT_ONCE)
            for source, records in found.items():
                if records[0].offset < positions[source]:
                    # The consumer began anew, since its position was not there: these belong to another changelog.
                    log.warning("%s was made anew: its local copy begins anew", source)
                    return
                self._table.write_records(source.partition, records)
                positions[source] = records[-1].offset + 1
            if behind:
                ends = await consumer.end_offsets(list(behind))
                behind = {source for source in behind if await consumer.position(source) < ends[source]}
                if not behind:
                    partitions = sorted(source.partition for source in positions)
                    log.info("local copies of markers partitions %s: up to date", partitions)
