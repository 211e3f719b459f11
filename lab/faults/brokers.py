"""Faults of brokers: restarted, killed, unreachable, too few; and all processes of Marq killed at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from lab.faults.cluster import Cluster
from lab.faults.scenario import Play, own_broker, scenario
from lab.program import RunError
from lab.proof.causes import EVERYBODY
from lab.stage import Stage
from marq.dead_letters.dead_letters import DeadLetters
from marq.kafka.acquire_strategies import MARKED, TRANSACTIONAL
from marq_worker.broker import EmbeddedBroker

AWAY_SECONDS = 30.0
#: How long there are too few brokers: longer than leases and sessions.
TOO_FEW_SECONDS = 10.0
REPLICAS = 3
START_LIMIT_SECONDS = 120.0
KILLS = 4
MAX_ATTEMPTS = 3
#: The firing in whose transaction a worker dies, after its redeliveries were written.
FIRING = 20


def down_twice(end: Callable[[EmbeddedBroker], None]) -> Play:
    async def play(stage: Stage, broker: EmbeddedBroker) -> None:
        await stage.begin()
        for _ in range(2):
            with stage.fault("cut", EVERYBODY):
                await asyncio.to_thread(end, broker)
                await asyncio.to_thread(broker.start)
            await stage.delivered_more()

    return play


scenario(
    "broker-restarted",
    "the only broker is stopped cleanly and started again under load, twice",
    "everything waits; clients retry sends; messages whose leases expire meanwhile are redelivered",
    own_broker,
)(down_twice(EmbeddedBroker.stop))

scenario(
    "broker-killed",
    "kill -9 of the only broker, started again at once, twice",
    "the same",
    own_broker,
    quick=True,
)(down_twice(EmbeddedBroker.kill))


@scenario(
    "broker-away",
    f"kill -9 of the only broker, down for {AWAY_SECONDS:.0f} s under load",
    "sends fail with `BrokerUnavailable` after their timeout; everything else waits",
    own_broker,
)
async def away(stage: Stage, broker: EmbeddedBroker) -> None:
    await stage.begin()
    with stage.fault("cut", EVERYBODY):
        broker.kill()
        await stage.play(AWAY_SECONDS)
        await asyncio.to_thread(broker.start)
    await stage.delivered_more()


@scenario(
    "leader-killed",
    "three brokers, replication factor 3: kill -9 of the leader of each markers partition in turn",
    "all work on the partition pauses until another broker leads it",
    partial(Cluster, REPLICAS),
)
async def leader_killed(stage: Stage, cluster: Cluster) -> None:
    """The remaining brokers have everything that was acknowledged."""
    await stage.begin(MARQ_REPLICATION_FACTOR=str(REPLICAS))
    for partition in range(2):
        leader = await leader_of(stage, cluster, partition)
        # The other brokers keep answering; clients of this one notice its end immediately.
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, leader)
            await stage.delivered_more()
        await asyncio.to_thread(cluster.start, leader)
        await stage.delivered_more()


async def leader_of(stage: Stage, cluster: Cluster, partition: int) -> int:
    topic = stage.settings.names.markers
    leader: int | None = None

    async def led() -> bool:
        nonlocal leader
        leader = await cluster.leader_of(topic, partition)
        return leader is not None

    await stage.until(led, f"{topic}/{partition} has a leader")
    assert leader is not None
    return leader


@scenario(
    "too-few-brokers",
    f"three brokers, `min.insync.replicas=3`: one is down for {TOO_FEW_SECONDS:.0f} s, then two",
    "sends fail with `BrokerUnavailable` after their timeout; everything else waits until all brokers are back",
    partial(Cluster, REPLICAS, properties={"min.insync.replicas": str(REPLICAS)}),
)
async def too_few(stage: Stage, cluster: Cluster) -> None:
    """With one broker away, writes are refused; with two away, no broker leads."""
    await stage.begin(MARQ_REPLICATION_FACTOR=str(REPLICAS))
    leader = await leader_of(stage, cluster, 0)
    others = [node for node in cluster.nodes if node != leader]
    for gone in ([leader], others):
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, *gone)
            await stage.play(TOO_FEW_SECONDS)
            await asyncio.to_thread(cluster.start, *gone)
        await stage.delivered_more(limit=START_LIMIT_SECONDS)


def everything_killed(start: str) -> Play:
    """Kill a worker in a transaction, and all other processes right after that."""

    async def play(stage: Stage, _: Any) -> None:
        stage.define(max_attempts=MAX_ATTEMPTS)
        consumer = ("--manner=hopeless", f"--start={start}")
        data = [stage.folder / "data-1", stage.folder / "data-2"]
        await stage.worker(data=data[1])
        stage.load()
        for _ in range(KILLS):
            victim = await stage.worker(f"--die-in-transaction={FIRING}", data=data[0], ready=False)
            await asyncio.gather(*[stage.consumer(*consumer) for _ in range(2)])
            await stage.dead(victim)
            await asyncio.gather(*[stage.kill(program) for program in stage.everybody if program.running])
            await stage.worker(data=data[1], ready=False)
        await stage.worker(data=data[0])
        await stage.consumer(*consumer)
        await stage.delivered_more()
        await stage.stop_load()
        await stage.drain()
        if start == TRANSACTIONAL:
            await no_message_is_dead_twice(stage)

    return play


async def no_message_is_dead_twice(stage: Stage) -> None:
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        ids = Counter([letter.id for queue in stage.queues async for letter in letters.peek(queue)])
    if twice := [id_ for id_, count in ids.items() if count > 1]:
        raise RunError(f"{len(twice)} of {len(ids)} messages have two dead letters: {', '.join(twice[:5])}")


scenario(
    "everything-killed",
    "kill -9 of both workers and both consumers at once, one worker inside a transaction,"
    f" {KILLS} times, while many messages fail",
    "nothing is processed until new processes start; redeliveries of the aborted transactions are delivered too,"
    " and some messages have two dead letters",
)(everything_killed(MARKED))

scenario(
    "transactional-everything-killed",
    "the same with `transactional=True`",
    "no consumer receives redeliveries of aborted transactions; no message has two dead letters",
)(everything_killed(TRANSACTIONAL))
