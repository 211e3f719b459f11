"""Scenarios for members of groups: a leader without metadata, and two members with one instance id."""

from __future__ import annotations

import asyncio
from typing import Any

import marq
from broker import EmbeddedBroker
from faults.scenario import Scenario, own_broker
from faults.stage import Stage

#: Messages before, between and after faults.
SOME = 300
HANDLED = "handled"
#: After the start of a handlers process: its broker is away when it joins the group.
START_SECONDS = 0.3
AWAY_SECONDS = 5.0
#: Time limit until messages are handled; a group that assigned nothing would try again after five minutes.
HANDLED_SECONDS = 30.0
INSTANCE = "one"
#: The watchdog is shorter than the session, so it ends a worker that waits for the session to end.
STATIC = {"MARQ_INSTANCE_ID": INSTANCE, "MARQ_SESSION_TIMEOUT": "30", "MARQ_WATCHDOG": "20"}
#: Less than that session.
RESTART_SECONDS = 20.0
FENCED_SECONDS = 30.0


async def handlers_without_a_broker(stage: Stage, broker: EmbeddedBroker) -> None:
    stage.define(f'[queues.{HANDLED}]\nhandler = "faults.handling:handle"\n')
    worker = await stage.worker(ready=False)
    await stage.until(lambda: "HandlersApp]: Starting" in worker.log_file.read_text(), "a handlers process starts")
    await stage.play(START_SECONDS)
    with stage.fault("cut", "*"):
        broker.kill()
        await stage.play(AWAY_SECONDS)
        await asyncio.to_thread(broker.start)
    async with marq.Producer(stage.servers, prefix=stage.prefix) as producer:
        await stage.send_one(producer, HANDLED)
    await stage.delivered_more(1, HANDLED_SECONDS)
    await stage.owned()
    stage.load()
    await stage.consumer()
    await stage.delivered_more(SOME)


async def static_worker_elsewhere(stage: Stage, _: Any) -> None:
    """Restart a static worker; each worker of a scenario has its own web port, which its group knows."""
    worker = await stage.worker(**STATIC)
    stage.load()
    await stage.consumer()
    for _ in range(2):
        await stage.delivered_more(SOME)
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data, ready=False, **STATIC)
        await stage.owned(RESTART_SECONDS)
    await stage.delivered_more(SOME)


async def one_instance_id_twice(stage: Stage, _: Any) -> None:
    first = await stage.worker(**STATIC)
    stage.load()
    former = await stage.consumer(f"--instance-id={INSTANCE}")
    await stage.delivered_more(SOME)
    await stage.consumer(f"--instance-id={INSTANCE}")
    await stage.replaced(former, FENCED_SECONDS)
    await stage.delivered_more(SOME)
    await stage.worker(ready=False, **STATIC)
    await stage.replaced(first, FENCED_SECONDS)
    await stage.owned(FENCED_SECONDS)
    await stage.delivered_more(SOME)


SCENARIOS = [
    Scenario(
        "handlers-start-without-broker",
        f"kill -9 of the only broker while a handlers process starts; it stays away for {AWAY_SECONDS:.0f} s",
        "messages are handled as soon as the group has joined",
        handlers_without_a_broker,
        own_broker,
    ),
    Scenario(
        "static-worker-restarted-elsewhere",
        "kill -9 of the only worker, which has an instance id; it is started again with another web port, twice",
        "the new process has the partitions at once, without waiting for the session timeout",
        static_worker_elsewhere,
    ),
    Scenario(
        "one-instance-id-twice",
        "a second consumer, and a second worker, start with the instance id of the first",
        "the first one stops with an error that names the id; the second one keeps running",
        one_instance_id_twice,
    ),
]
