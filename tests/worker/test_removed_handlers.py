"""A module of handlers is taken out of a deployment: what the next worker does, and what a consumer gets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import marq
from marq.settings.definitions import confirmed_key
from marq.settings.removed_handlers import EXPIRY_S
from marq_worker.handlers.handler_watch import RemovedHandlers
from tests.worker.conftest import client_of
from tests.worker.harness import LIMIT_SECONDS, ROOT, Worker, eventually, take

pytestmark = pytest.mark.verify

REMOVED = """
import asyncio

import marq


@marq.handler("removed", group="pair")
async def handle(message: marq.Message) -> None:
    if message.value == b"in flight":
        await asyncio.Event().wait()
"""
KEPT = """
import marq


@marq.handler("kept", group="pair")
async def handle(message: marq.Message) -> None: ...
"""
#: A short lease, so that the message of a killed handler returns soon.
QUEUES = "[queues]\nremoved = { lease = 5 }\n"


async def test_a_module_that_was_removed_keeps_no_worker_from_starting_and_no_consumer_for_good(
    new_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    for name, text in (("removed_of_the_test", REMOVED), ("kept_of_the_test", KEPT)):
        (tmp_path / f"{name}.py").write_text(text)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "MARQ_HANDLERS": "removed_of_the_test,kept_of_the_test",
    }
    old = await new_worker(queues=QUEUES, environment=environment).start().ready()
    client = client_of(old)
    async with marq.Producer(**client) as producer, marq.Queues(**client) as queues:
        await producer.send("removed", b"done")
        await eventually(lambda: old.queue("removed"), lambda found: found.get("acked") == 1)
        await producer.send("removed", b"in flight")
        await eventually(lambda: old.queue("removed"), lambda found: found.get("in_flight") == 1)
        old.kill()
        await producer.send("removed", b"waits")

        new = await new_worker(like=old, MARQ_HANDLERS="kept_of_the_test").start().ready()
        assert "this worker has handlers for 'kept', but none for 'removed'" in new.log()
        await producer.send("kept", b"x")
        await eventually(lambda: new.queue("kept"), lambda found: found.get("acked") == 1)
        with pytest.raises(marq.ConfigError, match="queue 'removed' has the handler 'removed_of_the_test:handle'"):
            await marq.Consumer("removed", **client).start()

        # The tracker of a namespace in which 15 minutes have passed.
        tracker = RemovedHandlers(queues, lambda: True)
        await tracker.look(0.0)
        await queues.publish({confirmed_key("kept"): {}})
        await tracker.look(EXPIRY_S)
        async with marq.Consumer("removed", **client) as consumer:
            messages = [message for _ in range(2) for message in await take(consumer)]
            await consumer.ack(messages)
            # The attempt counts only if its start was in the log before the kill.
            assert sorted([message.value for message in messages]) == [b"in flight", b"waits"]
        await eventually(lambda: new.queue("removed"), lambda found: found.get("acked") == 3, limit=LIMIT_SECONDS)

        await producer.send("kept", b"y")
        await eventually(lambda: new.queue("kept"), lambda found: found.get("acked") == 2)
        assert json.loads((await new.page("/api/queues"))[1])["removed_handlers"] == {}
