"""One process with many consumers, each of a queue of its own: how many bytes they receive for the messages they get.

Counted is all that the process receives from the broker from when all have joined until the last message is acked.
"""

from __future__ import annotations

import asyncio
import sys

import marq
from bench.clients.talk import say, told
from bench.rows.readers import queue_name

#: Consumers that start at a time.
STARTING = 10


def count_received() -> list[int]:
    """Count the bytes that come in from now on; the count is the list's only item."""
    received = [0]
    feed = asyncio.StreamReader.feed_data

    def feed_data(self: asyncio.StreamReader, data: bytes) -> None:
        received[0] += len(data)
        feed(self, data)

    asyncio.StreamReader.feed_data = feed_data  # type: ignore[method-assign]
    return received


async def main(servers: str, prefix: str, first: int, consumers: int, messages: int) -> None:
    received = count_received()
    left = consumers * messages
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    own = [marq.Consumer(queue_name(first + number), servers, prefix=prefix) for number in range(consumers)]
    for start in range(0, consumers, STARTING):
        await asyncio.gather(*(consumer.start() for consumer in own[start : start + STARTING]))
    before = received[0]
    say(joined=True)
    await told()
    running = [asyncio.create_task(consumer.run(handler)) for consumer in own]
    await done.wait()
    await asyncio.gather(*(consumer.flush() for consumer in own))
    say(bytes_received=received[0] - before, left=left)
    await told()
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await asyncio.gather(*(consumer.stop() for consumer in own))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])))  # type: ignore[call-arg]
