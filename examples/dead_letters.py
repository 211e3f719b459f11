"""Shows the dead letters of a queue and their reasons: ``python -m examples.dead_letters QUEUE [--redrive]``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq


async def main(queue: str, *options: str) -> None:
    async with marq.DeadLetters() as letters:
        async for letter in letters.peek(queue):
            print(letter.id, letter.value, "died:", letter.reason)
            if letter.last_error:
                print("  its last error was", letter.last_error)
        if "--redrive" in options:
            result = await letters.redrive(queue, rate=100)
            print(f"{result.redriven} sent back to {queue}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
