"""What stock Faust does and Marq must not: each hazard of Faust that would lose or double messages, by name.

Numbers are those of issues in faust-streaming/faust; more of them have their tests in test_faust_issues.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import rocksdict
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.consumer.subscription_state import TopicPartitionState
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread
from faust.types import TP, ConsumerMessage
from faust.types.enums import ProcessingGuarantee

from agents.fetched import Fetched
from app import app
from app.batching import BatchConsumer, BatchThread
from app.worker import claim_slot
from broker import EmbeddedBroker
from marq.core import rows
from tests.worker.harness import ROOT, Installation, Sent, Worker, admin, eventually, throughout

Make = Callable[..., Worker]
STATIC = {"MARQ_INSTANCE_ID": "one"}
#: Faust commits what was acknowledged this often (broker_commit_interval), and a little.
COMMIT_SECONDS = 3.3
#: Too small for rows, large enough for the mark that ends a transaction: without that it could never be aborted.
REFUSING_BYTES = 100


@pytest_asyncio.fixture
async def worker(new_worker: Make) -> Worker:
    return await new_worker(environment=STATIC).start().ready()


@pytest_asyncio.fixture
async def marq(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Installation]:
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        yield installation


async def ahead(marq: Installation) -> dict[int, int]:
    """By how many markers each committed offset is ahead of what the changelog has: 0 at the most is right."""
    committed = await marq.committed()  # first: what is durable only grows meanwhile
    durable = await marq.durable()
    return {partition: offset - 1 - durable.get(partition, -1) for partition, offset in committed.items()}


async def refuse_changelog(marq: Installation, limit_bytes: int | None) -> None:
    """Let the broker refuse every write to the changelog; None: no more."""
    config = await marq.config(marq.names.changelog)
    kept = {name: config[name] for name in ("cleanup.policy", "delete.retention.ms")}
    limit = str(limit_bytes or 4 << 20)
    await marq.alter(marq.names.changelog, {**kept, "max.message.bytes": limit})


async def opened_and_finished(marq: Installation, queue: str, *, lease: float) -> tuple[list[Sent], list[Sent], object]:
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
    # Rows are written less often than offsets are committed: whatever was acknowledged too early would be committed.
    worker = await new_worker(environment={"MARQ_FLUSH_INTERVAL": "5"}).start().ready()
    async with Installation(broker.bootstrap_servers, worker.names) as marq:
        await offsets_follow_the_changelog(marq)


async def offsets_follow_the_changelog(marq: Installation) -> None:
    async def traffic() -> dict[int, int]:
        await opened_and_finished(marq, "traffic", lease=60)
        return await ahead(marq)

    await throughout(COMMIT_SECONDS, traffic, lambda found: all(count <= 0 for count in found.values()))

    assert await eventually(marq.committed), "no offset was ever committed: nothing was shown"


async def test_a_failed_changelog_write_is_not_passed_over_and_rocksdb_is_never_ahead_of_it(
    worker: Worker, marq: Installation, new_worker: Make
) -> None:
    """Stock Faust logs a failed changelog write, commits the offset all the same and keeps the row in RocksDB only."""
    _, open_before, last = await opened_and_finished(marq, "refused", lease=30)
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
    assert sorted(dict(copy.headers)["marq-id"].decode() for copy in copies) == sorted(sent.id for sent in still_open)
    figures = await eventually(lambda: successor.queue("refused"), lambda found: found["redelivered"] == 5)
    assert (figures["acquired"], figures["acked"], figures["in_flight"]) == (20, 10, len(open_before))
    assert (figures["reacquired"], figures["late"]) == (0, 0)
    assert not [copy for sent in done for copy in await marq.copies_of(sent)]


async def test_a_worker_whose_changelog_write_failed_goes_on_by_itself(worker: Worker, marq: Installation) -> None:
    await refuse_changelog(marq, REFUSING_BYTES)
    _, still_open, last = await opened_and_finished(marq, "refused", lease=2)
    await eventually(worker.partitions, lambda found: any(part["state"] == "waiting" for part in found.values()))

    await refuse_changelog(marq, None)
    await marq.applied(last)
    copies = await eventually(lambda: marq.copies("refused"), lambda found: len(found) >= 5)

    assert len(copies) == len(still_open)
    assert (await worker.queue("refused"))["acked"] == 5
    assert worker.exit_code is None


async def test_markers_that_are_read_again_are_skipped_by_the_applied_offset_and_old_files_are_not_trusted(
    worker: Worker, marq: Installation, new_worker: Make
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
    figures = await successor.queue("replayed")
    assert (figures["acquired"], figures["acked"], figures["reacquired"], figures["late"]) == (10, 5, 0, 0)
    await marq.folded_only_after(successor, applied)
    found = await successor.partitions()
    assert "older than half of the changelog's delete.retention.ms" in successor.log()
    assert found[last.partition]["recovered_records"] >= len(still_open) + 3


async def test_a_position_that_retention_has_removed_stops_the_partition_instead_of_being_reset(
    worker: Worker, marq: Installation, new_worker: Make
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
    figures = await eventually(successor.partitions, lambda found: found.get(unread.partition, {}).get("alarm"))

    assert re.search(r"retention has removed everything before \d+", figures[unread.partition]["alarm"])
    assert figures[unread.partition]["state"] == "stopped"
    assert figures[1 - unread.partition]["alarm"] == ""


async def test_an_idle_worker_writes_nothing_uses_little_memory_and_is_reachable_from_this_machine_only(
    worker: Worker, marq: Installation
) -> None:
    """One worker for all that can be seen of one that has nothing to do."""
    await nothing_is_written(worker, marq)
    await pages_of_faust_are_not_there(worker)
    only_the_loopback_address_answers(worker)
    caches_are_small(worker)


async def nothing_is_written(worker: Worker, marq: Installation) -> None:
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
    shutil.copytree(ROOT / "agents", tmp_path / "agents", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "agents" / "tracker.py").write_text("raise ImportError('no tracker today')\n")

    worker = new_worker().start()

    assert await worker.ended() != 0
    assert "no tracker today" in worker.log()


async def test_records_of_a_partition_that_becomes_active_during_a_fetch_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """#175, #640: Faust adds to the set of active partitions while a fetch with it is under way, in another thread.

    A TICK that was dropped so stopped its partition for ever: on a quiet partition no later record shows the gap.
    """
    known, added = TP("markers", 0), TP("markers", 1)
    active = {known}
    tick = SimpleNamespace(offset=7)

    async def fetch(*_: object, **__: object) -> dict[TopicPartition, list[SimpleNamespace]]:
        active.add(added)
        return {TopicPartition(*added): [tick]}

    monkeypatch.setattr(AIOKafkaConsumerThread, "_fetch_records", fetch)
    thread = new_thread()

    found = await thread._fetch_records(Consumer(), active)

    assert found == {added: Fetched(7, 8, [tick])}


def new_thread() -> BatchThread:
    thread = object.__new__(BatchThread)
    thread._passed, thread._reads = {}, {}
    return thread


class Consumer:
    """Stands in for aiokafka's: one partition, with the real state of it."""

    partition = TP("messages", 0)

    def __init__(self, position: int = 0) -> None:
        self.state = TopicPartitionState(None)
        self.state.seek(position)
        assignment = SimpleNamespace(state_value=lambda tp: self.state if tp == self.partition else None)
        self._subscription = SimpleNamespace(subscription=SimpleNamespace(assignment=assignment))

    def reads(self, end: int, *offsets: int) -> list[SimpleNamespace]:
        """What the fetcher does to read on to an offset; records are at these offsets, the others are control's."""
        self.state.consumed_to(end)
        return [SimpleNamespace(offset=offset) for offset in offsets]


async def fetched(
    monkeypatch: pytest.MonkeyPatch, thread: BatchThread, consumer: Consumer, fetch: Callable[[], list[SimpleNamespace]]
) -> Fetched | None:
    async def fetch_records(*_: object, **__: object) -> dict[TopicPartition, list[SimpleNamespace]]:
        return {TopicPartition(*consumer.partition): fetch()}

    monkeypatch.setattr(AIOKafkaConsumerThread, "_fetch_records", fetch_records)
    found = await thread._fetch_records(consumer, {consumer.partition})
    return found.get(consumer.partition)


async def test_a_seek_forward_during_a_fetch_never_makes_records_pass_for_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """#216, #221: Faust seeks to the committed offsets whenever it likes, and a queue may be behind them."""
    thread, consumer = new_thread(), Consumer(position=100)

    def with_records() -> list[SimpleNamespace]:
        consumer.state.seek(500)
        return consumer.reads(502, 500, 501)

    def without_records() -> list[SimpleNamespace]:
        consumer.state.seek(900)
        return []

    first = await fetched(monkeypatch, thread, consumer, with_records)
    nothing = await fetched(monkeypatch, thread, consumer, without_records)
    last = await fetched(monkeypatch, thread, consumer, lambda: consumer.reads(901, 900))

    assert first is not None
    assert (first.start, first.end) == (500, 502)
    assert nothing is None
    assert last is not None
    assert (last.start, last.end) == (900, 901)


async def test_control_records_are_read_with_what_follows_them_whenever_somebody_seeks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark of a transaction is at 100: who waits for what is there would go back to it for ever."""
    thread, consumer = new_thread(), Consumer(position=500)

    def back_to_the_mark() -> list[SimpleNamespace]:
        consumer.state.seek(100)
        return consumer.reads(101)

    nothing = await fetched(monkeypatch, thread, consumer, back_to_the_mark)
    thread._ensure_consumer = lambda: consumer  # type: ignore[method-assign]
    returned_to = thread.returned_to(consumer.partition)
    batch = await fetched(monkeypatch, thread, consumer, lambda: consumer.reads(104, 101, 102))

    assert nothing is None
    assert returned_to == 100
    assert batch is not None
    assert (batch.start, batch.end) == (100, 104)


async def test_a_worker_without_partitions_stays_in_the_group(new_worker: Make, broker: EmbeddedBroker) -> None:
    """#175: stock Faust polls nothing then, and aiokafka leaves the group after a time: nobody is there any more."""
    poll_seconds = 10
    # The second is one of Faust's own variables: its default is 1000.
    environment = {"MARQ_PARTITIONS": "1", "BROKER_MAX_POLL_INTERVAL": str(poll_seconds)}
    owner = await new_worker(environment=environment).start().ready(1)
    idle = new_worker(like=owner, MARQ_WEB_PORT=str(owner.web_port + 1)).start()
    async with admin(broker.bootstrap_servers) as client:

        async def members() -> int:
            [response] = await client.describe_consumer_groups([owner.names.app_id])
            return len(response.groups[0][5])

        async def ended() -> list[int | None]:
            return [owner.exit_code, idle.exit_code]

        await eventually(members, lambda count: count == 2)
        await throughout(poll_seconds * 1.2, ended, lambda codes: codes == [None, None])
        # On a starved machine either may be late for a poll, leave, and join again; stock Faust's never comes back.
        await eventually(members, lambda count: count == 2, limit=60)


async def test_a_batch_that_was_fetched_while_its_partition_is_paused_is_delivered_all_the_same() -> None:
    """Stock Faust drops it, and reads on after it."""
    paused, gone, changelog = TP("messages", 0), TP("messages", 1), TP("changelog", 0)
    delivered: list[TP] = []

    async def callback(message: ConsumerMessage) -> None:
        delivered.append(message.tp)

    async def wait_first(delivery: Awaitable[None], suspended: Awaitable[bool]) -> None:
        await delivery
        asyncio.ensure_future(suspended).cancel()

    consumer = object.__new__(BatchConsumer)
    consumer.__dict__.update(
        app=SimpleNamespace(consumer_generation_id=1, tables=SimpleNamespace(changelog_topics={changelog.topic})),
        flow_active=True,
        suspend_flow=asyncio.Event(),
        callback=callback,
        wait_first=wait_first,
        _paused_partitions={paused, changelog},
        _read_offset={},
    )
    batch = Fetched(0, 1, [SimpleNamespace(offset=0, timestamp=0, timestamp_type=0)])

    await consumer._deliver(dict.fromkeys([paused, gone, changelog], batch), set(), 1)

    assert delivered == [paused]


def test_two_workers_on_one_machine_never_share_a_data_directory(tmp_path: Path) -> None:
    first, held = claim_slot(tmp_path)
    second, also_held = claim_slot(tmp_path)
    held.close()
    third, again_held = claim_slot(tmp_path)

    assert (first, second, third) == (0, 1, 0)
    also_held.close()
    again_held.close()


def test_what_fausts_own_exactly_once_and_standbys_break_is_not_used() -> None:
    assert app.conf.processing_guarantee is ProcessingGuarantee.AT_LEAST_ONCE
    assert app.conf.table_standby_replicas == 0
    assert not app.conf.autodiscover
    assert app.conf.topic_disable_leader
