"""Tables, result files and exit codes of measurements."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.bench.suite import BenchRow, RowOutcome, Size, format_number, measure
from lab.report import terminal_table
from marq_worker.broker import java
from marq_worker.broker.downloads import VERSION as KAFKA_VERSION

RESULTS = Path(__file__).with_name("results")
#: Packages whose versions may affect a result.
LIBRARIES = ("aiokafka", "confluent-kafka", "faust-streaming", "rocksdict", "aio-pika", "pyspark")
#: Width of tables in a log.
LOG_COLUMNS = 140


def medians_tables(outcome: RowOutcome) -> list[Table]:
    """Return a table of the medians of all systems."""
    medians = outcome.medians
    runs = max(len(runs) for runs in outcome.runs.values())
    rows = [
        (key.replace("_", " "), *[format_number(found[key]) if key in found else "" for found in medians.values()])
        for key in dict.fromkeys(key for measurements in medians.values() for key in measurements)
    ]
    return [terminal_table(f"{outcome.row.name} ({runs} runs)", ("medians", *medians), rows)]


#: Returns the tables of a row that was measured.
Tables = Callable[[RowOutcome], list[Table]]


def run(rows: Sequence[BenchRow], size: Size, name: str, tables: Tables = medians_tables) -> list[RowOutcome]:
    """Measure rows, print their tables, and write the result to a file whose name begins with ``name``."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_COLUMNS)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="marq-bench-", ignore_cleanup_errors=True) as folder:
        outcomes = [measure(row, Path(folder), size, say) for row in rows]
    show(outcomes, console, tables)
    say(f"all rows: {(time.monotonic() - began) / 60:.1f} minutes")
    write_result({"size": {**asdict(size), "only": sorted(size.only)}, "load_before": load, **kept(outcomes)}, name)
    return outcomes


def show(outcomes: Sequence[RowOutcome], console: Console, tables: Tables) -> None:
    """Print the tables of each row, and all bars in one table."""
    for outcome in outcomes:
        if outcome.runs:
            console.print(*tables(outcome), sep="\n")
        for system, reason in outcome.skipped.items():
            console.print(f"{system}: skipped: {reason}", highlight=False)
    bars = [
        (bar.what, f"{bar.limit:,.2f} {bar.unit}", f"{bar.found:,.2f} {bar.unit}", "yes" if bar.met else "NO")
        for outcome in outcomes
        for bar in outcome.bars
    ]
    if bars:
        console.print(terminal_table("", ("bar", "limit", "found", "met"), bars))
    for outcome in outcomes:
        if outcome.error:
            console.print(f"{outcome.row.name}: FAILED: {outcome.error.splitlines()[-1]}", highlight=False)


def exit_code(outcomes: Sequence[RowOutcome]) -> int:
    """Return 1 if a row failed, 2 if a bar is not met."""
    if any(outcome.error for outcome in outcomes):
        return 1
    return 0 if all(bar.met for outcome in outcomes for bar in outcome.bars) else 2


def kept(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """Return the measurements of all runs, and all bars, as they are written to the result file."""
    fields = ("medians", "runs", "skipped", "error")
    return {
        "rows": {
            outcome.row.name: {
                "what": outcome.row.what,
                "seconds": round(outcome.seconds, 1),
                **{field: getattr(outcome, field) for field in fields},
            }
            for outcome in outcomes
        },
        "bars": [
            {"row": outcome.row.name, **asdict(bar), "met": bar.met} for outcome in outcomes for bar in outcome.bars
        ],
        "failed": [outcome.row.name for outcome in outcomes if outcome.error],
    }


def write_result(result: Mapping[str, Any], name: str) -> None:
    """Write and print a result, with date, machine and versions."""
    now = datetime.now(UTC)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    result = {"date": now.isoformat(timespec="seconds"), "machine": machine, "versions": versions(), **result}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{now:%Y-%m-%dT%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def versions() -> dict[str, str]:
    installed = {"Kafka": KAFKA_VERSION, "Java": str(java.find().version), "Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
