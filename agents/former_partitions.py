"""Whether a queue has read what it has in partitions to which its messages are not sent any more."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from marq.connection import client_options, close_admin, stop_consumer
from marq.core.definitions import Definitions
from marq.core.errors import MarqError
from marq.core.markers import Source
from marq.offsets import positions_of
from marq.positions import Positions
from marq.reconnects import paced
from marq.settings import ClientSettings

log = logging.getLogger("marq.worker")

#: So many records before an end are read to see whether some are the queue's; more are left to its consumers.
MAX_GAP = 10_000
STOP_SECONDS = 1.0
_POLL_MS = 100

#: Of each queue: offsets by partition.
Ends = Mapping[str, Mapping[int, int]]


class FormerPartitions:
    """Partitions of the messages topic, looked at with connections of its own; made by :func:`former_partitions`."""

    def __init__(
        self,
        client: ClientSettings,
        consumer: AIOKafkaConsumer,
        admin: AIOKafkaAdminClient,
        owed: dict[tuple[str, int], int],
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._admin = admin
        #: From where a queue was found to have something to read in a partition: that need not be read again.
        self._owed = owed

    async def ends(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return where partitions end now."""
        ends = await self._consumer.end_offsets([self._partition(each) for each in sorted(partitions)])
        return {partition.partition: int(end) for partition, end in ends.items()}

    async def drained(self, definitions: Definitions, ends: Ends) -> list[str]:
        """Return the queues that have had everything up to these offsets."""
        names = self._client.names
        groups: dict[str, list[str]] = {}
        for queue in ends:
            named = definitions.group(queue)
            groups.setdefault(names.group(queue) if named is None else names.named_group(named), []).append(queue)
        spans: dict[tuple[str, int], tuple[int, int]] = {}
        for group, queues in groups.items():
            spans |= await self._unread(group, {queue: ends[queue] for queue in queues})
        owing = {queue for queue, _ in await self._owing(spans)}
        return [queue for queue in ends if queue not in owing]

    def _partition(self, number: int) -> TopicPartition:
        return TopicPartition(self._client.names.messages, number)

    async def _unread(self, group: str, ends: Ends) -> dict[tuple[str, int], tuple[int, int]]:
        """Return from where to where queues of a group have not read, by queue and partition."""
        topic = self._client.names.messages
        sources = {partition: Source(topic, partition) for each in ends.values() for partition in each}
        try:
            positions = await positions_of(self._client, self._admin, group, sources.values())
        except (KafkaError, MarqError) as error:
            # A group that nobody has joined so far has no coordinator at first; and other queues can go on.
            log.info("how far group %s has read is not known: %r", group, error)
            positions = {source: Positions() for source in sources.values()}
        return {
            (queue, partition): (start, end)
            for queue, each in ends.items()
            for partition, end in each.items()
            if (start := positions[sources[partition]].start([queue], 0)) < end
        }

    async def _owing(self, spans: Mapping[tuple[str, int], tuple[int, int]]) -> set[tuple[str, int]]:
        """Return those among spans of partitions that have a record of their queue, or are too long to look at.

        What stands before an end is often Kafka's own, the ends of transactions, which no consumer commits.
        """
        if not spans:
            return set()
        begins = await self._consumer.beginning_offsets([self._partition(each) for each in {p for _, p in spans}])
        left = {
            (queue, number): (max(start, begins[self._partition(number)]), end)
            for (queue, number), (start, end) in spans.items()
        }
        owing = {
            place for place, (start, end) in left.items() if end - start > MAX_GAP or self._owed.get(place) == start
        }
        sought = {(queue.encode(), p): span for (queue, p), span in left.items() if (queue, p) not in owing}
        async for key, partition, offset in self._records(_by_partition(sought)):
            start, end = sought.get((key, partition), (0, 0))
            if start <= offset < end:
                owing.add((key.decode(), partition))
                self._owed[key.decode(), partition] = start
        return owing

    async def _records(self, spans: Mapping[int, tuple[int, int]]) -> AsyncIterator[tuple[bytes, int, int]]:
        """Read spans of partitions: key, partition and offset of each record that has a key, and some after it."""
        consumer = self._consumer
        lasts = {self._partition(number): end for number, (_, end) in spans.items()}
        consumer.assign(list(lasts))
        for number, (start, _) in spans.items():
            consumer.seek(self._partition(number), start)
        while lasts:
            for found in (await consumer.getmany(*lasts, timeout_ms=_POLL_MS)).values():
                for record in found:
                    if record.key is not None:
                        yield record.key, record.partition, record.offset
            lasts = {each: end for each, end in lasts.items() if await consumer.position(each) < end}


def _by_partition(spans: Mapping[tuple[bytes, int], tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Return one span for each partition, from the first start to the last end."""
    found: dict[int, tuple[int, int]] = {}
    for (_, partition), (start, end) in spans.items():
        first, last = found.get(partition, (start, end))
        found[partition] = (min(first, start), max(last, end))
    return found


@asynccontextmanager
async def former_partitions(
    client: ClientSettings, owed: dict[tuple[str, int], int]
) -> AsyncIterator[FormerPartitions]:
    """Look at partitions; ``owed`` is kept from one look to the next.

    Raises:
        KafkaError: the broker does not answer, or refuses.
    """
    consumer = paced(
        AIOKafkaConsumer(
            enable_auto_commit=False, auto_offset_reset="earliest", fetch_max_wait_ms=_POLL_MS, **client_options(client)
        )
    )
    admin = paced(AIOKafkaAdminClient(**client_options(client)))
    try:
        await consumer.start()
        await admin.start()
        yield FormerPartitions(client, consumer, admin, owed)
    finally:
        await stop_consumer(consumer, STOP_SECONDS)
        await close_admin(admin)
