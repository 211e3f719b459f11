"""Messages that take their time: waiting, as for a service that is asked, with as many at a time as serves each system.

What is best for each was tried (docs/benchmarks.md): more concurrency is not better, since each wait takes its share of
the event loop, which is what limits all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.bars import Bar
from bench.clients.drain_share import BROKER_PROPERTIES
from bench.rows.drain import GROUP, RUN, SHARE, marq, native
from bench.suite import Medians, Row

#: So many messages for each of a drain that a run takes its 8 to 15 seconds.
OF_MESSAGES = 1.5
RUNS = 3


@dataclass(frozen=True)
class Cell:
    """``marq`` and ``group``: messages at a time; ``share``: consumers, and messages that each polls at a time."""

    name: str
    what: str
    work: str
    marq: int
    group: int
    share: tuple[int, int]


CELLS = (
    Cell("work-1ms", "1 ms of waiting for each message", "1", 1_000, 2_000, (1, 40_000)),
    Cell("work-10ms", "10 ms of waiting for each message", "10", 2_000, 4_000, (1, 40_000)),
    Cell("work-100ms", "100 ms of waiting for each message", "100", 10_000, 10_000, (1, 40_000)),
    Cell("work-slow", "500 ms of waiting for 1 % of the messages", "500/100", 2_000, 40_000, (4, 10_000)),
)


def bars(cell: Cell, medians: Medians) -> list[Bar]:
    of_share = medians[RUN]["rate"] / medians[SHARE]["rate"]
    return [Bar(f"{cell.what}: rate, of the share group's", of_share, 1.0, "times", at_least=True)]


def row(cell: Cell) -> Row:
    consumers, polled = map(str, cell.share)
    return Row(
        cell.name,
        f"{cell.what}; marq run at concurrency {cell.marq}, {consumers} consumers of a share group with {polled} "
        f"messages a poll, a consumer group with {cell.group} messages at a time",
        {
            RUN: partial(marq, work=cell.work, concurrency=cell.marq),
            SHARE: partial(native, client="drain_share", how=(cell.work, consumers, polled)),
            GROUP: partial(native, client="drain_confluent", how=(cell.work, str(cell.group))),
        },
        partial(bars, cell),
        runs=RUNS,
        broker_properties=BROKER_PROPERTIES,
        of_messages=OF_MESSAGES,
    )


WORK_ROWS = tuple(map(row, CELLS))
