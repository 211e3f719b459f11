"""A worker keeps copies of the partitions that others own, and takes one over from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, eventually, shared_out

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
OPEN = 200


async def test_a_takeover_reads_only_what_the_local_copy_has_not(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    first = await new_worker(environment={"MARQ_DATA_DIR": str(tmp_path / "one")}).start().ready()
    async with Namespace(broker.bootstrap_servers, first.names) as marq:
        for partition in (0, 1):
            sent = await marq.send_many("held", OPEN, partition=partition)
            await marq.applied(await marq.acquire(*sent, lease=600))
        standby = new_worker(like=first, MARQ_DATA_DIR=str(tmp_path / "two")).start()
        standby.web_port += 1

        async def copied() -> bool:
            return f"local copies of markers partitions [{taken}]: up to date" in standby.log()

        # Neither worker owns a partition while the second one joins.
        workers = (await shared_out(first, standby))["workers"]
        [taken] = [
            part["partition"] for worker in workers if worker["url"] == first.url for part in worker["partitions"]
        ]
        await eventually(copied)
        first.kill()
        partitions = await standby.owned_partitions()

    assert {number: part["unfinished"] for number, part in partitions.items()} == {0: OPEN, 1: OPEN}
    # What it owned from the start had to be read from the changelog, and was not read a second time.
    assert partitions[1 - taken]["recovered_records"] > OPEN > partitions[taken]["recovered_records"]
