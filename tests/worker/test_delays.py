"""Delayed messages on real workers: kept over kill -9 and takeovers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import marq
from tests.worker.conftest import client_of
from tests.worker.harness import Worker, eventually, take

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
HOUR_S = 3600.0


async def test_what_waits_is_delivered_once_after_kill_9_with_data_and_without(new_worker: Make) -> None:
    worker = await new_worker().start().ready()
    async with marq.Producer(**client_of(worker)) as producer:
        receipts = await producer.send_many("q", [b"%d" % number for number in range(500)], delay=20)
        gone = await producer.send_many("q", [b"gone"] * 20, delay=20)
        assert await producer.cancel(gone) == [True] * 20
        moved = await producer.send_many("q", [b"moved"] * 20, delay=HOUR_S)
        assert await producer.reschedule(moved, delay=21) == [True] * 20
    worker.kill()
    worker = await new_worker(like=worker).start().ready()
    worker.kill()
    worker = await new_worker(like=worker, MARQ_DATA_DIR=str(worker.directory / "empty")).start().ready()

    async with marq.Consumer("q", **client_of(worker)) as consumer:
        messages = await take(consumer, 520)
        await consumer.ack(messages)
        assert sorted(message.id for message in messages) == sorted(receipt.id for receipt in [*receipts, *moved])
        assert {message.attempt for message in messages} == {1}
        assert await consumer.receive(wait=2) == []


async def delayed_messages(worker: Worker) -> dict[str, Any]:
    status, text = await worker.page("/api/queues/q/messages?state=delayed&limit=1000")
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


async def test_every_worker_tells_of_all_that_waits_and_another_takes_it_over(new_worker: Make) -> None:
    first = await new_worker().start().ready()
    other = await new_worker(like=first, MARQ_DATA_DIR=str(first.directory / "other")).start().ready(1)
    await first.ready(1)
    async with marq.Producer(**client_of(first)) as producer:
        receipts = await producer.send_many("q", [b"%d" % number for number in range(5_000)], delay=HOUR_S)
        last = await producer.send("q", b"last", delay=2 * HOUR_S)
        await eventually(lambda: first.queue("q"), lambda found: found.get("waiting_for_delivery") == 5_001)
        for worker in (first, other):
            found = await eventually(partial(delayed_messages, worker), lambda found: found["complete"])
            assert len(found["messages"]) == 1_000
            assert {receipt["id"] for receipt in found["messages"]} <= {message.id for message in receipts}
        first.kill()
        await other.ready()
        assert await producer.reschedule([*receipts[:100], last], delay=0) == [True] * 101

    async with marq.Consumer("q", **client_of(first)) as consumer:
        messages = await take(consumer, 101)
        await consumer.ack(messages)
        assert {message.id for message in messages} == {receipt.id for receipt in [*receipts[:100], last]}
