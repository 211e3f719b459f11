"""A worker is killed: its successor redelivers open messages once, and finished messages never."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaProducer

from marq.core.storage import rows
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import HOLDER, Namespace, Sent, Worker
from tests.worker.restarting import STATIC, came_back, half_done, ids, witness


@pytest.mark.parametrize("data_directory", ["kept", pytest.param("deleted", marks=pytest.mark.verify)])
async def test_after_kill_9_open_messages_come_back_once_and_finished_ones_never(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker, data_directory: str
) -> None:
    worker = await new_worker(environment=STATIC).start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:
        done, still_open = await half_done(marq, "crash", lease=4)
        aborted = await write_aborted_rows(marq)
        applied = await marq.durable()
        worker.kill()
        if data_directory == "deleted":
            shutil.rmtree(worker.data_directory)

        successor = await new_worker(like=worker).start().ready()
        returned = await came_back(marq, "crash", still_open)
        await witness(marq)

        assert returned == ids(still_open)
        assert not [copy for sent in [*done, aborted] for copy in await marq.copies_of(sent)]
        statistics, never = await successor.queue("crash"), await successor.queue("never")
        assert (statistics["acquired"], statistics["acked"], statistics["redelivered"]) == (40, 20, 20)
        assert (statistics["reacquired"], statistics["late"]) == (0, 0), "a marker was folded twice"
        assert (never.get("acquired", 0), never.get("in_flight", 0)) == (0, 0)
        # State came from the table, not from a replay: exactly the markers after the applied offset were folded.
        await marq.folded_only_after(successor, applied)
        recovered = [part["recovered_records"] for part in (await successor.owned_partitions()).values()]
        # The position, the marks and the counters: no more than the last write, which the kill may have cut short.
        assert all(recovered) if data_directory == "deleted" else max(recovered) <= 4, recovered


async def write_aborted_rows(marq: Namespace) -> Sent:
    """Write lease rows to the changelog in a transaction that is aborted; return their message."""
    never = await marq.send("never")
    row = rows.encode_row(rows.encode_lease(rows.LeaseRow("never", HOLDER, 1, 0, 0)), never.payload)
    producer = AIOKafkaProducer(bootstrap_servers=marq.bootstrap_servers, transactional_id=f"{marq.names.prefix}-other")
    async with producer:
        await producer.begin_transaction()
        for partition in (0, 1):
            key = rows.row_key("never", never.source, never.offset)
            await producer.send_and_wait(marq.names.changelog, row, key, partition=partition)
        await producer.abort_transaction()
    return never
