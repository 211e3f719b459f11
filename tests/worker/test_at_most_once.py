"""Handlers of an at-most-once queue, run by workers that are killed: none runs twice for a message."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable

import pytest

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import LIMIT_SECONDS, Worker, eventually

pytestmark = pytest.mark.verify

#: The leases of a killed process end before the next one reads its partitions: the session lasts 6 s.
QUEUES = """
[queues.once]
handler = "handlers_of_the_test:slow"
delivery = "at-most-once"
concurrency = 20
lease = 4
"""
KILLS = 5
BATCH = 40
MAX_AHEAD = 20 * BATCH


async def test_no_handler_runs_twice_when_handlers_processes_and_workers_are_killed(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, handlers: Handlers
) -> None:
    chance = random.Random(7)
    worker = await new_worker(queues=QUEUES, environment=handlers.environment).start().ready()
    sent: set[str] = set()

    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:

        async def send_until(done: asyncio.Event) -> None:
            while not done.is_set():
                # No faster than the handlers, so that a slow machine is not left with a backlog.
                await handlers.has_noted("once", len(sent) - MAX_AHEAD)
                sent.update([receipt.id for receipt in await producer.send_many("once", [b"x"] * BATCH)])
                await asyncio.sleep(0.05)

        async def pid() -> int | None:
            [process] = (await worker.handlers()).values()
            return process["pid"]

        for turn in range(KILLS):
            done = asyncio.Event()
            sending = asyncio.create_task(send_until(done))
            begun = len(await handlers.noted("once"))
            await handlers.has_noted("once", begun + BATCH)
            # Within a cycle: between ACQUIRE, commit, DISPATCH and handler.
            await asyncio.sleep(chance.random() / 2)
            if turn == 1:
                worker.kill()
                worker = await new_worker(like=worker).start().ready()
            else:
                running = await eventually(pid)
                assert running is not None
                os.kill(running, signal.SIGKILL)
                await eventually(pid, lambda found, before=running: found not in (None, before))
            done.set()
            await sending

        # All end: acked, abandoned after DISPATCH, or as a dead letter of an interrupted attempt.
        await eventually(
            lambda: worker.queue("once"),
            lambda found: (
                found.get("acked", 0) + found.get("abandoned", 0) + found.get("dead_lettered", 0) == len(sent)
            ),
            limit=2 * LIMIT_SECONDS,
        )

    runs = Counter(line["id"] for line in await handlers.noted("once"))
    assert runs.keys() <= sent
    assert [identity for identity, count in runs.items() if count > 1] == []
    statistics = await worker.queue("once")
    # Those whose handler did not run to its end, and those that a handler would have had next.
    assert statistics["acked"] >= len(sent) - KILLS * 2 * 20
