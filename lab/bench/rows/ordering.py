"""Queues that go by keys: a drain compared with one without, a key that fails, a busy tenant, and rebalances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import marq
from lab.bench.client import percentiles, read_stamp, say, told, until_handled
from lab.bench.load import CHUNK, QUEUE, fill, fill_keys
from lab.bench.rows.drain import drained
from lab.bench.rows.latency import SECONDS, UNMEASURED_SECONDS, paced, send_to_handler
from lab.bench.suite import Bar, Bench, BenchRow, Limit, Measurements, Medians, limits
from lab.program import BenchClient

KEYS, CONCURRENCY, WORK_MS = 10_000, 1_000, 1
#: The rate with ordering keys, divided by the rate without.
_RELATIVE, LEAST_OF_UNORDERED = f"order by {KEYS:,} keys: rate relative to no order", 0.7
_LIMITED, LEAST_LIMITED = f"limits of {KEYS:,} keys: rate relative to no limits", 0.85
UNORDERED, ORDERED, LIMITED = "marq run, unordered", "marq run, by key", "marq run, 2 of a key at a time"
TWO_OF_A_KEY = {"limits": {"per_key": {"concurrency": 2}}}


def drain(bench: Bench, keys: int, settings: Mapping[str, Any] | None = None) -> Measurements:
    """Drain a queue of messages with ``keys`` ordering keys; 0: without order. ``settings`` are others than order."""
    prefix, size = bench.prefix(), bench.size
    worker = bench.worker(prefix)
    if keys:
        asyncio.run(fill_keys(bench.servers, prefix, size.messages, size.value_bytes, keys, settings))
    else:
        asyncio.run(fill(bench.servers, prefix, size.messages, size.value_bytes))
    return drained(bench, prefix, worker, "run", (WORK_MS, 1), CONCURRENCY)


ORDERED_ROW = BenchRow(
    "ordered",
    f"a full queue drained by one process; {WORK_MS} ms of waiting per message at concurrency {CONCURRENCY:,}; without "
    f"order; with {KEYS:,} ordering keys in turn; with as many keys, of which each has a limit of 2",
    {
        UNORDERED: partial(drain, keys=0),
        ORDERED: partial(drain, keys=KEYS),
        LIMITED: partial(drain, keys=KEYS, settings=TWO_OF_A_KEY),
    },
    limits(
        Limit(_RELATIVE, ORDERED, "rate", LEAST_OF_UNORDERED, "times", at_least=True, over=UNORDERED),
        Limit(_LIMITED, LIMITED, "rate", LEAST_LIMITED, "times", at_least=True, over=UNORDERED),
    ),
    runs=3,
)

# --- poisoned ---------------------------------------------------------------------------------------------------------

PER_SECOND, SOME_KEYS = 1_000, 1_000
HEALTHY, POISONED = "no key fails", "one key fails"
MOST_MORE_MS = 50.0


def poisoned(bench: Bench, poison: bool) -> Measurements:
    """Measure messages whose key does not fail; with ``poison``, each message of the first key does."""
    prefix = bench.prefix()
    bench.worker(prefix)
    asyncio.run(_define(bench.servers, prefix))
    return send_to_handler(bench, prefix, QUEUE, PER_SECOND, keys=SOME_KEYS, poison=poison)


async def _define(servers: str, prefix: str) -> None:
    async with marq.Queues(servers, prefix=prefix) as queues:
        await queues.change(QUEUE, ordering="key", max_attempts="unlimited", backoff=[10])


def poisoned_bars(medians: Medians) -> list[Bar]:
    more = medians[POISONED]["p99_ms"] - medians[HEALTHY]["p99_ms"]
    return [Bar("a key that fails: p99 of the other keys, more than without it", more, MOST_MORE_MS, "ms")]


POISONED_ROW = BenchRow(
    "poisoned",
    f"{PER_SECOND:,} messages a second of {SOME_KEYS:,} ordering keys; the messages of one key fail, with a backoff of "
    "10 s: send to handler of the other keys",
    {HEALTHY: partial(poisoned, poison=False), POISONED: partial(poisoned, poison=True)},
    poisoned_bars,
    runs=3,
    warm=1,
)

# --- tenants ----------------------------------------------------------------------------------------------------------

#: Messages of the busy tenant, sent before; the other tenants send one message a second each.
BUSY_MESSAGES, TENANTS = 100_000, 50
HANDLED_MS, HANDLERS = 10, 64
UNDISTURBED, FAIR, UNFAIR = "fair, without the busy tenant", "fair, with it", "not fair, with it"
MOST_OF_UNDISTURBED = 2.0


async def sharing(servers: str, prefix: str, count: int, unmeasured: int) -> None:
    """Measure the time from each message's planned send until its handler begins; empty messages are another's."""
    milliseconds: list[float] = []
    seen, done = 0, asyncio.Event()

    async def handler(message: marq.Message) -> None:
        nonlocal seen
        if message.value:
            number, intended_s = read_stamp(message.value)
            seen += 1
            if number >= unmeasured:
                milliseconds.append((time.monotonic() - intended_s) * 1000)
            if seen == count:
                done.set()
        await asyncio.sleep(HANDLED_MS / 1000)

    async with marq.Consumer(QUEUE, servers, prefix=prefix) as consumer:
        say(ready=True)
        await until_handled(consumer, consumer.run(handler, concurrency=HANDLERS), done)
    say(**percentiles(milliseconds))


def tenants(bench: Bench, fair: bool, busy: bool) -> Measurements:
    """Measure the messages of tenants with few messages, perhaps next to one with many."""
    prefix, size = bench.prefix(), bench.size
    bench.worker(prefix)
    asyncio.run(_send_busy(bench.servers, prefix, BUSY_MESSAGES if busy else 0, fair))
    count, unmeasured = TENANTS * (SECONDS + UNMEASURED_SECONDS), TENANTS * UNMEASURED_SECONDS
    consumer = bench.client(sharing, bench.servers, prefix, count, unmeasured)
    keys = TENANTS if fair else 0
    producer = bench.client(paced, bench.servers, prefix, QUEUE, TENANTS, count, size.value_bytes, 1, keys)
    for client in (consumer, producer):
        client.read()
    producer.go()
    producer.read()
    return consumer.read()


async def _send_busy(servers: str, prefix: str, count: int, fair: bool) -> None:
    async with marq.Queues(servers, prefix=prefix) as queues, marq.Producer(servers, prefix=prefix) as producer:
        await queues.change(QUEUE, fair=fair)
        for start in range(0, count, CHUNK):
            empty = [b""] * min(CHUNK, count - start)
            await producer.send_many(QUEUE, empty, ordering_key="busy" if fair else None)


def tenants_bars(medians: Medians) -> list[Bar]:
    times = medians[FAIR]["p99_ms"] / medians[UNDISTURBED]["p99_ms"]
    return [Bar("a busy tenant: p99 of the others, relative to without it", times, MOST_OF_UNDISTURBED, "times")]


TENANTS_ROW = BenchRow(
    "tenants",
    f"{TENANTS} tenants send a message a second each, while one with {BUSY_MESSAGES:,} waiting messages is served; "
    f"{HANDLED_MS} ms per message at concurrency {HANDLERS}: send to handler of the {TENANTS}",
    {
        UNDISTURBED: partial(tenants, fair=True, busy=False),
        FAIR: partial(tenants, fair=True, busy=True),
        UNFAIR: partial(tenants, fair=False, busy=True),
    },
    tenants_bars,
    runs=3,
    warm=1,
)

# --- rebalance --------------------------------------------------------------------------------------------------------

REBALANCED_PER_SECOND = 10_000
SETTLE_S, PHASE_S = 8.0, 6.0
MOST_PAUSE_MS = 250.0
RUNNING = "marq run"


async def pausing(servers: str, prefix: str, queue: str, words: int) -> None:
    """Join when told; at each of ``words`` signals, report the longest gap between messages since the last; leave."""
    longest_s = last_s = 0.0

    async def handler(message: marq.Message) -> None:
        nonlocal longest_s, last_s
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s

    say(ready=True)
    await told()
    async with marq.Consumer(queue, servers, prefix=prefix) as consumer:
        running = asyncio.create_task(consumer.run(handler))
        say(joined=True)
        for _ in range(words):
            await told()
            say(longest_ms=1000 * max(longest_s, time.monotonic() - last_s))
            longest_s = 0.0
        await told()
        running.cancel()
        await asyncio.wait([running])
    say(left=True)


def rebalance(bench: Bench) -> Measurements:
    """Measure the longest time without a message at two consumers while a third one joins, and while it leaves."""
    prefix, size = bench.prefix(), bench.size
    count = int(REBALANCED_PER_SECOND * (SETTLE_S + 5 * PHASE_S))
    namespace = (bench.servers, prefix, QUEUE)
    bench.worker(prefix)
    *staying, third = [bench.client(pausing, *namespace, words) for words in (4, 4, 0)]
    producer = bench.client(paced, *namespace, REBALANCED_PER_SECOND, count, size.value_bytes, 100)
    for client in (*staying, third, producer):
        client.read()
    for consumer in staying:
        consumer.ask()
    producer.go()
    time.sleep(SETTLE_S)
    _longest_ms(staying)
    pauses_ms = {}
    for name in ("steady_ms", "join_ms", "leave_ms"):
        if name != "steady_ms":
            third.ask()
        time.sleep(PHASE_S)
        pauses_ms[name] = _longest_ms(staying)
    return pauses_ms


def _longest_ms(consumers: list[BenchClient]) -> float:
    for consumer in consumers:
        consumer.go()
    return float(max(consumer.read()["longest_ms"] for consumer in consumers))


REBALANCE_ROW = BenchRow(
    "rebalance",
    f"two consumers and {REBALANCED_PER_SECOND:,} messages a second: the longest time without a message at one of them "
    "when nothing happens, when a third one joins, and when it leaves",
    {RUNNING: rebalance},
    limits(
        Limit("a consumer joins: longest pause of the others", RUNNING, "join_ms", MOST_PAUSE_MS, "ms"),
        Limit("a consumer leaves: longest pause of the others", RUNNING, "leave_ms", MOST_PAUSE_MS, "ms"),
    ),
    runs=3,
    warm=1,
)
