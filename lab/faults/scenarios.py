"""All fault scenarios: the set-up, the faults, what must hold, and where. docs/guarantees.md describes each in words.

In all of them nothing may be lost, and the checker must explain each duplicate. Each family of rows stands below the
steps that only it needs.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import shutil
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from statistics import median
from typing import Any

import marq
from lab.consumer import LEASE_SECONDS
from lab.faults.conditions import (
    MOVE_SECONDS,
    NODES,
    BrokerCluster,
    Proxy,
    WallClock,
    behind_proxies,
    movable_broker,
    with_small_disk,
)
from lab.faults.flow_control import exceeded, passed_by, turns_of_others
from lab.faults.mix import mix
from lab.faults.scenario import Scenario, Step, begin
from lab.program import Program, RunError
from lab.proof.evidence import EVERYBODY
from lab.stage import QUEUE, QUICK_BACKOFF, SESSION_SECONDS, Stage
from marq.dead_letters.dead_letters import DeadLetters
from marq.kafka.connection import admin_client
from marq.settings.limits import Limits
from marq_worker.broker import EmbeddedBroker

#: The option of a program of the next version.
NEWER = "--install=lab.variants:newer"
#: Options of a consumer: how it acquires messages, and the outcomes of messages, some of which fail at every attempt.
TRANSACTIONAL, UNLUCKY, HOPELESS = "--transactional", "--manner=unlucky", "--manner=hopeless"
#: Deliveries before, between and after faults of slow scenarios; SOME in all others.
FEWER, FEW = 150, 60
#: Longer than leases and sessions.
GONE_SECONDS = SESSION_SECONDS + 2 * LEASE_SECONDS

# --- steps ------------------------------------------------------------------------------------------------------------


def then(*steps: Step) -> Step:
    """Carry out steps, one after the other, as one fault."""

    async def fault(stage: Stage) -> None:
        for step in steps:
            await step(stage)

    return fault


def worker(*options: str, again: bool = False, **settings: Any) -> Step:
    """Start a worker; ``again``: with the data of one that has ended, which no running worker uses."""

    async def step(stage: Stage) -> None:
        running = {former.data for former in stage.workers if former.running}
        data = [former.data for former in stage.workers if former.data not in running][-1] if again else None
        await stage.worker(*options, data=data, **settings)

    return step


def consumer(*options: str) -> Step:
    return lambda stage: stage.consumer(*options)


def end(kind: str, which: int | random.Random, how: Callable[..., Any] = Stage.kill, *arguments: Any) -> Step:
    """End one of the running ``workers`` or ``consumers``, or pause it: by its place, or at random."""

    def chosen(stage: Stage) -> Program:
        running: list[Program] = [program for program in getattr(stage, kind) if program.running]
        return running[which] if isinstance(which, int) else which.choice(running)

    return lambda stage: how(stage, chosen(stage), *arguments)


def doomed(point: str, after: int = 1) -> tuple[str, str]:
    """Return the options of a program that kills itself when it passes a point for the n-th time."""
    return f"--die-at={point}", f"--die-after={after}"


def dies_at(point: str, after: int, *options: str) -> Step:
    async def fault(stage: Stage) -> None:
        await stage.dead(await stage.consumer(*options, *doomed(point, after)))

    return fault


def next_worker(*options: str) -> Step:
    """Wait until the newest worker has killed itself, and restart it with its data."""
    return then(lambda stage: stage.dead(stage.workers[-1]), worker(*options, again=True))


def worker_killed(*meanwhile: Step) -> Step:
    """Kill the newest worker, and restart it with its data, if that is still there."""
    return then(end("workers", -1), *meanwhile, worker(again=True))


WORKER_KILLED = worker_killed()


def require(holds: object, otherwise: str) -> None:
    if not holds:
        raise RunError(otherwise)


# --- consumers --------------------------------------------------------------------------------------------------------

#: The points of all queues at which consumers die.
POINTS = ["before-acquire", "after-acquire", "after-commit", "in-handler", "before-ack"]
#: Further points of queues with ordering: while a source is resumed, and after that.
RESUMING = ["before-resume", "after-resume", "before-verify", "after-verify"]
IN_ORDER = [
    "before-acquire-in-order", "after-acquire-in-order", "before-acquire-again", "after-acquire-again",
    "before-last-release", "after-last-release",
]  # fmt: skip
#: Attempts before a message of the queue with ordering is released for the last time.
FEW_ATTEMPTS: dict[str, Any] = {"max_attempts": 3}


def killed_at(name: str, points: Sequence[str], *options: str, after: int = 3, quick: bool = False) -> Scenario:
    """Return a row in which a consumer dies at each of these points, while another one continues."""
    define = FEW_ATTEMPTS if UNLUCKY in options else None
    faults = [dies_at(point, after, *options) for point in points]
    return Scenario(name, faults, begin(consumers=[options], some=0, define=define), quick=quick)


async def consumers_join_and_leave(stage: Stage) -> None:
    await stage.churn(partial(stage.consumer, "--manner=slow"), seconds=60.0, every_seconds=4.0)


HANDLED = "handled"
#: Time from the start of a handler process until its broker is killed: at about that time it joins its group.
START_SECONDS, AWAY_SECONDS = 0.3, 5.0
#: Time limit until messages are handled; a group that assigned nothing would try again only after five minutes.
HANDLED_SECONDS = 30.0


async def handlers_start_without_broker(stage: Stage) -> None:
    stage.define(own=f'[queues.{HANDLED}]\nhandler = "lab.consumer:handle"\n')
    started = await stage.worker(ready=False)
    await stage.until(lambda: "HandlersApp]: Starting" in started.log(), "a handler process starts")
    await stage.play(START_SECONDS)
    await down(AWAY_SECONDS)(stage)
    async with marq.Producer(stage.servers, prefix=stage.prefix) as producer:
        await stage.send_one(producer, HANDLED)
    await stage.delivered_more(1, HANDLED_SECONDS)
    await stage.owned()
    stage.load(stage.send())
    await stage.consumer()


INSTANCE = "one"
SAME_INSTANCE = f"--instance-id={INSTANCE}"
#: The watchdog is shorter than the session, so it ends a worker that waits for the session to end.
STATIC: dict[str, Any] = {"MARQ_INSTANCE_ID": INSTANCE, "MARQ_SESSION_TIMEOUT": "30", "MARQ_WATCHDOG": "20"}
#: Time limits of a take-over, which is shorter than that session timeout, and until the former program has stopped.
RESTART_SECONDS, FENCED_SECONDS = 20.0, 30.0


def same_twice(kind: str, another: Step) -> Step:
    """Start another program with the instance id of the only one, which must stop."""

    async def fault(stage: Stage) -> None:
        [former] = getattr(stage, kind)
        # It may stop before the other one is ready.
        former.ended_by_us = True
        await another(stage)
        await stage.until(lambda: not former.running, f"{former.name} has stopped", FENCED_SECONDS)
        stage.note("info", "stop", target=former.name)
        require("joined" in former.log(), f"{former.name} does not say why it stopped:\n{former.log_tail()}")
        await stage.owned(FENCED_SECONDS)

    return fault


STATIC_RESTARTED = then(
    end("workers", -1), worker(again=True, ready=False, **STATIC), lambda stage: stage.owned(RESTART_SECONDS)
)
CONSUMERS = [
    killed_at("consumer-killed-at-each-point", POINTS, quick=True),
    killed_at("transactional-consumer-killed", POINTS, TRANSACTIONAL),
    killed_at("ordered-consumer-killed-while-resuming", RESUMING, after=1),
    killed_at("ordered-consumer-killed-at-each-point", IN_ORDER, UNLUCKY),
    killed_at("ordered-transactional-consumer-killed", [*RESUMING, *IN_ORDER], TRANSACTIONAL, UNLUCKY, after=1),
    Scenario("consumers-join-and-leave", [consumers_join_and_leave], begin(consumers=[["--manner=slow"]], some=0)),
    Scenario("all-consumers-killed", [then(*[end("consumers", -1)] * 2, consumer(), consumer())] * 3),
    Scenario("consumer-paused-past-the-lease", [end("consumers", -1, Stage.pause, LEASE_SECONDS + 1)], quick=True),
    Scenario("consumer-paused-past-the-session", [end("consumers", -1, Stage.pause, GONE_SECONDS)]),
    Scenario("handlers-start-without-broker", [handlers_start_without_broker], None, EmbeddedBroker),
    Scenario("static-worker-restarted-elsewhere", [STATIC_RESTARTED] * 2, begin(consumers=[()], **STATIC)),
    Scenario(
        "one-instance-id-twice",
        [same_twice("consumers", consumer(SAME_INSTANCE)), same_twice("workers", worker(ready=False, **STATIC))],
        begin(consumers=[[SAME_INSTANCE]], **STATIC),
    ),
]

# --- workers ----------------------------------------------------------------------------------------------------------


async def data_lost(stage: Stage) -> None:
    shutil.rmtree(stage.workers[-1].data)


async def changelog_lost(stage: Stage) -> None:
    topic = stage.settings.names.changelog
    async with admin_client(stage.settings) as admin:
        await admin.delete_topics([topic])

        async def gone() -> bool:
            return topic not in await admin.list_topics()

        await stage.until(gone, f"topic {topic} is gone")


async def workers_join_and_leave(stage: Stage) -> None:
    await stage.churn(partial(stage.worker, ready=False), seconds=120.0, every_seconds=6.0)
    await stage.owned()


async def halted(stage: Stage) -> None:
    """Wait until a worker stops a partition, because it cannot read the markers of the next version."""

    async def stopped() -> bool:
        return any(part["state"] == "stopped" for part in await stage.partitions())

    await stage.until(stopped, "a worker has stopped a partition")


#: A worker dies in the transaction of a firing, after its redeliveries were written.
IN_TRANSACTION = doomed("in-transaction", 20)
FIRST_WORKER_STOPPED, FIRST_CONSUMER_STOPPED = end("workers", 0, Stage.stop), end("consumers", 0, Stage.stop)
WORKER_UPGRADED = then(FIRST_WORKER_STOPPED, worker(NEWER, again=True))
CONSUMER_UPGRADED = then(FIRST_CONSUMER_STOPPED, consumer(NEWER))
WORKERS = [
    Scenario("worker-killed", [WORKER_KILLED] * 2, quick=True),
    Scenario("worker-killed-data-lost", [worker_killed(data_lost)]),
    Scenario("worker-killed-changelog-lost", [worker_killed(data_lost, changelog_lost)], place=EmbeddedBroker),
    Scenario(
        "worker-killed-in-the-transaction",
        [next_worker(*IN_TRANSACTION), next_worker(*IN_TRANSACTION), next_worker()],
        begin(IN_TRANSACTION, [()], some=0),
        quick=True,
    ),
    Scenario(
        "worker-killed-in-the-answer",
        # The partitions of another consumer move, so they are resumed again. The first worker fixes those of the keys:
        # before that, senders wait for a worker.
        [
            then(end("workers", -1), worker(*doomed("in-answer"), again=True), consumer()),
            *[
                then(next_worker(*options), consumer())
                for options in (doomed("after-answer"), doomed("in-answer", 3), doomed("after-answer", 3), ())
            ],
        ],
        begin(consumers=[()]),
    ),
    Scenario(
        "worker-paused-past-the-session",
        [then(worker(), Stage.delivered_more, end("workers", 0, Stage.pause, SESSION_SECONDS + 4), Stage.owned)],
    ),
    Scenario("workers-restarted-one-by-one", [then(FIRST_WORKER_STOPPED, worker(again=True))] * 2, begin(workers=2)),
    Scenario("workers-join-and-leave", [workers_join_and_leave]),
    Scenario("upgrade-workers-first", [*[WORKER_UPGRADED] * 2, *[CONSUMER_UPGRADED] * 2], begin(workers=2)),
    Scenario(
        "upgrade-consumers-first",
        [
            then(consumer(NEWER), halted),
            then(worker(NEWER, ready=False), FIRST_WORKER_STOPPED, Stage.owned),
            FIRST_CONSUMER_STOPPED,
        ],
        begin(consumers=[()]),
    ),
]

# --- brokers, and a full disk -----------------------------------------------------------------------------------------

#: How long there are too few brokers: longer than leases and sessions.
TOO_FEW_SECONDS = 10.0
CLUSTER_SECONDS = 120.0
KILLS = 4
FULL_SECONDS = 10.0


def down(
    seconds: float = 0.0,
    end: Callable[[EmbeddedBroker], object] = EmbeddedBroker.kill,
    start: Callable[[EmbeddedBroker], object] = EmbeddedBroker.start,
) -> Step:
    """End the only broker, or pause it, and start it again after a while."""

    async def fault(stage: Stage) -> None:
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(end, stage.place)
            await stage.play(seconds)
            await asyncio.to_thread(start, stage.place)

    return fault


def leader_killed(partition: int) -> Step:
    """Kill the leader of a markers partition; the remaining brokers have everything that was acknowledged."""

    async def fault(stage: Stage) -> None:
        leader = await leader_of(stage, partition)
        # The other brokers keep answering; clients of this one notice its end immediately.
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(stage.place.kill, leader)
            await stage.delivered_more()
        await asyncio.to_thread(stage.place.start, leader)

    return fault


async def leader_of(stage: Stage, partition: int) -> int:
    topic = stage.settings.names.markers
    leading = partial(stage.place.leader_of, topic, partition)
    leader: int = await stage.until(leading, f"{topic}/{partition} has a leader")
    return leader


async def too_few(stage: Stage) -> None:
    """With one broker away, writes are refused; with two away, no broker leads."""
    leader = await leader_of(stage, 0)
    for gone in ([leader], [node for node in stage.place.nodes if node != leader]):
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(stage.place.kill, *gone)
            await stage.play(TOO_FEW_SECONDS)
            await asyncio.to_thread(stage.place.start, *gone)
        await stage.delivered_more(limit=CLUSTER_SECONDS)


def everything_killed(*options: str) -> Step:
    """Kill a worker in a transaction, and all other processes right after that."""

    async def fault(stage: Stage) -> None:
        stage.define(**FEW_ATTEMPTS)
        data = [stage.folder / "data-1", stage.folder / "data-2"]
        await stage.worker(data=data[1])
        stage.load(stage.send())
        for _ in range(KILLS):
            victim = await stage.worker(*IN_TRANSACTION, data=data[0], ready=False)
            await asyncio.gather(*[stage.consumer(*options) for _ in range(2)])
            await stage.dead(victim)
            await asyncio.gather(*[stage.kill(program) for program in stage.everybody if program.running])
            await stage.worker(data=data[1], ready=False)
        await stage.worker(data=data[0])
        await stage.consumer(*options)

    return fault


async def no_message_is_dead_twice(stage: Stage) -> None:
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        ids = Counter([letter.id for queue in stage.queues async for letter in letters.peek(queue)])
    twice = [id_ for id_, count in ids.items() if count > 1]
    require(not twice, f"{len(twice)} of {len(ids)} messages have two dead letters: {', '.join(twice[:5])}")


async def disk_full(stage: Stage) -> None:
    """The changelog has the whole table, so rows that the disk did not accept are not lost."""

    async def stalled() -> bool:
        return any(part["state"] != "owner" for part in await stage.partitions())

    with stage.fault("cut", stage.workers[-1].name):
        stage.place.disk.fill()
        await stage.until(stalled, "the worker notices that its disk is full")
        await stage.play(FULL_SECONDS)
        stage.place.disk.free()
    await stage.owned()


REPLICATED = begin(MARQ_REPLICATION_FACTOR=str(NODES))
BROKERS = [
    Scenario("broker-restarted", [down(end=EmbeddedBroker.stop)] * 2, place=EmbeddedBroker),
    Scenario("broker-killed", [down()] * 2, place=EmbeddedBroker, quick=True),
    Scenario("broker-away", [down(30)], place=EmbeddedBroker),
    Scenario("leader-killed", [leader_killed(0), leader_killed(1)], REPLICATED, BrokerCluster),
    Scenario("too-few-brokers", [too_few], REPLICATED, partial(BrokerCluster, {"min.insync.replicas": str(NODES)})),
    Scenario("everything-killed", [everything_killed(HOPELESS)], None),
    Scenario(
        "transactional-everything-killed",
        [everything_killed(HOPELESS, TRANSACTIONAL)],
        None,
        holds=no_message_is_dead_twice,
    ),
    Scenario(
        "worker-disk-full",
        [disk_full],
        lambda stage: begin(data=stage.place.disk.path / "data")(stage),
        with_small_disk,
    ),
]

# --- networks ---------------------------------------------------------------------------------------------------------

#: Delay of each direction; a request and its response take twice as long.
DELAY_SECONDS = 0.25
#: Maximum connection attempts of one process without a broker, in any second.
MAX_ATTEMPTS = 5
#: Less than a second, because attempts are limited when they begin and counted when the proxy accepts them: on a busy
#: machine, the first of them up to half a second later.
WINDOW_SECONDS = 0.5
#: Maximum log lines of one process, on average.
MAX_LINES_PER_SECOND = 2.0
#: Time limit from the broker's start until all clients are connected: two pauses, on a busy machine.
RETURN_SECONDS = 10.0


async def start_behind_proxies(stage: Stage) -> None:
    """Start a worker, the load and two consumers; the worker, the load and the last consumer may have a proxy each."""
    servers = {client: proxy.address for client, proxy in stage.place.proxies.items()}
    await stage.worker(MARQ_BOOTSTRAP_SERVERS=servers.get("WORKER", stage.servers))
    stage.load(stage.send(servers=servers.get("PRODUCER")))
    await stage.consumer()
    await stage.consumer(MARQ_BOOTSTRAP_SERVERS=servers.get("CONSUMER", stage.servers))
    await stage.delivered_more()


def disturbed(client: str, disturb: Callable[[Proxy], None], *, dead: bool = False) -> Step:
    """Disturb the connections of a client for a while.

    Then the proxy delivers the data that it held, or the old connections turn out to be ``dead``.
    """

    async def fault(stage: Stage) -> None:
        proxy = stage.place.proxies[client.upper()]
        with stage.fault("cut", getattr(stage, f"{client}s")[-1].name):
            disturb(proxy)
            await stage.play(GONE_SECONDS)
            if dead:
                proxy.cut()
            proxy.restore()

    return fault


async def reconnects_counted(stage: Stage) -> None:
    """A proxy counts all attempts, because it accepts connections even while the broker is down."""
    with stage.fault("cut", EVERYBODY):
        stage.place.broker.kill()
        began_s, before = time.monotonic(), {program: _lines(program) for program in stage.everybody}
        await stage.play(GONE_SECONDS)
        seconds, after = time.monotonic() - began_s, {program: _lines(program) for program in before}
        await asyncio.to_thread(stage.place.broker.start)
    await stage.until(
        lambda: all("broker reachable again" in program.log() for program in before),
        "all clients have found the broker",
        RETURN_SECONDS,
    )
    await stage.delivered_more()
    for client, proxy in stage.place.proxies.items():
        attempts = [at_s - began_s for at_s in proxy.accepted_at if 0 <= at_s - began_s <= seconds]
        require(attempts, f"{client} made no attempt")
        times = " ".join(f"{at_s:.2f}" for at_s in attempts)
        most = max(sum(first <= at_s < first + WINDOW_SECONDS for at_s in attempts) for first in attempts)
        require(most <= MAX_ATTEMPTS, f"{client} made {most} attempts within {WINDOW_SECONDS} s: {times}")
    for program, old in before.items():
        new = after[program][len(old) :]
        limit = MAX_LINES_PER_SECOND * seconds
        require(len(new) <= limit, f"{program.name} wrote {len(new)} lines, such as {new[-1:]}")
        for sentence in ("broker unreachable", "broker reachable again"):
            count = program.log().count(sentence)
            require(count == 1, f"{program.name} wrote {count} times {sentence!r}")


def _lines(program: Program) -> Sequence[str]:
    return program.log().splitlines()


NO_ANSWER, NO_REQUEST = (lambda proxy: proxy.freeze("to client")), (lambda proxy: proxy.freeze("to broker"))
#: How the network of one client is disturbed: the ways, and whether the connections are dead afterwards.
DISTURBANCES: dict[str, tuple[list[Callable[[Proxy], None]], bool]] = {
    "slow-network": ([partial(Proxy.delay, seconds=DELAY_SECONDS)], False),
    "cut-off": ([Proxy.cut], False),
    "half-open": ([NO_ANSWER, NO_REQUEST], True),
    "held-up": ([Proxy.freeze], False),
}
NETWORKS = [
    Scenario(
        "reconnects-are-few",
        [reconnects_counted],
        start_behind_proxies,
        partial(behind_proxies, "PRODUCER", "CONSUMER", "WORKER"),
        quick=True,
    ),
    *[
        Scenario(
            f"{client}-{name}",
            [disturbed(client, way, dead=dead) for way in ways],
            start_behind_proxies,
            partial(behind_proxies, client.upper()),
        )
        for client in ("consumer", "worker")
        for name, (ways, dead) in DISTURBANCES.items()
    ],
]

# --- wrong wall clocks ------------------------------------------------------------------------------------------------

AHEAD, BACK = 7200.0, -3600.0
#: Long enough for leases to begin and end by the new clock.
STAY_SECONDS = 2 * LEASE_SECONDS


async def move(stage: Stage, clock: WallClock, seconds: float, target: str) -> None:
    """Move a clock, and let messages pass."""
    stage.note("info", "clock", target=target, seconds=seconds)
    if target == EVERYBODY:
        stage.move_brokers_clock(seconds, 2 * MOVE_SECONDS)
    clock.move(seconds)
    await stage.play(MOVE_SECONDS + STAY_SECONDS)
    await stage.delivered_more()


async def consumers_clock_moved(stage: Stage) -> None:
    """Clocks of clients are never compared with others."""
    clock = WallClock(stage.folder / "clock")
    moved = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    for seconds in (AHEAD, BACK):
        await move(stage, clock, seconds, moved.name)
    # A consumer whose clock is wrong from the start, and which dies with messages in flight.
    victim = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    await stage.kill(victim)


async def workers_clock_moved(stage: Stage) -> None:
    """Its tables contain times: it restarts with them and a clock that is an hour behind."""
    clock = WallClock(stage.folder / "clock")
    await begin(consumers=[()], **clock.environment)(stage)
    for seconds in (AHEAD, BACK):
        await move(stage, clock, seconds, stage.workers[-1].name)
        await then(end("workers", -1), worker(again=True, **clock.environment))(stage)
        await stage.delivered_more()


def brokers_clock_moved(seconds: float) -> Step:
    """The broker stamps all markers, so leases follow its clock alone."""
    # The messages of a killed consumer must return although time has jumped.
    return then(lambda stage: move(stage, stage.place.clock, seconds, EVERYBODY), end("consumers", -1))


#: Messages that are acquired or released between the jump and the next TICK return late by the size of the jump: no
#: worker runs, so nothing can tell the jump from the passage of time.
WITHOUT_A_WORKER = then(
    FIRST_WORKER_STOPPED, lambda stage: move(stage, stage.place.clock, 2 * AHEAD, EVERYBODY), worker(again=True)
)
CLOCKS = [
    Scenario("consumer-clock-moved", [consumers_clock_moved], begin(consumers=[()], some=0)),
    Scenario("worker-clock-moved", [workers_clock_moved], None),
    Scenario("broker-clock-ahead", [brokers_clock_moved(AHEAD), WITHOUT_A_WORKER], place=movable_broker),
    Scenario("broker-clock-back", [brokers_clock_moved(BACK)], place=movable_broker),
]

# --- while messages are delayed, retried, dead-lettered, redriven, or delivered at most once --------------------------

#: Retries after a list of delays, after an exception's own delay, and a reject for another exception.
RETRIES = {"lines": 'backoff = [0.1, 0.4, 1]\nerrors = { TimeoutError = [0.7], ValueError = "reject" }\n'}
FAILING, REJECTING, PATIENT = ["--manner=failing"], ["--manner=rejecting"], ["--manner=patient"]
#: Lines for both queues: an at-most-once queue rejects messages after any exception, the other one after ValueError.
AT_MOST_ONCE = {
    "lines": QUICK_BACKOFF + 'errors = { ValueError = "reject" }\n',
    "own": 'delivery = "at-most-once"\n',
}
#: The points of an at-most-once queue, and after how many passes consumers die there.
SPENDING = {
    "after-acquire": 3, "after-commit": 3, "before-dispatch": 3, "after-dispatch": 3, "in-handler": 40,
    "before-ack": 3,
}  # fmt: skip
#: Rate of a redrive: slow enough for a kill during it.
LETTERS_IN_A_SECOND = 30
AGAIN_S = 0.5
DELAYING = {"own": "delay = 1.5\n"}


def random_consumer_and_worker_killed(turn: int) -> Step:
    """Kill a consumer and the worker; the worker keeps its data in the first turn only."""
    lost = [data_lost] if turn else []
    return then(
        lambda stage: end("consumers", random.Random(stage.seed + turn))(stage),
        worker_killed(*lost),
        consumer(*FAILING),
    )


async def redriven_under_a_kill(stage: Stage) -> None:
    for program in stage.consumers:
        if program.running:
            await stage.stop(program)
    # It handles all redriven messages successfully.
    await stage.consumer(*PATIENT)
    await redriven(stage, killed=True)


async def redriven(stage: Stage, *, killed: bool = False) -> None:
    """Redrive all dead letters; if ``killed``, kill and restart the worker meanwhile."""
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        offsets_of: dict[str, list[int]] = defaultdict(list)
        for queue in stage.queues:
            async for letter in letters.peek(queue):
                offsets_of[f"{stage.settings.names.dead_letters}/{letter.partition}"].append(letter.offset)
        for source, offsets in offsets_of.items():
            stage.note("invoke", "redrive", process="redriver", source=source, offsets=offsets)
        redriving = asyncio.create_task(_redrive_all(letters, stage.queues))
        if killed:
            await stage.delivered_more(sum(map(len, offsets_of.values())) // 3)
            await WORKER_KILLED(stage)
        await stage.until(redriving.done, "all dead letters are redriven")
        await redriving
        for source, offsets in offsets_of.items():
            stage.note("ok", "redrive", process="redriver", source=source, offsets=offsets)


async def _redrive_all(letters: DeadLetters, queues: Sequence[str]) -> None:
    while True:
        try:
            for queue in queues:
                await letters.redrive(queue, rate=LETTERS_IN_A_SECOND)
        except marq.BrokerUnavailable:
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def abandoned_are_counted(stage: Stage) -> None:
    """Compare the worker's counts of the queue without ordering; a busy worker may not answer at once."""
    counting = partial(asyncio.to_thread, stage.workers[-1].row, QUEUE, "worker")
    counts = await stage.until(counting, "the worker returns its counts")
    sent = stage.accepted_by[QUEUE]
    lost = sent - counts["acked"] - counts["dead_lettered"]
    require(
        0 < counts["abandoned"] == lost, f"{sent} sent, {lost} neither done nor dead, but the worker counts {counts}"
    )


#: A consumer dies before DISPATCH; then the worker in the transaction of its redeliveries.
SPENT = dies_at("before-dispatch", 3, *PATIENT)
RANDOM = random_consumer_and_worker_killed
MIXED = partial(begin, (), [FAILING] * 2, load=mix, define=RETRIES)
DELAYS = [
    Scenario("mixed-at-random", [RANDOM(0)], MIXED(some=FEW), holds=redriven, some=FEW, quick=True),
    Scenario("delays-under-kills", [RANDOM(0), RANDOM(1)], MIXED(some=FEWER), holds=redriven_under_a_kill, some=FEWER),
    Scenario(
        "delayed-broker-killed",
        [down()] * 2,
        begin((), [()], load=partial(mix, delayed=1.0), some=FEWER),
        EmbeddedBroker,
        some=FEWER,
    ),
    Scenario(
        "queue-with-delay-killed",
        # Only the queue's setting delays these records, which any producer may write.
        [*[then(end("consumers", 0), consumer())] * 2, WORKER_KILLED],
        begin(define=DELAYING, load=partial(Stage.send, rate=100)),
        some=FEWER,
    ),
    Scenario(
        "at-most-once-killed",
        [dies_at(point, after, *REJECTING) for point, after in SPENDING.items()],
        begin((), [REJECTING], load=partial(mix, delayed=0.0, with_ids=0.0), some=0, define=AT_MOST_ONCE),
        holds=abandoned_are_counted,
        some=FEW,
    ),
    Scenario(
        "at-most-once-worker-killed",
        # The redeliveries are of messages that no handler has seen.
        [then(SPENT, next_worker(*doomed("in-transaction"))), then(SPENT, next_worker())],
        begin(doomed("in-transaction"), [PATIENT], load=partial(mix, delayed=0.0), some=0, define=AT_MOST_ONCE),
        some=FEW,
    ),
]

# --- while messages wait for their turns ------------------------------------------------------------------------------

#: Messages per second of a queue with limits, and its keys; the last one has more messages than each of the others.
LIMITED_RATE, TENANTS = 30, (0, 1, 2, 3, 4, 4)


def of_key(key: str) -> dict[str, str]:
    """Return the arguments of a message of a queue with limits or fairness."""
    return {"queue": QUEUE, "ordering_key": key}


def tenants_send(stage: Stage) -> Coroutine[Any, Any, None]:
    return stage.send(LIMITED_RATE, messages=(of_key(f"tenant-{tenant}") for tenant in itertools.cycle(TENANTS)))


def limited(name: str, lines: str, *options: str) -> Scenario:
    """Return a row in which consumers and the worker of a queue with limits are killed, stopped, and started."""
    limits = Limits.read(tomllib.loads(lines)["limits"])

    async def within_limits(stage: Stage) -> None:
        wrong = exceeded(stage.events, QUEUE, limits)
        require(not wrong, "\n".join(wrong))

    # Partitions move from a killed consumer, whose leases last, and to each that joins from one whose handlers run on.
    joins = consumer(*options)
    faults = [end("consumers", 0), joins, *[FIRST_CONSUMER_STOPPED, joins] * 2, WORKER_KILLED]
    setup = begin((), [options] * 2, define={"own": lines}, load=tenants_send, some=FEWER)
    return Scenario(name, faults, setup, holds=within_limits, some=FEWER)


#: Messages of one key that wait in a fair queue when others are sent; and how many of them half of the others wait for.
FLOOD, MOST_BEFORE = 2_000, 50


def fair(name: str, *options: str) -> Scenario:
    """Return a row in which consumers of a queue with ``fair`` are killed while thousands of messages of a key wait."""
    options = ("--at-once=4", "--work=0.1", "--manner=patient", *options)

    def flood(stage: Stage) -> Awaitable[None]:
        return stage.send(math.inf, messages=itertools.repeat(of_key("flood"), FLOOD))

    async def turns_are_taken(stage: Stage) -> None:
        counts = turns_of_others(stage.events, QUEUE, "flood")
        require(len(counts) > FEW, f"only {len(counts)} messages were sent while many of another key waited")
        half = median(counts)
        require(half <= MOST_BEFORE, f"half of {len(counts)} messages waited for {half} of another key")

    define = {"own": "fair = true\n"}
    # Before the first fault, many more of the busy key than a message of another one may wait for.
    setup = begin((), [options] * 2, define=define, fill=flood, load=tenants_send, some=10 * MOST_BEFORE)
    faults = [end("consumers", 0), consumer(*options), WORKER_KILLED]
    return Scenario(name, faults, setup, holds=turns_are_taken, some=FEWER)


#: Queues of a group with their priorities. Every fifth message is sent to the lower queue, which is more than its share
#: of turns. How many urgent ones may begin before a lower one, and how many would at most in the order of sending.
URGENT, LOWER = "urgent", "lower"
PRIORITIES = {URGENT: 9, LOWER: 1}
LOWER_SHARE, MOST_AHEAD, PREFERRED = 5, 100, 6


def levels_send(stage: Stage, rate: float = math.inf, count: int | None = None) -> Coroutine[Any, Any, None]:
    """Send this many messages to both queues, or until the load ends."""
    queues = itertools.cycle([LOWER, *[URGENT] * (LOWER_SHARE - 1)])
    return stage.send(rate, messages=({"queue": queue} for queue in itertools.islice(queues, count)))


def prioritised(name: str, *options: str) -> Scenario:
    """Return a row in which consumers of a group are killed and join while both of its queues have messages waiting."""
    options = ("--at-once=4", "--work=0.05", "--manner=patient", *options)

    async def set_up(stage: Stage) -> None:
        lines = {queue: f"priority = {priority}\n" for queue, priority in PRIORITIES.items()}
        stage.define_group("levels", lines)
        fill, load = partial(levels_send, count=FLOOD), partial(levels_send, rate=LIMITED_RATE)
        await begin((), [options] * 2, fill=fill, load=load, some=FEWER)(stage)

    async def lower_goes_on(stage: Stage) -> None:
        runs = passed_by(stage.events, URGENT, LOWER)
        first = sum(run for run in runs if run > PREFERRED)
        require(first > FLOOD // 4, f"only {first} urgent messages began before lower ones that waited")
        require(max(runs) <= MOST_AHEAD, f"a process began {max(runs)} urgent messages while lower ones waited")

    joins = consumer(*options)
    faults = [end("consumers", 0), joins, FIRST_CONSUMER_STOPPED, joins, WORKER_KILLED]
    return Scenario(name, faults, set_up, holds=lower_goes_on, some=FEWER)


CONCURRENCY = "limits = { concurrency = 8, per_key = { concurrency = 2 } }\n"
RATES = 'limits = { rate = "40/s", per_key = { rate = "12/s" } }\n'
LIMITS = [
    limited("limits-of-concurrency-hold", CONCURRENCY, "--manner=slow"),
    limited("limits-of-rate-hold", RATES),
    fair("fair-queue-killed"),
    prioritised("lower-priority-goes-on"),
]

SCENARIOS = [*CONSUMERS, *WORKERS, *BROKERS, *NETWORKS, *CLOCKS, *DELAYS, *LIMITS]
