"""Fills a queue with numbered messages, as fast as the client goes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from itertools import count as count_from

from aiokafka import AIOKafkaProducer

import marq
from marq.core.names import Names

QUEUE = "bench"
CHUNK = 20_000
#: Messages in a batch of a plain producer.
BATCH = 2_000


def values(start: int, end: int, size: int) -> list[bytes]:
    """Messages whose first 8 bytes are their number."""
    padding = b"x" * (size - 8)
    return [number.to_bytes(8, "big") + padding for number in range(start, end)]


def check(values: list[bytes], count: int) -> None:
    """Check that each message came, by its number; raises as :func:`check_numbers`."""
    check_numbers([int.from_bytes(value[:8], "big") for value in values], count)


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Check that each message came.

    Raises:
        SystemExit: one is missing; or one came twice, which no fault here explains.
    """
    found = set(numbers)
    if found != set(range(count)) or len(numbers) != count:
        raise SystemExit(f"bench: {count} sent, {len(numbers)} received, {len(found)} different: not a valid run")


async def fill(servers: str, prefix: str, count: int, size: int) -> float:
    """Send the messages; return how many per second."""
    async with marq.Producer(servers, prefix=prefix) as producer:
        prepared = [values(start, min(start + CHUNK, count), size) for start in range(0, count, CHUNK)]
        begun = time.perf_counter()
        for chunk in prepared:
            await producer.send_many(QUEUE, chunk)
        return count / (time.perf_counter() - begun)


async def fill_queues(
    servers: str, names: Names, queues: Sequence[str], count: int, size: int, partitions: int
) -> None:
    """Write numbered messages of several queues, which take turns, as a plain Kafka producer does."""
    keys = [queue.encode() for queue in queues]
    async with AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, max_batch_size=1 << 20) as producer:
        turn = count_from(0)
        number = 0
        while number < count:
            batch = producer.create_batch()
            for value in values(number, min(number + BATCH, count), size):
                assert batch.append(key=keys[number % len(keys)], value=value, timestamp=None) is not None
                number += 1
            await producer.send_batch(batch, names.messages, partition=next(turn) % partitions)
        await producer.flush()


if __name__ == "__main__":
    print(asyncio.run(fill(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
