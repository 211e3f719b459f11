"""Opens many leases: messages, and the ACQUIRE markers of a consumer that never acknowledges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaProducer

from lab.bench.load import QUEUE, values
from lab.program import RunError
from lab.topics import TopicScan
from marq.settings.client import ClientSettings
from marq.wire.marker_codec import encode
from marq.wire.markers import Acquire, Source
from marq.wire.names import ATTEMPT_HEADER, Names, markers_partition
from marq.wire.payload_columns import Columns

HOLDER = 0xA11CE
#: A lease that outlives the measurement.
LONG_MS = 24 * 3_600_000
#: Messages per ACQUIRE, as in a consumer's fetch.
BATCH = 500
#: Time limit of a request, for busy machines.
REQUEST_TIMEOUT_MS = 300_000
#: Batches in flight at a time.
WINDOW = 16


class Opener:
    """Writes messages to the topics of a namespace and acquires each; both topics have equally many partitions."""

    def __init__(self, producer: AIOKafkaProducer, names: Names, partitions: int, value_bytes: int) -> None:
        self._producer = producer
        self._names = names
        self._partitions = partitions
        self._value_bytes = value_bytes

    async def open(self, start: int, count: int, lease_ms: int = LONG_MS, batch: int = BATCH) -> None:
        """Send the messages with these numbers to the partitions in turn, and write their leases."""
        window = asyncio.Semaphore(WINDOW)

        async def one(partition: int, numbers: Sequence[bytes]) -> None:
            async with window:
                await self._open(partition, numbers, lease_ms)

        async with asyncio.TaskGroup() as tasks:
            for turn, first in enumerate(range(start, start + count, batch)):
                numbers = values(first, min(first + batch, start + count), self._value_bytes)
                tasks.create_task(one(turn % self._partitions, numbers))

    async def _open(self, partition: int, numbers: Sequence[bytes], lease_ms: int) -> None:
        names, key = self._names, QUEUE.encode()
        now_ms = int(time.time() * 1000)
        records = self._producer.create_batch()
        for value in numbers:
            assert records.append(key=key, value=value, timestamp=now_ms) is not None, "a batch is larger than a record"
        records.close()
        sent = await (await self._producer.send_batch(records, names.messages, partition=partition))
        source, offsets = Source(names.messages, partition), range(sent.offset, sent.offset + len(numbers))
        acquire = Acquire(
            QUEUE, HOLDER, source, offsets, lease_ms, sent.offset, Columns(key, [now_ms] * len(numbers), numbers)
        )
        where = markers_partition(*source, self._partitions)
        await self._producer.send_and_wait(names.markers, encode(acquire), partition=where)


def marker_producer(servers: str) -> AIOKafkaProducer:
    """Return a producer for large batches."""
    sizes = {"max_batch_size": 1 << 20, "max_request_size": 4 << 20}
    return AIOKafkaProducer(
        bootstrap_servers=servers, enable_idempotence=True, request_timeout_ms=REQUEST_TIMEOUT_MS, **sizes
    )


class Copies:
    """Redeliveries and delayed messages: the time of the first copy of each message, by its number."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    async def read(self, reader: TopicScan) -> None:
        async for record in reader.follow():
            if any(name == ATTEMPT_HEADER for name, _ in record.headers):
                self.seen.setdefault(int.from_bytes(record.value[:8], "big"), time.monotonic())

    async def all_of(self, numbers: range, limit: float) -> tuple[float, float]:
        """Wait for copies of all these messages; return the times at which the first and the last arrived.

        Raise RunError if they did not arrive within the limit, in seconds.
        """
        until = time.monotonic() + limit
        while not all(number in self.seen for number in numbers):
            if time.monotonic() > until:
                arrived = sum(number in self.seen for number in numbers)
                raise RunError(f"{arrived} of {len(numbers)} messages arrived within {limit} s")
            await asyncio.sleep(0.01)
        times = [self.seen[number] for number in numbers]
        return min(times), max(times)


@asynccontextmanager
async def copies(client: ClientSettings) -> AsyncIterator[Copies]:
    """Read the messages topic from now on."""
    async with TopicScan(client, client.names.messages, new=True) as reader:
        seen = Copies()
        reading = asyncio.create_task(seen.read(reader))
        try:
            yield seen
        finally:
            reading.cancel()
            await asyncio.wait([reading])
