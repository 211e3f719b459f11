"""One producer process that sends at a steady rate, however long each message takes (an open loop).

What is due at a turn of the loop is sent in one call, and never waited for: a message that is sent late, because the
process had something else to do, still says when it was to be sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any

import marq
from bench.clients.stamps import stamped
from bench.clients.talk import say, told

#: From when it is told to begin until the first message is due.
AHEAD_S = 0.1


async def send(producer: marq.Producer, queue: str, rate: float, count: int, size: int, burst: int) -> None:
    """Send messages, ``burst`` at a time."""
    start_s, sent = time.monotonic() + AHEAD_S, 0
    async with asyncio.TaskGroup() as calls:
        while sent < count:
            now_s = time.monotonic()
            due = min(count, burst * (int((now_s - start_s) * rate / burst) + 1)) if now_s >= start_s else sent
            if due > sent:
                first_s = [start_s + number // burst * burst / rate for number in range(sent, due)]
                calls.create_task(
                    _call(
                        producer, queue, [stamped(n, at, size) for n, at in zip(range(sent, due), first_s, strict=True)]
                    )
                )
                sent = due
            await asyncio.sleep(max(0.0, start_s + sent / rate - time.monotonic()))


def _call(producer: marq.Producer, queue: str, messages: list[bytes]) -> Coroutine[Any, Any, Any]:
    return producer.send(queue, messages[0]) if len(messages) == 1 else producer.send_many(queue, messages)


async def main(servers: str, prefix: str, queue: str, rate: float, count: int, size: int, burst: int) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        await producer.send("another", b"")
        say(ready=True)
        await told()
        await send(producer, queue, rate, count, size, burst)
    say(sent=count)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], float(sys.argv[4]), *map(int, sys.argv[5:8])))  # type: ignore[call-arg]
