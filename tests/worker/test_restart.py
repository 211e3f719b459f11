"""Workers that end, die, hang or lose their broker: what was open comes back once, what was finished never does."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer

from app.faust_app import EXIT_FENCED
from broker import EmbeddedBroker, ports
from marq.core import rows
from marq.core.markers import Kind
from tests.worker.conftest import workers
from tests.worker.harness import HOLDER, Installation, Sent, Worker, eventually, kinds, throughout

Make = Callable[..., Worker]
#: A restart with the same instance id needs no rebalance, so nobody waits for the dead one's session.
STATIC = {"MARQ_INSTANCE_ID": "one"}


@pytest.fixture(scope="module")
def fragile_broker() -> Iterator[EmbeddedBroker]:
    """A broker for tests that stop or kill it; each finds it running."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def own_broker(fragile_broker: EmbeddedBroker) -> EmbeddedBroker:
    return fragile_broker.start()


@pytest.fixture
def new_worker_of_own(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Make]:
    yield from workers(own_broker, tmp_path)


@pytest_asyncio.fixture
async def worker(new_worker: Make) -> Worker:
    return await new_worker(environment=STATIC).start().ready()


@pytest_asyncio.fixture
async def marq(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Installation]:
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        yield installation


async def half_done(marq: Installation, queue: str, *, lease: float, count: int = 20) -> tuple[list[Sent], list[Sent]]:
    """Messages on both source partitions, acquired; the first half acknowledged, the second half open."""
    done: list[Sent] = []
    still_open: list[Sent] = []
    for partition in (0, 1):
        sent = await marq.send_many(queue, count, partition=partition)
        await marq.acquire(*sent, lease=lease)
        # In a flush of its own: the ACQUIRE has left rows, and the ACKs delete them.
        middle = count // 2
        last = await marq.ack(*sent[:middle])
        await marq.applied(last)
        # RocksDB is written right after the changelog: once the next write is there, this one is on the disk too.
        finished = await marq.send(f"{queue} done", partition=partition)
        await marq.acquire(finished, lease=60)
        await marq.applied(await marq.ack(finished))
        done += [*sent[:middle], finished]
        still_open += sent[middle:]
    return done, still_open


async def came_back(marq: Installation, queue: str, expected: list[Sent]) -> list[str]:
    """Wait until as many copies are there as are expected; return their ids."""
    copies = await eventually(lambda: marq.copies(queue), lambda found: len(found) >= len(expected))
    return sorted(dict(record.headers)["marq-id"].decode() for record in copies)


async def witness(marq: Installation, queue: str, *, partitions: tuple[int, ...] = (0, 1)) -> None:
    """Wait until messages that are acquired only now have come back: whatever was due before has fired by then."""
    for partition in partitions:
        sent = await marq.send(queue, partition=partition)
        await marq.acquire(sent, lease=0.2)
        await eventually(lambda sent=sent: marq.copies_of(sent))


def ids(messages: list[Sent]) -> list[str]:
    return sorted(message.id for message in messages)


@pytest.mark.parametrize("data_directory", ["kept", "deleted"])
async def test_after_kill_9_open_messages_come_back_once_and_finished_ones_never(
    worker: Worker, marq: Installation, new_worker: Make, data_directory: str
) -> None:
    done, still_open = await half_done(marq, "crash", lease=6)
    applied = await marq.durable()
    worker.kill()
    if data_directory == "deleted":
        shutil.rmtree(worker.data_directory)

    successor = await new_worker(like=worker).start().ready()
    returned = await came_back(marq, "crash", still_open)
    await witness(marq, "witness")

    assert returned == ids(still_open)
    assert not [copy for sent in done for copy in await marq.copies_of(sent)]
    figures = await successor.queue("crash")
    assert (figures["acquired"], figures["acked"], figures["redelivered"]) == (40, 20, 20)
    assert (figures["reacquired"], figures["late"]) == (0, 0), "a marker was folded twice"
    # State came from the table, not from a replay: exactly the markers after the applied offset were folded.
    await marq.folded_only_after(successor, applied)
    partitions = await successor.partitions()
    recovered = [part["recovered_records"] for part in partitions.values()]
    # The position, the marks and the counters: no more than the last write, which the kill may have cut short.
    assert all(recovered) if data_directory == "deleted" else max(recovered) <= 4, recovered


async def test_after_a_clean_stop_no_old_marker_is_read_again(
    worker: Worker, marq: Installation, new_worker: Make
) -> None:
    _, still_open = await half_done(marq, "clean", lease=6)

    await worker.stop()
    committed, ends = await marq.committed(), await marq.ends(marq.names.markers)
    before = {number: end - 1 for number, end in ends.items()}
    durable = await marq.durable()
    successor = await new_worker(like=worker).start().ready()
    returned = await came_back(marq, "clean", still_open)

    assert worker.exit_code == 0
    # What stands between the two is Kafka's own: the end marks of transactions.
    assert await marq.markers_after({number: offset - 1 for number, offset in committed.items()}) == (
        await marq.markers_after(before)
    )
    assert await marq.markers_after(durable) == await marq.markers_after(before)
    partitions = await successor.partitions()
    assert {number: part["skipped"] for number, part in partitions.items()} == {0: 0, 1: 0}
    await marq.folded_only_after(successor, before)
    assert {number: part["recovered_records"] for number, part in partitions.items()} == {0: 0, 1: 0}
    assert returned == ids(still_open)


async def test_what_an_aborted_transaction_wrote_to_the_changelog_is_not_recovered(
    worker: Worker, marq: Installation, new_worker: Make
) -> None:
    _, still_open = await half_done(marq, "kept", lease=6)
    never = await marq.send("never")
    row = rows.encode_row(rows.encode_lease(rows.Lease("never", HOLDER, 1, 0, 0)), never.payload)
    producer = AIOKafkaProducer(bootstrap_servers=marq.bootstrap_servers, transactional_id=f"{marq.names.prefix}-other")
    async with producer:
        await producer.begin_transaction()
        for partition in (0, 1):
            key = rows.row_key(never.source, never.offset)
            await producer.send_and_wait(marq.names.changelog, row, key, partition=partition)
        await producer.abort_transaction()
    worker.kill()
    shutil.rmtree(worker.data_directory)

    successor = await new_worker(like=worker).start().ready()

    assert await came_back(marq, "kept", still_open) == ids(still_open)
    assert await marq.copies_of(never) == []
    figures = await successor.queue("never")
    assert (figures.get("acquired", 0), figures.get("in_flight", 0)) == (0, 0)


async def test_a_worker_stops_within_ten_seconds_with_work_under_way(worker: Worker, marq: Installation) -> None:
    await half_done(marq, "busy", lease=0.5)

    seconds = await worker.stop(limit=10)

    assert worker.exit_code == 0
    assert seconds < 10
    assert "Traceback" not in worker.log()


async def test_a_worker_stops_within_ten_seconds_although_its_broker_is_gone(
    own_broker: EmbeddedBroker, new_worker_of_own: Make
) -> None:
    worker = await new_worker_of_own().start().ready()
    async with Installation(own_broker.bootstrap_servers, worker.names) as marq:
        await half_done(marq, "gone", lease=60)
    own_broker.kill()

    seconds = await worker.stop(limit=12)

    assert seconds <= 10.5


async def test_a_worker_that_is_stopped_in_the_middle_of_a_transaction_ends_cleanly(
    own_broker: EmbeddedBroker, new_worker_of_own: Make
) -> None:
    worker = await new_worker_of_own(environment=STATIC).start().ready()
    async with Installation(own_broker.bootstrap_servers, worker.names) as marq:
        _, still_open = await half_done(marq, "cut short", lease=3)
        own_broker.pause()
        try:
            # The leases are over, so its TICKs are on their way to a broker that does not answer.
            await eventually(lambda: worker.queue("cut short"), lambda found: found["oldest_lease_seconds"] > 4)
            seconds = await worker.stop(limit=12)
        finally:
            own_broker.resume()
        successor = await new_worker_of_own(like=worker).start().ready()
        returned = await came_back(marq, "cut short", still_open)
        await witness(marq, "witness")

        assert seconds <= 10.5
        assert "AssertionError" not in worker.log()
        assert returned == ids(still_open)
        assert len(await marq.copies("cut short")) == len(still_open)
        assert successor.exit_code is None


async def test_a_worker_whose_broker_ended_before_it_ends_too(
    own_broker: EmbeddedBroker, new_worker_of_own: Make
) -> None:
    worker = await new_worker_of_own().start().ready()
    own_broker.stop()

    await worker.stop(limit=12)

    assert "Exception in thread" not in worker.log()


async def test_a_worker_without_a_broker_says_so_and_ends(tmp_path: Path) -> None:
    address = f"127.0.0.1:{ports.free_port('127.0.0.1')}"
    worker = Worker(address, tmp_path, environment={"MARQ_CONNECT_TIMEOUT": "3"}).start()
    try:
        code = await worker.ended(limit=20)
    finally:
        worker.close()

    assert code != 0
    assert re.search(rf"marq: no Kafka broker could be used at {re.escape(address)} within 3 s", worker.log())
    assert "Traceback" not in worker.log()


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_worker_outlives_a_restart_of_its_broker_and_loses_nothing(
    own_broker: EmbeddedBroker, new_worker_of_own: Make, how: str
) -> None:
    worker = await new_worker_of_own().start().ready()
    async with Installation(own_broker.bootstrap_servers, worker.names) as marq:
        done, still_open = await half_done(marq, "outage", lease=3)

    if how == "stopped":
        own_broker.stop()
    else:
        own_broker.kill()
    own_broker.start()

    async with Installation(own_broker.bootstrap_servers, worker.names) as marq:
        assert await came_back(marq, "outage", still_open) == ids(still_open)
        await witness(marq, "after the outage")
        assert not [copy for sent in done for copy in await marq.copies_of(sent)]
        assert len(await marq.copies("outage")) == len(still_open)
        figures = await eventually(lambda: worker.queue("outage"), lambda found: found.get("redelivered") == 20)
    assert (figures["acquired"], figures["acked"], figures["reacquired"], figures["late"]) == (40, 20, 0, 0)
    assert worker.exit_code is None


async def shared_out(*together: Worker, total: int = 2) -> dict[str, Any]:
    """Wait until these workers own all markers partitions, each at least one; return the figures."""

    def fits(figures: dict[str, Any]) -> bool:
        owned = [[p["partition"] for p in w["partitions"] if p["state"] == "owner"] for w in figures.get("workers", [])]
        return len(owned) == len(together) and all(owned) and sum(map(len, owned)) == total

    return await eventually(together[0].figures, fits)


@pytest_asyncio.fixture
async def pair(new_worker: Make) -> tuple[Worker, Worker]:
    """Two workers with the same settings; the first has the port that both were given, the second the next one."""
    first = new_worker().start()
    await eventually(first.has_a_directory)
    second = new_worker(like=first).start()
    second.web_port += 1
    await shared_out(first, second)
    return first, second


async def test_two_workers_share_the_partitions_and_one_takes_over_when_the_other_is_killed(
    pair: tuple[Worker, Worker], broker: EmbeddedBroker
) -> None:
    first, second = pair

    async with Installation(broker.bootstrap_servers, first.names) as marq:
        done, still_open = await half_done(marq, "shared", lease=8)
        from_first, from_second = await first.figures(), await second.figures()
        second.kill()
        returned = await came_back(marq, "shared", still_open)
        await witness(marq, "witness")
        copies = await marq.copies("shared")
        facts = [kinds(await marq.fact_of(sent)) for sent in still_open]

    # Each shows the sum of both, and each had a directory and a port of its own.
    for figures in (from_first, from_second):
        assert figures["complete"]
        assert figures["queues"]["shared"]["in_flight"] == 20
        assert figures["queues"]["shared"]["acked"] == 20
        assert {worker["url"] for worker in figures["workers"]} == {first.canonical_url, second.canonical_url}
    assert {path.name for path in first.data_directory.iterdir()} == {"worker-0", "worker-1"}
    assert returned == ids(still_open)
    assert len(copies) == len(still_open)
    assert facts == [[Kind.REDELIVERED]] * len(still_open)
    assert not set(ids(done)) & set(returned)
    assert first.exit_code is None


async def test_a_worker_that_was_paused_past_its_session_redelivers_nothing_a_second_time(
    pair: tuple[Worker, Worker], broker: EmbeddedBroker
) -> None:
    first, zombie = pair

    async with Installation(broker.bootstrap_servers, first.names) as marq:
        _, still_open = await half_done(marq, "zombie", lease=3)
        zombie.pause()
        # Only the other one can have sent those of the zombie's partition, and only after its session had run out.
        returned = await came_back(marq, "zombie", still_open)
        zombie.resume()
        figures = await shared_out(first, zombie)
        await witness(marq, "witness")
        copies = await marq.copies("zombie")
        facts = [kinds(await marq.fact_of(sent)) for sent in still_open]

    assert returned == ids(still_open)
    assert len(copies) == len(still_open)
    assert facts == [[Kind.REDELIVERED]] * len(still_open)
    assert figures["queues"]["zombie"]["redelivered"] == len(still_open)
    assert (first.exit_code, zombie.exit_code) == (None, None)


async def test_of_two_workers_with_one_instance_id_the_first_ends_and_the_second_goes_on_at_its_own_address(
    worker: Worker, new_worker: Make
) -> None:
    second = new_worker(like=worker)
    second.start()
    # The port of the first one is taken, so it takes the next.
    second.web_port += 1
    await second.ready(limit=30)

    assert await worker.ended(limit=30) == EXIT_FENCED
    assert "another worker joined with the same MARQ_INSTANCE_ID 'one'" in worker.log()
    await second.ready()
    assert second.log().count("Joined group") == 1


async def test_the_changelog_is_compacted_and_keeps_deletions_for_a_week(worker: Worker, marq: Installation) -> None:
    config = await marq.config(marq.names.changelog)

    assert config["cleanup.policy"] == "compact"
    assert int(config["delete.retention.ms"]) == 7 * 24 * 3600 * 1000


async def test_a_second_worker_that_joins_and_leaves_makes_nothing_be_folded_twice(
    new_worker: Make, broker: EmbeddedBroker
) -> None:
    first = await new_worker().start().ready()
    async with Installation(broker.bootstrap_servers, first.names) as marq:
        _, still_open = await half_done(marq, "rebalance", lease=60)
        second = new_worker(like=first).start()
        second.web_port += 1
        await shared_out(first, second)
        _, more = await half_done(marq, "rebalance", lease=60)
        await second.stop()
        await first.ready()
        figures = await eventually(lambda: first.queue("rebalance"), lambda found: found.get("in_flight") == 40)
        await throughout(0.5, lambda: marq.copies("rebalance"), lambda copies: not copies)

    assert len(still_open) + len(more) == 40
    assert (figures["acquired"], figures["acked"], figures["reacquired"], figures["late"]) == (80, 40, 0, 0)
