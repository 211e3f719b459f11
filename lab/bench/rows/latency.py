"""Latency of single messages: from send to handler, alone and next to a flooded queue, and of redeliveries."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count

from lab.bench.clients.consumers import FORGOTTEN
from lab.bench.load import QUEUE, fill, place
from lab.bench.suite import Bar, Bench, BenchRow, Limit, Measurements, Medians, limits
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


def send_to_handler(
    bench: Bench,
    prefix: str,
    queue: str,
    rate: int,
    burst: int = 1,
    keys: int = 0,
    poison: int = 0,
    flooded: str = "",
    worker: Worker | None = None,
) -> Measurements:
    """Measure the time from when each message should be sent at a steady rate until its handler begins.

    Args:
        bench: the environment.
        prefix: prefix of topics that have a worker.
        queue: the queue.
        rate: messages per second.
        burst: messages per call.
        keys: number of ordering keys in turn; 0 for none.
        poison: 1 if each message of the first key fails.
        flooded: another queue, which is flooded meanwhile.
        worker: a worker whose use of the CPU counts, as well as that of clients and broker.
    """
    sent, unmeasured, size = rate * (SECONDS + UNMEASURED_SECONDS), rate * UNMEASURED_SECONDS, bench.size.value_bytes
    namespace = (bench.servers, prefix)
    consumer = bench.client("consumers", "timed", *namespace, queue, sent, unmeasured, keys, poison)
    producers = [bench.client("producers", "paced", *namespace, queue, rate, sent, size, burst, keys)]
    if flooded:
        # Lasts longer than the measurement, and comes before the quiet producer, so that it also begins before it.
        messages = FLOOD_PER_SECOND * (SECONDS + 2 * UNMEASURED_SECONDS)
        flooding = (flooded, FLOOD_PER_SECOND, messages, size, BURST)
        producers.insert(0, bench.client("producers", "paced", *namespace, *flooding))
    for client in (consumer, *producers):
        client.read()
    parts = {"producer": producers[-1].pid, "consumer": consumer.pid}
    if worker is not None:
        parts |= {"worker": worker.pid, "broker": bench.broker_pid}
    meter = Meter({part: [pid] for part, pid in parts.items()})
    for producer in producers:
        producer.go()
    producers[-1].read()
    cores = meter.cores()
    return {**consumer.read(), **(cores if worker is not None else {})}


def latency(bench: Bench, name: str) -> Measurements:
    prefix = bench.prefix()
    worker = bench.worker(prefix)
    return send_to_handler(bench, prefix, QUEUE, RATES[name], BURSTS[name], worker=worker)


LATENCY = BenchRow(
    "latency",
    "a producer sends at a steady rate: time from when a message should be sent until its handler begins",
    {name: partial(latency, name=name) for name in RATES},
    limits(
        Limit(f"send to handler at {STEADY}: p50", STEADY, "p50_ms", P50_MS, "ms"),
        Limit(f"send to handler at {STEADY}: p99", STEADY, "p99_ms", P99_MS, "ms"),
    ),
    runs=3,
    warm=1,
)

# --- neighbours -------------------------------------------------------------------------------------------------------

ALONE, SHARED, APART = "alone", "with a flooded queue", "with a flooded queue, partitions = 1"
QUIET_QUEUE, QUIET_PER_SECOND = "quiet", 200
FLOOD_PER_SECOND, BURST = 40_000, 40_000
#: Limits of the quiet queue's p99 with `partitions = 1`: a multiple of that without a flood, or ms. The larger applies.
MOST_OF_ALONE, MOST_MS = 3.0, 40.0


def neighbours(bench: Bench, flood: bool, apart: bool) -> Measurements:
    """Measure a quiet queue while messages of another one, without consumers, arrive in bursts and pile up.

    In shared partitions the quiet queue's consumer reads them too. If ``apart``, each queue has its own partition.
    """
    prefix, partitions = bench.prefix(), bench.size.partitions
    flooded = neighbour(QUIET_QUEUE, partitions)
    if apart:
        asyncio.run(place(bench.servers, prefix, [QUIET_QUEUE, flooded], 1, partitions))
    bench.worker(prefix)
    return send_to_handler(bench, prefix, QUIET_QUEUE, QUIET_PER_SECOND, flooded=flooded if flood else "")


def neighbour(queue: str, partitions: int) -> str:
    """Return the name of a queue that shares no partition with this one when each has one partition."""
    own = subset(queue, partitions, 1)
    return next(name for number in count() if subset(name := f"flooded-{number}", partitions, 1) != own)


def neighbours_bars(medians: Medians) -> list[Bar]:
    limit = max(MOST_OF_ALONE * medians[ALONE]["p99_ms"], MOST_MS)
    return [
        Bar("a quiet queue next to a flooded one, each with partitions = 1: p99", medians[APART]["p99_ms"], limit, "ms")
    ]


NEIGHBOURS = BenchRow(
    "neighbours",
    f"{QUIET_PER_SECOND} messages a second of a queue, and {FLOOD_PER_SECOND:,} of another at once: send to handler",
    {
        ALONE: partial(neighbours, flood=False, apart=False),
        SHARED: partial(neighbours, flood=True, apart=False),
        APART: partial(neighbours, flood=True, apart=True),
    },
    neighbours_bars,
    runs=3,
    warm=1,
)

# --- redelivery -------------------------------------------------------------------------------------------------------

MESSAGES, LEASE_S = 20_000, 5.0
QUIET, BUSY = "without other traffic", "with other traffic"
#: Messages a second of another queue in the same partitions, sent, handled and acked meanwhile.
TRAFFIC_PER_SECOND = 2_000
#: Limits by measurement: name, limit, unit.
REDELIVERY_LIMITS = {
    "lateness_p50_ms": ("lateness p50", 60.0, "ms"),
    "lateness_p99_ms": ("lateness p99", 250.0, "ms"),
    "all_acked_seconds": ("all acked after", 6.5, "s"),
    "duplicates": ("duplicates", 0.0, "messages"),
}


def redelivery(bench: Bench, traffic: int = 0) -> Measurements:
    prefix = bench.prefix()
    bench.worker(prefix)
    if traffic:
        bench.client("producers", "traffic", bench.servers, prefix, "others", traffic).read()
    consumer = bench.client("consumers", "forgetting", bench.servers, prefix, MESSAGES, LEASE_S)
    consumer.read()
    asyncio.run(fill(bench.servers, prefix, MESSAGES, bench.size.value_bytes))
    return consumer.read()


def redelivery_bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"redelivery, {system}: {what}", measurements[name], limit, unit)
        for system, measurements in medians.items()
        for name, (what, limit, unit) in REDELIVERY_LIMITS.items()
    ]


REDELIVERY = BenchRow(
    "redelivery",
    f"{MESSAGES:,} messages, one in {FORGOTTEN} forgotten and redelivered when its lease of {LEASE_S:g} s ends",
    {QUIET: redelivery, BUSY: partial(redelivery, traffic=TRAFFIC_PER_SECOND)},
    redelivery_bars,
    runs=3,
    warm=1,
)

# --- expiry -----------------------------------------------------------------------------------------------------------

EXPIRED_PER_SECOND = 40_000


def expiry(bench: Bench) -> Measurements:
    prefix, messages = bench.prefix(), bench.size.messages
    asyncio.run(fill(bench.servers, prefix, messages, bench.size.value_bytes))
    meter = Meter({"worker": [bench.worker(prefix).pid]})
    measurements = measured("consumers", "expiring", bench.servers, prefix, messages)
    return {**measurements, "worker_cpu_seconds": meter.seconds()["worker"]}


EXPIRY = BenchRow(
    "expiry",
    "a consumer leaves with all messages in flight: from the end of the first lease until another has acked them all",
    {"marq": expiry},
    limits(
        Limit(
            "leases that expire together: redelivered and acked",
            "marq",
            "redelivered_per_second",
            EXPIRED_PER_SECOND,
            "messages/s",
            at_least=True,
        )
    ),
    runs=3,
    of_messages=0.5,
)
