"""What a queue's consumer notices of another queue that is flooded: how long its own few messages take.

Each second many messages of the other queue come at once, and its consumers are away, so they pile up: where both
queues share partitions the quiet one's consumer has to read through them. With spread each queue lives on one
partition, and these two queues on different ones. Producers and the consumer are processes of their own.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from itertools import count

from bench.bars import Bar
from bench.children import Child
from bench.placing import place
from bench.suite import Bench, Figures, Medians, Row
from bench.worker import BenchWorker
from marq.core.spread import subset

ALONE, BESIDE, APART = "alone", "beside a flood", "beside a flood, spread of 1"
QUIET, QUIET_PER_SECOND, SECONDS, UNMEASURED_SECONDS = "quiet", 200, 8, 2
FLOOD_PER_SECOND, BURST = 40_000, 40_000
#: With spread, p99 of the quiet queue: of that of the quiet queue alone, or in ms, whichever is more.
MOST_OF_ALONE, MOST_MS = 3.0, 40.0


def quiet(bench: Bench, flood: bool, spread: bool) -> Figures:
    prefix, size = bench.prefix(), bench.size
    flooded = another(QUIET, size.partitions)
    if spread:
        asyncio.run(place(bench.servers, prefix, [QUIET, flooded], 1, size.partitions))
    sent, unmeasured = QUIET_PER_SECOND * (SECONDS + UNMEASURED_SECONDS), QUIET_PER_SECOND * UNMEASURED_SECONDS
    with ExitStack() as stack:
        worker = stack.enter_context(BenchWorker(bench.servers, prefix, bench.folder))
        worker.wait_until_owner()

        def client(name: str, *arguments: object) -> Child:
            return stack.enter_context(Child(f"bench.clients.{name}", bench.servers, prefix, *arguments))

        processes = [consumer := client("timed", QUIET, sent, unmeasured)]
        processes.append(producer := client("paced", QUIET, QUIET_PER_SECOND, sent, size.value_bytes, 1))
        if flood:
            # For longer than it is looked at.
            messages = FLOOD_PER_SECOND * (SECONDS + 2 * UNMEASURED_SECONDS)
            processes.append(flooding := client("paced", flooded, FLOOD_PER_SECOND, messages, size.value_bytes, BURST))
        for process in processes:
            process.said()
        if flood:
            flooding.tell()
        producer.tell()
        figures: Figures = consumer.said()
        return figures


def another(queue: str, partitions: int) -> str:
    """Return the name of a queue that shares no partition with one, when both live on one partition."""
    own = subset(queue, partitions, 1)
    return next(name for number in count() if subset(name := f"flooded-{number}", partitions, 1) != own)


def bars(medians: Medians) -> list[Bar]:
    limit = max(MOST_OF_ALONE * medians[ALONE]["p99_ms"], MOST_MS)
    return [
        Bar("a quiet queue beside a flooded one, each with a spread of 1: p99", medians[APART]["p99_ms"], limit, "ms")
    ]


NEIGHBOURS = Row(
    "neighbours",
    f"{QUIET_PER_SECOND} messages a second of a queue, and {FLOOD_PER_SECOND:,} of another at once: send to handler",
    {
        ALONE: partial(quiet, flood=False, spread=False),
        BESIDE: partial(quiet, flood=True, spread=False),
        APART: partial(quiet, flood=True, spread=True),
    },
    bars,
    runs=3,
    warm=1,
)
