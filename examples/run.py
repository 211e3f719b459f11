"""Runs a handler until Ctrl-C or SIGTERM: ``python -m examples.run QUEUE``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import contextlib
import signal
import sys

import marq


async def handle(message: marq.Message) -> None:
    """Return to ack; raise Reject to dead-letter, Retry or any other exception to redeliver later."""
    if message.value == b"bad":
        raise marq.Reject("this can't be handled")
    print("handled", message.value, "attempt", message.attempt, flush=True)


async def main(queue: str) -> None:
    async with marq.Consumer(queue) as consumer:
        stopping: set[asyncio.Task[None]] = set()

        def stop() -> None:
            # Running handlers may end, and prefetched messages are released. Then run() returns.
            stopping.add(asyncio.create_task(consumer.stop()))

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        print("running", flush=True)
        await consumer.run(handle, concurrency=64)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
