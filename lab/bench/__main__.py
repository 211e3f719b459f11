"""Runs the suite: ``make bench``, or some rows of it: ``make bench ONLY=drain,work RUNS=3 MESSAGES=100000``.

With ``COMPARE=<commit>``, it compares the working tree with a commit (:mod:`lab.bench.compare`).

The last line is one JSON object, which is also written to ``lab/bench/results``. Exit code 1: a row failed; 2: a bar is
not met, or a variable is invalid.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lab.bench.compare import compare
from lab.bench.pipeline import PIPELINE
from lab.bench.rows import drain, latency, ordering, queues, restarts, sqs, throughput, tracker
from lab.bench.suite import BenchRow, Size, UsageError, exit_code, run

#: All rows in the order in which they run; the last ones run only by name.
ROWS: tuple[BenchRow, ...] = (
    drain.DRAIN,
    *drain.WORK_ROWS,
    drain.RABBITMQ,
    throughput.SEND,
    tracker.TRACKER,
    tracker.BACKLOG,
    latency.LATENCY,
    latency.REDELIVERY,
    latency.EXPIRY,
    queues.QUEUES_ROW,
    queues.READERS_ROW,
    latency.NEIGHBOURS,
    ordering.ORDERED_ROW,
    ordering.POISONED_ROW,
    ordering.TENANTS_ROW,
    ordering.REBALANCE_ROW,
    sqs.SQS,
    drain.MEMORY,
    throughput.SCALE,
    tracker.IDLE,
    restarts.RECOVERY,
    restarts.DELAYS,
    restarts.DEDUPLICATION,
    PIPELINE,
)


def chosen(rows: Sequence[BenchRow], size: Size) -> list[BenchRow]:
    """Return the rows that the size names; without names, all except those that run only by name.

    Raise UsageError if a name matches no row.
    """
    if not size.only:
        return [row for row in rows if not row.by_name]
    unknown = [name for name in size.only if not any(row.is_named(name) for row in rows)]
    if unknown:
        raise UsageError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if any(row.is_named(name) for name in size.only)]


def main() -> None:
    try:
        if sys.argv[1:]:
            raise UsageError("takes no arguments, but variables: make bench ONLY=drain RUNS=3 MESSAGES=100000")
        size = Size.from_environment()
        rows, whole = chosen(ROWS, size), not size.only and size.is_barred
        if commit := os.environ.get("COMPARE"):
            outcomes = compare(rows, size, commit)
        else:
            outcomes = run(rows, size, "suite-" if whole else "rows-")
    except UsageError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(exit_code(outcomes))


if __name__ == "__main__":
    main()
