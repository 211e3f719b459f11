"""Sends numbered messages with pauses: ``python -m examples.standalone.sender [COUNT]``."""
# ruff: noqa: T201 - printing is what an example is for

import asyncio
import sys

import marq


async def main(count: int = 50) -> None:
    async with marq.Producer() as producer:
        for number in range(1, count + 1):
            await producer.send("standalone", b"%d" % number)
            print("sent", number, flush=True)
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
