"""Faults of consumers and group members: killed at each step, paused, replaced, without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import marq
from lab.consumer import Point
from lab.faults.scenario import Play, own_broker, scenario
from lab.proof.causes import EVERYBODY
from lab.stage import LEASE_SECONDS, SESSION_SECONDS, Stage
from marq.kafka.acquire_strategies import MARKED, TRANSACTIONAL
from marq_worker.broker import EmbeddedBroker

#: The points of all queues.
POINTS = [Point.BEFORE_ACQUIRE, Point.AFTER_ACQUIRE, Point.AFTER_COMMIT, Point.IN_HANDLER, Point.BEFORE_ACK]
#: Further points of queues with ordering: while a source is resumed, and after that.
RESUMING = [Point.BEFORE_RESUME, Point.AFTER_RESUME, Point.BEFORE_VERIFY, Point.AFTER_VERIFY]
IN_ORDER = [
    Point.BEFORE_ACQUIRE_IN_ORDER,
    Point.AFTER_ACQUIRE_IN_ORDER,
    Point.BEFORE_ACQUIRE_AGAIN,
    Point.AFTER_ACQUIRE_AGAIN,
    Point.BEFORE_LAST_RELEASE,
    Point.AFTER_LAST_RELEASE,
]
#: Attempts before a message of the queue with ordering is released for the last time.
FEW_ATTEMPTS = 3
#: How long consumers join and leave, and how often.
CHURN_SECONDS, CHURN_EVERY_SECONDS = 60.0, 4.0
HANDLED = "handled"
#: Time from the start of a handler process until its broker is killed: at about that time it joins its group.
START_SECONDS = 0.3
AWAY_SECONDS = 5.0
#: Time limit until messages are handled; a group that assigned nothing would try again only after five minutes.
HANDLED_SECONDS = 30.0
INSTANCE = "one"
#: The watchdog is shorter than the session, so it ends a worker that waits for the session to end.
STATIC = {"MARQ_INSTANCE_ID": INSTANCE, "MARQ_SESSION_TIMEOUT": "30", "MARQ_WATCHDOG": "20"}
#: Shorter than that session timeout.
RESTART_SECONDS = 20.0
FENCED_SECONDS = 30.0


def killed_at_each_point(start: str, points: Sequence[Point] = POINTS, after: int = 3, manner: str = "mixed") -> Play:
    async def play(stage: Stage, _: Any) -> None:
        if manner == "unlucky":
            stage.define(max_attempts=FEW_ATTEMPTS)
        options = (f"--start={start}", f"--manner={manner}")
        await stage.worker()
        stage.load()
        await stage.consumer(*options)
        for point in points:
            victim = await stage.consumer(*options, f"--die-at={point}", f"--die-after={after}")
            await stage.dead(victim)
            await stage.delivered_more()

    return play


scenario(
    "consumer-killed-at-each-point",
    "kill -9 of a consumer: before ACQUIRE, between ACQUIRE and commit, after the commit, in a handler, before ACK",
    "messages in flight are redelivered when their leases expire",
    quick=True,
)(killed_at_each_point(MARKED))

scenario(
    "transactional-consumer-killed",
    "the same with `transactional=True`: inside the transaction, and before and after it",
    "the same; redelivery in its markers partitions waits until the broker aborts the open transaction",
)(killed_at_each_point(TRANSACTIONAL))


scenario(
    "ordered-consumer-killed-while-resuming",
    "kill -9 of a consumer of a queue with `ordering`: before and after RESUME, and before and after the commit that"
    " verifies its partition",
    "the next consumer sends RESUME again",
)(killed_at_each_point(MARKED, RESUMING, after=1))

scenario(
    "ordered-consumer-killed-at-each-point",
    "kill -9 of a consumer of such a queue: before and after ACQUIRE, the ACQUIRE of a redelivery, and the last"
    " RELEASE",
    "when their leases expire, messages in flight are redelivered before later messages with the same keys",
)(killed_at_each_point(MARKED, IN_ORDER, manner="unlucky"))

scenario(
    "ordered-transactional-consumer-killed",
    "the kills from the two rows above, with `transactional=True`",
    "the same; redelivery and answers to RESUME wait until the broker aborts the open transaction",
)(killed_at_each_point(TRANSACTIONAL, [*RESUMING, *IN_ORDER], after=1, manner="unlucky"))


@scenario(
    "consumers-join-and-leave",
    f"a consumer joins and leaves every few seconds for {CHURN_SECONDS:.0f} s, every other time by kill -9, while slow"
    " handlers are running",
    "messages in flight are redelivered: at once, or after a kill when their leases expire",
)
async def join_and_leave(stage: Stage, _: Any) -> None:
    await stage.worker()
    stage.load()
    await stage.consumer("--manner=slow")
    await stage.churn(partial(stage.consumer, "--manner=slow"), CHURN_SECONDS, CHURN_EVERY_SECONDS)
    await stage.delivered_more()


@scenario(
    "all-consumers-killed",
    "kill -9 of all consumers at once, three times",
    "nothing is received until a consumer starts; messages in flight are redelivered",
)
async def killed_with_all_others(stage: Stage, _: Any) -> None:
    await stage.begin()
    for _ in range(3):
        for consumer in stage.consumers[-2:]:
            await stage.kill(consumer)
        for _ in range(2):
            await stage.consumer()
        await stage.delivered_more()


def paused(seconds: float) -> Play:
    async def play(stage: Stage, _: Any) -> None:
        await stage.begin()
        await stage.pause(stage.consumers[-1], seconds)
        await stage.delivered_more()

    return play


scenario(
    "consumer-paused-past-the-lease",
    "SIGSTOP of a consumer for longer than its lease, then SIGCONT",
    "other consumers receive its messages; its own acks are late",
    quick=True,
)(paused(LEASE_SECONDS + 1))

scenario(
    "consumer-paused-past-the-session",
    "SIGSTOP of a consumer for longer than its session timeout, then SIGCONT",
    "other consumers take over its partitions and receive its messages",
)(paused(SESSION_SECONDS + 2 * LEASE_SECONDS))


@scenario(
    "handlers-start-without-broker",
    f"kill -9 of the only broker while a handler process starts; the broker is down for {AWAY_SECONDS:.0f} s",
    "handling starts as soon as the group has joined",
    own_broker,
)
async def handlers_without_a_broker(stage: Stage, broker: EmbeddedBroker) -> None:
    stage.define(own=f'[queues.{HANDLED}]\nhandler = "lab.consumer:handle"\n')
    worker = await stage.worker(ready=False)
    await stage.until(lambda: "HandlersApp]: Starting" in worker.log(), "a handler process starts")
    await stage.play(START_SECONDS)
    with stage.fault("cut", EVERYBODY):
        broker.kill()
        await stage.play(AWAY_SECONDS)
        await asyncio.to_thread(broker.start)
    async with marq.Producer(stage.servers, prefix=stage.prefix) as producer:
        await stage.send_one(producer, HANDLED)
    await stage.delivered_more(1, HANDLED_SECONDS)
    await stage.owned()
    stage.load()
    await stage.consumer()
    await stage.delivered_more()


@scenario(
    "static-worker-restarted-elsewhere",
    "kill -9 of the only worker, which has an instance id and is restarted with another web port; twice",
    "the new process owns the partitions at once, without the session timeout",
)
async def static_worker_elsewhere(stage: Stage, _: Any) -> None:
    worker = await stage.worker(**STATIC)
    stage.load()
    await stage.consumer()
    for _ in range(2):
        await stage.delivered_more()
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data, ready=False, **STATIC)
        await stage.owned(RESTART_SECONDS)
    await stage.delivered_more()


@scenario(
    "one-instance-id-twice",
    "a second consumer and a second worker start with the instance id of the first",
    "the first one stops with an error that names the id; the second one keeps running",
)
async def one_instance_id_twice(stage: Stage, _: Any) -> None:
    first = await stage.worker(**STATIC)
    stage.load()
    former = await stage.consumer(f"--instance-id={INSTANCE}")
    await stage.delivered_more()
    await stage.consumer(f"--instance-id={INSTANCE}")
    await stage.replaced(former, FENCED_SECONDS)
    await stage.delivered_more()
    await stage.worker(ready=False, **STATIC)
    await stage.replaced(first, FENCED_SECONDS)
    await stage.owned(FENCED_SECONDS)
    await stage.delivered_more()
