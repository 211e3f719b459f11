"""Latency of single messages: from send to handler, alone and next to a flooded queue, and of redeliveries."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import count
from typing import Any

import marq
from lab.bench.client import (
    CHUNK,
    QUEUE,
    ReceivedMessages,
    percentiles,
    place,
    read_stamp,
    say,
    stamped,
    told,
    until_handled,
)
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import Worker, measured
from lab.resources import Meter
from marq.settings.placements import subset

#: Measured seconds, and the unmeasured ones before them.
SECONDS, UNMEASURED_SECONDS = 8, 2

# --- latency ----------------------------------------------------------------------------------------------------------

STEADY, FAST = "1,000/s", "50,000/s"
#: The fast one first, because a new broker is slow until its JVM has compiled its hot paths.
RATES = {FAST: 50_000, STEADY: 1_000}
#: Messages per call: at 50,000/s there is a call of send_many every 5 ms.
BURSTS = {FAST: 250, STEADY: 1}
P50_MS, P99_MS = 5.0, 40.0
#: Time from the start signal until the first paced message is due.
AHEAD_S = 0.1


async def paced(
    servers: str, prefix: str, queue: str, rate: float, count: int, size: int, burst: int, keys: int = 0
) -> None:
    """Send messages at a steady rate, ``burst`` at a time, however long each takes (an open loop).

    With ``keys``, each message is sent by its own call, with one of this number of ordering keys in turn. A message
    that is sent late, because the process was busy, still carries the time when it should have been sent.
    """
    async with marq.Producer(servers, prefix=prefix) as producer, asyncio.TaskGroup() as calls:
        await producer.send("another", b"")
        say(ready=True)
        await told()
        start_s, sent = time.monotonic() + AHEAD_S, 0
        while sent < count:
            now_s = time.monotonic()
            due = min(count, burst * (int((now_s - start_s) * rate / burst) + 1)) if now_s >= start_s else sent
            # All messages that are due are sent in one call, which is not awaited.
            numbers = range(sent, due)
            messages = [stamped(number, start_s + number // burst * burst / rate, size) for number in numbers]
            if keys or len(messages) == 1:
                for number, message in zip(numbers, messages, strict=True):
                    key = str(number % keys) if keys else None
                    calls.create_task(producer.send(queue, message, ordering_key=key))
            elif messages:
                calls.create_task(producer.send_many(queue, messages))
            sent = due
            await asyncio.sleep(max(0.0, start_s + sent / rate - time.monotonic()))
    say(sent=count)


async def timed(servers: str, prefix: str, queue: str, count: int, unmeasured: int, handled: dict[str, Any]) -> None:
    """Measure the time from each message's planned send until its handler begins; leave out the first messages.

    Args:
        handled: ``concurrency``; ``work_s``, how long a handler takes; ``failing``, the number of ordering keys, whose
            first is not measured; and with ``poison``, each message of that key fails. Empty messages are others'.
    """
    keys, poison, work_s = (handled.get(name, 0) for name in ("failing", "poison", "work_s"))
    milliseconds: list[float] = []
    expected = count - len(range(0, count, keys)) if keys else count
    seen, done = set[int](), asyncio.Event()

    async def handler(message: marq.Message) -> None:
        if message.value:
            number, intended_s = read_stamp(message.value)
            if keys and number % keys == 0:
                if poison:
                    raise ConnectionError("poisoned")
                return
            seen.add(number)
            if number >= unmeasured:
                milliseconds.append((time.monotonic() - intended_s) * 1000)
            if len(seen) == expected:
                done.set()
        if work_s:
            await asyncio.sleep(work_s)

    async with marq.Consumer(queue, servers, prefix=prefix) as consumer:
        say(ready=True)
        await until_handled(consumer, consumer.run(handler, concurrency=handled.get("concurrency")), done)
    say(**percentiles(milliseconds))


def send_to_handler(
    bench: Bench,
    queue: str,
    rate: int,
    burst: int = 1,
    keys: int = 0,
    *,
    flooded: str = "",
    worker: Worker | None = None,
    **handled: Any,
) -> Measurements:
    """Measure the time from when each message should be sent at a steady rate until its handler begins.

    Clients are described at :func:`paced` and :func:`timed`, which gets ``handled``. ``flooded`` names another queue,
    which is flooded meanwhile. ``worker``: one that runs already.
    """
    sent, unmeasured, size = rate * (SECONDS + UNMEASURED_SECONDS), rate * UNMEASURED_SECONDS, bench.size.value_bytes
    namespace, worker = bench.namespace, worker or bench.worker()
    calls: list[tuple[Any, ...]] = [(timed, *namespace, queue, sent, unmeasured, handled)]
    if flooded:
        # Lasts longer than the measurement, and comes before the quiet producer, so that it also begins before it.
        messages = FLOOD_PER_SECOND * (SECONDS + 2 * UNMEASURED_SECONDS)
        calls.append((paced, *namespace, flooded, FLOOD_PER_SECOND, messages, size, BURST))
    consumer, *producers = bench.clients(*calls, (paced, *namespace, queue, rate, sent, size, burst, keys))
    parts = {"producer": producers[-1].pid, "consumer": consumer.pid, "worker": worker.pid, "broker": bench.broker_pid}
    meter = Meter({part: [pid] for part, pid in parts.items()})
    for producer in producers:
        producer.go()
    producers[-1].read()
    cores = meter.cores()
    return {**consumer.read(), **cores}


def _at_rate(bench: Bench, name: str) -> Measurements:
    return send_to_handler(bench, QUEUE, RATES[name], BURSTS[name])


LATENCY = BenchRow(
    "latency",
    "a producer sends at a steady rate: time from when a message should be sent until its handler begins",
    {name: partial(_at_rate, name=name) for name in RATES},
    lambda medians: [
        Bar(f"send to handler at {STEADY}: {name}", medians[STEADY][f"{name}_ms"], limit, "ms")
        for name, limit in (("p50", P50_MS), ("p99", P99_MS))
    ],
    runs=3,
    warm=1,
)

# --- neighbours -------------------------------------------------------------------------------------------------------

ALONE, SHARED, APART = "alone", "with a flooded queue", "with a flooded queue, partitions = 1"
QUIET_QUEUE, QUIET_PER_SECOND = "quiet", 200
FLOOD_PER_SECOND, BURST = 40_000, 40_000
#: Limits of the quiet queue's p99 with `partitions = 1`: a multiple of that without a flood, or ms. The larger applies.
MOST_OF_ALONE, MOST_MS = 3.0, 40.0
_APART = "a quiet queue next to a flooded one, each with partitions = 1: p99"


def neighbours(bench: Bench, flood: bool, apart: bool) -> Measurements:
    """Measure a quiet queue while messages of another one, without consumers, arrive in bursts and pile up.

    In shared partitions the quiet queue's consumer reads them too. If ``apart``, each queue has its own partition.
    """
    partitions = bench.size.partitions
    flooded = neighbour(QUIET_QUEUE, partitions)
    if apart:
        asyncio.run(place(*bench.namespace, [QUIET_QUEUE, flooded], 1, partitions))
    return send_to_handler(bench, QUIET_QUEUE, QUIET_PER_SECOND, flooded=flooded if flood else "")


def neighbour(queue: str, partitions: int) -> str:
    """Return the name of a queue that shares no partition with this one when each has one partition."""
    own = subset(queue, partitions, 1)
    return next(name for number in count() if subset(name := f"flooded-{number}", partitions, 1) != own)


NEIGHBOURS = BenchRow(
    "neighbours",
    f"{QUIET_PER_SECOND} messages a second of a queue, and {FLOOD_PER_SECOND:,} of another at once: send to handler",
    {
        ALONE: partial(neighbours, flood=False, apart=False),
        SHARED: partial(neighbours, flood=True, apart=False),
        APART: partial(neighbours, flood=True, apart=True),
    },
    lambda medians: [
        Bar(_APART, medians[APART]["p99_ms"], max(MOST_OF_ALONE * medians[ALONE]["p99_ms"], MOST_MS), "ms")
    ],
    runs=3,
    warm=1,
)

# --- redelivery -------------------------------------------------------------------------------------------------------

MESSAGES, LEASE_S = 20_000, 5.0
#: One message in this many is forgotten.
FORGOTTEN = 10
QUIET, BUSY = "without other traffic", "with other traffic"
#: Messages a second of another queue in the same partitions, sent, handled and acked meanwhile.
TRAFFIC_PER_SECOND = 2_000
#: Interval between the bursts of that traffic.
TURN_S = 0.005
#: Limits by measurement: name, limit, unit.
REDELIVERY_LIMITS = {
    "lateness_p50_ms": ("lateness p50", 60.0, "ms"),
    "lateness_p99_ms": ("lateness p99", 250.0, "ms"),
    "all_acked_seconds": ("all acked after", 6.5, "s"),
    "duplicates": ("duplicates", 0.0, "messages"),
}


async def traffic(servers: str, prefix: str, queue: str, rate: int) -> None:
    """Send to a queue and handle its messages, at a steady rate, until the row ends this process."""
    handled = asyncio.Event()
    messages = [b"x" * 200] * int(rate * TURN_S)

    async def handler(message: marq.Message) -> None:
        handled.set()

    async def feed(producer: marq.Producer) -> None:
        while True:
            await producer.send_many(queue, messages)
            await asyncio.sleep(TURN_S)

    async with (
        marq.Producer(servers, prefix=prefix) as producer,
        marq.Consumer(queue, servers, prefix=prefix) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handler))
        tasks.create_task(feed(producer))
        await handled.wait()
        say(ready=True)


async def forgetting(servers: str, prefix: str, count: int, lease_s: float) -> None:
    """Forget one message in ten, and measure how late it is redelivered."""
    dropped: dict[int, float] = {}
    late_ms: list[float] = []
    done: set[int] = set()
    duplicates, first_s = 0, 0.0
    # A lease that may not be renewed ends by itself.
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=lease_s, max_lease=lease_s) as consumer:
        say(ready=True)
        while len(done) < count:
            for message in await consumer.receive(max_messages=500, wait=20):
                number = int.from_bytes(message.value[:8], "big")
                first_s = first_s or time.monotonic()
                if message.attempt == 1 and number % FORGOTTEN == 0 and number not in dropped:
                    dropped[number] = message.lease_expires_at.timestamp()
                    continue
                if number in done or (message.attempt > 1) != (number in dropped):
                    duplicates += 1
                elif number in dropped:
                    late_ms.append((time.time() - dropped[number]) * 1000)
                done.add(number)
                await message.ack(wait=False)
        await consumer.flush()
        seconds = time.monotonic() - first_s
    lateness = {f"lateness_{name}": value for name, value in percentiles(late_ms).items()}
    say(**lateness, all_acked_seconds=seconds, duplicates=duplicates)


def redelivery(bench: Bench, rate: int = 0) -> Measurements:
    bench.worker()
    if rate:
        bench.clients((traffic, *bench.namespace, "others", rate))
    [consumer] = bench.clients((forgetting, *bench.namespace, MESSAGES, LEASE_S))
    bench.fill(MESSAGES)
    return consumer.read()


REDELIVERY = BenchRow(
    "redelivery",
    f"{MESSAGES:,} messages, one in {FORGOTTEN} forgotten and redelivered when its lease of {LEASE_S:g} s ends",
    {QUIET: redelivery, BUSY: partial(redelivery, rate=TRAFFIC_PER_SECOND)},
    lambda medians: [
        Bar(f"redelivery, {system}: {what}", measurements[name], limit, unit)
        for system, measurements in medians.items()
        for name, (what, limit, unit) in REDELIVERY_LIMITS.items()
    ],
    runs=3,
    warm=1,
)

# --- expiry -----------------------------------------------------------------------------------------------------------

_TOGETHER, EXPIRED_PER_SECOND = "leases that expire together: redelivered and acked", 40_000
#: While `expiring` receives messages, the library renews their leases; then all leases are set to end at one time.
TAKING_S, LAST_S = 8.0, 8.0


async def expiring(servers: str, prefix: str, count: int) -> None:
    """Receive all messages and leave without settling them; then handle them again when their leases end."""
    held: list[marq.Message] = []
    async with marq.Consumer(QUEUE, servers, prefix=prefix, lease=TAKING_S, max_in_flight=2 * count) as consumer:
        while len(held) < count:
            held += await consumer.receive(max_messages=CHUNK)
        ends_s = time.monotonic() + LAST_S
        for message in held:
            await message.renew(LAST_S, wait=False)
        await consumer.flush()
        all_ended_s = time.monotonic() + LAST_S
    if time.monotonic() > ends_s:
        raise SystemExit("bench: the first lease ended before all were written")
    received, attempts = ReceivedMessages(count), set[int]()

    async def handler(message: marq.Message) -> None:
        attempts.add(message.attempt)
        received.add((message.value,))

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        done_s = await until_handled(consumer, consumer.run(handler), received.done)
    received.check()
    if attempts != {2}:
        raise SystemExit(f"bench: expected only second attempts, got {attempts}")
    say(
        redelivered_per_second=count / (done_s - ends_s),
        first_after_seconds=received.first_s - ends_s,
        leases_ended_within_seconds=all_ended_s - ends_s,
    )


def expiry(bench: Bench) -> Measurements:
    bench.fill()
    meter = Meter({"worker": [bench.worker().pid]})
    measurements = measured(expiring, *bench.namespace, bench.size.messages)
    return {**measurements, "worker_cpu_seconds": meter.seconds()["worker"]}


EXPIRY = BenchRow(
    "expiry",
    "a consumer leaves with all messages in flight: from the end of the first lease until another has acked them all",
    {"marq": expiry},
    lambda medians: [
        Bar(_TOGETHER, medians["marq"]["redelivered_per_second"], EXPIRED_PER_SECOND, "messages/s", at_least=True)
    ],
    runs=3,
    of_messages=0.5,
)
