"""One consumer process that forgets each tenth message, and looks when it comes back."""

from __future__ import annotations

import asyncio
import sys
import time

import marq
from bench.clients.stamps import percentiles
from bench.clients.talk import say
from bench.load import QUEUE

FORGOTTEN = 10


async def main(servers: str, prefix: str, count: int, lease_s: float) -> None:
    dropped: dict[int, float] = {}
    late: list[float] = []
    done: set[int] = set()
    duplicates, first_s = 0, 0.0
    # A lease that may not be renewed runs out by itself.
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=lease_s, max_lease=lease_s) as consumer:
        say(ready=True)
        while len(done) < count:
            for message in await consumer.receive(max_messages=500, wait=20):
                number = int.from_bytes(message.value[:8], "big")
                first_s = first_s or time.monotonic()
                if message.attempt == 1 and number % FORGOTTEN == 0 and number not in dropped:
                    dropped[number] = message.lease_expires_at.timestamp()
                    continue
                if number in done or (message.attempt > 1) != (number in dropped):
                    duplicates += 1
                elif number in dropped:
                    late.append((time.time() - dropped[number]) * 1000)
                done.add(number)
                await message.ack(wait=False)
        await consumer.flush()
        seconds = time.monotonic() - first_s
    found = {f"lateness_{name}": figure for name, figure in percentiles(late).items()}
    say(**found, all_acked_seconds=seconds, duplicates=duplicates)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
