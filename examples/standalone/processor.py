"""Processes numbers and drops some, until none comes for 20 s: ``python -m examples.standalone.processor``.

Kill it (``kill -9``) and start it again: the messages it held are redelivered, too.
"""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import contextlib
import random

import marq


async def main() -> None:
    # Leases are renewed until max_lease, so a dropped message is redelivered after 5 s.
    async with marq.Consumer("standalone", lease=5, max_lease=5) as consumer:
        while messages := await consumer.receive(max_messages=10, wait=20):
            for message in messages:
                number = message.value.decode()
                if message.attempt < 3 and random.random() < 0.3:
                    # Neither acked nor released, as if the process had died.
                    print("dropped", number, flush=True)
                    continue
                await asyncio.sleep(0.02)  # the work
                await message.ack(wait=False)
                again = f"redelivered, attempt {message.attempt}" if message.attempt > 1 else ""
                print("processed", number, again, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
