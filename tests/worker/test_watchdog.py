"""Stalled workers end themselves and name the cause; workers that only wait continue."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer

import marq
from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker, ports
from marq_worker.progress import ProgressReport
from marq_worker.watchdog.broker_probe import BrokerProbe, MarkersPartition
from marq_worker.watchdog.watchdog import ProbeResult
from marq_worker.worker_exit_codes import EXIT_STALLED
from tests.worker import standstill
from tests.worker.conftest import workers
from tests.worker.handling import Handlers
from tests.worker.harness import ROOT, Namespace, Worker, eventually

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
QUEUES = """
[queues]
coroutine = { handler = "handlers_of_the_test:coroutine" }
"""
#: Output with nothing read and nothing due.
READ = ProgressReport((0,), 0)
#: Far above what any step of a worker takes, also on a starved machine.
WATCHDOG_SECONDS = 12
LIMIT_SECONDS = 120.0
patiently = functools.partial(eventually, limit=LIMIT_SECONDS)


class Victim:
    """A worker that the test can stall."""

    def __init__(
        self, new_worker: Make, directory: Path, *, queues: str = "", modules: Path = ROOT, **settings: str
    ) -> None:
        self.directory = directory
        directory.mkdir()
        self.worker = new_worker(
            data_directory=directory / "data",
            queues=queues,
            environment={
                "PYTHONPATH": f"{standstill.site_folder(directory)}:{ROOT}:{modules}",
                "MARQ_WATCHDOG": str(WATCHDOG_SECONDS),
                **settings,
            },
        )

    async def starts_and_stands_still(self, how: Callable[[], object]) -> None:
        await self.worker.start().ready(limit=LIMIT_SECONDS)
        await self.stands_still(how)

    async def stands_still(self, how: Callable[[], object]) -> None:
        standstill.stand_still(self.directory, how)
        await eventually(self._obeyed)

    async def _obeyed(self) -> bool:
        return standstill.is_obeyed(self.directory)

    async def last_words(self) -> str:
        """Wait for the end that the watchdog makes; return what it said."""
        assert await self.worker.ended(LIMIT_SECONDS) == EXIT_STALLED, self.worker.log()
        [words] = [line for line in self.worker.log().splitlines() if "watchdog: " in line]
        return words


async def write_markers(broker: EmbeddedBroker, victim: Victim) -> None:
    async with Namespace(broker.bootstrap_servers, victim.worker.names) as marq:
        for partition in (0, 1):
            await marq.acquire(await marq.send("waits", partition=partition), lease=60)


@pytest.mark.timeout(600)
async def test_a_stalled_worker_ends_itself_and_names_what_stalled(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Consumers that die slowly (faust-streaming #175, #640) stay in their group and are never heard of again.

    All at once, for each takes its time: code that blocks the event loop, a consumer that fetches no more, and an owner
    that does not come back from folding.
    """
    blocked, deaf, stuck = (Victim(new_worker, tmp_path / name) for name in ("blocked", "deaf", "stuck"))
    await blocked.starts_and_stands_still(standstill.event_loop)
    await deaf.starts_and_stands_still(standstill.fetch)
    await stuck.starts_and_stands_still(standstill.fold)
    await asyncio.gather(write_markers(broker, deaf), write_markers(broker, stuck))

    reasons = [asyncio.create_task(why_not(victim.worker, "/healthz")) for victim in (deaf, stuck)]
    words = await asyncio.gather(*(victim.last_words() for victim in (blocked, deaf, stuck)))

    # A supervisor could have known for half of that time.
    for subject, found in await asyncio.gather(*reasons):
        assert subject.startswith("markers partition ")
        assert found.startswith("makes no progress, although it has work")
    assert f"watchdog: the event loop has had no turn, for {WATCHDOG_SECONDS} s" in words[0]
    assert "most recent call first" in blocked.worker.log(), "where each thread stood"
    # A consumer may bring what it had fetched before, and so its own TICK is what is missing.
    assert re.search(r"markers partition \d stalled: (available records are not read|its own TICK)", words[1])
    assert re.search(r"markers partition \d stalled: ", words[2])


@pytest.mark.timeout(600)
async def test_a_worker_that_does_not_get_out_of_a_rebalance_ends_itself(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    # Faust's variable: until then the broker waits for it, and a rebalance with other members is no reason to end
    # for.
    lost = Victim(new_worker, tmp_path / "lost", BROKER_REBALANCE_TIMEOUT="6")
    await lost.starts_and_stands_still(standstill.rebalance)
    other = new_worker(like=lost.worker, PYTHONPATH=str(ROOT)).start()

    words = await lost.last_words()

    # What waits in its partitions may be missed first: nothing is read in a rebalance.
    assert re.search(r"(a rebalance of the group .*-app|markers partition \d) stalled: ", words), words
    assert other.exit_code is None


@pytest.mark.timeout(600)
async def test_a_handlers_process_whose_consumer_brings_nothing_ends_and_is_followed_by_another(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path, handlers: Handlers
) -> None:
    victim = Victim(new_worker, tmp_path / "victim", queues=QUEUES, modules=handlers.directory)
    await victim.worker.start().ready(limit=LIMIT_SECONDS)

    async with marq.Producer(broker.bootstrap_servers, prefix=victim.worker.names.prefix) as producer:
        await producer.send("coroutine", b"one")
        [one] = await handlers.has_noted("coroutine", 1)
        await victim.stands_still(standstill.handlers_fetch)
        standstill.take_back(victim.directory)

        async def by_others() -> set[int]:
            # Always something to be read: a fetch that was under way brings the first of it.
            await producer.send("coroutine", b"more")
            return {start["worker"] for start in await handlers.noted("coroutine")} - {one["worker"]}

        await patiently(by_others)

    assert f"{one['worker']} has ended with exit code {EXIT_STALLED}" in victim.worker.log()
    assert "stalled: available records are not read" in victim.worker.log()
    assert victim.worker.exit_code is None


@pytest.mark.timeout(600)
async def test_a_handlers_process_that_does_not_get_out_of_a_rebalance_ends_itself(
    new_worker: Make, broker: EmbeddedBroker, tmp_path: Path, handlers: Handlers
) -> None:
    # Faust's variable, as above.
    victim = Victim(
        new_worker, tmp_path / "victim", queues=QUEUES, modules=handlers.directory, BROKER_REBALANCE_TIMEOUT="6"
    )
    await victim.worker.start().ready(limit=LIMIT_SECONDS)
    async with marq.Producer(broker.bootstrap_servers, prefix=victim.worker.names.prefix) as producer:
        await producer.send("coroutine", b"one")
        await handlers.has_noted("coroutine", 1)
    await victim.stands_still(standstill.handlers_rebalance)
    standstill.take_back(victim.directory)

    # A second member starts a rebalance of the group.
    new_worker(like=victim.worker, PYTHONPATH=f"{ROOT}:{handlers.directory}").start()

    async def ended() -> bool:
        return f"has ended with exit code {EXIT_STALLED}" in victim.worker.log()

    await patiently(ended)

    assert re.search(r"a rebalance of the group .* stalled: it does not end", victim.worker.log())
    assert victim.worker.exit_code is None


@pytest.mark.timeout(600)
async def test_a_worker_whose_broker_hangs_and_one_that_was_stopped_itself_go_on(tmp_path: Path) -> None:
    with EmbeddedBroker() as broker, contextlib.contextmanager(workers)(broker, tmp_path) as new_worker:
        worker = await new_worker(environment={"MARQ_WATCHDOG": "8"}).start().ready(limit=LIMIT_SECONDS)
        async with Namespace(broker.bootstrap_servers, worker.names) as marq_:
            sent = await marq_.send_many("waits", 2)
            await marq_.applied(await marq_.acquire(sent[0], lease=1))
            await eventually(lambda: marq_.copies_of(sent[0]))
            await marq_.applied(await marq_.acquire(sent[1], lease=8))

            broker.pause()
            # A restart would not help.
            assert await why_not(worker, "/readyz") == ("broker", "does not answer")
            assert (await worker.page("/healthz"))[0] == 200
            # Work is due meanwhile, and the witness finds more than once that it can't be done.
            await eventually(
                lambda: times(worker, "the watchdog waits, "), lambda count: count >= 2, limit=LIMIT_SECONDS
            )
            broker.resume()
            await patiently(lambda: marq_.copies_of(sent[1]))
            await patiently(lambda: worker.page("/readyz"), lambda found: found[0] == 200)
            worker.pause()
            last = await marq_.send("waits")
            await marq_.acquire(last, lease=12)
            # As long as it takes to be thrown out of the group.
            await eventually(worker.members, lambda count: count == 0)
            worker.resume()
            await patiently(lambda: marq_.copies_of(last))

        assert worker.exit_code is None, worker.log()


async def why_not(worker: Worker, path: str) -> tuple[str, str]:
    """Wait until a page says that the worker is not live, or not ready; return the first reason."""
    _, text = await patiently(lambda: worker.page(path), lambda found: found[0] == 503)
    first = json.loads(text)["reasons"][0]
    return first["subject"], first["found"]


async def times(worker: Worker, text: str) -> int:
    """How often something stands in a worker's log."""
    return worker.log().count(text)


@pytest_asyncio.fixture
async def client(broker: EmbeddedBroker, names: Names) -> ClientSettings:
    """With existing topics."""
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": names.prefix, "partitions": 1}, environment={})
    await ensure_topics(settings, changelog=True)
    return settings


async def ask(client: ClientSettings, standing: ProgressReport, *, last: bool = False) -> ProbeResult:
    markers = MarkersPartition(0, client.names.changelog)
    return await asyncio.to_thread(BrokerProbe(client).ask, markers, standing, last)


async def test_a_witness_finds_markers_and_takes_control_records_for_none(client: ClientSettings) -> None:
    owner = AIOKafkaProducer(
        transactional_id=client.names.transactional_id(0), bootstrap_servers=client.bootstrap_servers
    )
    async with owner:
        nothing = await ask(client, READ)
        await owner.begin_transaction()
        await owner.send_and_wait(client.names.markers, b"never", partition=0)
        await owner.abort_transaction()
        aborted = await ask(client, READ)
        await owner.begin_transaction()
        await owner.send_and_wait(client.names.markers, b"marker", partition=0)
        await owner.commit_transaction()
        # The broker ends a transaction a moment after it says so.
        await eventually(lambda: ask(client, READ), lambda answer: answer is ProbeResult.WORK_WAITS)
        behind = await ask(client, ProgressReport((0,), 3))

    assert {nothing, aborted, behind} == {ProbeResult.NOTHING_TO_DO}


async def test_the_last_question_leaves_nothing_that_anybody_reads(client: ClientSettings) -> None:
    owes = ProgressReport((0,), None, "it is recovering, and no owner")

    assert await ask(client, owes, last=True) is ProbeResult.WORK_WAITS
    assert await ask(client, READ) is ProbeResult.NOTHING_TO_DO


async def test_a_witness_without_a_broker_says_so() -> None:
    nowhere = ClientSettings.read(f"127.0.0.1:{ports.free_port('127.0.0.1')}", {}, environment={})

    assert await ask(nowhere, ProgressReport((0,), None, "it is waiting, and no owner"), last=True) is ProbeResult.AWAY
