"""Changes of several orders, one of which fails twice: ``python -m examples.ordered QUEUE``.

The changes to an order are handled one after the other, and a failed one keeps its place. The other orders continue.
"""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq

CHANGES = (b"created", b"paid", b"shipped")
ORDERS = ("order-1", "order-2", "order-3")


async def main(queue: str) -> None:
    async with marq.Queues() as queues:
        await queues.change(queue, ordering="key", backoff=[1])  # usually in marq.toml
    done = asyncio.Semaphore(0)

    async def apply(message: marq.Message[bytes]) -> None:
        order = (message.headers["order"] or b"").decode()
        if order == "order-1" and message.value == b"paid" and message.attempt < 3:
            print(order, "paid: failed, attempt", message.attempt)
            raise marq.Retry(delay=0.5)
        print(order, message.value.decode())
        done.release()

    async with marq.Producer() as producer:
        for change in CHANGES:
            for order in ORDERS:
                await producer.send(queue, change, ordering_key=order, headers={"order": order})
    async with marq.Consumer(queue) as consumer:
        running = asyncio.create_task(consumer.run(apply))
        for _ in range(len(CHANGES) * len(ORDERS)):
            await done.acquire()
    await running


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
