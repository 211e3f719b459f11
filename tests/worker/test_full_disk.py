"""A full disk: the tracker stops, says why, and continues as soon as there is space."""

from __future__ import annotations

import resource
from collections.abc import Callable

from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, eventually

#: The tracker copies payloads only of leases that still last; on a busy machine, it reads of them late.
LEASE = 8.0
#: More than the worker's log has, and far less than the messages take.
ROOM_BYTES = 256 << 10
MESSAGES, VALUE_BYTES = 40, 16 << 10


async def test_a_worker_whose_disk_is_full_goes_on_when_there_is_room(
    new_worker: Callable[..., Worker], broker: EmbeddedBroker
) -> None:
    worker = await new_worker().start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:
        # Files may not grow past a size: to RocksDB that is a write that failed, like a full disk.
        _, hard = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
        sent = [await marq.send("large", bytes(VALUE_BYTES)) for _ in range(MESSAGES)]
        await marq.acquire(*sent, lease=LEASE)

        async def said() -> str:
            return worker.log()

        await eventually(said, lambda log: "free space there" in log)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (hard, hard))

        copies = await eventually(lambda: marq.copies("large"), lambda found: len(found) >= MESSAGES)
        await worker.ready()
    assert len(copies) == MESSAGES
    assert "a defect of marq" not in worker.log()
