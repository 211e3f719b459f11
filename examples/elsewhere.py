"""Receives a message, and acks it in another process by its token: ``python -m examples.elsewhere QUEUE [TOKEN]``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq


async def take(queue: str) -> None:
    async with marq.Consumer(queue, lease=300) as consumer:
        messages = await consumer.receive(max_messages=1, wait=20)
        for message in messages:
            # Any process with the token may ack the message until the lease ends.
            print(message.token)


async def finish(queue: str, token: str) -> None:
    async with marq.Consumer(queue) as consumer:
        await consumer.ack(token)
        print("acked")


if __name__ == "__main__":
    asyncio.run(finish(*sys.argv[1:]) if len(sys.argv) > 2 else take(sys.argv[1]))
