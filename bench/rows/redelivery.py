"""How late messages come back whose consumer has forgotten them, at the consumer, in hand again."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from bench.bars import Bar
from bench.children import Child
from bench.clients.redelivery import FORGOTTEN
from bench.load import fill
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker

MESSAGES, LEASE_S = 20_000, 5.0
QUIET, BUSY = "nothing else", "beside other traffic"
#: Messages a second of another queue in the same partitions, sent, handled and acked meanwhile.
TRAFFIC_PER_SECOND = 2_000
P50_MS, P99_MS, ALL_ACKED_SECONDS = 60.0, 250.0, 6.5


def redelivered(bench: Bench, traffic: int = 0) -> Figures:
    prefix = bench.prefix()
    with ExitStack() as stack:
        worker = stack.enter_context(BenchWorker(bench.servers, prefix, bench.folder))
        worker.wait_until_owner()
        if traffic:
            others = Child("bench.clients.traffic", bench.servers, prefix, "others", traffic)
            stack.enter_context(others).said()
        consumer = stack.enter_context(Child("bench.clients.redelivery", bench.servers, prefix, MESSAGES, LEASE_S))
        consumer.said()
        asyncio.run(fill(bench.servers, prefix, MESSAGES, bench.size.value_bytes))
        return consumer.said()


def busy(bench: Bench) -> Figures:
    return redelivered(bench, TRAFFIC_PER_SECOND)


def bars(medians: Medians) -> list[Bar]:
    return [
        Bar(f"redelivery, {system}: {what}", found[figure], limit, unit)
        for system, found in medians.items()
        for what, figure, limit, unit in (
            ("lateness p50", "lateness_p50_ms", P50_MS, "ms"),
            ("lateness p99", "lateness_p99_ms", P99_MS, "ms"),
            ("all acked after", "all_acked_seconds", ALL_ACKED_SECONDS, "s"),
            ("duplicates", "duplicates", 0.0, "messages"),
        )
    ]


REDELIVERY = Row(
    "redelivery",
    f"{MESSAGES:,} messages, each {FORGOTTEN}th forgotten, which comes back when its lease of {LEASE_S:g} s is over",
    {QUIET: redelivered, BUSY: busy},
    bars,
    runs=3,
    warm=1,
)
