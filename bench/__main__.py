"""Runs the benchmark: rows in turn, medians, a table, and one JSON line at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.result import write_result
from bench.rows import Rows
from bench.settings import Size
from broker import EmbeddedBroker


def measure(rows: Rows, size: Size, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Return the median of every figure of every row."""
    alternated = {"marq": rows.drain, "confluent": rows.confluent, "iterate": rows.iterate}
    single = {"redelivery": rows.redelivery, "idle": rows.idle}
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(size.runs):
        for name, row in alternated.items():
            if size.wants(name):
                found.setdefault(name, []).append(row())
                say(f"{turn + 1}/{size.runs} {name}: {found[name][-1]}")
    for name, row in single.items():
        if size.wants(name):
            found[name] = [row()]
            say(f"{name}: {found[name][-1]}")
    return {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def show(figures: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("row", "figure", "median")
    for name, row in figures.items():
        for key, value in row.items():
            table.add_row(name, key.replace("_", " "), f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    console.print(table)


def main() -> None:
    size, console = Size.from_environment(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder:
        broker = EmbeddedBroker(heap="1g").start()
        try:
            rows = Rows(broker.bootstrap_servers, Path(folder), size)
            figures = measure(rows, size, lambda line: console.print(line, highlight=False))
        finally:
            broker.close()
    show(figures, console)
    result: dict[str, Any] = {"messages": size.messages, "runs": size.runs, "figures": figures}
    if "marq" in figures and "confluent" in figures:
        result["drain_ratio"] = figures["marq"]["rate"] / figures["confluent"]["rate"]
    write_result(result)


if __name__ == "__main__":
    main()
