"""``plan``: partitions, workers, disk and memory for a target load.

Reads the table lifecycle, unless --size and --run describe the messages. Marq's own needs were measured: --json names
the source of each constant and the command that measures it again.

  plan                                          the measured load of the busiest minute
  plan --rate 5000                              messages a second in all, divided among the queues as measured
  plan --rate emails=2000 --rate reports=10     of these queues; the others as in their busiest minutes
  plan --rate 5000 --size 200 --run 50ms        nothing measured yet
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence

from pipeline.errors import PipelineError
from pipeline.lake import Lake
from pipeline.planning import QUANTITIES, Plan, target_rates
from pipeline.profiles import Profile, Target, profiles
from pipeline.session import session
from pipeline.spans import duration_ms, show_bytes, show_ms, size_bytes
from pipeline.tables import LIFECYCLE_TABLE

#: The queue name in a plan without measurements.
ANY_QUEUE = "(any)"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", action="append", default=[], metavar="[QUEUE=]N", help="messages a second in all, or of a queue"
    )
    parser.add_argument("--retention", default="7d", help="of the messages topic (default: 7d)")
    parser.add_argument("--markers-retention", default="7d", help="of the markers topic (default: 7d)")
    parser.add_argument("--replication", type=int, default=3, metavar="N", help="replicas per partition (default: 3)")
    parser.add_argument("--delayed", type=float, metavar="N", help="delayed messages at any time (default: measured)")
    parser.add_argument("--headroom", type=float, default=2.0, metavar="N", help="factor on rates (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with constants and profiles")
    messages = parser.add_argument_group("messages, if they were not measured or will change")
    messages.add_argument("--size", metavar="BYTES", help="size of a value, such as 200 or 4KiB")
    messages.add_argument("--run", metavar="LENGTH", help="run time of a handler, such as 50ms")
    messages.add_argument("--lease", metavar="LENGTH", help="lease, such as 30s")
    messages.add_argument("--attempts", type=float, metavar="N", help="mean deliveries of a message, such as 1.05")


def run(options: argparse.Namespace) -> int:
    total, by_queue = rates(options.rate)
    known, guess = _profiles(options, total, by_queue)
    target = Target(
        target_rates(total, by_queue, known),
        duration_ms("--retention", options.retention),
        duration_ms("--markers-retention", options.markers_retention),
        options.replication,
        options.delayed,
        options.headroom,
    )
    result = Plan(known, target, guess=guess)
    print(json.dumps(result.document(), ensure_ascii=False) if options.json else "\n".join(text_lines(result)))
    return 0


def _profiles(
    options: argparse.Namespace, total: float | None, by_queue: Mapping[str, float]
) -> tuple[list[Profile], bool]:
    """Return the profiles, and whether they are a guess: with a size and a run time, no data is read."""
    size = None if options.size is None else size_bytes("--size", options.size)
    run_ms = None if options.run is None else duration_ms("--run", options.run, least_ms=0)
    lease_ms = None if options.lease is None else duration_ms("--lease", options.lease)
    attempts = options.attempts
    if attempts is not None and not (math.isfinite(attempts) and attempts >= 1):
        raise PipelineError(f"--attempts {attempts:g}: expected 1 or more deliveries of a message")
    guess = size is not None and run_ms is not None
    if guess and total is None and not by_queue:
        raise PipelineError("--size and --run describe the messages: set the load with --rate")
    base = [Profile(queue) for queue in by_queue or [ANY_QUEUE]] if guess else _measured(options.data)
    changes = {"size_bytes": size, "run_ms": run_ms, "lease_ms": lease_ms, "deliveries": attempts}
    return [profile.changed(**changes) for profile in base], guess


def _measured(data: str) -> list[Profile]:
    rows = profiles(Lake(session("plan"), data).read(LIFECYCLE_TABLE)).orderBy("queue").collect()
    if not rows:
        raise PipelineError(
            "the table lifecycle has no messages: run ingest and lifecycle after messages were sent, or give --rate,"
            " --size and --run"
        )
    return [Profile.measured(row) for row in rows]


def rates(texts: Sequence[str]) -> tuple[float | None, dict[str, float]]:
    """Parse --rate: the rate of all queues together, and those of single queues."""
    total: float | None = None
    by_queue: dict[str, float] = {}
    for text in texts:
        queue, is_queue, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not (math.isfinite(rate) and rate > 0):
            raise PipelineError(f"--rate {text}: expected messages a second, more than 0, as in 5000 or emails=2000")
        if is_queue:
            by_queue[queue] = rate
        else:
            total = rate
    if total is not None and len(texts) > 1:
        raise PipelineError("--rate: expected one rate of all queues together, or one for each named queue")
    return total, by_queue


def text_lines(result: Plan) -> list[str]:
    """Return the plan as lines for the terminal, the summary first."""
    lines = ["A GUESS: the messages were described by options, not measured."] if result.guess else []
    lines = [*(lines or ["From measured messages."]), "", *_queues(result), "", *_summary(result), ""]
    lines += [f"{what}: {_shown(result.values[key], unit)}" for key, (what, unit) in QUANTITIES.items()]
    lines += ["", f"Headroom: {result.target.headroom:g} x on processes and partitions; disks 70% full."]
    lines += ["Not in the model: processor time of brokers and handlers, compression."]
    return [*lines, *(f"WARNING: {text}" for text in result.warnings)]


def _summary(result: Plan) -> list[str]:
    values = result.values
    memory, disk, brokers = (_shown(values[key], "bytes") for key in ("worker_memory", "worker_disk", "broker_disk"))
    partitions, workers, consumers, concurrency = (
        f"{values[key]:,.0f}" for key in ("partitions", "workers", "consumers", "concurrency")
    )
    processes = f"{workers} workers with {memory} of memory and {disk} of disk each"
    groups = f"{consumers} or more consumer processes of each group, processing {concurrency} messages at the same time"
    return [
        f"PLAN: {partitions} partitions of messages and of markers; {processes};",
        f"      {groups}; {brokers} of disk in all brokers together.",
    ]


def _queues(result: Plan) -> list[str]:
    return [
        f"queue {queue.queue}: {result.target.rates[queue.queue]:,.4g} messages/s of {queue.size_bytes:,.0f} bytes,"
        f" {queue.deliveries:.3g} deliveries, run {show_ms(queue.run_ms)} (p99 {show_ms(queue.run_p99_ms)}),"
        f" lease {show_ms(queue.lease_ms)}"
        for queue in result.profiles
    ]


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return show_bytes(value)
    number = f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.2g}"
    return f"{number}{'' if unit.startswith('/') or not unit else ' '}{unit}"
