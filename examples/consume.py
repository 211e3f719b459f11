"""Takes messages one by one: ``python -m examples.consume QUEUE [COUNT]``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import contextlib
import sys

import marq


async def main(queue: str, count: int | None = None) -> None:
    async with marq.Consumer(queue, lease=30) as consumer:
        async for message in consumer:
            # A clean exit acks. An exception releases the message, which is redelivered after the queue's backoff.
            async with message:
                print(message.id, "attempt", message.attempt, message.value, message.headers)
            if count is not None:
                count -= 1
                if not count:
                    break
    # The stopped consumer has written all acks and released its prefetched messages.


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
