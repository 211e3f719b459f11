"""How often a process tries to reach a broker that is down, and what it says about it."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError

from marq.kafka import paced_clients as reconnects
from marq.kafka.connection_diagnosis import find_obstacle
from marq.kafka.paced_clients import paced
from marq.kafka.reconnect_pacer import (
    FRESH_S,
    MAX_CONCURRENT,
    MAX_FAILURES_PER_SECOND,
    MAX_PAUSE_S,
    MAX_TURN_S,
    SILENT_START_S,
    Pacer,
)
from marq.kafka.repeated_warnings import SUMMARY_S
from marq.settings.client import DEFAULT_CONNECT_TIMEOUT_MS, ClientSettings
from tests.unit.client.fakes import Clock

ROOT = Path(__file__).parents[3]
BROKER, OTHER = ("broker", 9092), ("other", 9092)
LIMIT_S = 60
STEP_S = 0.05


class Network:
    """A broker that is up or down, with the times of all connection attempts."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.up = False
        self.tried_at: list[float] = []
        self.open = self.most = 0
        self._clock = clock or Clock()

    async def connect(self) -> str:
        self.tried_at.append(self._clock())
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0)
            if not self.up:
                raise ConnectionRefusedError("refused")
            return "connection"
        finally:
            self.open -= 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def network(clock: Clock) -> Network:
    return Network(clock)


@pytest.fixture
def pacer(clock: Clock) -> Pacer:
    return Pacer(clock, jitter=lambda: 1.0)


async def tried(pacer: Pacer, network: Network, clients: int = 1) -> int:
    """Let clients try that do not wait for their turn; return how many got a connection."""
    attempts = [pacer.connect(BROKER, network.connect, patient=False) for _ in range(clients)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert all(isinstance(outcome, str | OSError | KafkaError) for outcome in outcomes), outcomes
    return outcomes.count("connection")


async def outage(pacer: Pacer, network: Network, clock: Clock, seconds: float, clients: int = 1) -> None:
    for _ in range(round(seconds / STEP_S)):
        await tried(pacer, network, clients)
        clock.now_s += STEP_S


async def test_many_clients_that_retry_all_the_time_make_few_attempts(pacer, network, clock) -> None:
    network.up = True
    await tried(pacer, network)
    network.up = False
    network.tried_at.clear()

    await outage(pacer, network, clock, 30, clients=10)

    assert all(
        sum(began <= other < began + 1 for other in network.tried_at) <= MAX_FAILURES_PER_SECOND
        for began in network.tried_at
    )
    assert 30 / MAX_PAUSE_S / 1.1 < len(network.tried_at) < 30 / MAX_PAUSE_S + 10


async def test_several_brokers_that_are_down_share_the_limit(clock) -> None:
    pacer, network = Pacer(clock, jitter=lambda: 0.5), Network(clock)
    for _ in range(200):
        attempts = [pacer.connect((f"b{number}", 9092), network.connect, patient=False) for number in range(9)]
        await asyncio.gather(*[asyncio.wait_for(attempt, 0.01) for attempt in attempts], return_exceptions=True)
        clock.now_s += STEP_S

    # Those that begin at the same moment, before any of them has failed, cannot know of each other.
    later = [began for began in network.tried_at if began > network.tried_at[0]]
    assert later
    assert all(sum(began <= other < began + 1 for other in later) <= MAX_FAILURES_PER_SECOND for began in later)


async def test_the_pause_grows_and_begins_again_after_a_success(pacer, network, clock) -> None:
    await outage(pacer, network, clock, 10)
    assert network.tried_at[-1] - network.tried_at[-2] == pytest.approx(MAX_PAUSE_S, abs=2 * STEP_S)

    network.up = True
    clock.now_s += MAX_PAUSE_S
    assert await tried(pacer, network) == 1
    network.up = False
    network.tried_at.clear()
    await outage(pacer, network, clock, 1)

    assert network.tried_at[1] - network.tried_at[0] < 0.2


async def test_all_waiters_of_an_attempt_share_its_outcome() -> None:
    pacer, network = Pacer(), Network()
    attempts = [asyncio.create_task(pacer.connect(BROKER, network.connect)) for _ in range(20)]

    outcomes = await asyncio.wait_for(asyncio.gather(*attempts, return_exceptions=True), LIMIT_S)

    assert len(network.tried_at) <= MAX_CONCURRENT
    assert all(isinstance(outcome, OSError | KafkaConnectionError) for outcome in outcomes)


async def test_when_the_broker_is_back_all_waiters_connect_at_once() -> None:
    pacer, network = Pacer(), Network()
    with pytest.raises(ConnectionRefusedError):
        await pacer.connect(BROKER, network.connect)
    waiting = [asyncio.create_task(pacer.connect(BROKER, network.connect)) for _ in range(20)]
    network.up = True

    assert await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S) == ["connection"] * 20
    assert len(network.tried_at) == 21


async def test_many_connections_to_a_broker_that_is_up_are_not_delayed(pacer, network) -> None:
    network.up = True

    # On a stopped clock: no client waits for a later time.
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*[pacer.connect(BROKER, network.connect) for _ in range(200)])

    assert network.most == MAX_CONCURRENT


async def test_clients_do_not_wait_for_a_broker_while_another_one_is_up(pacer, network) -> None:
    with pytest.raises(ConnectionRefusedError):
        await pacer.connect(BROKER, network.connect, [OTHER])

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(KafkaConnectionError, match=r"broker:9092 is unreachable: refused"):
            await pacer.connect(BROKER, network.connect, [OTHER])

    network.up = True
    assert await pacer.connect(OTHER, network.connect, [BROKER]) == "connection"
    assert len(network.tried_at) == 2


async def test_an_attempt_that_is_cancelled_passes_the_turn_on() -> None:
    pacer, network = Pacer(), Network()
    begun = asyncio.Event()

    async def hang() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    hanging = [asyncio.create_task(pacer.connect(BROKER, hang)) for _ in range(MAX_CONCURRENT)]
    await begun.wait()
    network.up = True
    waiting = asyncio.create_task(pacer.connect(BROKER, network.connect))
    for task in hanging:
        task.cancel()

    assert await asyncio.wait_for(waiting, LIMIT_S) == "connection"


async def test_an_attempt_of_a_blocked_event_loop_keeps_others_from_trying_for_a_short_time_only(
    pacer: Pacer, network: Network, clock: Clock
) -> None:
    await outage(pacer, network, clock, 3)
    blocked = asyncio.Event()

    async def never() -> str:
        await blocked.wait()
        return "late"

    clock.now_s += MAX_PAUSE_S
    first = asyncio.create_task(pacer.connect(BROKER, never))
    await asyncio.sleep(0)
    network.up = True
    assert await tried(pacer, network) == 0

    clock.now_s += MAX_TURN_S
    assert await tried(pacer, network) == 1

    blocked.set()
    assert await first == "late"


async def test_clients_in_other_threads_take_part() -> None:
    pacer, network = Pacer(), Network()
    release, results = asyncio.Event(), []

    async def late() -> str:
        await release.wait()
        return "connection"

    hanging = [asyncio.create_task(pacer.connect(BROKER, late)) for _ in range(MAX_CONCURRENT)]
    await asyncio.sleep(0)
    network.up = True
    thread = threading.Thread(target=lambda: results.append(asyncio.run(pacer.connect(BROKER, network.connect))))
    thread.start()
    release.set()
    await asyncio.gather(*hanging)
    await asyncio.to_thread(thread.join, LIMIT_S)

    assert results == ["connection"]


async def test_an_outage_has_a_line_at_its_beginning_one_at_its_end_and_summaries(
    pacer, network, clock, caplog, logged
) -> None:
    network.up = True
    await tried(pacer, network)
    network.up = False
    with caplog.at_level(logging.INFO, logger="marq"):
        await outage(pacer, network, clock, 2.2 * SUMMARY_S, clients=10)
        network.up = True
        clock.now_s += MAX_PAUSE_S
        await tried(pacer, network, clients=10)

    first, second, third, last = logged()
    assert first == "broker unreachable address=broker:9092 error=refused"
    assert second.startswith("broker still unreachable address=broker:9092 seconds=3")
    assert third.startswith("broker still unreachable address=broker:9092 seconds=6")
    assert last.startswith("broker reachable again address=broker:9092 seconds=6")


async def test_a_broker_that_never_answered_is_reported_after_a_while(pacer, network, clock, logged) -> None:
    """A start that fails raises an error that says more, and nothing else is said."""
    await outage(pacer, network, clock, DEFAULT_CONNECT_TIMEOUT_MS / 1000)
    assert not logged()

    await outage(pacer, network, clock, SILENT_START_S)
    assert logged() == ["broker unreachable address=broker:9092 error=refused"]


async def test_an_outage_is_over_some_time_after_the_last_failure(pacer, network, clock) -> None:
    assert not pacer.in_outage
    await tried(pacer, network)
    assert pacer.in_outage
    assert isinstance(pacer.fresh_error(BROKER), ConnectionRefusedError)

    clock.now_s += FRESH_S

    assert not pacer.in_outage
    assert pacer.fresh_error(BROKER) is None


async def test_a_broken_connection_explains_an_outage_until_the_broker_answers(pacer, network) -> None:
    network.up = True
    await tried(pacer, network)

    pacer.lost(BROKER)
    assert pacer.in_outage
    assert isinstance(pacer.fresh_error(BROKER), KafkaConnectionError)

    await tried(pacer, network)
    assert pacer.fresh_error(BROKER) is None


async def test_clients_of_aiokafka_share_the_limit(monkeypatch, unused_tcp_port: int) -> None:
    """A listener that ends each connection, as a proxy does whose broker is away."""
    monkeypatch.setattr(reconnects, "_pacers", {})
    accepted, loop, enough = 0, asyncio.get_running_loop(), asyncio.Event()

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()
        if accepted >= MAX_FAILURES_PER_SECOND and loop.time() - began_s > 1.5:
            enough.set()

    async def use(servers: str) -> None:
        while True:
            admin = paced(AIOKafkaAdminClient(bootstrap_servers=servers))
            with pytest.raises(KafkaConnectionError):
                await admin.start()
            await admin.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", unused_tcp_port):
        began_s = loop.time()
        users = [asyncio.create_task(use(f"127.0.0.1:{unused_tcp_port}")) for _ in range(10)]
        await asyncio.wait_for(enough.wait(), LIMIT_S)
        for user in users:
            user.cancel()
        await asyncio.wait(users)

    assert MAX_FAILURES_PER_SECOND <= accepted <= MAX_FAILURES_PER_SECOND * (loop.time() - began_s + 1)


@pytest.mark.parametrize("seen", ["attempt failed", "connection broke"])
async def test_an_outage_of_a_broker_that_was_up_is_explained_without_another_attempt(
    monkeypatch, unused_tcp_port: int, seen: str
) -> None:
    """Otherwise each client that starts meanwhile would connect several times, beyond the limit."""
    monkeypatch.setattr(reconnects, "_pacers", {})
    accepted, address = 0, f"127.0.0.1:{unused_tcp_port}"
    settings = ClientSettings.read(address, {}, owner="test")
    pacer = reconnects.pacer_of(address, settings.security_protocol, settings.login)

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    async def answer() -> None:
        return

    async def fail() -> None:
        raise KafkaConnectionError("closed")

    async with await asyncio.start_server(end, "127.0.0.1", unused_tcp_port):
        await pacer.connect(("127.0.0.1", unused_tcp_port), answer)
        if seen == "attempt failed":
            with pytest.raises(KafkaConnectionError):
                await pacer.connect(("127.0.0.1", unused_tcp_port), fail)
        else:
            pacer.lost(("127.0.0.1", unused_tcp_port))
        # On a busy machine, the next attempt takes a while.
        now_s = time.monotonic() + FRESH_S
        monkeypatch.setattr(pacer, "_clock", lambda: now_s)

        obstacle = await find_obstacle(settings, 2 * FRESH_S)

    assert f"{address} answered before, but not now" in str(obstacle)
    assert accepted == 0


@pytest.fixture
def unused_tcp_port() -> int:
    from marq_worker.broker import ports

    return ports.free_port("127.0.0.1")


# --- paced clients ----------------------------------------------------------------------------------------------------

KINDS = ("AIOKafkaProducer", "AIOKafkaConsumer", "AIOKafkaAdminClient")


def unpaced(text: str) -> Iterator[int]:
    """Yield the lines where a client of aiokafka is made that neither `paced` nor `started` gets to see."""
    if not any(kind in text for kind in KINDS):
        return
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    given = {
        ast.unparse(argument).removeprefix("self.")
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "started"
        for argument in call.args[:1]
    }
    # A function that is given to `started` may call another one that makes the client.
    calls = {
        ast.unparse(call.func).removeprefix("self.")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in given
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(KINDS):
            continue
        around, parent = [], node
        while parent in parents:
            parent = parents[parent]
            around.append(parent)
        callers = [ast.unparse(each.func) for each in around if isinstance(each, ast.Call)]
        functions = {each.name for each in around if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        if not {"paced", "started"} & set(callers) and not functions & (given | calls):
            yield node.lineno


def test_every_client_of_aiokafka_is_paced() -> None:
    packages = ("marq", "marq_worker", "agents", "app", "tables")
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unpaced(path.read_text(encoding="utf-8"))]

    assert not found


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("admin = AIOKafkaAdminClient()", [1]),
        ("admin = paced(AIOKafkaAdminClient())", []),
        ("admin = started(lambda: AIOKafkaAdminClient(), settings)", []),
        ("def make():\n    return AIOKafkaConsumer()\nstarted(make, settings)", []),
        ("def make():\n    return AIOKafkaConsumer()", [2]),
    ],
)
def test_how_an_unpaced_client_is_found(text: str, lines: list[int]) -> None:
    assert list(unpaced(text)) == lines
