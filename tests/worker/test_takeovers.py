"""Workers that stop, hang or lose their broker: others redeliver open messages once, and finished messages never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marq.wire.markers import Fact, Kind, Tick
from marq_worker.broker import EmbeddedBroker
from marq_worker.worker_exit_codes import EXIT_FENCED
from tests.worker.conftest import workers
from tests.worker.harness import Namespace, Worker, eventually, kinds, shared_out
from tests.worker.restarting import STATIC, came_back, half_done, ids, witness

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
#: A worker must end within its limit for a stop, and not only when its requests time out after 90 s.
STOP = {"MARQ_STOP_TIMEOUT": "4"}
STOP_LIMIT_SECONDS = 60.0


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


async def test_after_a_clean_stop_no_old_marker_is_read_again(new_worker: Make, broker: EmbeddedBroker) -> None:
    worker = await new_worker(environment={**STATIC, "MARQ_STOP_TIMEOUT": "60"}).start().ready()
    async with Namespace(broker.bootstrap_servers, worker.names) as marq:
        config = await marq.config(marq.names.changelog)
        _, still_open = await half_done(marq, "clean", lease=6)
        # Their leases end while the worker stops.
        await half_done(marq, "busy", lease=0.5)

        await worker.stop()
        committed, ends = await marq.committed(), await marq.ends(marq.names.markers)
        durable = await marq.durable()
        successor = await new_worker(like=worker).start().ready()
        returned = await came_back(marq, "clean", still_open)

        assert worker.exit_code == 0
        assert "Traceback" not in worker.log()
        # What it wrote last of all it does not read itself.
        unread = await marq.markers_between(committed, ends)
        assert all(isinstance(marker, Fact | Tick) for marker in unread)
        assert unread == await marq.markers_between({number: offset + 1 for number, offset in durable.items()}, ends)
        partitions = await successor.owned_partitions()
        # A takeover may read again what it was given while it read the table.
        assert sum(part["skipped"] for part in partitions.values()) <= len(unread)
        await marq.folded_only_after(successor, durable)
    assert {number: part["recovered_records"] for number, part in partitions.items()} == {0: 0, 1: 0}
    assert returned == ids(still_open)
    assert (config["cleanup.policy"], int(config["delete.retention.ms"])) == ("compact", 7 * 24 * 3600 * 1000)


# --- without a broker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_worker_outlives_a_restart_of_its_broker_and_stops_within_its_limit_without_a_broker(
    own_broker: EmbeddedBroker, new_worker_of_own: Make, how: str
) -> None:
    worker = await new_worker_of_own(environment=STOP).start().ready()
    async with Namespace(own_broker.bootstrap_servers, worker.names) as marq:
        done, still_open = await half_done(marq, "outage", lease=3)

    getattr(own_broker, how)()
    own_broker.start()

    async with Namespace(own_broker.bootstrap_servers, worker.names) as marq:
        assert await came_back(marq, "outage", still_open) == ids(still_open)
        await witness(marq, "after the outage")
        assert not [copy for sent in done for copy in await marq.copies_of(sent)]
        assert len(await marq.copies("outage")) == len(still_open)
        counts = await eventually(lambda: worker.queue("outage"), lambda found: found.get("redelivered") == 20)
        await half_done(marq, "unfinished", lease=60)
    assert (counts["acquired"], counts["acked"], counts["reacquired"], counts["late"]) == (40, 20, 0, 0)
    assert worker.exit_code is None

    getattr(own_broker, how)()
    await worker.stop(limit=STOP_LIMIT_SECONDS)

    assert "Exception in thread" not in worker.log()


async def test_a_worker_that_is_stopped_in_the_middle_of_a_transaction_ends_cleanly(
    own_broker: EmbeddedBroker, new_worker_of_own: Make
) -> None:
    worker = await new_worker_of_own(environment={**STATIC, **STOP}).start().ready()
    async with Namespace(own_broker.bootstrap_servers, worker.names) as marq:
        _, still_open = await half_done(marq, "cut short", lease=15)
        own_broker.pause()
        try:
            # The leases have ended: the broker does not answer the TICKs that the worker sends.
            await eventually(lambda: worker.queue("cut short"), lambda found: found.get("oldest_lease_seconds", 0) > 16)
            await worker.stop(limit=STOP_LIMIT_SECONDS)
        finally:
            own_broker.resume()
        successor = await new_worker_of_own(like=worker).start().ready()
        returned = await came_back(marq, "cut short", still_open)
        await witness(marq)

        assert "AssertionError" not in worker.log()
        assert returned == ids(still_open)
        assert len(await marq.copies("cut short")) == len(still_open)
        assert successor.exit_code is None


# --- two workers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The worker that stays in all tests of two workers."""
    with Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("first")) as worker:
        yield worker


@pytest.fixture
def second(first: Worker) -> Iterator[Worker]:
    """A worker that is not started, with the same settings: it takes the next port and another data directory."""
    worker = first.again()
    worker.web_port += 1
    yield worker
    worker.close()


async def test_two_workers_share_the_partitions_and_one_takes_over_when_the_other_is_killed(
    first: Worker, second: Worker, broker: EmbeddedBroker
) -> None:
    await first.ready()
    second.start()
    await shared_out(first, second)

    async with Namespace(broker.bootstrap_servers, first.names) as marq:
        done, still_open = await half_done(marq, "shared", lease=30)
        from_first, from_second = [
            await eventually(worker.published, lambda found: found.get("complete")) for worker in (first, second)
        ]
        second.kill()
        returned = await came_back(marq, "shared", still_open)
        await witness(marq)
        copies = await marq.copies("shared")
        facts = [kinds(await marq.fact_of(sent)) for sent in still_open]

    # Each shows the sum of both, and each has its own directory and port.
    for counts in (from_first, from_second):
        assert counts["queues"]["shared"]["in_flight"] == 20
        assert counts["queues"]["shared"]["acked"] == 20
        assert {worker["url"] for worker in counts["workers"]} == {first.url, second.url}
    assert {path.name for path in first.data_directory.iterdir()} == {"worker-0", "worker-1"}
    assert returned == ids(still_open)
    assert len(copies) == len(still_open)
    assert facts == [[Kind.REDELIVERED]] * len(still_open)
    assert not set(ids(done)) & set(returned)
    assert first.exit_code is None


async def test_a_worker_that_was_paused_past_its_session_redelivers_nothing_a_second_time(
    first: Worker, second: Worker, broker: EmbeddedBroker
) -> None:
    await first.ready()
    second.start()
    await shared_out(first, second)

    async with Namespace(broker.bootstrap_servers, first.names) as marq:
        _, still_open = await half_done(marq, "zombie", lease=3)
        second.pause()
        # Only the first worker can have sent those of the paused worker's partition, after the end of its session.
        returned = await came_back(marq, "zombie", still_open)
        second.resume()
        await shared_out(first, second)
        await witness(marq)
        copies = await marq.copies("zombie")
        facts = [kinds(await marq.fact_of(sent)) for sent in still_open]

    assert returned == ids(still_open)
    assert len(copies) == len(still_open)
    assert facts == [[Kind.REDELIVERED]] * len(still_open)
    # A new owner counts what was redelivered only when it has read the facts.
    await eventually(lambda: first.queue("zombie"), lambda found: found.get("redelivered") == len(still_open))
    assert (first.exit_code, second.exit_code) == (None, None)


async def test_the_first_of_two_workers_with_one_instance_id_ends_and_the_second_continues_at_its_own_address(
    new_worker: Make,
) -> None:
    worker = await new_worker(environment=STATIC).start().ready()
    second = new_worker(like=worker).start()
    # The first worker has the port, so the second takes the next.
    second.web_port += 1
    await second.ready()

    assert await worker.ended() == EXIT_FENCED
    assert "another worker joined with the same MARQ_INSTANCE_ID 'one'" in worker.log()
    await second.ready()
    assert second.log().count("Joined group") == 1
