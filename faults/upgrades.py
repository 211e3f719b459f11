"""What happens while some processes are of the next version and others are not yet."""

from __future__ import annotations

from typing import Any

from faults.scenario import Scenario
from faults.stage import Stage

#: Messages before, between and after upgrades.
SOME = 300


async def consumers_first(stage: Stage, _: Any) -> None:
    """The wrong order: workers can't read what the newer consumer writes, and stop where they meet it."""
    worker = await stage.worker()
    stage.load()
    old = await stage.consumer()
    await stage.delivered_more(SOME)
    await stage.consumer("--newer")

    async def halted() -> bool:
        return any(part["state"] == "stopped" for part in await stage.partitions())

    await stage.until(halted, "a worker has stopped a partition")
    await stage.delivered_more(SOME)
    await stage.worker("--newer", ready=False)
    await stage.stop(worker)
    await stage.owned()
    await stage.delivered_more(SOME)
    await stage.stop(old)
    await stage.delivered_more(SOME)


async def workers_first(stage: Stage, _: Any) -> None:
    """The right order, with one worker and one consumer at a time."""
    workers = [await stage.worker(), await stage.worker()]
    stage.load()
    consumers = [await stage.consumer(), await stage.consumer()]
    await stage.delivered_more(SOME)
    for worker in workers:
        await stage.stop(worker)
        await stage.worker("--newer", data=worker.data)
        await stage.delivered_more(SOME)
    for consumer in consumers:
        await stage.stop(consumer)
        await stage.consumer("--newer")
        await stage.delivered_more(SOME)


SCENARIOS = [
    Scenario(
        "upgrade-workers-first",
        "a newer version comes, process by process: workers, then consumers",
        "while both kinds of worker run, partitions of the older one may stop with an alarm until it is replaced",
        workers_first,
    ),
    Scenario(
        "upgrade-consumers-first",
        "a newer consumer comes before the workers can read what it writes; then they are replaced",
        "the partitions that it writes to stop with an alarm; nothing is redelivered there until the worker is newer",
        consumers_first,
    ),
]
