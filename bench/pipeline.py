"""Measures the data pipeline on a great many messages: ``python -m bench.pipeline --messages 10000000``.

A history with a known truth (:mod:`bench.history`) is written to a Kafka of its own. Then ``ingest``, ``lifecycle`` and
``audit`` run as their users run them, each as a process. What they find must be the truth, to the message: anything
else ends the run. Memory is what is resident of all processes of a job at a time, shared pages each time; the broker's
is not among it. Several sizes in one run show how time grows with size, in a plot too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, show
from bench.history import TURN, History, Log, Truth
from bench.processes import Taken, run
from bench.result import write_result
from broker import EmbeddedBroker
from marq.settings import ClientSettings
from marq.topics import ensure_topics
from pipeline.audit import FIGURES

INGEST_PER_SECOND = 80_000
JUDGED_PER_SECOND = 60_000
MAX_MEMORY_GIB = 4.0
#: A marker of the largest run may take so many times what one of the smallest takes.
MAX_GROWTH = 1.2
JOBS = ("ingest", "lifecycle", "audit")
PLOT = Path(__file__).parents[1] / "docs" / "pipeline-scale.png"

_OPTIONS = {"audit": ("--json", "--drained")}
_INGESTED = re.compile(r"([\d,]+) (markers|corrupt|messages|dead_letters)")


@dataclass(frozen=True)
class Size:
    """So many messages of ``value_bytes``; the topics of messages and of markers have ``partitions`` each."""

    messages: int = 1_000_000
    value_bytes: int = 200
    partitions: int = 4


def measure(servers: str, folder: Path, size: Size, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure on a broker that is there; return the figures of one run.

    Raises:
        SystemExit: a job failed, or what it found is not the truth.
    """
    prefix = f"pipeline{int(time.time())}"
    client = ClientSettings.read(servers, {"prefix": prefix, "partitions": size.partitions}, environment={})
    topics = asyncio.run(ensure_topics(client))
    began = time.monotonic()
    history = History(
        Log(servers), client.names, topics.messages_partitions, topics.markers_partitions, size.value_bytes
    )
    history.write(size.messages)
    truth = history.truth
    say(f"history: {truth.rows['markers']:,} markers in {time.monotonic() - began:.1f} s")
    environment = {**os.environ, "MARQ_BOOTSTRAP_SERVERS": servers, "MARQ_PREFIX": prefix}
    data = folder / prefix
    taken = {}
    for job in JOBS:
        command = [sys.executable, "-m", "pipeline", job, "--data", str(data), *_OPTIONS.get(job, ())]
        taken[job] = found = run(command, environment)
        say(
            f"{job}: {found.seconds:.1f} s, {found.cpu_seconds:.1f} s of processor time,"
            f" at most {found.peak_bytes / 2**20:,.0f} MiB"
        )
        if found.code:
            raise SystemExit(f"bench: {job} ended with exit code {found.code}:\n{found.errors}{found.output[:2_000]}")
    compare(truth, taken["ingest"].output, json.loads(taken["audit"].output))
    return {"markers": truth.rows["markers"], **_figures(taken), **_disk(data)}


def compare(truth: Truth, ingested: str, audit: dict[str, Any]) -> None:
    """Compare what the jobs say with the truth.

    Raises:
        SystemExit: there is any difference.
    """
    found = {table: int(count.replace(",", "")) for count, table in _INGESTED.findall(ingested)}
    wrong = [
        f"ingest: {count:,} {table}, expected {truth.rows[table]:,}"
        for table, count in found.items()
        if count != truth.rows[table]
    ]
    if found.keys() < truth.rows.keys():
        wrong.append(f"ingest says nothing of {sorted(truth.rows.keys() - found.keys())}: {ingested!r}")
    for queue in sorted(truth.figures.keys() | audit["queues"].keys()):
        expected, said = truth.figures[queue], audit["queues"].get(queue, {})
        wrong += [
            f"audit: {queue}: {said.get(name, 0):,} {name}, expected {expected[name]:,}"
            for name in FIGURES
            if said.get(name, 0) != expected[name]
        ]
    if dict(audit["causes"]) != dict(truth.causes):
        wrong.append(f"audit: causes {audit['causes']}, expected {dict(truth.causes)}")
    if not audit["right"]:
        wrong.append(f"audit: not right: {audit['wrong'][:5]}")
    if wrong:
        raise SystemExit("\n".join(["bench: the pipeline has not found the truth", *wrong]))


def _figures(taken: dict[str, Taken]) -> dict[str, float]:
    return {
        f"{job}_{name}": value
        for job, found in taken.items()
        for name, value in (
            ("seconds", found.seconds),
            ("cpu_seconds", found.cpu_seconds),
            ("peak_mib", found.peak_bytes / 2**20),
        )
    }


def _disk(data: Path) -> dict[str, float]:
    """How many MiB the tables take."""
    return {
        f"{table}_disk_mib": sum(file.stat().st_size for file in (data / table).rglob("*") if file.is_file()) / 2**20
        for table in ("markers", "messages", "lifecycle")
    }


def bars(figures: dict[str, Any]) -> list[Bar]:
    """Return what is asked of a run."""
    markers = figures["markers"]
    judged = markers / (figures["lifecycle_seconds"] + figures["audit_seconds"])
    memory = max(figures[f"{job}_peak_mib"] for job in JOBS) / 1024
    return [
        Bar("ingest, at least", markers / figures["ingest_seconds"], INGEST_PER_SECOND, "markers/s", at_least=True),
        Bar("lifecycle and audit together, at least", judged, JUDGED_PER_SECOND, "markers/s", at_least=True),
        Bar("memory of a job, at the most", memory, MAX_MEMORY_GIB, "GiB"),
    ]


def growth(runs: list[dict[str, Any]]) -> Bar:
    """Return what is asked of several sizes: a marker of the largest takes hardly longer than one of the smallest."""
    of_a_marker = [sum(run[f"{job}_seconds"] for job in JOBS) / run["markers"] for run in runs]
    return Bar("time of a marker, largest to smallest run", of_a_marker[-1] / of_a_marker[0], MAX_GROWTH, "times")


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of each job over the number of markers."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    millions = [run["markers"] / 1e6 for run in runs]
    for job in JOBS:
        axes.plot(millions, [run[f"{job}_seconds"] for run in runs], marker="o", label=job)
    for text, rate, style in (
        ("bar of ingest", INGEST_PER_SECOND, ":"),
        ("bar of lifecycle and audit together", JUDGED_PER_SECOND, "--"),
    ):
        limits = [0, millions[-1]]
        axes.plot(limits, [each * 1e6 / rate for each in limits], style, color="grey", linewidth=1, label=text)
    axes.set_xlabel("million markers")
    axes.set_ylabel("seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=100)


def read_sizes() -> list[Size]:
    default = Size()
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description="The data pipeline, measured.")
    parser.add_argument("--messages", type=int, nargs="+", default=[default.messages], help="one run for each")
    parser.add_argument("--value-bytes", type=int, default=default.value_bytes, help="bytes of each message's value")
    parser.add_argument("--partitions", type=int, default=default.partitions, help="of the topics")
    given = parser.parse_args()
    if any(messages < TURN or messages % TURN for messages in given.messages):
        parser.error(f"--messages: expected a multiple of {TURN:,}")
    return [Size(messages, given.value_bytes, given.partitions) for messages in sorted(given.messages)]


def main() -> None:
    sizes, console = read_sizes(), Console(stderr=True)
    runs: list[dict[str, Any]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="marq-bench-") as folder, EmbeddedBroker(heap="1g") as broker:
            runs.append(measure(broker.bootstrap_servers, Path(folder), size, partial(console.print, highlight=False)))
    judged = bars(runs[-1])
    if len(runs) > 1:
        judged.append(growth(runs))
        plot(runs, PLOT)
    show({name: [run[name] for run in runs] for name in runs[0]}, judged, console)
    found = [{"size": asdict(size), "figures": figures} for size, figures in zip(sizes, runs, strict=True)]
    write_result({"runs": found, "bars": [{**asdict(bar), "met": bar.met} for bar in judged]}, "pipeline-")
    sys.exit(not all(bar.met for bar in judged))


if __name__ == "__main__":
    main()
