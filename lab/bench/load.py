"""Fills queues with numbered messages, as fast as the client can, and checks that all arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

import marq
from marq.settings.definitions import layer_key, placement_key
from marq.settings.placements import Placement, subset
from marq.wire.names import Names

QUEUE = "bench"
CHUNK = 20_000
#: Messages per batch of a plain producer.
BATCH = 2_000


def queue_name(number: int) -> str:
    return f"queue-{number}"


def values(start: int, end: int, size: int) -> list[bytes]:
    """Return messages whose first 8 bytes are their number."""
    padding = b"x" * (size - 8)
    return [number.to_bytes(8, "big") + padding for number in range(start, end)]


def check(values: list[bytes], count: int) -> None:
    """Check by number that each message arrived; raise like :func:`check_numbers`."""
    check_numbers([int.from_bytes(value[:8], "big") for value in values], count)


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Check that each message arrived.

    Raise SystemExit if one is missing, or one arrived twice, which nothing in a benchmark explains.
    """
    different = set(numbers)
    if different != set(range(count)) or len(numbers) != count:
        raise SystemExit(f"bench: {count} sent, {len(numbers)} received, {len(different)} different: not a valid run")


async def fill(servers: str, prefix: str, count: int, size: int) -> None:
    """Send numbered messages to QUEUE."""
    async with marq.Producer(servers, prefix=prefix) as producer:
        for start in range(0, count, CHUNK):
            await producer.send_many(QUEUE, values(start, min(start + CHUNK, count), size))


async def fill_keys(
    servers: str, prefix: str, count: int, size: int, keys: int, settings: Mapping[str, Any] | None = None
) -> None:
    """Make QUEUE a queue with ordering, or other settings, and send it messages of several ordering keys in turn."""
    async with marq.Queues(servers, prefix=prefix) as queues, marq.Producer(servers, prefix=prefix) as producer:
        await queues.change(QUEUE, **(settings or {"ordering": "key"}))
        for start in range(0, count, CHUNK):
            messages = values(start, min(start + CHUNK, count), size)
            await asyncio.gather(
                *[producer.send(QUEUE, value, ordering_key=str(n % keys)) for n, value in enumerate(messages, start)]
            )


async def fill_queues(
    servers: str, names: Names, queues: Sequence[str], count: int, size: int, partitions: int
) -> None:
    """Write numbered messages to several queues in turn, as a plain Kafka producer does."""
    keys = [queue.encode() for queue in queues]
    async with AIOKafkaProducer(bootstrap_servers=servers, enable_idempotence=True, max_batch_size=1 << 20) as producer:
        for turn, start in enumerate(range(0, count, BATCH)):
            batch = producer.create_batch()
            for number, value in enumerate(values(start, min(start + BATCH, count), size), start):
                assert batch.append(key=keys[number % len(keys)], value=value, timestamp=None) is not None
            await producer.send_batch(batch, names.messages, partition=turn % partitions)
        await producer.flush()


async def place(servers: str, prefix: str, queues: Iterable[str], count: int, partitions: int) -> None:
    """Place queues on few partitions, as after a completed change of ``partitions``."""
    documents: dict[bytes, Mapping[str, Any] | None] = {}
    for queue in queues:
        own = subset(queue, partitions, count)
        documents[layer_key("change", queue)] = {"partitions": count}
        documents[placement_key(queue)] = Placement(own, own).document()
    async with marq.Queues(servers, prefix=prefix) as definitions:
        await definitions.publish(documents)
