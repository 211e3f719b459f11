"""A user's program: it knows marq by the names of API.md alone, sends, works, is killed, and accounts for each message.

``python api_script.py FIGURES_URL DIRECTORY`` runs all of it; its last line is a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import marq

QUEUE = "jobs"
MESSAGES = 300
#: The first process gets kill -9 after so many.
KILLED_AFTER = 120
LIMIT_SECONDS = 60.0


class Odd(Exception):
    """What a message does at its first attempt."""


def work(number: int, attempt: int) -> None:
    """What the program does with a message."""
    if number % 10 == 3:
        raise marq.Reject("an odd one")
    if number % 10 == 5 and attempt == 1:
        raise marq.Retry(delay=0)
    if number % 10 == 7 and attempt == 1:
        raise Odd(f"message {number}")


def note(journal: Path, what: str, message: marq.Message) -> None:
    with journal.open("a") as file:
        print(what, int(message.value), message.attempt, message.headers["tenant"].decode(), message.id, file=file)


async def send() -> None:
    async with marq.Producer() as producer:
        values = [b"%d" % number for number in range(MESSAGES)]
        await producer.send_many(QUEUE, values[:-1], headers={"tenant": b"acme"})
        await producer.send(QUEUE, values[-1], headers={"tenant": b"acme"})


async def until_killed(journal: Path) -> None:
    """Iterate over the messages, with outcomes of all kinds, and die while some are held."""
    taken = 0
    async with marq.Consumer(QUEUE, lease=2, instance_id="worker-1") as consumer:
        async for message in consumer:
            taken += 1
            note(journal, "first", message)
            if taken == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
            number = int(message.value)
            if number % 10 == 0:
                await message.renew(5)
                await message.ack()
                await message.ack()
            elif number % 10 == 1 and message.attempt == 1:
                await message.release(0)
            elif number % 10 == 2:
                await consumer.ack(message.token)
            elif number % 10 == 3:
                await message.reject("an odd one")
            else:
                try:
                    async with message:
                        work(number, message.attempt)
                except Odd:
                    pass


async def finish(url: str, journal: Path) -> dict[str, float]:
    """Work on what is left, with a handler; return the queue's figures when nothing is open."""

    async def handle(message: marq.Message) -> None:
        note(journal, "second", message)
        work(int(message.value), message.attempt)

    async with marq.Consumer(QUEUE, lease=2, instance_id="worker-1") as consumer:
        running = asyncio.create_task(consumer.run(handle, concurrency=16))
        async with asyncio.timeout(LIMIT_SECONDS):
            while not ended(found := await asyncio.to_thread(figures, url)):  # noqa: ASYNC110 - another process knows
                await asyncio.sleep(0.05)
        await consumer.flush()
        await consumer.stop(release=True)
        await running
    return found


def figures(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: dict[str, float] = json.load(answer)["queues"][QUEUE]
    return found


def ended(found: dict[str, float]) -> bool:
    return found["in_flight"] == 0 and found["acked"] + found["dead"] >= MESSAGES


async def everything(url: str, journal: Path) -> dict[str, object]:
    await send()
    first = await asyncio.create_subprocess_exec(sys.executable, __file__, "--until-killed", str(journal))
    exit_code = await first.wait()
    found = await finish(url, journal)
    return {"killed": exit_code == -signal.SIGKILL, **account(journal, found)}


def account(journal: Path, found: dict[str, float]) -> dict[str, object]:
    """What became of the messages, by the journal of both processes and by the worker's figures."""
    lines = [line.split() for line in journal.read_text().splitlines()]
    numbers = Counter(int(number) for _, number, *_ in lines)
    ids = {(number, message_id) for _, number, _, _, message_id in lines}
    # One attempt that two processes began: the first of them had the message when it was killed.
    begun = Counter((number, attempt) for _, number, attempt, *_ in lines)
    return {
        "sent": MESSAGES,
        "handled": len(numbers),
        "lost": sorted(set(range(MESSAGES)) - set(numbers)),
        "acked": found["acked"],
        "dead": found["dead"],
        "in_flight": found["in_flight"],
        "ids_of_one_message": max(Counter(number for number, _ in ids).values()),
        "tenants": sorted({tenant for _, _, _, tenant, _ in lines}),
        "same_attempt_twice": sum(count > 1 for count in begun.values()),
    }


if __name__ == "__main__":
    if sys.argv[1] == "--until-killed":
        asyncio.run(until_killed(Path(sys.argv[2])))
    else:
        print(json.dumps(asyncio.run(everything(sys.argv[1], Path(sys.argv[2]) / "journal"))))  # noqa: T201 - the account
