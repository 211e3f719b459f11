"""Receives messages in batches until none comes for some seconds: ``python -m examples.receive QUEUE``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import contextlib
import sys

import marq


async def main(queue: str) -> None:
    done = 0
    async with marq.Consumer(queue) as consumer:
        while messages := await consumer.receive(max_messages=100, wait=5):
            total = sum(len(message.value) for message in messages)
            print("a batch of", len(messages), "messages,", total, "bytes")
            await consumer.ack(messages)
            done += len(messages)
    print("done:", done)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
