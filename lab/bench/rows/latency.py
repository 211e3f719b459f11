"""Latency of single messages: from send to handler, alone and next to a flooded queue, and of redeliveries."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial
from itertools import count

from lab.bench.clients.consumers import FORGOTTEN
from lab.bench.load import QUEUE, fill, place
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row
from lab.program import Client, measured
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


def latency(bench: Bench, name: str) -> Measurements:
    prefix, rate = bench.prefix(), RATES[name]
    messages, unmeasured = rate * (SECONDS + UNMEASURED_SECONDS), rate * UNMEASURED_SECONDS
    sending = (bench.servers, prefix, QUEUE, rate, messages, bench.size.value_bytes, BURSTS[name])
    with (
        bench.worker(prefix) as worker,
        Client("producers", "paced", *sending) as producer,
        Client("consumers", "timed", bench.servers, prefix, QUEUE, messages, unmeasured) as consumer,
    ):
        producer.read()
        consumer.read()
        parts = {"producer": producer.pid, "consumer": consumer.pid, "worker": worker.pid, "broker": bench.broker_pid}
        meter, began = Meter({part: [pid] for part, pid in parts.items()}), time.monotonic()
        producer.go()
        producer.read()
        cores = {f"{part}_cores": taken / (time.monotonic() - began) for part, taken in meter.seconds().items()}
        return {**consumer.read(), **cores}


def latency_bars(medians: Medians) -> list[Bar]:
    steady = medians[STEADY]
    return [
        Bar(f"send to handler at {STEADY}: p50", steady["p50_ms"], P50_MS, "ms"),
        Bar(f"send to handler at {STEADY}: p99", steady["p99_ms"], P99_MS, "ms"),
    ]


LATENCY = Row(
    "latency",
    "a producer sends at a steady rate: time from when a message should be sent until its handler begins",
    {name: partial(latency, name=name) for name in RATES},
    latency_bars,
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
    prefix, size = bench.prefix(), bench.size
    flooded = neighbour(QUIET_QUEUE, size.partitions)
    if apart:
        asyncio.run(place(bench.servers, prefix, [QUIET_QUEUE, flooded], 1, size.partitions))
    sent, unmeasured = QUIET_PER_SECOND * (SECONDS + UNMEASURED_SECONDS), QUIET_PER_SECOND * UNMEASURED_SECONDS
    with ExitStack() as stack:
        stack.enter_context(bench.worker(prefix))

        def client(module: str, function: str, *arguments: object) -> Client:
            return stack.enter_context(Client(module, function, bench.servers, prefix, *arguments))

        consumer = client("consumers", "timed", QUIET_QUEUE, sent, unmeasured)
        producers = [client("producers", "paced", QUIET_QUEUE, QUIET_PER_SECOND, sent, size.value_bytes, 1)]
        if flood:
            # Lasts longer than the measurement, and comes before the quiet producer, so that it also begins before it.
            messages = FLOOD_PER_SECOND * (SECONDS + 2 * UNMEASURED_SECONDS)
            flooding = (flooded, FLOOD_PER_SECOND, messages, size.value_bytes, BURST)
            producers.insert(0, client("producers", "paced", *flooding))
        for process in (consumer, *producers):
            process.read()
        for producer in producers:
            producer.go()
        return consumer.read()


def neighbour(queue: str, partitions: int) -> str:
    """Return the name of a queue that shares no partition with this one when each has one partition."""
    own = subset(queue, partitions, 1)
    return next(name for number in count() if subset(name := f"flooded-{number}", partitions, 1) != own)


def neighbours_bars(medians: Medians) -> list[Bar]:
    limit = max(MOST_OF_ALONE * medians[ALONE]["p99_ms"], MOST_MS)
    return [
        Bar("a quiet queue next to a flooded one, each with partitions = 1: p99", medians[APART]["p99_ms"], limit, "ms")
    ]


NEIGHBOURS = Row(
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
    with ExitStack() as stack:
        stack.enter_context(bench.worker(prefix))
        if traffic:
            stack.enter_context(Client("producers", "traffic", bench.servers, prefix, "others", traffic)).read()
        consumer = stack.enter_context(Client("consumers", "forgetting", bench.servers, prefix, MESSAGES, LEASE_S))
        consumer.read()
        asyncio.run(fill(bench.servers, prefix, MESSAGES, bench.size.value_bytes))
        return consumer.read()


def redelivery_bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"redelivery, {system}: {what}", measurements[name], limit, unit)
        for system, measurements in medians.items()
        for name, (what, limit, unit) in REDELIVERY_LIMITS.items()
    ]


REDELIVERY = Row(
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
    with bench.worker(prefix) as worker:
        meter = Meter({"worker": [worker.pid]})
        measurements = measured("consumers", "expiring", bench.servers, prefix, messages)
        return {**measurements, "worker_cpu_seconds": meter.seconds()["worker"]}


def expiry_bars(medians: Medians) -> list[Bar]:
    rate = medians["marq"]["redelivered_per_second"]
    name = "leases that expire together: redelivered and acked"
    return [Bar(name, rate, EXPIRED_PER_SECOND, "messages/s", at_least=True)]


EXPIRY = Row(
    "expiry",
    "a consumer leaves with all messages in flight: from the end of the first lease until another has acked them all",
    {"marq": expiry},
    expiry_bars,
    runs=3,
    of_messages=0.5,
)
