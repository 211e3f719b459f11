"""Queues with ordering: a drain compared with one without order, a key that fails, and rebalances."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial

import marq
from lab.bench.load import QUEUE, fill, fill_keys
from lab.bench.rows.drain import drained
from lab.bench.suite import Bar, Bench, Measurements, Medians, Row
from lab.program import Client

KEYS, CONCURRENCY, WORK_MS = 10_000, 1_000, "1"
#: The rate with ordering keys, divided by the rate without.
LEAST_OF_UNORDERED = 0.7
UNORDERED, ORDERED = "marq run, unordered", "marq run, by key"


def drain(bench: Bench, keys: int) -> Measurements:
    """Drain a queue of messages with ``keys`` ordering keys; 0: without order."""
    prefix, size = bench.prefix(), bench.size
    with bench.worker(prefix) as worker:
        if keys:
            asyncio.run(fill_keys(bench.servers, prefix, size.messages, size.value_bytes, keys))
        else:
            asyncio.run(fill(bench.servers, prefix, size.messages, size.value_bytes))
        return drained(bench, prefix, worker, "run", WORK_MS, CONCURRENCY)


def drain_bars(medians: Medians) -> list[Bar]:
    share = medians[ORDERED]["rate"] / medians[UNORDERED]["rate"]
    return [Bar(f"order by {KEYS:,} keys: rate relative to no order", share, LEAST_OF_UNORDERED, "times", True)]


ORDERED_ROW = Row(
    "ordered",
    f"a full queue drained by one process; {WORK_MS} ms of waiting per message at concurrency {CONCURRENCY:,}; without "
    f"order, and with {KEYS:,} ordering keys in turn",
    {UNORDERED: partial(drain, keys=0), ORDERED: partial(drain, keys=KEYS)},
    drain_bars,
    runs=3,
)

# --- poisoned ---------------------------------------------------------------------------------------------------------

#: Measured seconds, and the unmeasured ones before them.
SECONDS, UNMEASURED_SECONDS = 8, 2
PER_SECOND, SOME_KEYS = 1_000, 1_000
HEALTHY, POISONED = "no key fails", "one key fails"
MOST_MORE_MS = 50.0


def poisoned(bench: Bench, poison: int) -> Measurements:
    """Measure messages whose key does not fail; each message of the first key does if ``poison`` is 1."""
    prefix, size = bench.prefix(), bench.size
    sent, unmeasured = PER_SECOND * (SECONDS + UNMEASURED_SECONDS), PER_SECOND * UNMEASURED_SECONDS
    with ExitStack() as stack:
        stack.enter_context(bench.worker(prefix))
        asyncio.run(_define(bench.servers, prefix))

        def client(module: str, function: str, *arguments: object) -> Client:
            return stack.enter_context(Client(module, function, bench.servers, prefix, QUEUE, *arguments))

        consumer = client("consumers", "timed", sent, unmeasured, SOME_KEYS, poison)
        producer = client("producers", "paced", PER_SECOND, sent, size.value_bytes, 1, SOME_KEYS)
        for process in (consumer, producer):
            process.read()
        producer.go()
        return consumer.read()


async def _define(servers: str, prefix: str) -> None:
    async with marq.Queues(servers, prefix=prefix) as queues:
        await queues.change(QUEUE, ordering="key", max_attempts="unlimited", backoff=[10])


def poisoned_bars(medians: Medians) -> list[Bar]:
    more = medians[POISONED]["p99_ms"] - medians[HEALTHY]["p99_ms"]
    return [Bar("a key that fails: p99 of the other keys, more than without it", more, MOST_MORE_MS, "ms")]


POISONED_ROW = Row(
    "poisoned",
    f"{PER_SECOND:,} messages a second of {SOME_KEYS:,} ordering keys; the messages of one key fail, with a backoff of "
    "10 s: send to handler of the other keys",
    {HEALTHY: partial(poisoned, poison=0), POISONED: partial(poisoned, poison=1)},
    poisoned_bars,
    runs=3,
    warm=1,
)

# --- rebalance --------------------------------------------------------------------------------------------------------

REBALANCED_PER_SECOND = 10_000
SETTLE_S, PHASE_S = 8.0, 6.0
MOST_PAUSE_MS = 250.0
RUNNING = "marq run"


def rebalance(bench: Bench) -> Measurements:
    """Measure the longest time without a message at two consumers while a third one joins, and while it leaves."""
    prefix, size = bench.prefix(), bench.size
    count = int(REBALANCED_PER_SECOND * (SETTLE_S + 5 * PHASE_S))
    with ExitStack() as stack:
        stack.enter_context(bench.worker(prefix))
        words = (4, 4, 0)
        consumers = [
            stack.enter_context(Client("consumers", "pausing", bench.servers, prefix, QUEUE, each)) for each in words
        ]
        arguments = (QUEUE, REBALANCED_PER_SECOND, count, size.value_bytes, 100)
        producer = stack.enter_context(Client("producers", "paced", bench.servers, prefix, *arguments))
        for process in (*consumers, producer):
            process.read()
        staying, third = consumers[:2], consumers[2]
        for consumer in staying:
            consumer.go()
            consumer.read()
        producer.go()
        time.sleep(SETTLE_S)
        _longest_ms(staying)
        time.sleep(PHASE_S)
        steady_ms = _longest_ms(staying)
        third.go()
        third.read()
        time.sleep(PHASE_S)
        join_ms = _longest_ms(staying)
        third.go()
        third.read()
        time.sleep(PHASE_S)
        return {"steady_ms": steady_ms, "join_ms": join_ms, "leave_ms": _longest_ms(staying)}


def _longest_ms(consumers: list[Client]) -> float:
    for consumer in consumers:
        consumer.go()
    return float(max(consumer.read()["longest_ms"] for consumer in consumers))


def rebalance_bars(medians: Medians) -> list[Bar]:
    found = medians[RUNNING]
    return [
        Bar(f"a consumer {what}: longest pause of the others", found[name], MOST_PAUSE_MS, "ms")
        for what, name in (("joins", "join_ms"), ("leaves", "leave_ms"))
    ]


REBALANCE_ROW = Row(
    "rebalance",
    f"two consumers and {REBALANCED_PER_SECOND:,} messages a second: the longest time without a message at one of them "
    "when nothing happens, when a third one joins, and when it leaves",
    {RUNNING: rebalance},
    rebalance_bars,
    runs=3,
    warm=1,
)
