"""Hazards of Faust that would lose or duplicate messages, shown with real workers.

Numbers are those of issues in faust-streaming/faust; see test_faust_issues.py and test_faust_transport.py for others.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import rocksdict
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from marq.core.storage import rows
from marq_worker.broker import EmbeddedBroker
from tests.worker.harness import ROOT, Namespace, Sent, Worker, admin, eventually, throughout
from tests.worker.restarting import STATIC, ids

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
#: Faust commits what was acknowledged this often (broker_commit_interval), and a little.
COMMIT_SECONDS = 3.3
#: Lease of the load: longer than the test, so only releases cause redeliveries.
LEASE_SECONDS = 600.0
PAUSE_SECONDS = 0.1
#: Limit for the start of a worker under load.
START_SECONDS = 240.0
#: Too small for rows, large enough for the mark that ends a transaction: without that it could never be aborted.
REFUSING_BYTES = 100


@pytest_asyncio.fixture
async def worker(new_worker: Make) -> Worker:
    return await new_worker(environment=STATIC).start().ready()


@pytest_asyncio.fixture
async def marq(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Namespace]:
    async with Namespace(broker.bootstrap_servers, worker.names) as namespace:
        yield namespace


async def ahead(marq: Namespace) -> dict[int, int]:
    """By how many markers each committed offset is ahead of the changelog; correct if not above 0."""
    committed = await marq.committed()  # first: what is durable only grows meanwhile
    durable = await marq.durable()
    return {partition: offset - 1 - durable.get(partition, -1) for partition, offset in committed.items()}


async def refuse_changelog(marq: Namespace, limit_bytes: int | None) -> None:
    """Let the broker refuse every write to the changelog; None: no more."""
    config = await marq.config(marq.names.changelog)
    kept = {name: config[name] for name in ("cleanup.policy", "delete.retention.ms")}
    limit = str(limit_bytes or 4 << 20)
    await marq.alter(marq.names.changelog, {**kept, "max.message.bytes": limit})


async def opened_and_finished(marq: Namespace, queue: str, *, lease: float) -> tuple[list[Sent], list[Sent], object]:
    sent = await marq.send_many(queue, 10)
    await marq.acquire(*sent, lease=lease)
    return sent[:5], sent[5:], await marq.ack(*sent[:5])


def local_applied(worker: Worker) -> dict[str, int]:
    """The applied offset in each RocksDB of a worker that has ended."""
    found = {}
    for current in worker.data_directory.rglob("CURRENT"):
        copy = worker.directory / f"copy-{time.monotonic_ns()}"
        shutil.copytree(current.parent, copy)
        database = rocksdict.Rdict(str(copy), options=rocksdict.Options(raw_mode=True))
        row = database.get(rows.APPLIED_KEY)
        database.close()
        if row is not None:
            found[current.parent.name] = rows.decode_applied(row)[0]
    return found


async def test_offsets_are_never_committed_before_the_changelog_write_that_they_depend_on(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    """Stock Faust commits while changelog writes below the offset are unsent."""
    # Rows are written less often than offsets are committed, so an early acknowledgement would be committed.
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "5"}).start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:

        async def traffic() -> dict[int, int]:
            await opened_and_finished(marq, "traffic", lease=60)
            return await ahead(marq)

        await throughout(COMMIT_SECONDS, traffic, lambda found: all(count <= 0 for count in found.values()))

        assert await eventually(marq.committed), "no offset was ever committed: nothing was shown"


async def test_a_failed_changelog_write_is_repeated_and_rocksdb_is_never_ahead_of_the_changelog(
    worker: Worker, marq: Namespace, new_worker: Make
) -> None:
    """Stock Faust logs a failed changelog write, commits the offset all the same and keeps the row in RocksDB only."""
    _, open_before, last = await opened_and_finished(marq, "refused", lease=LEASE_SECONDS)
    await marq.applied(last)

    await refuse_changelog(marq, REFUSING_BYTES)
    done, still_open, last = await opened_and_finished(marq, "refused", lease=8)
    await throughout(COMMIT_SECONDS, lambda: ahead(marq), lambda found: all(count <= 0 for count in found.values()))
    durable = await marq.durable()
    worker.kill()
    local = local_applied(worker)
    await refuse_changelog(marq, None)
    successor = await new_worker(like=worker).start().ready()
    await marq.applied(last)
    copies = await eventually(lambda: marq.copies("refused"), lambda found: len(found) >= 5)

    assert max(durable.values()) < last.offset, "the broker did not refuse: nothing was shown"
    assert max(local.values()) <= max(durable.values())
    assert sorted(dict(copy.headers)["marq-id"].decode() for copy in copies) == ids(still_open)
    statistics = await eventually(lambda: successor.queue("refused"), lambda found: found["redelivered"] == 5)
    assert (statistics["acquired"], statistics["acked"], statistics["in_flight"]) == (20, 10, len(open_before))
    assert (statistics["reacquired"], statistics["late"]) == (0, 0)
    assert not [copy for sent in done for copy in await marq.copies_of(sent)]

    # A worker that lives on continues without a restart.
    await refuse_changelog(marq, REFUSING_BYTES)
    _, still_open, last = await opened_and_finished(marq, "refused again", lease=2)
    await eventually(successor.partitions, lambda found: any(part["state"] == "waiting" for part in found.values()))
    await refuse_changelog(marq, None)
    await marq.applied(last)
    copies = await eventually(lambda: marq.copies("refused again"), lambda found: len(found) >= 5)
    assert len(copies) == len(still_open)
    assert (await successor.queue("refused again"))["acked"] == 5
    assert successor.exit_code is None


async def test_markers_that_are_read_again_are_skipped_by_the_applied_offset_and_old_files_are_not_trusted(
    worker: Worker, marq: Namespace, new_worker: Make
) -> None:
    """#502: Faust replays what was acknowledged and not yet committed; a replayed ACQUIRE must reopen nothing."""
    _, still_open, last = await opened_and_finished(marq, "replayed", lease=6)
    await marq.applied(last)
    worker.kill()
    applied, committed = await marq.durable(), await marq.committed()
    four_days_ago = time.time() - 4 * 24 * 3600
    for file in worker.data_directory.rglob("*"):
        os.utime(file, (four_days_ago, four_days_ago))

    successor = await new_worker(like=worker).start().ready()
    copies = await eventually(lambda: marq.copies("replayed"), lambda found: len(found) >= 5)

    assert committed.get(last.partition, 0) <= applied[last.partition], "nothing was left to be replayed"
    assert len(copies) == len(still_open)
    statistics = await successor.queue("replayed")
    assert (statistics["acquired"], statistics["acked"], statistics["reacquired"], statistics["late"]) == (10, 5, 0, 0)
    await marq.folded_only_after(successor, applied)
    found = await successor.owned_partitions()
    assert "older than half of the changelog's delete.retention.ms" in successor.log()
    assert found[last.partition]["recovered_records"] >= len(still_open) + 3


async def test_a_position_that_retention_has_removed_stops_the_partition_instead_of_being_reset(
    worker: Worker, marq: Namespace, new_worker: Make
) -> None:
    """#651 is of changelogs; of markers, Faust's auto_offset_reset would go on elsewhere without a word."""
    _, _, last = await opened_and_finished(marq, "removed", lease=60)
    await marq.applied(last)
    worker.kill()
    _, _, unread = await opened_and_finished(marq, "removed", lease=60)
    removed = TopicPartition(marq.names.markers, unread.partition)
    async with admin(marq.bootstrap_servers) as client:
        await client.delete_records({removed: RecordsToDelete(before_offset=unread.offset)})

    successor = new_worker(like=worker).start()
    statistics = await eventually(successor.partitions, lambda found: found.get(unread.partition, {}).get("alarm"))

    assert re.search(r"retention has removed everything before \d+", statistics[unread.partition]["alarm"])
    assert statistics[unread.partition]["state"] == "stopped"
    assert statistics[1 - unread.partition]["alarm"] == ""


async def test_an_idle_worker_writes_nothing_uses_little_memory_and_is_reachable_from_this_machine_only(
    worker: Worker, marq: Namespace
) -> None:
    """One worker for all that can be seen of one that has nothing to do."""
    await nothing_is_written(worker, marq)
    await pages_of_faust_are_not_there(worker)
    only_the_loopback_address_answers(worker)
    caches_are_small(worker)


async def nothing_is_written(worker: Worker, marq: Namespace) -> None:
    async def written() -> list[int]:
        return [part["transactions"] for part in (await worker.partitions()).values()]

    # The first: a TICK for each partition, and the row that says it was read.
    before = await eventually(written, lambda counts: min(counts) >= 2)
    ends = await marq.ends(marq.names.markers)
    await throughout(3.0, written, lambda counts: counts == before)
    assert await marq.ends(marq.names.markers) == ends


async def pages_of_faust_are_not_there(worker: Worker) -> None:
    for path in ("/table", "/table/", "/table/leases", "/router", "/router/", "/router/leases/key"):
        assert (await worker.page(path))[0] == 404, path
    assert (await worker.page("/"))[0] == 200


def only_the_loopback_address_answers(worker: Worker) -> None:
    # 127.0.0.2 is this machine too, but not the address that the worker binds: 0.0.0.0 would answer there.
    with pytest.raises(OSError, match=r"refused|assign|timed out"):
        socket.create_connection(("127.0.0.2", worker.web_port), timeout=2).close()


def caches_are_small(worker: Worker) -> None:
    options = [file.read_text() for file in worker.data_directory.rglob("OPTIONS-*")]
    logs = [file.read_text(errors="replace") for file in worker.data_directory.rglob("LOG")]
    assert options
    assert all(re.search(rf"^\s*write_buffer_size={8 << 20}$", text, re.MULTILINE) for text in options)
    assert all(re.search(rf"^\s*capacity : {16 << 20}$", text, re.MULTILINE) for text in logs)


async def test_an_agent_that_can_not_be_imported_ends_the_worker_loudly(new_worker: Make, tmp_path: Path) -> None:
    """Faust's autodiscovery only warns, and the worker then runs without the agent."""
    worker_packages = tmp_path / "marq_worker"
    shutil.copytree(ROOT / "marq_worker", worker_packages, ignore=shutil.ignore_patterns("__pycache__"))
    (worker_packages / "agents" / "tracker.py").write_text("raise ImportError('no tracker today')\n")

    worker = new_worker().start()

    assert await worker.ended() != 0
    assert "no tracker today" in worker.log()


async def test_a_worker_without_partitions_stays_in_the_group(new_worker: Make) -> None:
    """#175: stock Faust does not poll then, so aiokafka leaves the group after a time."""
    poll_seconds = 10
    # The second is one of Faust's own variables: its default is 1000.
    environment = {"MARQ_PARTITIONS": "1", "BROKER_MAX_POLL_INTERVAL": str(poll_seconds)}
    owner = await new_worker(environment=environment).start().ready(1)
    idle = new_worker(like=owner, MARQ_WEB_PORT=str(owner.web_port + 1)).start()

    async def ended() -> list[int | None]:
        return [owner.exit_code, idle.exit_code]

    await eventually(owner.members, lambda count: count == 2)
    await throughout(poll_seconds * 1.2, ended, lambda codes: codes == [None, None])
    # On a starved machine either may be late for a poll, leave, and join again; stock Faust's never comes back.
    await eventually(owner.members, lambda count: count == 2, limit=60)


# --- load ------------------------------------------------------------------------------------------------------------


class Load:
    """Acquires messages and acknowledges every other one until it is stopped."""

    def __init__(self, marq: Namespace) -> None:
        self._marq = marq
        self._over = False
        self.rounds = 0
        self.finished: list[Sent] = []
        self.still_open: list[Sent] = []

    async def run(self) -> None:
        while not self._over:
            sent = await self._marq.send_many("load", 20, partition=self.rounds % 2)
            await self._marq.acquire(*sent, lease=LEASE_SECONDS)
            await self._marq.ack(*sent[::2])
            self.finished += sent[::2]
            self.still_open += sent[1::2]
            self.rounds += 1
            # A load, and no race with the workers for the machine.
            await asyncio.sleep(PAUSE_SECONDS)

    async def goes_on(self) -> None:
        """Return after some more rounds."""
        until = self.rounds + 5

        async def done() -> bool:
            return self.rounds >= until

        await eventually(done)

    def stop(self) -> None:
        self._over = True


@pytest.mark.timeout(900)
async def test_rebalances_and_kills_under_load_lose_no_row_and_fold_none_twice(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    """#91, #92: RocksDB after rebalances; #333: state lost under load; acks that Faust drops at each rebalance.

    What the load has left open comes back when it is released, each message once; what it has finished never does.
    """
    first = await new_worker().start().ready()
    async with Namespace(broker.bootstrap_servers, first.names) as marq:
        load = Load(marq)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            await load.goes_on()
            second = new_worker(like=first).start()
            second.web_port += 1
            await second.ready(1, limit=START_SECONDS)
            await load.goes_on()
            second.kill()
            await first.ready(2, limit=START_SECONDS)
            await load.goes_on()
            first.kill()
            await load.goes_on()
            last = await new_worker(like=first).start().ready(limit=START_SECONDS)
            await load.goes_on()
            load.stop()

        for partition in (0, 1):
            await marq.release(*[sent for sent in load.still_open if sent.source.partition == partition])
        everything = len(load.finished) + len(load.still_open)
        statistics = await eventually(lambda: last.queue("load"), lambda found: found.get("acquired") == everything)
        copies = await eventually(lambda: marq.copies("load"), lambda found: len(found) >= len(load.still_open))

    returned = sorted(dict(copy.headers)["marq-id"].decode() for copy in copies)
    assert returned == ids(load.still_open)
    assert (statistics["acked"], statistics["reacquired"], statistics["late"]) == (len(load.finished), 0, 0)
    assert "Traceback" not in first.log() + second.log() + last.log()
