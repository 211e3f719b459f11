"""Runs many seeds on all cores and adds up their results, in constant memory for any number of seeds."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.simulation.world import Plan, Result, simulate

#: Seeds that one process runs before it reports.
CHUNK = 25
#: Results of failed seeds that are kept; the others are only counted.
MAX_FAILED = 20
#: Interval between two lines of progress.
PROGRESS_SECONDS = 60.0


@dataclass
class Summary:
    """The sum of many seeds."""

    seeds: int = 0
    events: int = 0
    duplicates: int = 0
    failures: int = 0
    #: The results of the first failed seeds.
    failed: list[Result] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)
    causes: Counter[int] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.duplicates += other.duplicates
        self.failures += other.failures
        self.failed = sorted([*self.failed, *other.failed], key=lambda result: result.seed)[:MAX_FAILED]
        self.stats.update(other.stats)
        self.causes.update(other.causes)


def _summary(result: Result) -> Summary:
    failed = [result] if result.failed else []
    return Summary(1, result.events, result.duplicates, len(failed), failed, result.stats, result.causes)


@contextmanager
def processes(count: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Start a process for each core; spawned, so that nothing of this process (threads, warnings filters) leaks in."""
    # Sets of texts have the same order in all of them, so that a seed is the same world.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    with ProcessPoolExecutor(count or os.cpu_count() or 1, get_context("spawn")) as pool:
        yield pool


def _run_chunk(seeds: range, plan: Plan) -> Summary:
    summary = Summary()
    for seed in seeds:
        summary.add(_summary(simulate(seed, plan)))
    return summary


def run(
    start: int,
    count: int,
    plan: Plan | None = None,
    *,
    cores: int | None = None,
    progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Simulate ``count`` seeds from ``start`` on; ``progress`` is called with the summary from time to time."""
    plan, summary, tell = plan or Plan(), Summary(), _Progress(progress)
    chunks = (range(first, min(first + CHUNK, start + count)) for first in range(start, start + count, CHUNK))
    if count <= CHUNK or cores == 1:
        for chunk in chunks:
            summary.add(_run_chunk(chunk, plan))
            tell(summary)
        return summary
    with processes(cores) as pool:
        running: set[Future[Summary]] = set()
        for chunk in chunks:
            running.add(pool.submit(_run_chunk, chunk, plan))
            # A few chunks ahead: a million of them would fill the memory.
            if len(running) >= 2 * (cores or os.cpu_count() or 1):
                running = _collect(running, summary)
            tell(summary)
        while running:
            running = _collect(running, summary)
    return summary


class _Progress:
    """Calls back now and then, and when a seed has failed."""

    def __init__(self, call: Callable[[Summary], None] | None) -> None:
        self._call = call
        self._told_at = time.monotonic()
        self._failures = 0

    def __call__(self, summary: Summary) -> None:
        due = time.monotonic() - self._told_at > PROGRESS_SECONDS
        if self._call is not None and (due or summary.failures > self._failures):
            self._told_at, self._failures = time.monotonic(), summary.failures
            self._call(summary)


def _collect(running: set[Future[Summary]], summary: Summary) -> set[Future[Summary]]:
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        summary.add(future.result())
    return rest
