"""Writes the markers of a consumer, without one: what a tracker then has to fold is all there before it begins."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

from aiokafka import AIOKafkaProducer

from bench.clients.talk import say
from bench.leases import BATCH, HOLDER, LONG_MS
from bench.load import QUEUE, values
from marq.connection import stop_producer
from marq.core.marker_codec import encode
from marq.core.markers import Ack, Acquire, Columns, Source
from marq.core.names import Names, markers_partition

STOP_SECONDS = 5.0


def markers(names: Names, partition: int, count: int, size: int, kinds: str) -> Iterator[bytes]:
    """ACQUIREs of the messages of one partition, their ACKs, or both: each ACK after its ACQUIRE."""
    source, now_ms = Source(names.messages, partition), int(time.time() * 1000)
    for start in range(0, count, BATCH):
        stop = min(start + BATCH, count)
        if "acquire" in kinds:
            columns = Columns(QUEUE.encode(), [now_ms] * (stop - start), values(start, stop, size))
            yield encode(Acquire(QUEUE, HOLDER, source, range(start, stop), LONG_MS, start, columns))
        if "ack" in kinds:
            yield encode(Ack(QUEUE, HOLDER, source, range(start, stop)))


async def write(servers: str, names: Names, partitions: int, count: int, size: int, kinds: str) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=servers, enable_idempotence=True, max_batch_size=1 << 20, max_request_size=4 << 20
    )
    await producer.start()

    async def one(partition: int, share: int) -> None:
        where = markers_partition(names.messages, partition, partitions)
        for record in markers(names, partition, share, size, kinds):
            sent = await producer.send(names.markers, record, partition=where)
        await sent

    try:
        shares = [len(range(partition, count, partitions)) for partition in range(partitions)]
        await asyncio.gather(*(one(partition, share) for partition, share in enumerate(shares)))
    finally:
        await stop_producer(producer, STOP_SECONDS)


async def main(servers: str, prefix: str, partitions: int, count: int, size: int, kinds: str) -> None:
    await write(servers, Names(prefix), partitions, count, size, kinds)
    say(messages=count)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]))  # type: ignore[call-arg]
