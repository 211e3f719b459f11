"""Compares the working tree with a commit: ``make bench ONLY=drain,latency COMPARE=main RUNS=5``.

Each system of a row becomes two, one per tree, which take turns on the row's broker. Each measurement is a process
that runs the tree's code, and has its own topics.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from lab.bench.suite import Bench, BenchRow, Measurements, RowOutcome, Size, Skipped, UsageError, format_number, run
from lab.program import ROOT, Program, RunError
from lab.report import terminal_table

WORKING = "working tree"
#: Time limit of one measurement; those of a million delayed messages take longest.
LIMIT_SECONDS = 3600.0
#: CPU use of one part of a system; the tables also show the sum of all parts.
_PART = re.compile(r"(?:\w+_)?(cpu_seconds\w*|cores)")
#: Gives each process its own files.
_numbers = count(1)


@dataclass(frozen=True)
class Tree:
    """A checkout; its processes write to ``folder``, which is deleted if this process dies."""

    label: str
    path: Path
    folder: Path

    def call(self, **arguments: object) -> Any:
        """Run :mod:`lab.bench.measure_once` with this tree's code; raise RunError if it fails."""
        name = f"measurement-{next(_numbers)}"
        result, script = self.folder / f"{name}.json", Path(__file__).with_name("measure_once.py")
        command, log_file = ["-P", str(script), json.dumps(arguments), str(result)], self.folder / f"{name}.log"
        # Byte code is written, because the working tree may have some already.
        environment = {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": ""}
        with Program(name, command, environment, log_file, directory=self.path, temporary=[self.folder]) as program:
            program.wait(LIMIT_SECONDS)
            if program.exit_code != 0:
                raise RunError(f"{self.label}: exit code {program.exit_code}: {program.log_tail()}")
        return json.loads(result.read_text())

    def measure(self, bench: Bench, row: str, system: str) -> Measurements:
        """Measure a system of this tree; raise Skipped if the system does."""
        size = {name: getattr(bench.size, name) for name in ("messages", "value_bytes", "partitions")}
        broker = {"servers": bench.servers, "pid": bench.broker_pid, "data": str(bench.broker.data_directory)}
        measurements = self.call(row=row, system=system, size=size, **broker, folder=str(self.folder))
        if "skipped" in measurements:
            raise Skipped(measurements["skipped"])
        return with_sums(measurements)


def compare(rows: Sequence[BenchRow], size: Size, commit: str) -> list[RowOutcome]:
    """Measure rows from a commit and from the working tree, print their ratios, and write the result.

    Raise UsageError if the commit does not exist or does not have such a row.
    """
    label = short_name(commit)
    with tempfile.TemporaryDirectory(prefix="marq-compare-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        trees = (Tree(label, extracted(label, folder / "tree"), folder), Tree(WORKING, ROOT, folder))
        try:
            known = trees[0].call()
        except RunError as error:
            reason = str(error).splitlines()[-1].strip()
            raise UsageError(f"the rows of commit {label} cannot be listed: {reason}") from None
        pairs = [paired(row, known, trees) for row in rows]
        return run(pairs, size, "rows-compared-", ratio_tables)


def short_name(commit: str) -> str:
    """Return the short hash of a commit; raise UsageError if it does not exist."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--short", f"{commit}^{{commit}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"commit {commit} does not exist")
    return done.stdout.strip()


def extracted(commit: str, tree: Path) -> Path:
    """Write the files of a commit to a new directory, and return it; raise UsageError if lab/bench is missing."""
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    if not (tree / "lab/bench/suite.py").exists():
        raise UsageError(f"commit {commit} does not contain lab/bench")
    return tree


def paired(row: BenchRow, known: Mapping[str, Sequence[str]], trees: Sequence[Tree]) -> BenchRow:
    """Return a row without bars, which measures each system from all trees in turn.

    ``known`` are the commit's rows and their systems. Leave out systems that only one tree has. Raise UsageError if
    the commit does not have the row, or none of its systems.
    """
    systems = [system for system in row.systems if system in known.get(row.name, ())]
    if not systems:
        raise UsageError(f"commit {trees[0].label} does not have row {row.name}, or none of its systems")
    return replace(
        row,
        systems={
            f"{one}, {tree.label}": partial(tree.measure, row=row.name, system=one) for one in systems for tree in trees
        },
        bars=lambda medians: [],
        runs=BenchRow.runs,
    )


def with_sums(measurements: Measurements) -> Measurements:
    """Add the sum of the CPU seconds, or cores, of all parts of a system; a single part gets no sum."""
    parts: dict[str, list[float]] = {}
    for name, value in measurements.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(f"all_{match[1]}", []).append(value)
    return {**measurements, **{name: sum(values) for name, values in parts.items() if len(values) > 1}}


def ratio_tables(outcome: RowOutcome) -> list[Table]:
    """Return a table for each system: the measurements of both trees, and their ratios."""
    pairs = [(*name.rpartition(", ")[::2], before) for name, before in outcome.runs.items()]
    return [
        terminal_table(
            f"{outcome.row.name}: {system} ({len(after)} runs; in brackets: min..max)",
            ("median", label, WORKING, "ratio"),
            ratios(before, after),
        )
        for system, label, before in pairs
        if label != WORKING and (after := outcome.runs.get(f"{system}, {WORKING}"))
    ]


def ratios(before: Sequence[Measurements], after: Sequence[Measurements]) -> list[tuple[str, ...]]:
    """Return a line for each measurement: the medians of both trees, and the second divided by the first.

    The spread of the ratio is that of the runs' own ratios. A measurement that one tree lacks gets an empty ratio.
    """
    lines = []
    for name in dict.fromkeys([*before[0], *after[0]]):
        old, new = ([run[name] for run in runs if name in run] for runs in (before, after))
        sides = [_spread(median(values), values, format_number) if values else "" for values in (old, new)]
        pairs = [_ratio(*pair) for pair in zip(old, new, strict=False)]
        ratio = _spread(_ratio(median(old), median(new)), pairs, "{:.3f}".format) if pairs else ""
        lines.append((name.replace("_", " "), *sides, ratio))
    return lines


def _ratio(before: float, after: float) -> float:
    return after / before if before else math.inf if after else 1.0


def _spread(middle: float, values: Sequence[float], form: Callable[[float], str]) -> str:
    return f"{form(middle)} ({form(min(values))}..{form(max(values))})"
