"""Sends messages: ``python -m examples.send QUEUE COUNT``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq


async def main(queue: str, count: int) -> None:
    async with marq.Producer() as producer:
        receipt = await producer.send(queue, b"the first", headers={"to": "ann@example.org"})
        print("sent", receipt.id)
        # One call for many messages, durable when it returns.
        receipts = await producer.send_many(queue, [b"message %d" % number for number in range(1, count)])
        print("sent", len(receipts), "more")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
