"""Runs many seeds on all cores and adds up what came of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.world import Result, simulate

#: Seeds that one process runs before it reports.
CHUNK = 25


@dataclass
class Summary:
    """The sum of many seeds."""

    seeds: int = 0
    events: int = 0
    duplicates: int = 0
    failed: list[Result] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.events += result.events
        self.duplicates += result.duplicates
        self.stats.update(result.stats)
        if result.failed:
            self.failed.append(result)


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """A process for each core; spawned, so that nothing of this process (threads, warnings filters) leaks in."""
    with ProcessPoolExecutor(os.cpu_count() or 1, get_context("spawn")) as pool:
        yield pool


def _run_chunk(seeds: range) -> list[Result]:
    return [simulate(seed) for seed in seeds]


def run(start: int, count: int) -> Summary:
    """Simulate ``count`` seeds from ``start`` on."""
    summary = Summary()
    chunks = [range(first, min(first + CHUNK, start + count)) for first in range(start, start + count, CHUNK)]
    if len(chunks) == 1:
        for result in _run_chunk(chunks[0]):
            summary.add(result)
        return summary
    with processes() as pool:
        for results in pool.map(_run_chunk, chunks):
            for result in results:
                summary.add(result)
    return summary
