"""Local tables and their changelogs: what may be believed when the two no longer belong together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import Namespace, Worker, delete_topic

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
FOR_LONG = 600.0


async def test_a_local_table_of_a_recreated_changelog_is_not_trusted(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The changelog is lost; one worker rebuilds it, and it grows past the position of another worker's old files.

    Found by the simulation: mutant "only a table that is ahead of its changelog is thrown away".
    """
    one = await new_worker(environment={"MARQ_DATA_DIR": str(tmp_path / "one")}).start().ready()
    async with Namespace(broker.bootstrap_servers, one.names) as marq:
        ended = await marq.send_many("ended", 5)
        await marq.applied(await marq.acquire(*ended, lease=FOR_LONG))
        await one.stop()
        two = await new_worker(like=one, MARQ_DATA_DIR=str(tmp_path / "two")).start().ready()
        await two.stop()

        await delete_topic(broker.bootstrap_servers, one.names.changelog)
        await marq.ack(*ended)
        still_open = await marq.send_many("still-open", 5)
        await marq.acquire(*still_open, lease=FOR_LONG)

    one = await new_worker(like=one).start().ready()
    async with Namespace(broker.bootstrap_servers, one.names) as marq:
        others = await marq.send_many("others", 100)
        await marq.applied(await marq.acquire(*others, lease=FOR_LONG))
    await one.stop()

    two = await new_worker(like=two).start().ready()

    held = {queue: (await two.queue(queue)).get("in_flight", 0) for queue in ("ended", "still-open", "others")}
    assert held == {"ended": 0, "still-open": 5, "others": 100}


async def test_a_changelog_that_is_recreated_while_its_owner_runs_is_rebuilt_from_the_markers(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    """Else the new one would hold only the rows that change from then on, and the next owner would trust it."""
    worker = await new_worker().start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:
        earlier = await marq.send_many("earlier", 5)
        await marq.applied(await marq.acquire(*earlier, lease=FOR_LONG))
        await delete_topic(broker.bootstrap_servers, worker.names.changelog)
        options = {"prefix": worker.names.prefix, "markers_partitions": 2}
        await ensure_topics(ClientSettings.read(broker.bootstrap_servers, options, environment={}), changelog=True)
        later = await marq.send_many("later", 5)
        await marq.applied(await marq.acquire(*later, lease=FOR_LONG))
    await worker.stop()
    assert "the topic was recreated" in worker.log()

    worker = await new_worker(like=worker).start().ready()

    in_flight = {queue: (await worker.queue(queue)).get("in_flight", 0) for queue in ("earlier", "later")}
    assert in_flight == {"earlier": 5, "later": 5}


async def test_a_damaged_local_table_is_rebuilt_without_losing_a_lease(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    """RocksDB's iteration just ends at a damaged block, as if the rest of the table did not exist."""
    worker = await new_worker().start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:
        sent = await marq.send_many("many", 2_000)
        await marq.applied(await marq.acquire(*sent, lease=FOR_LONG))
    await worker.stop()
    # A start writes the rows from RocksDB's log into a table file.
    worker = await new_worker(like=worker).start().ready()
    await worker.stop()
    largest = max(worker.data_directory.rglob("*.sst"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(os.urandom(64))

    worker = await new_worker(like=worker).start().ready()

    assert (await worker.queue("many"))["in_flight"] == 2_000
    assert "are damaged: rebuilding them from the changelog" in worker.log()
