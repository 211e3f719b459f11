"""Faults of workers: killed, paused, restarted, replaced by a newer version, without their data."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

from lab.faults.scenario import Play, own_broker, scenario
from lab.stage import SESSION_SECONDS, Stage
from marq.kafka.connection import admin_client

#: How long workers join and leave, and how often.
CHURN_SECONDS, CHURN_EVERY_SECONDS = 120.0, 6.0


def killed(times: int = 1, *, data: bool = True, changelog: bool = True) -> Play:
    """Kill the only worker and restart it with its data and the changelog, or without them."""

    async def play(stage: Stage, _: Any) -> None:
        worker = await stage.begin()
        for _ in range(times):
            await stage.kill(worker)
            if not data:
                shutil.rmtree(worker.data)
            if not changelog:
                await delete_topic(stage, stage.settings.names.changelog)
            worker = await stage.worker(data=worker.data)
            await stage.delivered_more()

    return play


async def delete_topic(stage: Stage, topic: str) -> None:
    async with admin_client(stage.settings) as admin:
        await admin.delete_topics([topic])

        async def gone() -> bool:
            return topic not in await admin.list_topics()

        await stage.until(gone, f"topic {topic} is gone")


scenario(
    "worker-killed",
    "kill -9 of the only worker, twice; RocksDB data kept",
    "consumers continue, but nothing is redelivered while no worker runs",
    quick=True,
)(killed(2))

scenario(
    "worker-killed-data-lost",
    "kill -9 of the only worker; data directory deleted",
    "the same; the new worker reads the table from the changelog",
)(killed(data=False))

scenario(
    "worker-killed-changelog-lost",
    "kill -9 of the only worker; data directory and changelog topic deleted",
    "the same; the new worker rebuilds the table from the markers (it raises an alarm if these are gone too)",
    own_broker,
)(killed(data=False, changelog=False))


@scenario(
    "worker-killed-in-the-transaction",
    "kill -9 of a worker after it sent redeliveries and before it committed them, three times",
    "the transaction is aborted; the next owner sends the redeliveries",
    quick=True,
)
async def killed_in_the_transaction(stage: Stage, _: Any) -> None:
    victim = await stage.worker("--die-in-transaction=20")
    stage.load()
    await stage.consumer()
    for options in (["--die-in-transaction=20"], ["--die-in-transaction=20"], []):
        await stage.dead(victim)
        victim = await stage.worker(*options, data=victim.data)
    await stage.delivered_more()


@scenario(
    "worker-killed-in-the-answer",
    "kill -9 of a worker before and after it commits its answer to a RESUME, twice each",
    "consumers of queues with `ordering` receive nothing from new partitions before the next owner answers",
)
async def killed_in_the_answer(stage: Stage, _: Any) -> None:
    victim = await stage.worker("--die-in-answer=1")
    stage.load()
    await stage.consumer()
    for options in (["--die-after-answer=1"], ["--die-in-answer=3"], ["--die-after-answer=3"], []):
        await stage.dead(victim)
        victim = await stage.worker(*options, data=victim.data)
        # Its partitions move, so they are resumed again.
        await stage.consumer()
    await stage.delivered_more()


@scenario(
    "worker-paused-past-the-session",
    "SIGSTOP of a worker until another worker owns its partitions, then SIGCONT",
    "the paused worker is fenced and writes nothing more; redelivery pauses for the session timeout",
)
async def paused_past_the_session(stage: Stage, _: Any) -> None:
    worker = await stage.begin()
    await stage.worker()
    await stage.delivered_more()
    await stage.pause(worker, SESSION_SECONDS + 4)
    await stage.owned()
    await stage.delivered_more()


@scenario(
    "workers-restarted-one-by-one",
    "two workers are stopped and started, one after the other",
    "redelivery pauses briefly",
)
async def rolling_restart(stage: Stage, _: Any) -> None:
    workers = [await stage.begin(), await stage.worker()]
    for worker in workers:
        await stage.stop(worker)
        await stage.worker(data=worker.data)
        await stage.delivered_more()


@scenario(
    "workers-join-and-leave",
    f"a worker joins and leaves every few seconds for {CHURN_SECONDS:.0f} s, every other time by kill -9",
    "redelivery pauses at each change; after a kill, for the session timeout",
)
async def join_and_leave(stage: Stage, _: Any) -> None:
    await stage.begin()
    await stage.churn(partial(stage.worker, ready=False), CHURN_SECONDS, CHURN_EVERY_SECONDS)
    await stage.owned()
    await stage.delivered_more()


@scenario(
    "upgrade-workers-first",
    "rolling upgrade: workers first, then consumers",
    "while both versions of the worker run, partitions of the older one may stop with an alarm until it is replaced",
)
async def workers_first(stage: Stage, _: Any) -> None:
    """The correct order."""
    workers = [await stage.worker(), await stage.worker()]
    stage.load()
    consumers = [await stage.consumer(), await stage.consumer()]
    await stage.delivered_more()
    for worker in workers:
        await stage.stop(worker)
        await stage.worker("--newer", data=worker.data)
        await stage.delivered_more()
    for consumer in consumers:
        await stage.stop(consumer)
        await stage.consumer("--newer")
        await stage.delivered_more()


@scenario(
    "upgrade-consumers-first",
    "an upgraded consumer starts before the workers can read its markers; then the workers are replaced",
    "the partitions that it writes to stop with an alarm; they redeliver nothing until the workers are upgraded",
)
async def consumers_first(stage: Stage, _: Any) -> None:
    """The wrong order: workers stop at the newer consumer's markers, which they cannot read."""
    worker = await stage.worker()
    stage.load()
    old = await stage.consumer()
    await stage.delivered_more()
    await stage.consumer("--newer")

    async def halted() -> bool:
        return any(part["state"] == "stopped" for part in await stage.partitions())

    await stage.until(halted, "a worker has stopped a partition")
    await stage.delivered_more()
    await stage.worker("--newer", ready=False)
    await stage.stop(worker)
    await stage.owned()
    await stage.delivered_more()
    await stage.stop(old)
    await stage.delivered_more()
