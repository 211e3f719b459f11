"""What happens when all of Marq is killed at once, while many messages fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from faults.scenario import Scenario
from faults.stage import QUEUE, FaultError, Stage
from marq.dead_letters import DeadLetters
from marq.starts import MARKED, TRANSACTIONAL

#: Messages after the last kill.
SOME = 300
KILLS = 4
MAX_ATTEMPTS = 3
#: The firing in whose transaction a worker dies, after its redeliveries were written.
FIRING = 20


def everything_killed(start: str) -> Callable[[Stage, Any], Awaitable[None]]:
    async def play(stage: Stage, _: Any) -> None:
        """Kill a worker in a transaction, and all other processes right after that."""
        stage.define(max_attempts=MAX_ATTEMPTS)
        consumer = ("--manner=hopeless", f"--start={start}")
        data = [stage.folder / "data-1", stage.folder / "data-2"]
        await stage.worker(data=data[1])
        stage.load()
        for _ in range(KILLS):
            victim = await stage.worker(f"--die-in-transaction={FIRING}", data=data[0], ready=False)
            await asyncio.gather(*[stage.consumer(*consumer) for _ in range(2)])
            await stage.dead(victim)
            await asyncio.gather(*[stage.kill(each) for each in stage.everybody if each.running])
            await stage.worker(data=data[1], ready=False)
        await stage.worker(data=data[0])
        await stage.consumer(*consumer)
        await stage.delivered_more(SOME)
        await stage.stop_load()
        await stage.drain()
        if start == TRANSACTIONAL:
            await no_message_is_dead_twice(stage)

    return play


async def no_message_is_dead_twice(stage: Stage) -> None:
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        ids = Counter([letter.id async for letter in letters.peek(QUEUE)])
    if twice := [id_ for id_, count in ids.items() if count > 1]:
        raise FaultError(f"{len(twice)} of {len(ids)} messages have two dead letters: {', '.join(twice[:5])}")


_FAULT = (
    f"kill -9 of both workers and both consumers at once, one worker in the middle of a transaction, {KILLS} times,"
    " while many messages fail"
)

SCENARIOS = [
    Scenario(
        "everything-killed",
        _FAULT,
        "nothing is processed until new processes start; redeliveries of the aborted transactions are delivered too,"
        " and some messages have two dead letters",
        everything_killed(MARKED),
    ),
    Scenario(
        "transactional-everything-killed",
        'the same with `start="transactional"`',
        "no consumer receives redeliveries of aborted transactions, and no message has two dead letters",
        everything_killed(TRANSACTIONAL),
    ),
]
