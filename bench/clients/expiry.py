"""A consumer takes all messages and leaves without a word on them; another one gets them back when their leases end."""

from __future__ import annotations

import asyncio
import sys
import time

import marq
from bench.clients.talk import say
from bench.load import QUEUE, check

#: While messages are taken they renew themselves; then all are renewed once more at the same time, and none again.
TAKING_S, LEASE_S = 8.0, 8.0
CHUNK = 20_000


async def take(servers: str, prefix: str, count: int) -> tuple[float, float]:
    """Return when the first lease ends, and when the last."""
    messages: list[marq.Message] = []
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=TAKING_S, max_in_flight=2 * count) as consumer:
        while len(messages) < count:
            messages += await consumer.receive(max_messages=CHUNK)
        first_s = time.monotonic() + LEASE_S
        for message in messages:
            await message.renew(LEASE_S, wait=False)
        await consumer.flush()
        return first_s, time.monotonic() + LEASE_S


async def take_back(servers: str, prefix: str, count: int) -> tuple[float, float]:
    """Return when the first message was in hand again, and when the last was acked."""
    seen: list[bytes] = []
    attempts: set[int] = set()
    begun_s = 0.0
    done = asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal begun_s
        begun_s = begun_s or time.monotonic()
        attempts.add(message.attempt)
        seen.append(message.value)
        if len(seen) == count:
            done.set()

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler))
        await done.wait()
        await consumer.flush()
        ended_s = time.monotonic()
        running.cancel()
        await asyncio.wait([running])
    check(seen, count)
    if attempts != {2}:
        raise SystemExit(f"bench: attempts {attempts}, and not only the second")
    return begun_s, ended_s


async def main(servers: str, prefix: str, count: int) -> None:
    first_s, last_s = await take(servers, prefix, count)
    if time.monotonic() > first_s:
        raise SystemExit("bench: the first lease had ended before all were written")
    begun_s, ended_s = await take_back(servers, prefix, count)
    say(
        redelivered_per_second=count / (ended_s - first_s),
        first_after_seconds=begun_s - first_s,
        leases_ended_within_seconds=last_s - first_s,
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
