"""Fills a queue with numbered messages, as fast as the client goes."""

from __future__ import annotations

import asyncio
import sys
import time

import marq

QUEUE = "bench"
CHUNK = 20_000


def values(start: int, end: int, size: int) -> list[bytes]:
    """Messages whose first 8 bytes are their number."""
    padding = b"x" * (size - 8)
    return [number.to_bytes(8, "big") + padding for number in range(start, end)]


def check(numbers: list[bytes], count: int) -> None:
    """Check that each message came, by its number.

    Raises:
        SystemExit: one is missing; or one came twice, which no fault here explains.
    """
    found = {int.from_bytes(value[:8], "big") for value in numbers}
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


if __name__ == "__main__":
    print(asyncio.run(fill(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
