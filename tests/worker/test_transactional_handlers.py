"""Handlers of a group with a transactional queue, in a worker: what the setting changes for each queue of the group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaProducer

import marq
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import Worker, eventually

pytestmark = pytest.mark.verify

QUEUES = """
[queues.transfers]
handler = "handlers_of_the_test:coroutine"
group = "money"
transactional = true

[queues.receipts]
handler = "handlers_of_the_test:coroutine"
group = "money"

[queues.emails]
handler = "handlers_of_the_test:coroutine"
"""


async def send(producer: AIOKafkaProducer, names: Names, queue: str, number: int) -> None:
    """Send one redelivery that is aborted, as by a tracker that was killed, and then one that is not."""
    headers = [("marq-id", f"{names.messages}/0/0".encode()), ("marq-attempt", b"2")]
    for value, end in ((b"aborted", producer.abort_transaction), (b"kept %d" % number, producer.commit_transaction)):
        await producer.begin_transaction()
        await producer.send_and_wait(names.messages, value, key=queue.encode(), partition=0, headers=headers)
        await end()


async def was_used(servers: str, transactional_id: str) -> bool:
    """Whether a producer has used a transactional id: each one raises its epoch, from 0."""
    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=transactional_id) as producer:
        return bool(producer._txn_manager.producer_epoch > 0)


async def test_a_group_with_a_transactional_queue_acquires_and_reads_in_transactions(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, handlers: Handlers
) -> None:
    servers = broker.bootstrap_servers
    environment = {**handlers.environment, "MARQ_INSTANCE_ID": "one"}
    worker = await new_worker(queues=QUEUES, environment=environment).start().ready()
    names = worker.names

    async def seen(queue: str, number: int) -> list[str]:
        await send(producer, names, queue, number)

        async def values() -> list[str]:
            return [line["value"] for line in await handlers.noted(queue)]

        return await eventually(values, lambda found: f"kept {number}" in found)

    async def pid() -> int | None:
        process = (await worker.handlers()).get("handlers", {})
        return process["pid"] if process.get("partitions") else None

    async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{names.prefix}-x") as producer:
        found = {queue: await seen(queue, 1) for queue in ("transfers", "receipts", "emails")}
        before = await eventually(pid)
        async with marq.Queues(servers, prefix=names.prefix) as queues:
            await queues.change("emails", transactional=True)
        await eventually(pid, lambda now: now not in (None, before))
        later = await seen("emails", 2)
        await eventually(lambda: worker.queue("emails"), lambda found: found.get("acked") == 3)
    await worker.stop()

    assert found == {"transfers": ["kept 1"], "receipts": ["kept 1"], "emails": ["aborted", "kept 1"]}
    assert later == ["aborted", "kept 1", "kept 2"]
    for group in ("money", "handlers"):
        assert await was_used(servers, names.start_id(names.named_group(group), "one"))
