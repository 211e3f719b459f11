"""Queues that go by keys: a drain compared with one without, a key that fails, a busy tenant, and rebalances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import marq
from lab.bench.client import CHUNK, QUEUE, say, take_keys, told
from lab.bench.rows.drain import drained, relative
from lab.bench.rows.latency import paced, send_to_handler
from lab.bench.suite import Bar, Bench, BenchRow, Measurements
from lab.program import BenchClient, ask

KEYS, CONCURRENCY, WORK_MS = 10_000, 1_000, 1
#: The rate with ordering keys, divided by the rate without.
_RELATIVE, LEAST_OF_UNORDERED = f"order by {KEYS:,} keys: rate relative to no order", 0.7
_LIMITED, LEAST_LIMITED = f"limits of {KEYS:,} keys: rate relative to no limits", 0.85
UNORDERED, ORDERED, LIMITED = "marq run, unordered", "marq run, by key", "marq run, 2 of a key at a time"
TWO_OF_A_KEY = {"limits": {"per_key": {"concurrency": 2}}}


def drain(bench: Bench, settings: Mapping[str, Any] | None = None) -> Measurements:
    """Drain a queue; with ``settings``, one whose messages have ordering keys."""
    worker = bench.worker()
    if settings:
        asyncio.run(take_keys(*bench.namespace, settings))
    bench.fill(keys=KEYS if settings else 0)
    return drained(bench, worker, "run", (WORK_MS, 1), CONCURRENCY)


ORDERED_ROW = BenchRow(
    "ordered",
    f"a full queue drained by one process; {WORK_MS} ms of waiting per message at concurrency {CONCURRENCY:,}; without "
    f"order; with {KEYS:,} ordering keys in turn; with as many keys, of which each has a limit of 2",
    {
        UNORDERED: drain,
        ORDERED: partial(drain, settings={"ordering": "key"}),
        LIMITED: partial(drain, settings=TWO_OF_A_KEY),
    },
    lambda medians: [
        relative(_RELATIVE, medians, ORDERED, UNORDERED, LEAST_OF_UNORDERED),
        relative(_LIMITED, medians, LIMITED, UNORDERED, LEAST_LIMITED),
    ],
    runs=3,
)

# --- poisoned ---------------------------------------------------------------------------------------------------------

PER_SECOND, SOME_KEYS = 1_000, 1_000
HEALTHY, POISONED = "no key fails", "one key fails"
_OTHERS, MOST_MORE_MS = "a key that fails: p99 of the other keys, more than without it", 50.0


def poisoned(bench: Bench, poison: bool) -> Measurements:
    """Measure messages whose key does not fail; with ``poison``, each message of the first key does."""
    handled: dict[str, Any] = {"failing": SOME_KEYS, "poison": poison, "concurrency": CONCURRENCY}
    settings = {"ordering": "key", "max_attempts": "unlimited", "backoff": [10]}
    worker = bench.worker()
    asyncio.run(take_keys(*bench.namespace, settings))
    return send_to_handler(bench, QUEUE, PER_SECOND, 1, SOME_KEYS, worker=worker, **handled)


POISONED_ROW = BenchRow(
    "poisoned",
    f"{PER_SECOND:,} messages a second of {SOME_KEYS:,} ordering keys; the messages of one key fail, with a backoff of "
    "10 s: send to handler of the other keys",
    {HEALTHY: partial(poisoned, poison=False), POISONED: partial(poisoned, poison=True)},
    lambda medians: [Bar(_OTHERS, medians[POISONED]["p99_ms"] - medians[HEALTHY]["p99_ms"], MOST_MORE_MS, "ms")],
    runs=3,
    warm=1,
)

# --- tenants ----------------------------------------------------------------------------------------------------------

#: Messages of the busy tenant, sent before; the other tenants send one message a second each.
BUSY_MESSAGES, TENANTS = 100_000, 50
HANDLED_MS, HANDLERS = 10, 64
UNDISTURBED, FAIR, UNFAIR = "fair, without the busy tenant", "fair, with it", "not fair, with it"
_BUSY, MOST_OF_UNDISTURBED = "a busy tenant: p99 of the others, relative to without it", 2.0


def tenants(bench: Bench, fair: bool, busy: bool) -> Measurements:
    """Measure the messages of tenants with few messages, perhaps next to one with many."""
    handled: dict[str, Any] = {"work_s": HANDLED_MS / 1000, "concurrency": HANDLERS}
    worker = bench.worker()
    if fair:
        asyncio.run(take_keys(*bench.namespace, {"fair": True}))
    asyncio.run(_send_busy(*bench.namespace, BUSY_MESSAGES if busy else 0, fair))
    return send_to_handler(bench, QUEUE, TENANTS, 1, TENANTS if fair else 0, worker=worker, **handled)


async def _send_busy(servers: str, prefix: str, count: int, fair: bool) -> None:
    async with marq.Producer(servers, prefix=prefix) as producer:
        for start in range(0, count, CHUNK):
            empty = [b""] * min(CHUNK, count - start)
            await producer.send_many(QUEUE, empty, ordering_key="busy" if fair else None)


TENANTS_ROW = BenchRow(
    "tenants",
    f"{TENANTS} tenants send a message a second each, while one with {BUSY_MESSAGES:,} waiting messages is served; "
    f"{HANDLED_MS} ms per message at concurrency {HANDLERS}: send to handler of the {TENANTS}",
    {
        UNDISTURBED: partial(tenants, fair=True, busy=False),
        FAIR: partial(tenants, fair=True, busy=True),
        UNFAIR: partial(tenants, fair=False, busy=True),
    },
    lambda medians: [
        Bar(_BUSY, medians[FAIR]["p99_ms"] / medians[UNDISTURBED]["p99_ms"], MOST_OF_UNDISTURBED, "times")
    ],
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
    count = int(REBALANCED_PER_SECOND * (SETTLE_S + 5 * PHASE_S))
    queue = (*bench.namespace, QUEUE)
    bench.worker()
    sending = (paced, *queue, REBALANCED_PER_SECOND, count, bench.size.value_bytes, 100)
    producer, *staying, third = bench.clients(sending, *[(pausing, *queue, words) for words in (4, 4, 0)])
    ask(*staying)
    producer.go()
    time.sleep(SETTLE_S)
    _longest_ms(staying)
    pauses_ms = {}
    for name in ("steady_ms", "join_ms", "leave_ms"):
        if name != "steady_ms":
            ask(third)
        time.sleep(PHASE_S)
        pauses_ms[name] = _longest_ms(staying)
    return pauses_ms


def _longest_ms(consumers: list[BenchClient]) -> float:
    return float(max(answer["longest_ms"] for answer in ask(*consumers)))


REBALANCE_ROW = BenchRow(
    "rebalance",
    f"two consumers and {REBALANCED_PER_SECOND:,} messages a second: the longest time without a message at one of them "
    "when nothing happens, when a third one joins, and when it leaves",
    {RUNNING: rebalance},
    lambda medians: [
        Bar(f"a consumer {name}s: longest pause of the others", medians[RUNNING][f"{name}_ms"], MOST_PAUSE_MS, "ms")
        for name in ("join", "leave")
    ],
    runs=3,
    warm=1,
)
