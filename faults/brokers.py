"""What happens to brokers: they are restarted, die, stay away, and are too few."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from broker import EmbeddedBroker
from faults.cluster import Cluster
from faults.scenario import Scenario, own_broker
from faults.stage import Stage
from proof.causes import EVERYBODY

#: Messages before, between and after faults.
SOME = 300
AWAY_SECONDS = 30.0
#: How long there are too few brokers: longer than leases and sessions.
TOO_FEW_SECONDS = 10.0
COPIES = 3
START_LIMIT_SECONDS = 120.0


async def begin(stage: Stage, copies: int = 1) -> None:
    await stage.worker(MARQ_REPLICATION_FACTOR=str(copies))
    stage.load()
    await stage.consumer()
    await stage.consumer()
    await stage.delivered_more(SOME)


async def restarted(stage: Stage, broker: EmbeddedBroker) -> None:
    await begin(stage)
    for _ in range(2):
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(broker.restart)
        await stage.delivered_more(SOME)


async def killed(stage: Stage, broker: EmbeddedBroker) -> None:
    await begin(stage)
    for _ in range(2):
        with stage.fault("cut", EVERYBODY):
            broker.kill()
            await asyncio.to_thread(broker.start)
        await stage.delivered_more(SOME)


async def away(stage: Stage, broker: EmbeddedBroker) -> None:
    await begin(stage)
    with stage.fault("cut", EVERYBODY):
        broker.kill()
        await stage.play(AWAY_SECONDS)
        await asyncio.to_thread(broker.start)
    await stage.delivered_more(SOME)


async def leader_killed(stage: Stage, cluster: Cluster) -> None:
    """One broker of three: those that are left have all that was ever acknowledged."""
    await begin(stage, COPIES)
    markers = stage.settings.names.markers
    for partition in range(2):
        leader = await leader_of(stage, cluster, markers, partition)
        # The others answer all the while; who waits for this one learns at once that it is gone.
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, leader)
            await stage.delivered_more(SOME)
        await asyncio.to_thread(cluster.start, leader)
        await stage.delivered_more(SOME)


async def leader_of(stage: Stage, cluster: Cluster, topic: str, partition: int) -> int:
    found: list[int] = []

    async def led() -> bool:
        leader = await cluster.leader_of(topic, partition)
        found.extend([leader] if leader is not None else [])
        return bool(found)

    await stage.until(led, f"{topic}/{partition} has a leader")
    return found[0]


async def too_few(stage: Stage, cluster: Cluster) -> None:
    """All three must have a record: first one is away, and writes are refused; then two, and nobody leads."""
    await begin(stage, COPIES)
    leader = await leader_of(stage, cluster, stage.settings.names.markers, 0)
    others = [node for node in cluster.nodes if node != leader]
    for gone in ([leader], others):
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, *gone)
            await stage.play(TOO_FEW_SECONDS)
            await asyncio.to_thread(cluster.start, *gone)
        await stage.delivered_more(SOME, START_LIMIT_SECONDS)


def three_brokers() -> Cluster:
    return Cluster(COPIES)


@contextmanager
def three_that_must_all_write() -> Iterator[Cluster]:
    with Cluster(COPIES, properties={"min.insync.replicas": str(COPIES)}) as cluster:
        yield cluster


SCENARIOS = [
    Scenario(
        "broker-restarted",
        "the only broker is stopped cleanly and started again under load, twice",
        "everything waits; sends are tried again; leases that end meanwhile are redelivered",
        restarted,
        own_broker,
    ),
    Scenario(
        "broker-killed",
        "kill -9 of the only broker, which is started again at once, twice",
        "the same",
        killed,
        own_broker,
        quick=True,
    ),
    Scenario(
        "broker-away",
        f"kill -9 of the only broker, which stays away for {AWAY_SECONDS:.0f} s under load",
        "sends fail with BrokerUnavailable after their time limit; the rest waits",
        away,
        own_broker,
    ),
    Scenario(
        "leader-killed",
        "three brokers, replication factor 3: kill -9 of the leader of a markers partition, for each of them",
        "a pause until another broker leads",
        leader_killed,
        three_brokers,
    ),
    Scenario(
        "too-few-brokers",
        f"three brokers, min.insync.replicas=3: one is away for {TOO_FEW_SECONDS:.0f} s, then two",
        "sends fail with BrokerUnavailable after their time limit; the rest waits until all brokers are back",
        too_few,
        three_that_must_all_write,
    ),
]
