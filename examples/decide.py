"""Settles messages one by one: ``python -m examples.decide QUEUE``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq


async def decide(message: marq.Message) -> str:
    """Settle the message as its value says; each call is durable when it returns."""
    if message.value == b"later":
        await message.release(delay=60)
        return "released for a minute"
    if message.value == b"never":
        await message.reject("not wanted")
        return "rejected"
    if message.value == b"long":
        # The consumer renews leases up to max_lease; this message needs a longer one.
        await message.renew(600)
    await message.ack()
    return "acked"


async def main(queue: str) -> None:
    async with marq.Consumer(queue, lease=30, max_lease=3600) as consumer:
        while messages := await consumer.receive(wait=5):
            for message in messages:
                try:
                    print(message.value, await decide(message))
                except marq.LeaseLost as error:
                    # Another consumer may have the message by now. The ack was written anyway.
                    print("too late:", error)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
