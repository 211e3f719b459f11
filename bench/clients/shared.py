"""One of several consumer processes of a queue: joins, waits for the others, and handles what it gets until told."""

from __future__ import annotations

import asyncio
import sys
from array import array
from pathlib import Path

import marq
from bench.clients.talk import say, told
from bench.load import QUEUE


async def main(servers: str, prefix: str, path: str) -> None:
    """Write the numbers of the messages that it handled to a file, 8 bytes each."""
    numbers = array("Q")

    async def handler(message: marq.Message) -> None:
        numbers.append(int.from_bytes(message.value[:8], "big"))

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        say(joined=True)
        await told()
        running = asyncio.create_task(consumer.run(handler))
        await told()
        running.cancel()
        await asyncio.wait([running])
    await asyncio.to_thread(Path(path).write_bytes, numbers.tobytes())
    say(messages=len(numbers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3]))
