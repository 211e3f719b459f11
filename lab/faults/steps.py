"""The parts of scenarios: set-ups, faults, and what must hold; :mod:`lab.faults.scenarios` puts them together."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import marq
from lab.consumer import LEASE_SECONDS, Point
from lab.faults.conditions import MOVE_SECONDS, BrokerCluster, Proxy, WallClock
from lab.faults.mix import Mix
from lab.faults.scenario import Options, Step, begin
from lab.program import Program, RunError, Worker
from lab.proof.evidence import EVERYBODY
from lab.stage import QUEUE, QUICK_BACKOFF, SESSION_SECONDS, Stage
from marq.dead_letters.dead_letters import DeadLetters
from marq.kafka.connection import admin_client
from marq_worker.broker import EmbeddedBroker

# --- set-up -----------------------------------------------------------------------------------------------------------


def mixed(worker: Options = (), consumers: Sequence[Options] = ((),), *, some: int = 150, **load: Any) -> Step:
    """Start a worker and consumers, and a load of all kinds; ``load`` has arguments of Mix, and ``define``'s."""

    async def set_up(stage: Stage, _: Any) -> None:
        shares = {name: load[name] for name in ("delayed", "with_ids") if name in load}
        if define := {name: value for name, value in load.items() if name not in shares}:
            stage.define(**define)
        await stage.worker(*worker)
        await asyncio.gather(*[stage.consumer(*options) for options in consumers])
        Mix(stage, **shares).start()
        await stage.delivered_more(some)

    return set_up


# --- faults of consumers ----------------------------------------------------------------------------------------------

#: Attempts before a message of the queue with ordering is released for the last time.
FEW_ATTEMPTS = 3


def dies_at(point: str, after: int, *options: str) -> Step:
    async def fault(stage: Stage, _: Any) -> None:
        victim = await stage.consumer(*options, f"--die-at={point}", f"--die-after={after}")
        await stage.dead(victim)

    return fault


async def all_consumers_killed(stage: Stage, _: Any) -> None:
    for consumer in stage.consumers[-2:]:
        await stage.kill(consumer)
    for _ in range(2):
        await stage.consumer()


async def consumer_replaced_by_another(stage: Stage, _: Any) -> None:
    await stage.kill(next(consumer for consumer in stage.consumers if consumer.running))
    await stage.consumer()


def paused(seconds: float) -> Step:
    async def fault(stage: Stage, _: Any) -> None:
        await stage.pause(stage.consumers[-1], seconds)

    return fault


async def consumers_join_and_leave(stage: Stage, _: Any) -> None:
    await stage.churn(partial(stage.consumer, "--manner=slow"), seconds=60.0, every_seconds=4.0)


HANDLED = "handled"
#: Time from the start of a handler process until its broker is killed: at about that time it joins its group.
START_SECONDS, AWAY_SECONDS = 0.3, 5.0
#: Time limit until messages are handled; a group that assigned nothing would try again only after five minutes.
HANDLED_SECONDS = 30.0


async def handlers_start_without_broker(stage: Stage, broker: EmbeddedBroker) -> None:
    stage.define(own=f'[queues.{HANDLED}]\nhandler = "lab.consumer:handle"\n')
    worker = await stage.worker(ready=False)
    await stage.until(lambda: "HandlersApp]: Starting" in worker.log(), "a handler process starts")
    await stage.play(START_SECONDS)
    await down(AWAY_SECONDS)(stage, broker)
    async with marq.Producer(stage.servers, prefix=stage.prefix) as producer:
        await stage.send_one(producer, HANDLED)
    await stage.delivered_more(1, HANDLED_SECONDS)
    await stage.owned()
    stage.load()
    await stage.consumer()


INSTANCE = "one"
#: The watchdog is shorter than the session, so it ends a worker that waits for the session to end.
STATIC = {"MARQ_INSTANCE_ID": INSTANCE, "MARQ_SESSION_TIMEOUT": "30", "MARQ_WATCHDOG": "20"}
#: Shorter than that session timeout.
RESTART_SECONDS = 20.0
FENCED_SECONDS = 30.0


async def static_worker_elsewhere(stage: Stage, _: Any) -> None:
    worker = stage.workers[-1]
    await stage.kill(worker)
    await stage.worker(data=worker.data, ready=False, **STATIC)
    await stage.owned(RESTART_SECONDS)


async def same_consumer_twice(stage: Stage, _: Any) -> None:
    [former] = stage.consumers
    await stage.consumer(f"--instance-id={INSTANCE}")
    await stage.replaced(former, FENCED_SECONDS)


async def same_worker_twice(stage: Stage, _: Any) -> None:
    [former] = stage.workers
    await stage.worker(ready=False, **STATIC)
    await stage.replaced(former, FENCED_SECONDS)
    await stage.owned(FENCED_SECONDS)


# --- faults of workers ------------------------------------------------------------------------------------------------


def worker_killed(*, data: bool = True, changelog: bool = True) -> Step:
    """Kill the newest worker and restart it with its data and the changelog, or without them."""

    async def fault(stage: Stage, _: Any) -> None:
        worker = stage.workers[-1]
        await stage.kill(worker)
        if not data:
            shutil.rmtree(worker.data)
        if not changelog:
            await delete_topic(stage, stage.settings.names.changelog)
        await stage.worker(data=worker.data)

    return fault


async def delete_topic(stage: Stage, topic: str) -> None:
    async with admin_client(stage.settings) as admin:
        await admin.delete_topics([topic])

        async def gone() -> bool:
            return topic not in await admin.list_topics()

        await stage.until(gone, f"topic {topic} is gone")


def next_worker(*options: str, consumer: bool = False) -> Step:
    """Wait until the newest worker has killed itself; restart it with its data, and perhaps start another consumer."""

    async def fault(stage: Stage, _: Any) -> None:
        victim = stage.workers[-1]
        await stage.dead(victim)
        await stage.worker(*options, data=victim.data)
        # Its partitions move, so they are resumed again.
        if consumer:
            await stage.consumer()

    return fault


async def worker_paused_past_the_session(stage: Stage, _: Any) -> None:
    worker = stage.workers[-1]
    await stage.worker()
    await stage.delivered_more()
    await stage.pause(worker, SESSION_SECONDS + 4)
    await stage.owned()


def replaced(kind: str, index: int, *options: str) -> Step:
    """Stop one of the first workers or consumers, and start another one."""

    async def fault(stage: Stage, _: Any) -> None:
        former: Program = getattr(stage, f"{kind}s")[index]
        await stage.stop(former)
        if isinstance(former, Worker):
            await stage.worker(*options, data=former.data)
        else:
            await stage.consumer(*options)

    return fault


async def workers_join_and_leave(stage: Stage, _: Any) -> None:
    await stage.churn(partial(stage.worker, ready=False), seconds=120.0, every_seconds=6.0)
    await stage.owned()


async def newer_consumer(stage: Stage, _: Any) -> None:
    """Start a consumer whose markers the worker cannot read, so it stops their partitions."""
    await stage.consumer("--newer")

    async def halted() -> bool:
        return any(part["state"] == "stopped" for part in await stage.partitions())

    await stage.until(halted, "a worker has stopped a partition")


async def newer_worker(stage: Stage, _: Any) -> None:
    await stage.worker("--newer", ready=False)
    await stage.stop(stage.workers[0])
    await stage.owned()


async def old_consumer_stopped(stage: Stage, _: Any) -> None:
    await stage.stop(stage.consumers[0])


# --- faults of brokers ------------------------------------------------------------------------------------------------

#: How long there are too few brokers: longer than leases and sessions.
TOO_FEW_SECONDS = 10.0
CLUSTER_SECONDS = 120.0
KILLS = 4
#: The firing in whose transaction a worker dies, after its redeliveries were written.
FIRING = 20


def down(seconds: float = 0.0, end: Callable[[EmbeddedBroker], None] = EmbeddedBroker.kill) -> Step:
    """End the only broker, and start it again after a while."""

    async def fault(stage: Stage, broker: EmbeddedBroker) -> None:
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(end, broker)
            await stage.play(seconds)
            await asyncio.to_thread(broker.start)

    return fault


def leader_killed(partition: int) -> Step:
    """Kill the leader of a markers partition; the remaining brokers have everything that was acknowledged."""

    async def fault(stage: Stage, cluster: BrokerCluster) -> None:
        leader = await leader_of(stage, cluster, partition)
        # The other brokers keep answering; clients of this one notice its end immediately.
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, leader)
            await stage.delivered_more()
        await asyncio.to_thread(cluster.start, leader)

    return fault


async def leader_of(stage: Stage, cluster: BrokerCluster, partition: int) -> int:
    topic = stage.settings.names.markers
    leader: int | None = None

    async def led() -> bool:
        nonlocal leader
        leader = await cluster.leader_of(topic, partition)
        return leader is not None

    await stage.until(led, f"{topic}/{partition} has a leader")
    assert leader is not None
    return leader


async def too_few(stage: Stage, cluster: BrokerCluster) -> None:
    """With one broker away, writes are refused; with two away, no broker leads."""
    leader = await leader_of(stage, cluster, 0)
    others = [node for node in cluster.nodes if node != leader]
    for gone in ([leader], others):
        with stage.fault("cut", EVERYBODY):
            await asyncio.to_thread(cluster.kill, *gone)
            await stage.play(TOO_FEW_SECONDS)
            await asyncio.to_thread(cluster.start, *gone)
        await stage.delivered_more(limit=CLUSTER_SECONDS)


def everything_killed(start: str) -> Step:
    """Kill a worker in a transaction, and all other processes right after that."""
    consumer = ("--manner=hopeless", f"--start={start}")

    async def fault(stage: Stage, _: Any) -> None:
        data = [stage.folder / "data-1", stage.folder / "data-2"]
        await stage.worker(data=data[1])
        stage.load()
        for _ in range(KILLS):
            victim = await stage.worker(f"--die-in-transaction={FIRING}", data=data[0], ready=False)
            await asyncio.gather(*[stage.consumer(*consumer) for _ in range(2)])
            await stage.dead(victim)
            await asyncio.gather(*[stage.kill(program) for program in stage.everybody if program.running])
            await stage.worker(data=data[1], ready=False)
        await stage.worker(data=data[0])
        await stage.consumer(*consumer)

    return fault


async def few_attempts(stage: Stage, _: Any) -> None:
    stage.define(max_attempts=FEW_ATTEMPTS)


async def no_message_is_dead_twice(stage: Stage, _: Any) -> None:
    async with DeadLetters(stage.servers, prefix=stage.prefix) as letters:
        ids = Counter([letter.id for queue in stage.queues async for letter in letters.peek(queue)])
    if twice := [id_ for id_, count in ids.items() if count > 1]:
        raise RunError(f"{len(twice)} of {len(ids)} messages have two dead letters: {', '.join(twice[:5])}")


# --- a full disk ------------------------------------------------------------------------------------------------------

FULL_SECONDS = 10.0


async def on_the_small_disk(stage: Stage, here: Any) -> None:
    await begin(data=here.disk.path / "data")(stage, here)


async def disk_full(stage: Stage, here: Any) -> None:
    """The changelog has the whole table, so rows that the disk did not accept are not lost."""

    async def stalled() -> bool:
        return any(part["state"] != "owner" for part in await stage.partitions())

    with stage.fault("cut", stage.workers[-1].name):
        here.disk.fill()
        await stage.until(stalled, "the worker notices that its disk is full")
        await stage.play(FULL_SECONDS)
        here.disk.free()
    await stage.owned()


# --- faults of networks -----------------------------------------------------------------------------------------------

#: Delay of each direction; a request and its response take twice as long.
DELAY_SECONDS = 0.25
#: Longer than leases and sessions.
GONE_SECONDS = SESSION_SECONDS + 2 * LEASE_SECONDS
#: Maximum connection attempts of one process without a broker, in any second.
MAX_ATTEMPTS = 5
#: Less than a second, because attempts are limited when they begin and counted when the proxy accepts them: on a busy
#: machine, the first of them up to half a second later.
WINDOW_SECONDS = 0.5
#: Maximum log lines of one process, on average.
MAX_LINES_PER_SECOND = 2.0
#: Time limit from the broker's start until all clients are connected: two pauses, on a busy machine.
RETURN_SECONDS = 10.0


async def start_behind_proxies(stage: Stage, here: Any) -> None:
    """Start a worker, the load and two consumers; the worker, the load and the last consumer may have a proxy each."""
    servers = {client: proxy.address for client, proxy in here.proxies.items()}
    await stage.worker(MARQ_BOOTSTRAP_SERVERS=servers.get("WORKER", stage.servers))
    stage.load(servers=servers.get("PRODUCER"))
    await stage.consumer()
    await stage.consumer(MARQ_BOOTSTRAP_SERVERS=servers.get("CONSUMER", stage.servers))
    await stage.delivered_more()


def disturbed(client: str, disturb: Callable[[Proxy], None], *, dead: bool = False) -> Step:
    """Disturb the connections of a client for a while.

    Then the proxy delivers the data that it held, or the old connections turn out to be ``dead``.
    """

    async def fault(stage: Stage, here: Any) -> None:
        proxy = here.proxies[client.upper()]
        victim = (stage.workers if client == "worker" else stage.consumers)[-1]
        with stage.fault("cut", victim.name):
            disturb(proxy)
            await stage.play(GONE_SECONDS)
            if dead:
                proxy.cut()
            proxy.restore()

    return fault


async def reconnects_counted(stage: Stage, here: Any) -> None:
    """A proxy counts all attempts, because it accepts connections even while the broker is down."""
    with stage.fault("cut", EVERYBODY):
        here.broker.kill()
        began_s = time.monotonic()
        lines = {program: len(_lines(program)) for program in stage.everybody}
        await stage.play(GONE_SECONDS)
        ended_s = time.monotonic()
        written = {program: _lines(program)[count:] for program, count in lines.items()}
        await asyncio.to_thread(here.broker.start)
    await stage.until(
        lambda: all("broker reachable again" in program.log() for program in lines),
        "all clients have found the broker",
        RETURN_SECONDS,
    )
    await stage.delivered_more()
    for client, proxy in here.proxies.items():
        attempts = [at_s for at_s in proxy.accepted_at if began_s <= at_s <= ended_s]
        _require(bool(attempts), f"{client} made no attempt")
        times = " ".join(f"{at_s - began_s:.2f}" for at_s in attempts)
        most = max(sum(first <= at_s < first + WINDOW_SECONDS for at_s in attempts) for first in attempts)
        _require(most <= MAX_ATTEMPTS, f"{client} made {most} attempts within {WINDOW_SECONDS} s: {times}")
    for program, new in written.items():
        limit = MAX_LINES_PER_SECOND * (ended_s - began_s)
        _require(len(new) <= limit, f"{program.name} wrote {len(new)} lines, such as {new[-1:]}")
        for sentence in ("broker unreachable", "broker reachable again"):
            count = program.log().count(sentence)
            _require(count == 1, f"{program.name} wrote {count} times {sentence!r}")


def _lines(program: Program) -> Sequence[str]:
    return program.log().splitlines()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RunError(otherwise)


# --- wrong wall clocks ------------------------------------------------------------------------------------------------

AHEAD_SECONDS, BACK_SECONDS = 7200.0, -3600.0
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


async def consumers_clock_moved(stage: Stage, _: Any) -> None:
    """Clocks of clients are never compared with others."""
    clock = WallClock(stage.folder / "clock")
    moved = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, moved.name)
    # A consumer whose clock is wrong from the start, and which dies with messages in flight.
    victim = await stage.consumer(**clock.environment)
    await stage.delivered_more()
    await stage.kill(victim)


async def workers_clock_moved(stage: Stage, here: Any) -> None:
    """Its tables contain times: it restarts with them and a clock that is an hour behind."""
    clock = WallClock(stage.folder / "clock")
    await begin(consumers=[()], **clock.environment)(stage, here)
    worker = stage.workers[0]
    for seconds in (AHEAD_SECONDS, BACK_SECONDS):
        await move(stage, clock, seconds, worker.name)
        await stage.kill(worker)
        worker = await stage.worker(data=worker.data, **clock.environment)
        await stage.delivered_more()


def brokers_clock_moved(seconds: float) -> Step:
    """The broker stamps all markers, so leases follow its clock alone."""

    async def fault(stage: Stage, here: Any) -> None:
        await move(stage, here.clock, seconds, EVERYBODY)
        # Its messages must return although time has jumped.
        await stage.kill(stage.consumers[-1])

    return fault


async def brokers_clock_moved_without_a_worker(stage: Stage, here: Any) -> None:
    """Messages that are acquired or released between the jump and the next TICK return late by the size of the jump.

    No worker runs, so nothing can tell the jump from the passage of time.
    """
    [worker] = stage.workers
    await stage.stop(worker)
    await move(stage, here.clock, 2 * AHEAD_SECONDS, EVERYBODY)
    await stage.worker(data=worker.data)


# --- while messages are delayed, retried, dead-lettered, redriven, or delivered at most once --------------------------

#: Deliveries before, between and after faults.
SOME, FEW = 150, 60
#: Retries after a list of delays, after an exception's own delay, and a reject for another exception.
RETRIES = """backoff = [0.1, 0.4, 1]
errors = { TimeoutError = [0.7], ValueError = "reject" }
"""
BACKOFF = [1000, 2, 1000, False, [100, 400, 1000]]
#: Lines for both queues: an at-most-once queue rejects messages after any exception, the other one after ValueError.
REJECTS = QUICK_BACKOFF + 'errors = { ValueError = "reject" }\n'
AT_MOST_ONCE = {"lines": REJECTS, "own": 'delivery = "at-most-once"\n', "delivery": "at-most-once"}
#: Rate of a redrive: slow enough for a kill during it.
LETTERS_IN_A_SECOND = 30
AGAIN_S = 0.5
QUEUE_DELAY_S = 1.5
DELAYING = {"own": f"delay = {QUEUE_DELAY_S}\n", "delay_ms": int(QUEUE_DELAY_S * 1000)}


def random_consumer_and_worker_killed(turn: int) -> Step:
    """Kill a consumer and the worker; the worker keeps its data in the first turn only."""

    async def fault(stage: Stage, here: Any) -> None:
        consumers = [consumer for consumer in stage.consumers if consumer.running]
        await stage.kill(random.Random(stage.seed + turn).choice(consumers))
        await worker_killed(data=not turn)(stage, here)
        await stage.consumer("--manner=failing")

    return fault


def retried(some: int) -> Step:
    return mixed(consumers=[["--manner=failing"]] * 2, some=some, lines=RETRIES, backoff=BACKOFF)


async def redriven_under_a_kill(stage: Stage, _: Any) -> None:
    for consumer in stage.consumers:
        if consumer.running:
            await stage.stop(consumer)
    # It handles all redriven messages successfully.
    await stage.consumer("--manner=patient")
    await redriven(stage, _, killed=True)


async def redriven(stage: Stage, _: Any, *, killed: bool = False) -> None:
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
            await worker_killed()(stage, None)
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


async def abandoned_are_counted(stage: Stage, _: Any) -> None:
    """Compare the worker's counts of the queue without ordering; a busy worker may not answer at once."""
    counts: dict[str, float] = {}

    async def answered() -> bool:
        counts.update(await asyncio.to_thread(stage.workers[-1].row, QUEUE, "worker"))
        return bool(counts)

    await stage.until(answered, "the worker returns its counts")
    sent = stage.accepted_by[QUEUE]
    lost = sent - counts["acked"] - counts["dead_lettered"]
    if not 0 < counts["abandoned"] == lost:
        raise RunError(f"{sent} sent, {lost} neither done nor dead, but the worker counts {counts}")


def spent(*options: str) -> Step:
    """Let a consumer die before DISPATCH; then the worker in the transaction of its redeliveries."""

    async def fault(stage: Stage, here: Any) -> None:
        await dies_at(Point.BEFORE_SPEND, 3, "--manner=patient")(stage, here)
        await next_worker(*options)(stage, here)

    return fault
