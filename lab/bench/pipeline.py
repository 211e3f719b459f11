"""The data pipeline on many messages: ``make scale MESSAGES=10000000``.

A history with a known truth (:mod:`lab.bench.synthetic_history`) is written to Kafka. Then ``ingest``, ``lifecycle``
and ``audit`` run as processes. The run ends if their results differ from the truth. Memory is the peak of all processes
of a job together, with shared pages counted for each. Two sizes show how time grows with size.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from lab.audit import AUDIT_JOBS, JobsLog, jobs_program
from lab.bench.suite import Bar, Bench, BenchRow, Measurements, Medians
from lab.bench.synthetic_history import TURN, SyntheticHistory, Truth
from lab.program import RunError
from lab.resources import ProcessTree
from pipeline.audit import COUNTS

INGEST_PER_SECOND = 80_000
JUDGED_PER_SECOND = 60_000
MAX_MEMORY_GIB = 4.0
#: Interval between samples of memory.
SAMPLE_SECONDS = 0.2
#: Limit on the time per marker in the largest run, divided by that in the smallest.
MAX_GROWTH = 1.2
JOBS = tuple(name for name, *_ in AUDIT_JOBS)

_INGESTED = re.compile(r"([\d,]+) (markers|corrupt|messages|dead_letters)")


def measure(bench: Bench, share: float = 1.0) -> Measurements:
    """Measure the jobs on a history with this share of the messages, rounded up to whole turns.

    Raise SystemExit if a job failed, or its results differ from the truth.
    """
    client, size = bench.client, bench.size
    messages = math.ceil(size.messages * share / TURN) * TURN
    topics = asyncio.run(bench.make_topics())
    began = time.monotonic()
    partitions = (topics.messages_partitions, topics.markers_partitions)
    history = SyntheticHistory(bench.servers, client.names, *partitions, size.value_bytes)
    history.write(messages)
    truth = history.truth
    bench.say(f"history: {truth.rows['markers']:,} markers in {time.monotonic() - began:.1f} s")
    data = bench.folder / client.names.prefix
    measurements: Measurements = {"markers": truth.rows["markers"]}
    jobs_log = JobsLog()
    for job, *options in AUDIT_JOBS:
        program = jobs_program(client, data, [(job, *options)], bench.folder / f"{job}.log")
        began = time.monotonic()
        with program:
            tree = ProcessTree(program.pid)
            while program.running:
                tree.sample()
                time.sleep(SAMPLE_SECONDS)
        if program.exit_code:
            raise RunError(f"{job} ended with exit code {program.exit_code}: {program.log_tail()}")
        for line in program.log().splitlines():
            jobs_log.take(line)
        measurements |= {
            f"{job}_seconds": time.monotonic() - began,
            f"{job}_cpu_seconds": tree.cpu_seconds,
            f"{job}_peak_mib": tree.peak_bytes / 2**20,
        }
    compare(truth, jobs_log.outputs["ingest"], json.loads(jobs_log.outputs["audit"]))
    for table in ("markers", "messages", "lifecycle"):
        files = [file for file in (data / table).rglob("*") if file.is_file()]
        measurements[f"{table}_disk_mib"] = sum(file.stat().st_size for file in files) / 2**20
    return measurements


def compare(truth: Truth, ingested: str, audit: dict[str, Any]) -> None:
    """Compare the jobs' output with the truth; raise SystemExit if they differ."""
    counts = {table: int(count.replace(",", "")) for count, table in _INGESTED.findall(ingested)}
    wrong = [
        f"ingest: {count:,} {table}, expected {truth.rows[table]:,}"
        for table, count in counts.items()
        if count != truth.rows[table]
    ]
    if counts.keys() < truth.rows.keys():
        wrong.append(f"ingest does not mention {sorted(truth.rows.keys() - counts.keys())}: {ingested!r}")
    for queue in sorted(truth.counts.keys() | audit["queues"].keys()):
        expected, actual = truth.counts[queue], audit["queues"].get(queue, {})
        wrong += [
            f"audit: {queue}: {actual.get(name, 0):,} {name}, expected {expected[name]:,}"
            for name in COUNTS
            if actual.get(name, 0) != expected[name]
        ]
    if dict(audit["causes"]) != dict(truth.causes):
        wrong.append(f"audit: causes {audit['causes']}, expected {dict(truth.causes)}")
    if not audit["right"]:
        wrong.append(f"audit: not right: {audit['wrong'][:5]}")
    if wrong:
        raise SystemExit("\n".join(["bench: the pipeline's results differ from the truth", *wrong]))


def bars(medians: Medians) -> list[Bar]:
    smallest, largest = medians.values()
    markers = largest["markers"]
    judged = markers / (largest["lifecycle_seconds"] + largest["audit_seconds"])
    growth = _marker_seconds(largest) / _marker_seconds(smallest)
    memory = max(largest[f"{job}_peak_mib"] for job in JOBS) / 1024
    return [
        Bar("ingest, at least", markers / largest["ingest_seconds"], INGEST_PER_SECOND, "markers/s", at_least=True),
        Bar("lifecycle and audit together, at least", judged, JUDGED_PER_SECOND, "markers/s", at_least=True),
        Bar("peak memory of a job", memory, MAX_MEMORY_GIB, "GiB"),
        Bar("time of a marker, largest to smallest run", growth, MAX_GROWTH, "times"),
    ]


def _marker_seconds(measurements: Mapping[str, float]) -> float:
    return sum(measurements[f"{job}_seconds"] for job in JOBS) / measurements["markers"]


PIPELINE = BenchRow(
    "pipeline",
    "ingest, lifecycle and audit of a history whose truth is known",
    {"a tenth of the messages": partial(measure, share=0.1), "all messages": measure},
    bars,
    runs=1,
    warm=0,
    by_name=True,
)
