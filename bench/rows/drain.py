"""How fast a queue that is full is emptied by one consumer process, beside Kafka's own clients."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from bench.bars import Bar
from bench.clients.drain_share import BROKER_PROPERTIES
from bench.load import QUEUE, fill
from bench.processes import Meter
from bench.suite import Bench, Figures, Medians, Row, measured
from bench.worker import BenchWorker

#: ``run``'s rate, of the confluent-kafka consumer group's.
LEAST_OF_GROUP, GOAL_OF_GROUP = 0.55, 0.8
#: ``run_batch``'s rate, of the share group's.
LEAST_OF_SHARE, GOAL_OF_SHARE = 0.45, 1.0
RUN, RUN_BATCH, ITERATE = "marq run", "marq run_batch", "marq iterate"
AIOKAFKA, GROUP, SHARE = "aiokafka group", "confluent group", "confluent share group"


def filled(bench: Bench) -> tuple[str, float]:
    """Return the prefix of topics that were just filled, and how many messages were sent per second."""
    prefix, size = bench.prefix(), bench.size
    return prefix, asyncio.run(fill(bench.servers, prefix, size.messages, size.value_bytes))


def marq(bench: Bench, way: str = "run", start: str = "marked", work: str = "0", concurrency: int = 64) -> Figures:
    """Measure Marq with a worker of its own: ``work`` as :class:`bench.clients.work.Work` reads it."""
    prefix, _ = filled(bench)
    count = bench.size.messages
    with BenchWorker(bench.servers, prefix, bench.folder) as worker:
        worker.wait_until_owner()
        meter = Meter({"tracker": [worker.process.pid], "broker": [bench.broker_pid]})
        arguments = (bench.servers, prefix, str(count), way, start, work, str(concurrency))
        figures = measured("bench.clients.drain_marq", *arguments)
        worker.wait_until_drained(QUEUE, count)
        behind = max(0.0, time.time() - figures["ended_at"])
        return {**of_client(figures), "tracker_behind_seconds": behind, **of_parts(meter)}


def native(bench: Bench, client: str, how: tuple[str, ...] = ()) -> Figures:
    """Measure one of Kafka's own: a module of ``bench.clients``."""
    prefix, _ = filled(bench)
    meter = Meter({"broker": [bench.broker_pid]})
    arguments = (bench.servers, f"{prefix}.messages", str(bench.size.messages), *how)
    return {**of_client(measured(f"bench.clients.{client}", *arguments)), **of_parts(meter)}


def of_client(figures: Figures) -> Figures:
    return {name: figures[name] for name in ("rate", "startup_seconds", "cpu_seconds")}


def of_parts(meter: Meter) -> Figures:
    return {f"{part}_cpu_seconds": seconds for part, seconds in meter.seconds().items()}


def bars(medians: Medians) -> list[Bar]:
    of_group = medians[RUN]["rate"] / medians[GROUP]["rate"]
    of_share = medians[RUN_BATCH]["rate"] / medians[SHARE]["rate"]
    return [
        Bar("drain by run: rate, of the confluent group's", of_group, LEAST_OF_GROUP, "times", True, GOAL_OF_GROUP),
        Bar("drain by run_batch: rate, of the share group's", of_share, LEAST_OF_SHARE, "times", True, GOAL_OF_SHARE),
    ]


def crossings(medians: Medians) -> list[str]:
    """Say of each pair of Marq's ways and the others which of them is done first, from its start, and up to where."""
    return [
        crossing(mine, medians[mine], other, medians[other])
        for mine in (RUN, RUN_BATCH)
        for other in (AIOKAFKA, GROUP, SHARE)
        if mine in medians and other in medians
    ]


def crossing(first: str, one: Figures, second: str, other: Figures) -> str:
    """Say from how many messages on the one with the higher rate is done first, its start-up included."""
    faster, slower = (first, second) if one["rate"] > other["rate"] else (second, first)
    fast, slow = (one, other) if faster == first else (other, one)
    later = fast["startup_seconds"] - slow["startup_seconds"]
    if later <= 0:
        return f"{faster} is done before {slower} however many messages there are"
    count = later / (1 / slow["rate"] - 1 / fast["rate"])
    return f"{slower} is done before {faster} with less than {count:,.0f} messages"


DRAIN = Row(
    "drain",
    "a full queue emptied by one process, nothing done with a message but to look at it and to acknowledge it",
    {
        RUN: marq,
        GROUP: partial(native, client="drain_confluent"),
        RUN_BATCH: partial(marq, way="run_batch", concurrency=2),
        SHARE: partial(native, client="drain_share"),
        ITERATE: partial(marq, way="iterate"),
        AIOKAFKA: partial(native, client="drain_aiokafka"),
    },
    bars,
    crossings,
    broker_properties=BROKER_PROPERTIES,
)
