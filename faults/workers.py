"""What happens to workers: they die, stand still, come and go, and lose what they had stored."""

from __future__ import annotations

import shutil
import time
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient

from faults.processes import WorkerProcess
from faults.scenario import Scenario, own_broker
from faults.stage import SESSION_SECONDS, Stage

#: Messages before, between and after faults.
SOME = 300
#: How long workers join and leave, and how often.
CHURN_SECONDS, CHURN_EVERY_SECONDS = 120.0, 6.0


async def begin(stage: Stage) -> WorkerProcess:
    worker = await stage.worker()
    stage.load()
    await stage.consumer()
    await stage.consumer()
    await stage.delivered_more(SOME)
    return worker


async def killed_with_its_data(stage: Stage, _: Any) -> None:
    worker = await begin(stage)
    for _ in range(2):
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data)
        await stage.delivered_more(SOME)


async def killed_without_its_data(stage: Stage, _: Any) -> None:
    worker = await begin(stage)
    await stage.kill(worker)
    shutil.rmtree(worker.data)
    await stage.worker(data=worker.data)
    await stage.delivered_more(SOME)


async def killed_without_data_and_changelog(stage: Stage, _: Any) -> None:
    """The markers are all still there, so the table is built again from them."""
    worker = await begin(stage)
    await stage.kill(worker)
    shutil.rmtree(worker.data)
    await delete_topic(stage, stage.settings.names.changelog)
    await stage.worker(data=worker.data)
    await stage.delivered_more(SOME)


async def delete_topic(stage: Stage, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=stage.servers)
    await admin.start()
    try:
        await admin.delete_topics([topic])

        async def gone() -> bool:
            return topic not in await admin.list_topics()

        await stage.until(gone, f"topic {topic} is gone")
    finally:
        await admin.close()


async def killed_in_the_transaction(stage: Stage, _: Any) -> None:
    await stage.worker("--die-in-transaction=20")
    stage.load()
    await stage.consumer()
    victim = stage.workers[0]
    for _ in range(2):
        await stage.dead(victim)
        victim = await stage.worker("--die-in-transaction=20", data=victim.data)
    await stage.dead(victim)
    await stage.worker(data=victim.data)
    await stage.delivered_more(SOME)


async def paused_past_the_session(stage: Stage, _: Any) -> None:
    """Another worker takes its partitions over; it comes back and believes that it still has them."""
    worker = await begin(stage)
    await stage.worker()
    await stage.delivered_more(SOME)
    await stage.pause(worker, SESSION_SECONDS + 4)
    await stage.owned()
    await stage.delivered_more(SOME)


async def rolling_restart(stage: Stage, _: Any) -> None:
    workers = [await begin(stage), await stage.worker()]
    for worker in workers:
        await stage.stop(worker)
        await stage.worker(data=worker.data)
        await stage.delivered_more(SOME)


async def join_and_leave(stage: Stage, _: Any) -> None:
    await begin(stage)
    until_s = time.monotonic() + CHURN_SECONDS
    kills = 0
    while time.monotonic() < until_s:
        guest = await stage.worker(ready=False)
        await stage.play(CHURN_EVERY_SECONDS)
        kills += 1
        if kills % 2:
            await stage.kill(guest)
        else:
            await stage.stop(guest)
        await stage.play(CHURN_EVERY_SECONDS / 2)
    await stage.owned()
    await stage.delivered_more(SOME)


SCENARIOS = [
    Scenario(
        "worker-killed",
        "kill -9 of the only worker, twice; its RocksDB is kept",
        "nothing is redelivered while there is no worker; consumers go on",
        killed_with_its_data,
        quick=True,
    ),
    Scenario(
        "worker-killed-data-lost",
        "kill -9 of the only worker, and its data directory is deleted",
        "the same; the table is read from its changelog",
        killed_without_its_data,
    ),
    Scenario(
        "worker-killed-changelog-lost",
        "kill -9 of the only worker; its data directory and the changelog topic are deleted",
        "the same; the table is built from the markers (if these are gone, too: an alarm)",
        killed_without_data_and_changelog,
        own_broker,
    ),
    Scenario(
        "worker-killed-in-the-transaction",
        "kill -9 of a worker after it has sent copies and facts and before it commits them, three times",
        "the transaction is aborted; the next owner sends the copies",
        killed_in_the_transaction,
        quick=True,
    ),
    Scenario(
        "worker-paused-past-the-session",
        "SIGSTOP of a worker until another one has its partitions, then SIGCONT",
        "it is fenced and writes nothing more; redelivery stands still for the session timeout",
        paused_past_the_session,
    ),
    Scenario(
        "workers-restarted-one-by-one",
        "two workers are stopped and started again, one after the other",
        "redelivery stands still for a moment",
        rolling_restart,
    ),
    Scenario(
        "workers-join-and-leave",
        f"a worker comes and goes every few seconds for {CHURN_SECONDS:.0f} s, every other time by kill -9",
        "redelivery stands still at each change, for the session timeout after a kill",
        join_and_leave,
    ),
]
