"""What happens to consumers: they die at each point of the five steps, stand still, and come back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from faults.consumer import Point
from faults.scenario import Scenario
from faults.stage import LEASE_SECONDS, SESSION_SECONDS, Stage
from marq.starts import MARKED, TRANSACTIONAL

#: Messages before, between and after faults.
SOME = 300
#: Of all queues; nothing is spent where messages are delivered again.
POINTS = [point for point in Point if point not in (Point.BEFORE_SPEND, Point.AFTER_SPEND)]


def killed_at_each_point(start: str) -> Callable[[Stage, Any], Awaitable[None]]:
    async def play(stage: Stage, _: Any) -> None:
        await stage.worker()
        stage.load()
        await stage.consumer(f"--start={start}")
        for point in POINTS:
            victim = await stage.consumer(f"--start={start}", f"--die-at={point}", "--die-after=3")
            await stage.dead(victim)
            await stage.delivered_more(SOME)

    return play


async def killed_with_all_others(stage: Stage, _: Any) -> None:
    """Nobody is left to take over, until somebody comes."""
    await stage.worker()
    stage.load()
    for _ in range(3):
        both = [await stage.consumer(), await stage.consumer()]
        await stage.delivered_more(SOME)
        for consumer in both:
            await stage.kill(consumer)
    await stage.consumer()
    await stage.delivered_more(SOME)


async def paused_past_the_lease(stage: Stage, _: Any) -> None:
    await stage.worker()
    stage.load()
    await stage.consumer()
    paused = await stage.consumer()
    await stage.delivered_more(SOME)
    await stage.pause(paused, LEASE_SECONDS + 1)
    await stage.delivered_more(SOME)


async def paused_past_the_session(stage: Stage, _: Any) -> None:
    await stage.worker()
    stage.load()
    await stage.consumer()
    paused = await stage.consumer()
    await stage.delivered_more(SOME)
    await stage.pause(paused, SESSION_SECONDS + 2 * LEASE_SECONDS)
    await stage.delivered_more(SOME)


SCENARIOS = [
    Scenario(
        "consumer-killed-at-each-point",
        "kill -9 of a consumer before ACQUIRE, between ACQUIRE and commit, after the commit, in a handler, before ACK",
        "what it held comes back when its lease ends",
        killed_at_each_point(MARKED),
        quick=True,
    ),
    Scenario(
        "transactional-consumer-killed",
        'the same with `start="transactional"`: within the transaction of ACQUIRE and commit, and around it',
        "the same; an open transaction holds up redelivery in its markers partitions until the broker aborts it",
        killed_at_each_point(TRANSACTIONAL),
    ),
    Scenario(
        "all-consumers-killed",
        "kill -9 of all consumers at once, three times",
        "nothing is received until another one comes; what they held comes back",
        killed_with_all_others,
    ),
    Scenario(
        "consumer-paused-past-the-lease",
        "SIGSTOP of a consumer for longer than its lease, then SIGCONT",
        "what it held is delivered to others; its own acks are late",
        paused_past_the_lease,
        quick=True,
    ),
    Scenario(
        "consumer-paused-past-the-session",
        "SIGSTOP of a consumer for longer than its membership, then SIGCONT",
        "its partitions go to others meanwhile; what it held is delivered to them",
        paused_past_the_session,
    ),
]
