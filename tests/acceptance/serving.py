"""A consumer process for tests: ``python -m tests.acceptance.serving QUEUE LEASE_SECONDS``.

It prints a line, ``id attempt value``, when a message has been worked on, before its ack is decided: whoever dies
between the two has done the work and is found to have done it.
"""

from __future__ import annotations

import asyncio
import sys

import marq

#: What the work on a message takes.
WORK_SECONDS = 0.01


async def handle(message: marq.Message) -> None:
    await asyncio.sleep(WORK_SECONDS)
    print(message.id, message.attempt, message.value.decode(), flush=True)  # noqa: T201 - for the test to read


async def serve(queue: str, lease: float) -> None:
    async with marq.Consumer(queue, lease=lease) as consumer:
        await consumer.run(handle, concurrency=8)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
