"""Runs the suite: ``make bench``, or some rows of it: ``make bench ONLY=drain,work RUNS=3 MESSAGES=100000``.

The last line is one JSON object, which is also written to ``bench/results``. Exit code 1: a row failed; 2: a bar is
not met.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import report
from bench.result import write_result
from bench.rows import ROWS
from bench.settings import Size
from bench.suite import Outcome, Row, measure

#: Width of tables in a log.
LOG_COLUMNS = 140


def chosen(rows: Sequence[Row], size: Size) -> list[Row]:
    """Return the rows that the size names.

    Raises:
        SystemExit: it names one that does not exist.
    """
    unknown = [name for name in size.only if not any(is_named(row, name) for row in rows)]
    if unknown:
        raise SystemExit(f"bench: no row {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not size.only or any(is_named(row, name) for name in size.only)]


def is_named(row: Row, name: str) -> bool:
    """Whether a row has this name, or is of this family: ``work`` names ``work-1ms``, too."""
    return row.name == name or row.name.startswith(f"{name}-")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.error for outcome in outcomes):
        return 1
    return 0 if all(bar.met for outcome in outcomes for bar in outcome.bars) else 2


def main() -> None:
    size, console = Size.from_environment(), Console(stderr=True, width=None if sys.stderr.isatty() else LOG_COLUMNS)
    rows = chosen(ROWS, size)
    load, began = os.getloadavg()[0], time.monotonic()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="marq-bench-", ignore_cleanup_errors=True) as folder:
        outcomes = [measure(row, Path(folder), size, say) for row in rows]
    report.show(outcomes, console)
    say(f"all rows: {(time.monotonic() - began) / 60:.1f} minutes")
    shape = {**asdict(size), "only": sorted(size.only)}
    whole = rows == list(ROWS) and size.is_barred
    write_result({"size": shape, "load_before": load, **report.kept(outcomes)}, "suite-" if whole else "rows-")
    sys.exit(exit_code(outcomes))


if __name__ == "__main__":
    main()
