"""What each role of a worker does, and only that; and the processes that run handlers, through their whole life."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiokafka.admin import NewTopic

import marq
from app.health import MAX_LOOP_LAG_SECONDS
from broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import LIMIT_SECONDS, Installation, Worker, admin, eventually

Make = Callable[..., Worker]
#: A lease that can't be what brings a message back within a test.
LONG = 600
QUEUES = """
[queues]
coroutine = { handler = "handlers_of_the_test:coroutine" }
"""


@pytest.fixture
def handlers(tmp_path: Path) -> Handlers:
    return Handlers(tmp_path / "handlers")


@pytest.fixture
def make(new_worker: Make, handlers: Handlers) -> Make:
    """Makes workers that can import the handlers; ``roles`` are theirs."""

    def make(roles: str = "tracker,handlers,web", *, like: Worker | None = None, **settings: Any) -> Worker:
        if like is not None:
            worker = new_worker(like=like, MARQ_ROLES=roles)
            worker.web_port += 1
            worker._environment["MARQ_WEB_PORT"] = str(worker.web_port)
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


async def members(broker: EmbeddedBroker, worker: Worker) -> int:
    """How many members the trackers' group has."""
    async with admin(broker.bootstrap_servers) as client:
        [response] = await client.describe_consumer_groups([worker.names.app_id])
    return len(response.groups[0][5])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that nobody has waited for is dead all the same.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def gone(*pids: int, limit: float = LIMIT_SECONDS) -> None:
    async def left() -> list[int]:
        return [pid for pid in pids if alive(pid)]

    await eventually(left, lambda found: not found, limit=limit)


async def running(worker: Worker, *groups: str) -> dict[str, int]:
    """Wait until a worker has exactly these handlers processes; return their ids."""

    async def found() -> dict[str, Any]:
        return {name: each["pid"] for name, each in (await worker.handlers()).items()}

    return await eventually(found, lambda pids: pids.keys() == set(groups) and all(pids.values()))


# --- roles ------------------------------------------------------------------------------------------------------------


async def test_each_role_does_its_own_part_in_a_worker_of_its_own(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    tracker = await make("tracker,web").start().ready()
    runner = make("handlers", like=tracker)
    runner.data_directory = tracker.directory / "data of the runner"
    runner._environment["MARQ_DATA_DIR"] = str(runner.data_directory)
    runner.start()
    pages = make("web", like=runner).start()
    producer = await producer_of(tracker)

    await producer.send_many("coroutine", [b"%d" % number for number in range(20)])
    noted = await handlers.has_noted("coroutine", 20)
    figures = await eventually(
        pages.figures, lambda found: found.get("queues", {}).get("coroutine", {}).get("acked") == 20
    )

    # The handlers ran where that is the role, in a process below that worker.
    assert {line["parent"] for line in noted} == {runner.pid}
    assert (await tracker.handlers(), await pages.handlers()) == ({}, {})
    # The leases are kept where that is the role: nobody else is in that group or has a folder.
    assert await members(broker, tracker) == 1
    assert not runner.data_directory.exists()
    # The pages are shown where that is the role, with the figures of all trackers.
    assert (await runner.page("/"))[0] == 0
    assert figures["complete"]
    assert {each["url"]: len(each["partitions"]) for each in figures["workers"]} == {
        tracker.canonical_url: 2,
        pages.canonical_url: 0,
    }
    assert (await pages.page("/"))[0] == 200
    for worker in (tracker, runner, pages):
        assert worker.exit_code is None
        assert await worker.stop() < 9
        assert worker.exit_code == 0


async def test_a_tracker_without_the_role_web_redelivers_and_its_figures_are_said_to_be_missing(
    make: Make, broker: EmbeddedBroker
) -> None:
    pages = make("web").start()
    tracker = make("tracker", like=pages).start()

    async with Installation(broker.bootstrap_servers, pages.names) as installation:
        await eventually(lambda: members(broker, tracker), lambda count: count == 1)
        sent = await installation.send("emails")
        await installation.acquire(sent, lease=0.5)
        copies = await eventually(lambda: installation.copies_of(sent))
        figures = await eventually(pages.figures, lambda found: len(found.get("workers", [])) == 2)

    assert len(copies) == 1
    assert not figures["complete"]
    [missing] = [each["url"] for each in figures["workers"] if not each["answered"]]
    assert missing.startswith("no-web://")
    assert missing in (await pages.page("/"))[1]
    assert (await tracker.page("/"))[0] == 0


async def test_an_unknown_role_ends_the_start_with_a_sentence(make: Make) -> None:
    worker = make("tracker,handler").start()

    assert await worker.ended() != 0
    assert "marq: MARQ_ROLES: expected one or more of tracker, handlers, web" in worker.log()
    assert "Traceback" not in worker.log()


# --- processes --------------------------------------------------------------------------------------------------------


async def test_each_group_with_handlers_has_a_process_of_its_own(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = """
    [queues]
    one = { handler = "handlers_of_the_test:coroutine" }
    two = { handler = "handlers_of_the_test:coroutine", group = "slow work" }
    three = { handler = "handlers_of_the_test:plain", group = "slow work" }
    four = { group = "consumers" }
    """
    worker = await make(queues=queues).start().ready()
    pids = await running(worker, "handlers", "slow work")
    producer = await producer_of(worker)

    for queue in ("one", "two", "three"):
        await producer.send(queue, queue.encode())
    noted = [line for queue in ("one", "two", "three") for line in await handlers.has_noted(queue, 1)]

    assert {line["queue"]: line["worker"] for line in noted} == {
        "one": pids["handlers"],
        "two": pids["slow work"],
        "three": pids["slow work"],
    }
    assert worker.pid not in pids.values()


async def test_an_open_circuit_breaker_is_shown_and_nothing_dies_meanwhile(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = """[queues.obedient]
        handler = "handlers_of_the_test:obedient"
        max_attempts = 2
        backoff = [0.1]
        breaker = { window = 4, pause = 1 }
    """
    worker = await make(queues=queues).start().ready()
    await running(worker, "handlers")
    producer = await producer_of(worker)

    async def breaker() -> dict[str, Any]:
        found: dict[str, Any] = (await worker.handlers())["handlers"]["breakers"].get("obedient", {})
        return found

    assert (await eventually(breaker, lambda found: "state" in found)) == {"state": "closed", "openings": 0}
    await producer.send_many("obedient", [b"fail"] * 8)
    await eventually(breaker, lambda found: found.get("openings", 0) >= 3)
    assert (await worker.queue("obedient"))["dead"] == 0
    assert "circuit breaker open, no message is handed out: queue=obedient" in worker.log()


async def test_a_handlers_process_that_is_killed_is_followed_by_another_and_nothing_is_lost(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = '[queues.patient]\nhandler = "handlers_of_the_test:patient"\nconcurrency = 5\nlease = 2\n'
    worker = await make(queues=queues).start().ready()
    [killed] = (await running(worker, "handlers")).values()
    producer = await producer_of(worker)
    await producer.send_many("patient", [b"go"] * 20)
    before = await handlers.has_noted("patient", 5)

    os.kill(killed, signal.SIGKILL)
    handlers.let_go("go")
    await eventually(lambda: worker.queue("patient"), lambda found: found.get("acked") == 20)

    [process] = (await worker.handlers()).values()
    noted = await handlers.noted("patient")
    assert process["pid"] != killed
    assert process["starts"] == 2
    assert {line["worker"] for line in noted} == {killed, process["pid"]}
    # Those that ran were not acked: they came back, with the next attempt.
    twice = {line["id"] for line in before}
    assert {name for name, count in Counter(line["id"] for line in noted).items() if count == 2} == twice
    assert len({line["id"] for line in noted}) == 20
    assert f"handlers process {killed} has ended with exit code -9; the next one starts in 0.5 s" in worker.log()
    assert worker.exit_code is None


async def test_when_a_worker_is_killed_its_handlers_process_gives_everything_back_and_ends(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = f'[queues.patient]\nhandler = "handlers_of_the_test:patient"\nconcurrency = 5\nlease = {LONG}\n'
    worker = await make(queues=queues).start().ready()
    pids = await running(worker, "handlers")
    producer = await producer_of(worker)
    await producer.send_many("patient", [b"go"] * 20)
    await handlers.has_noted("patient", 5)

    worker.kill_alone()
    await gone(*pids.values())
    handlers.let_go("go")
    other = await make(like=worker).start().ready()
    figures = await eventually(lambda: other.queue("patient"), lambda found: found.get("acked") == 20)

    noted = await handlers.noted("patient")
    assert {line["attempt"] for line in noted} == {1}
    assert len({line["id"] for line in noted}) == 20
    assert figures["expired"] == 0
    assert "the worker that started this process is gone" in worker.log()


async def test_when_a_worker_is_killed_a_handlers_process_that_is_blocked_ends_at_the_limit_of_a_stop(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = '[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\n'
    worker = await make(queues=queues, environment={"MARQ_STOP_TIMEOUT": "2"}).start().ready()
    pids = await running(worker, "handlers")
    producer = await producer_of(worker)
    await producer.send("blocking", b"600")
    await handlers.has_noted("blocking", 1)

    worker.kill_alone()

    await gone(*pids.values())


async def test_a_stop_ends_within_its_limit_although_a_handler_blocks_its_process(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    queues = '[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\n'
    worker = await make(queues=queues, environment={"MARQ_STOP_TIMEOUT": "4"}).start().ready()
    pids = await running(worker, "handlers")
    producer = await producer_of(worker)
    await producer.send("blocking", b"600")
    await handlers.has_noted("blocking", 1)

    await worker.stop()

    # Not the end by force of the worker itself: it had kept enough of the time.
    assert worker.exit_code == 0
    await gone(*pids.values(), limit=1)
    assert "has not stopped within 2 s: ending it" in worker.log()


async def test_a_change_at_run_time_starts_stops_and_replaces_processes(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    queues = """
    [queues]
    left = { handler = "handlers_of_the_test:coroutine" }
    right = { handler = "handlers_of_the_test:plain" }
    """
    worker = await make(queues=queues).start().ready()
    before = await running(worker, "handlers")
    producer = await producer_of(worker)
    sent = 0

    async def both_get(count: int) -> None:
        nonlocal sent
        for queue in ("left", "right"):
            await producer.send_many(queue, [b"%d" % number for number in range(sent, sent + count)])
        sent += count
        for queue in ("left", "right"):
            await eventually(lambda queue=queue: worker.queue(queue), lambda found: found.get("acked") == sent)

    async with marq.Queues(broker.bootstrap_servers, prefix=worker.names.prefix) as settings:
        await both_get(10)
        # Another group: a process that leaves one queue, and one that takes it up where the other was.
        await settings.change("right", group="apart")
        apart = await eventually(worker.handlers, lambda found: found.keys() == {"handlers", "apart"})
        await both_get(10)
        # Another concurrency: another process.
        await settings.change("left", concurrency=1)
        await gone(apart["handlers"]["pid"])
        await both_get(10)
        last = await running(worker, "handlers", "apart")
        # A handler of a queue that had none; and no handler any more.
        await settings.change("new", handler="handlers_of_the_test:coroutine", group="apart as well")
        await running(worker, "handlers", "apart", "apart as well")
        await settings.reset("new")
        await running(worker, "handlers", "apart")

    assert last["handlers"] not in {*before.values(), apart["handlers"]["pid"]}
    assert last["apart"] == apart["apart"]["pid"]
    for queue in ("left", "right"):
        assert sorted(int(line["value"]) for line in await handlers.noted(queue)) == list(range(sent))
        assert (await worker.queue(queue))["redelivered"] == 0


async def test_a_lease_that_is_changed_counts_for_what_is_acquired_afterwards(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    worker = await make().start().ready()
    pids = await running(worker, "handlers")
    producer = await producer_of(worker)
    await producer.send("coroutine", b"before")
    await handlers.has_noted("coroutine", 1)

    async with marq.Queues(broker.bootstrap_servers, prefix=worker.names.prefix) as settings:
        await settings.change("coroutine", lease=77)

    async with Installation(broker.bootstrap_servers, worker.names) as installation:

        async def leases() -> set[int]:
            await producer.send("coroutine", b"after")
            markers = [batch for _, batch in await installation.markers()]
            return {batch.lease_ms for batch in markers if type(batch).__name__ == "Acquire"}

        await eventually(leases, lambda found: found == {30_000, 77_000})
    assert await running(worker, "handlers") == pids


async def test_a_decorated_handler_of_a_module_is_run_and_said_to_all(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    worker = await make(queues="", environment={"MARQ_HANDLERS": "handlers_of_the_test"}).start().ready()
    await running(worker, "decorated handlers")
    producer = await producer_of(worker)

    await producer.send("decorated", b'{"decoded": true}')
    await eventually(lambda: worker.queue("decorated"), lambda found: found.get("acked") == 1)

    async with marq.Queues(broker.bootstrap_servers, prefix=worker.names.prefix) as settings:
        found = settings["decorated"]
    assert (found.handler, found.concurrency, found.group) == (
        "handlers_of_the_test:decorated",
        2,
        "decorated handlers",
    )


async def test_a_handler_gets_what_stands_in_its_queues_own_topic(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    worker = make()
    topic = f"{worker.names.prefix}-orders"
    (worker.directory / "queues.toml").write_text(
        f'[queues.orders]\nhandler = "handlers_of_the_test:coroutine"\ntopic = "{topic}"\n'
    )
    async with admin(broker.bootstrap_servers) as client:
        await client.create_topics([NewTopic(topic, 2, 1)])
    await worker.start().ready()

    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        for partition in (0, 1):
            await installation.producer.send_and_wait(topic, b"own %d" % partition, b"any key", partition=partition)
        await installation.send("orders", b"shared")
        await eventually(lambda: worker.queue("orders"), lambda found: found.get("acked") == 3)

    assert sorted(line["value"] for line in await handlers.noted("orders")) == ["own 0", "own 1", "shared"]


async def test_a_group_with_a_queue_that_has_no_handler_ends_the_start_with_a_sentence(make: Make) -> None:
    queues = """
    [queues]
    one = { handler = "handlers_of_the_test:coroutine", group = "background" }
    two = { group = "background" }
    """
    worker = make(queues=queues).start()

    assert await worker.ended() != 0
    [sentence] = [line for line in worker.log().splitlines() if line.startswith("marq: ")]
    assert "'background'" in sentence
    assert "'two'" in sentence
    assert "Traceback" not in worker.log()


async def test_a_handler_that_blocks_its_process_holds_up_no_redelivery(
    make: Make, handlers: Handlers, broker: EmbeddedBroker, producer_of: Any
) -> None:
    queues = '[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\n'
    worker = await make(queues=queues).start().ready()
    producer = await producer_of(worker)
    block_seconds = 15.0

    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        sent = await installation.send_many("orphans", 50)
        await producer.send("blocking", str(block_seconds).encode())
        [blocked] = await handlers.has_noted("blocking", 1)
        acquired = await installation.acquire(*sent, lease=1)
        late = await installation.lateness(acquired, sent[-1], lease=1)
        copies = await installation.copies("orphans")
        still_blocked = time.monotonic() < blocked["at"] + block_seconds

    assert len(copies) == 50
    assert still_blocked, f"shown only while the handler blocks: it took {late} s"


async def test_a_worker_is_not_live_while_a_handler_blocks_its_process_and_is_while_handlers_are_slow(
    make: Make, handlers: Handlers, producer_of: Any
) -> None:
    worker = await make(
        queues=(
            '[queues.blocking]\nhandler = "handlers_of_the_test:blocking"\n'
            '[queues.slow]\nhandler = "handlers_of_the_test:patient"\ngroup = "slow"\n'
            '[queues.threaded]\nhandler = "handlers_of_the_test:plain_patient"\ngroup = "slow"\n'
        )
    ).start().ready()  # fmt: skip
    producer = await producer_of(worker)
    for queue in ("slow", "threaded"):
        await producer.send(queue, b"never")
        await handlers.has_noted(queue, 1)

    async def blocked() -> dict[str, float]:
        return {group: each["blocked_seconds"] for group, each in (await worker.handlers()).items()}

    await producer.send("blocking", b"600")
    await handlers.has_noted("blocking", 1)
    seconds = await eventually(blocked, lambda found: found["handlers"] > MAX_LOOP_LAG_SECONDS)
    status, text = await worker.page("/healthz")

    assert seconds["slow"] < MAX_LOOP_LAG_SECONDS
    assert status == 503
    [reason] = json.loads(text)["reasons"]
    assert reason["subject"] == "handlers of group handlers"
    worker.kill()
