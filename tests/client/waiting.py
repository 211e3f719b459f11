"""Waits for a condition with a limit: the only place of these tests that looks again and again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from aiokafka import AIOKafkaConsumer, TopicPartition

from marq.wire.marker_codec import decode
from marq.wire.markers import Batch

LIMIT_S = 60.0


async def until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the conditions are in other processes and objects
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """The same for threads."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.01)


def in_threads(*functions: Callable[[], object]) -> None:
    """Call each function in a thread of its own; return when all have returned."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def producer_threads() -> list[str]:
    """Return the threads of synchronous producers that run."""
    return [thread.name for thread in threading.enumerate() if thread.name == "marq-producer"]


async def read_all(servers: str, topic: str) -> list[object]:
    """Return all records of a topic as they stand now."""
    # Not seek_to_beginning(): where it meets aiokafka's own reset to the end, the end may win.
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, p) for p in await consumer._client._wait_on_metadata(topic)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        found: list[object] = []
        async with asyncio.timeout(LIMIT_S):
            while any([await consumer.position(p) < ends[p] for p in partitions]):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    found += records
        return found
    finally:
        await consumer.stop()


def values(servers: str, topic: str) -> list[bytes]:
    """Return the values of all records of a topic, to code without an event loop."""
    return [record.value for record in asyncio.run(read_all(servers, topic))]  # type: ignore[attr-defined]


async def read_markers(servers: str, topic: str) -> list[Batch]:
    return [decode(record.value) for record in await read_all(servers, topic)]  # type: ignore[attr-defined]
