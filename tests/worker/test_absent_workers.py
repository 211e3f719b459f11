"""What clients and commands say while no worker runs, and what happens when one comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.conftest import client_of
from tests.worker.dead_letters import yard_of
from tests.worker.harness import LIMIT_SECONDS, Worker, eventually
from tests.worker.shell import Shell

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]


async def test_the_last_owners_of_partitions_are_known(new_worker: Make) -> None:
    worker = await new_worker().start().ready()
    group = worker.names.group("emails")
    async with marq.Producer(**client_of(worker)) as producer, marq.Consumer("emails", **client_of(worker)) as consumer:
        await producer.send_many("emails", [b"x"] * 4)
        for _ in range(4):
            [message] = await consumer.receive(1, wait=LIMIT_SECONDS)
            await message.ack()
    await worker.stop()

    async with Shell(worker) as shell:
        state = await shell.json("state", code=1)

    assert [partition["unfinished"] for partition in state["markers"]] == [0, 0]
    assert all(str(worker.web_port) in partition["last_owner"] for partition in state["markers"])
    [found] = [row for row in state["groups"] if row["group"] == group]
    assert found["members"] == []
    committed = [partition for partition in found["partitions"] if partition["committed"]]
    assert committed
    for partition in committed:
        assert partition["owner"] is None
        assert partition["last_owner"].startswith("marq on ")
        assert f"(process {os.getpid()})" in partition["last_owner"]


async def test_a_cancellation_without_an_answer_is_unknown(new_worker: Make) -> None:
    worker = new_worker()
    async with marq.Producer(**client_of(worker), request_timeout=5) as producer:
        receipt = await producer.send("q", b"x", delay=3600)
        with pytest.raises(marq.BrokerUnavailable, match=r"unknown whether .* was cancelled: no tracker answered"):
            await producer.cancel(receipt)
    async with Shell(worker) as shell:
        assert "start one with marq worker" in (await shell("delayed", "q", code=1)).err


async def test_a_redrive_happens_when_a_worker_comes(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker().start().ready()
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("q", 5)
        await worker.stop()
        options: dict[str, Any] = {**client_of(worker), "request_timeout": 5}
        async with marq.DeadLetters(**options) as letters:
            with pytest.raises(marq.BrokerUnavailable, match="no worker has answered the requests"):
                await letters.redrive("q")

        await new_worker(like=worker).start().ready()

        await yard.each_once("q", ids)
        await eventually(yard.dead_letters.count, lambda counts: not counts)
