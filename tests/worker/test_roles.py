"""The roles of a worker, and the life of the processes that run handlers."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import marq
from marq_worker.broker import EmbeddedBroker
from marq_worker.web.liveness_and_readiness import MAX_LOOP_LAG_SECONDS
from tests.worker.handling import Handlers
from tests.worker.harness import LIMIT_SECONDS, Namespace, Worker, eventually, make_topic

pytestmark = pytest.mark.verify

Make = Callable[..., Worker]
#: A lease that can't be what brings a message back within a test.
LONG = 600
QUEUES = """
[queues]
coroutine = { handler = "handlers_of_the_test:coroutine" }
"""


@pytest.fixture
def make(new_worker: Make, handlers: Handlers) -> Make:
    """Makes workers that can import the handlers; ``roles`` are theirs."""

    def make(roles: str = "tracker,handlers,web", *, like: Worker | None = None, **settings: Any) -> Worker:
        if like is not None:
            worker = new_worker(like=like, MARQ_ROLES=roles)
            worker.web_port += 1
            worker.environment["MARQ_WEB_PORT"] = str(worker.web_port)
            return worker
        environment = {**handlers.environment, "MARQ_ROLES": roles, **settings.pop("environment", {})}
        return new_worker(environment=environment, **{"queues": QUEUES, **settings})

    return make


@pytest_asyncio.fixture
async def producer_of(broker: EmbeddedBroker) -> AsyncIterator[Callable[[Worker], Any]]:
    made: list[marq.Producer] = []

    async def make(worker: Worker) -> marq.Producer:
        made.append(marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix))
        await made[-1].start()
        return made[-1]

    yield make
    for producer in made:
        await producer.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie counts as dead.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def gone(*pids: int) -> None:
    async def left() -> list[int]:
        return [pid for pid in pids if alive(pid)]

    await eventually(left, lambda found: not found)


async def running(worker: Worker, *groups: str) -> dict[str, int]:
    """Wait until a worker has handler processes of these groups; return their ids."""

    async def pids() -> dict[str, Any]:
        handlers = await worker.handlers()
        return {group: handlers[group]["pid"] for group in groups if group in handlers}

    return await eventually(pids, lambda found: len(found) == len(groups) and all(found.values()))


# --- roles ------------------------------------------------------------------------------------------------------------


async def test_each_role_does_its_own_part_in_a_worker_of_its_own(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    tracker = await make("tracker,web").start().ready()
    runner = make("handlers", like=tracker)
    runner.data_directory = tracker.directory / "data of the runner"
    runner.environment["MARQ_DATA_DIR"] = str(runner.data_directory)
    runner.start()
    pages = make("web", like=runner).start()
    producer = await producer_of(tracker)

    await producer.send_many("coroutine", [b"%d" % number for number in range(20)])
    noted = await handlers.has_noted("coroutine", 20)
    statistics = await eventually(
        pages.published, lambda found: found.get("queues", {}).get("coroutine", {}).get("acked") == 20
    )

    # The handlers ran where that is the role, in a process below that worker.
    assert {line["parent"] for line in noted} == {runner.pid}
    assert (await tracker.handlers(), await pages.handlers()) == ({}, {})
    # Only the tracker keeps leases: no other worker is in its group or has a folder.
    assert await tracker.members() == 1
    assert not runner.data_directory.exists()
    # Only the role web shows pages, with the statistics of all trackers.
    assert (await runner.page("/"))[0] == 0
    assert statistics["complete"]
    assert {row["url"]: len(row["partitions"]) for row in statistics["workers"]} == {tracker.url: 2, pages.url: 0}
    assert (await pages.page("/"))[0] == 200
    for worker in (tracker, runner, pages):
        assert worker.exit_code is None
        await worker.stop()
        assert worker.exit_code == 0


async def test_a_tracker_without_the_role_web_redelivers_and_its_statistics_are_said_to_be_missing(
    make: Make, broker: EmbeddedBroker
) -> None:
    pages = make("web").start()
    tracker = make("tracker", like=pages).start()

    async with Namespace(broker.bootstrap_servers, pages.names) as namespace:
        await eventually(tracker.members, lambda count: count == 1)
        sent = await namespace.send("emails")
        await namespace.acquire(sent, lease=0.5)
        copies = await eventually(lambda: namespace.copies_of(sent))
        statistics = await eventually(pages.published, lambda found: len(found.get("workers", [])) == 2)

    assert len(copies) == 1
    assert not statistics["complete"]
    [missing] = [worker["url"] for worker in statistics["workers"] if not worker["answered"]]
    assert missing.startswith("no-web://")
    assert missing in (await pages.page("/"))[1]
    assert (await tracker.page("/"))[0] == 0


# --- processes of one worker ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_handlers(tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    return Handlers(tmp_path_factory.mktemp("shared") / "handlers")


@pytest.fixture(scope="module")
def shared_worker(broker: EmbeddedBroker, shared_handlers: Handlers) -> Iterator[Worker]:
    """One worker for the tests that do not end it."""
    environment = {**shared_handlers.environment, "MARQ_HANDLERS": "handlers_of_the_test"}
    with Worker(broker.bootstrap_servers, shared_handlers.directory.parent, environment=environment) as worker:
        yield worker


class Site:
    """The shared worker, and the handlers that a test gives to its queues at run time."""

    def __init__(self, worker: Worker, handlers: Handlers, settings: marq.Queues, producer: marq.Producer) -> None:
        self.worker, self.handlers, self.settings, self.producer = worker, handlers, settings, producer
        self.queues: set[str] = set()

    async def serve(self, queue: str, handler: str, **options: Any) -> int:
        """Give a queue a handler, in a group with the queue's name by default; return the id of the process."""
        settings = {"group": queue, **options}
        self.queues.add(queue)
        await self.settings.change(queue, handler=f"handlers_of_the_test:{handler}", **settings)
        return (await running(self.worker, settings["group"]))[settings["group"]]

    async def acked(self, queue: str, count: int) -> dict[str, Any]:
        """Wait until this many messages of a queue are acknowledged; return the statistics of the queue."""
        return await eventually(lambda: self.worker.queue(queue), lambda found: found.get("acked") == count)


@pytest_asyncio.fixture
async def site(shared_worker: Worker, shared_handlers: Handlers, broker: EmbeddedBroker) -> AsyncIterator[Site]:
    await shared_worker.ready()
    client = {"bootstrap_servers": broker.bootstrap_servers, "prefix": shared_worker.names.prefix}
    async with marq.Queues(**client) as settings, marq.Producer(**client) as producer:
        site = Site(shared_worker, shared_handlers, settings, producer)
        yield site
        for queue in site.queues:
            await settings.reset(queue)


async def test_each_group_with_handlers_has_a_process_of_its_own(site: Site) -> None:
    await site.serve("one", "coroutine")
    await site.serve("two", "coroutine", group="slow work")
    await site.serve("three", "plain", group="slow work")
    await site.settings.change("four", group="consumers")

    for queue in ("one", "two", "three"):
        await site.producer.send(queue, queue.encode())
    noted = [line for queue in ("one", "two", "three") for line in await site.handlers.has_noted(queue, 1)]

    pids = await running(site.worker, "one", "slow work")
    assert {line["queue"]: line["worker"] for line in noted} == {
        "one": pids["one"],
        "two": pids["slow work"],
        "three": pids["slow work"],
    }
    assert len({site.worker.pid, *pids.values()}) == 3
    assert "consumers" not in await site.worker.handlers()


async def test_an_open_circuit_breaker_is_shown_and_dead_letters_nothing(site: Site) -> None:
    settings = {"max_attempts": 2, "backoff": [0.1], "breaker": {"window": 4, "reset_timeout": 1}}
    await site.serve("failing", "failing", **settings)

    async def breaker() -> dict[str, Any]:
        found: dict[str, Any] = (await site.worker.handlers())["failing"]["breakers"].get("failing", {})
        return found

    assert (await eventually(breaker, lambda found: "state" in found)) == {"state": "closed", "openings": 0}
    await site.producer.send_many("failing", [b"x"] * 8)
    await eventually(breaker, lambda found: found.get("openings", 0) >= 3)
    assert (await site.worker.queue("failing"))["dead_lettered"] == 0
    assert "circuit breaker open, no message is delivered: queue=failing" in site.worker.log()


async def test_a_handlers_process_that_is_killed_has_a_successor_and_nothing_is_lost(site: Site) -> None:
    killed = await site.serve("patient", "patient", concurrency=5, lease=6)
    await site.producer.send_many("patient", [b"go"] * 20)
    before = await site.handlers.has_noted("patient", 5)

    os.kill(killed, signal.SIGKILL)
    site.handlers.let_go("go")
    await site.acked("patient", 20)

    process = (await site.worker.handlers())["patient"]
    noted = await site.handlers.noted("patient")
    assert process["pid"] != killed
    assert process["starts"] == 2
    assert {line["worker"] for line in noted} == {killed, process["pid"]}
    # The killed process had not acknowledged these messages. They are redelivered.
    twice = {line["id"] for line in before}
    assert {name for name, count in Counter(line["id"] for line in noted).items() if count == 2} == twice
    assert len({line["id"] for line in noted}) == 20
    assert f"handler process {killed} has ended with exit code -9; the next one starts in 0.5 s" in site.worker.log()
    assert site.worker.exit_code is None


async def test_a_change_at_run_time_starts_stops_and_replaces_processes(site: Site) -> None:
    before = {queue: await site.serve(queue, "coroutine", group="both") for queue in ("left", "right")}
    sent = 0

    async def both_get(count: int) -> None:
        nonlocal sent
        for queue in ("left", "right"):
            await site.producer.send_many(queue, [b"%d" % number for number in range(sent, sent + count)])
        sent += count
        for queue in ("left", "right"):
            await site.acked(queue, sent)

    await both_get(10)
    # Another group: one process releases the queue, and another one continues there.
    await site.settings.change("right", group="apart")
    apart = await running(site.worker, "both", "apart")
    await both_get(10)
    # Another concurrency: another process.
    await site.settings.change("left", concurrency=1)
    await gone(apart["both"])
    await both_get(10)
    last = await running(site.worker, "both", "apart")
    # A handler for a queue without one, and its end.
    await site.serve("new", "coroutine")
    await site.settings.reset("new")
    await eventually(site.worker.handlers, lambda found: "new" not in found)

    assert last["both"] not in {*before.values(), apart["both"]}
    assert last["apart"] == apart["apart"]
    for queue in ("left", "right"):
        assert sorted(int(line["value"]) for line in await site.handlers.noted(queue)) == list(range(sent))
        assert (await site.worker.queue(queue))["redelivered"] == 0


async def test_a_decorated_handler_of_a_module_is_run_and_published(site: Site) -> None:
    await site.producer.send("decorated", b'{"decoded": true}')
    await site.acked("decorated", 1)

    found = site.settings["decorated"]
    assert (found.handler, found.concurrency, found.group) == (
        "handlers_of_the_test:decorated",
        2,
        "decorated handlers",
    )


async def test_a_worker_runs_the_handlers_of_a_queue_by_the_type_of_each_message(site: Site) -> None:
    await site.producer.send("typed", b'{"number": 7}', type="parcel")
    await site.producer.send("typed", b"seven", type="text")
    await site.producer.send("typed", b"?", type="unheard-of")
    await site.acked("typed", 2)

    # then: the settings of both decorators apply, and a type without a handler is released without counting
    assert (site.settings["typed"].max_attempts, site.settings["typed"].group) == (2, "decorated handlers")
    noted = await site.handlers.noted("typed")
    assert sorted(line["value"] for line in noted) == ["seven", '{"number": 7}']
    await eventually(
        lambda: site.worker.queue("typed"),
        lambda found: found["redelivered"] > 0 and found["waiting_for_redelivery"] == 1,
    )


async def test_a_handler_sends_to_another_one_with_the_workers_producer(site: Site) -> None:
    await site.producer.send("parcels", b'{"number": 1}')

    await site.acked("arrivals", 1)
    await site.acked("parcels", 1)
    assert [line["value"] for line in await site.handlers.noted("arrivals")] == ['{"number":2}']


async def test_a_handler_gets_the_messages_of_its_queues_own_topic(site: Site, broker: EmbeddedBroker) -> None:
    topic = f"{site.worker.names.prefix}-orders"
    await make_topic(broker.bootstrap_servers, topic, 2)
    await site.serve("orders", "coroutine", topic=topic)

    async with Namespace(broker.bootstrap_servers, site.worker.names) as namespace:
        for partition in (0, 1):
            await namespace.producer.send_and_wait(topic, b"own %d" % partition, b"any key", partition=partition)
        await namespace.send("orders", b"shared")
        await site.acked("orders", 3)

    assert sorted(line["value"] for line in await site.handlers.noted("orders")) == ["own 0", "own 1", "shared"]


async def test_a_blocked_handler_makes_its_worker_not_live_and_holds_up_no_redelivery(
    site: Site, broker: EmbeddedBroker
) -> None:
    await site.serve("slow", "patient", group="slow")
    await site.serve("threaded", "plain_patient", group="slow")
    for queue in ("slow", "threaded"):
        await site.producer.send(queue, b"until the end")
        await site.handlers.has_noted(queue, 1)
    await site.serve("blocking", "blocking")
    await site.producer.send("blocking", b"600")
    await site.handlers.has_noted("blocking", 1)

    async def blocked() -> dict[str, float]:
        return {group: process["blocked_seconds"] for group, process in (await site.worker.handlers()).items()}

    async with Namespace(broker.bootstrap_servers, site.worker.names) as namespace:
        orphans = await namespace.send_many("orphans", 50)
        await namespace.acquire(*orphans, lease=0.5)
        redelivered = await eventually(lambda: namespace.copies("orphans"), lambda found: len(found) >= 50)
    seconds = await eventually(blocked, lambda found: found["blocking"] > MAX_LOOP_LAG_SECONDS)
    status, text = await site.worker.page("/healthz")
    _, running = await site.worker.page("/api/running")
    site.handlers.let_go("until the end")

    assert len(redelivered) == 50
    assert seconds["slow"] < MAX_LOOP_LAG_SECONDS
    assert status == 503
    [reason] = json.loads(text)["reasons"]
    assert reason["subject"] == "handlers of group blocking"
    warning = "handler handlers_of_the_test:blocking of queue blocking has blocked the event loop"
    _, _, stack = site.worker.log().partition(warning)
    assert "time.sleep(float(message.value))" in stack
    assert (await site.worker.handlers())["blocking"]["blocked_by"] in warning
    # A blocked process says what it runs, too.
    calls = {call["queue"]: call for call in json.loads(running)["calls"]}
    assert set(calls) == {"slow", "threaded", "blocking"}
    assert calls["blocking"]["seconds"] > MAX_LOOP_LAG_SECONDS


async def test_another_process_takes_over_from_one_whose_handler_blocks_for_longer_than_the_session_timeout(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    """A blocked process sends no heartbeats, and what is sent meanwhile would wait until the handler ends."""
    queues = f'[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\nlease = {LONG}\n'
    one = await make(queues=queues).start().ready()
    make("handlers", like=one).start()
    producer = await producer_of(one)

    async def sharing() -> set[int]:
        await producer.send_many("blocking", [b"0"] * 2)
        return {line["worker"] for line in await handlers.noted("blocking")}

    both = await eventually(sharing, lambda processes: len(processes) == 2)
    await producer.send("blocking", b"600")

    async def blocked_by() -> list[int]:
        return [line["worker"] for line in await handlers.noted("blocking") if line["value"] == "600"]

    [blocked] = await eventually(blocked_by)
    last = [await producer.send("blocking", b"0.0") for _ in range(20)]

    async def handled() -> list[dict[str, Any]]:
        return [line for line in await handlers.noted("blocking") if line["value"] == "0.0"]

    noted = await eventually(handled, lambda lines: len(lines) >= 20)
    assert sorted(line["id"] for line in noted) == sorted(receipt.id for receipt in last)
    assert {(line["worker"], line["attempt"]) for line in noted} == {(pid, 1) for pid in both - {blocked}}


# --- the end of a worker with handlers --------------------------------------------------------------------------------


async def test_when_a_worker_is_killed_its_handlers_processes_release_everything_and_end(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = f"""
    [queues.patient]
    handler = "handlers_of_the_test:patient"
    concurrency = 5
    lease = {LONG}
    [queues.blocking]
    handler = "handlers_of_the_test:blocking"
    group = "blocked"
    lease = {LONG}
    """
    worker = await make(queues=queues).start().ready()
    pids = await running(worker, "handlers", "blocked")
    producer = await producer_of(worker)
    await producer.send_many("patient", [b"go"] * 20)
    await producer.send("blocking", b"600")
    await handlers.has_noted("patient", 5)
    await handlers.has_noted("blocking", 1)

    # Not the processes that it started.
    worker.ended_by_us = True
    worker.signal(signal.SIGKILL)
    worker.wait(LIMIT_SECONDS)
    # A blocked process ends at the limit of a stop.
    await gone(*pids.values())
    handlers.let_go("go")
    other = await make(like=worker).start().ready()
    statistics = await eventually(lambda: other.queue("patient"), lambda found: found.get("acked") == 20)

    noted = await handlers.noted("patient")
    assert {line["attempt"] for line in noted} == {1}
    assert len({line["id"] for line in noted}) == 20
    assert statistics["expired"] == 0
    assert "the worker that started this process has died" in worker.log()


async def test_a_stop_ends_within_its_limit_although_a_handler_blocks_its_process(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = '[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\n'
    worker = await make(queues=queues, environment={"MARQ_STOP_TIMEOUT": "12"}).start().ready()
    pids = await running(worker, "handlers")
    producer = await producer_of(worker)
    await producer.send("blocking", b"600")
    await handlers.has_noted("blocking", 1)

    await worker.stop()

    # The worker was not ended by force: its processes get only a part of the limit.
    assert worker.exit_code == 0
    await gone(*pids.values())
    assert "has not stopped within 9 s: ending it" in worker.log()
