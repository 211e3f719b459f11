"""``plan``: partitions, workers, disk and memory for a target load.

Reads the table lifecycle, unless --size and --run say what messages are like. Each figure comes with its formula and
its inputs. What Marq itself needs was measured: --json names the source of each constant, and what measures it anew.

  plan                                          the measured load of the busiest minute
  plan --rate 5000                              so many messages a second in all, as they are spread now
  plan --rate emails=2000 --rate reports=10     of these queues; the others as in their busiest minutes
  plan --rate 5000 --size 200 --run 50ms        nothing measured yet
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Mapping, Sequence

from pipeline.capacity import plan, spread
from pipeline.errors import PipelineError
from pipeline.jobs.stats import unknown_queue
from pipeline.lake import Lake
from pipeline.planning import GIB, MIB, Plan, Target
from pipeline.profiles import DEFAULT_LEASE_MS, Profile, profiles
from pipeline.session import session
from pipeline.spans import duration_ms, show_ms, size_bytes

#: The name of messages that nobody has measured.
ANY_QUEUE = "(any)"
_WIDTH = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the job takes."""
    parser.add_argument(
        "--rate", action="append", default=[], metavar="[QUEUE=]N", help="messages a second in all, or of a queue"
    )
    parser.add_argument("--retention", default="7d", help="of the messages topic (default: 7d)")
    parser.add_argument("--markers-retention", default="7d", help="of the markers topic (default: 7d)")
    parser.add_argument("--replication", type=int, default=3, metavar="N", help="copies of each partition (default: 3)")
    parser.add_argument(
        "--delayed", type=float, metavar="N", help="messages that wait for their time (default: measured)"
    )
    parser.add_argument("--headroom", type=float, default=2.0, metavar="N", help="factor on rates (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with constants and profiles")
    given = parser.add_argument_group("what messages are like, where it was not measured, or is to be otherwise")
    given.add_argument("--size", metavar="BYTES", help="of a value, such as 200 or 4KiB")
    given.add_argument("--run", metavar="LENGTH", help="of a handler, such as 50ms")
    given.add_argument("--lease", metavar="LENGTH", help="such as 30s")
    given.add_argument("--attempts", type=float, metavar="N", help="deliveries of a message in the mean, such as 1.05")


def run(given: argparse.Namespace) -> int:
    """Print the plan."""
    in_all, of_queues = rates(given.rate)
    known, guess = known_profiles(given, in_all, of_queues)
    target = Target(
        target_rates(in_all, of_queues, known),
        duration_ms("--retention", given.retention),
        duration_ms("--markers-retention", given.markers_retention),
        given.replication,
        given.delayed,
        given.headroom,
    )
    found = plan(known, target, guess=guess)
    print(json.dumps(found.document(), ensure_ascii=False) if given.json else "\n".join(told(found)))
    return 0


def known_profiles(
    given: argparse.Namespace, in_all: float | None, of_queues: Mapping[str, float]
) -> tuple[list[Profile], bool]:
    """Return what messages are like, and whether that is a guess: with a size and a run time nothing is read.

    Raises:
        PipelineError: a figure makes no sense, or is missing.
    """
    size = size_bytes("--size", given.size) if given.size is not None else None
    run_ms = duration_ms("--run", given.run, least_ms=0) if given.run is not None else None
    lease_ms = duration_ms("--lease", given.lease) if given.lease is not None else None
    attempts = given.attempts
    if attempts is not None and not (math.isfinite(attempts) and attempts >= 1):
        raise PipelineError(f"--attempts {attempts:g}: expected 1 or more deliveries of a message")
    if size is None or run_ms is None:
        return [each.changed(size, run_ms, lease_ms, attempts) for each in measured(given)], False
    if in_all is None and not of_queues:
        raise PipelineError("--size and --run say what messages are like: say with --rate how many a second")
    names = list(of_queues) or [ANY_QUEUE]
    return [Profile.given(each, size, run_ms, lease_ms or DEFAULT_LEASE_MS, attempts or 1.0) for each in names], True


def rates(texts: Sequence[str]) -> tuple[float | None, dict[str, float]]:
    """Return the rate of all queues, and those of single ones.

    Raises:
        PipelineError: one is no rate above 0, or both kinds are given.
    """
    in_all: float | None = None
    of_queues: dict[str, float] = {}
    for text in texts:
        queue, is_queue, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not (math.isfinite(rate) and rate > 0):
            raise PipelineError(f"--rate {text}: expected messages a second, more than 0, as in 5000 or emails=2000")
        if is_queue:
            of_queues[queue] = rate
        else:
            in_all = rate
    if in_all is not None and (of_queues or len(texts) > 1):
        raise PipelineError("--rate: expected one rate of all queues together, or one for each queue that is named")
    return in_all, of_queues


def measured(given: argparse.Namespace) -> list[Profile]:
    """Return what the queues are like, as the table lifecycle has it, but for what is given.

    Raises:
        PipelineError: there is no table, or nothing in it.
    """
    rows = profiles(Lake(session("plan"), given.data).read("lifecycle")).orderBy("queue").collect()
    if not rows:
        raise PipelineError(
            "the table lifecycle has no messages: run ingest and lifecycle when some were sent, or give --rate, --size"
            " and --run"
        )
    return [Profile.measured(row) for row in rows]


def target_rates(in_all: float | None, of_queues: Mapping[str, float], known: Sequence[Profile]) -> dict[str, float]:
    """Return the rate of each queue: as asked for, else as in its busiest minute.

    Raises:
        PipelineError: one is asked for that is not known.
    """
    names = [profile.queue for profile in known]
    for queue in of_queues:
        if queue not in names:
            raise PipelineError(f"{unknown_queue(queue, names, '--rate')}; for a new queue give --size and --run")
    if in_all is not None:
        return spread(in_all, known)
    busiest = {profile.queue: profile.rate_peak for profile in known if profile.rate_peak > 0}
    return {**busiest, **of_queues}


def told(found: Plan) -> list[str]:
    """Return lines for the terminal."""
    lines = ["A GUESS: what messages are like was given, not measured." if found.guess else "From measured messages."]
    lines += ["", *_queues(found), "", *_summary(found), ""]
    for line in found.lines:
        lines.append(f"{line.words.what}: {shown(line.value, line.words.unit)}")
        inputs = ", ".join(f"{name} {_input(name, value)}" for name, value in line.inputs.items())
        lines += _wrapped(f"= {line.words.formula}")
        lines += _wrapped(f"  {inputs}") if inputs else []
    lines += ["", f"Headroom: {found.target.headroom:g} x on processes and partitions; disks full to 70 %."]
    lines += ["Not in the model: processors of brokers, what handlers compute, compression."]
    return [*lines, *(f"WARNING: {text}" for text in found.warnings)]


def _summary(found: Plan) -> list[str]:
    """Return the answer; all behind it says why."""
    memory, disk, brokers = (shown(found[key], "bytes") for key in ("worker_memory", "worker_disk", "broker_disk"))
    workers = f"{found['workers']:,.0f} workers with {memory} of memory and {disk} of disk each"
    consumers = f"{found['consumers']:,.0f} consumer processes of each group or more"
    at_work = f"{found['concurrency']:,.0f} messages at work at a time in all"
    return [
        f"PLAN: {found['partitions']:,.0f} partitions of messages and of markers; {workers};",
        f"      {consumers}, {at_work}; {brokers} of disk in all brokers together.",
    ]


def _queues(found: Plan) -> list[str]:
    return [
        f"queue {each.queue}: {found.target.rates[each.queue]:,.4g} messages/s of {each.size_bytes:,.0f} bytes,"
        f" {each.deliveries:.3g} deliveries, run {show_ms(each.run_ms)} (p99 {show_ms(each.run_p99_ms)}),"
        f" lease {show_ms(each.lease_ms)}"
        for each in found.profiles
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")


def _input(name: str, value: float) -> str:
    if name.endswith("bytes") or name in ("used", "worker_memory", "partition_memory"):
        return shown(value, "bytes")
    return f"{value:,.0f}" if value == int(value) or value >= 1_000 else f"{value:.3g}"


def shown(value: float, unit: str) -> str:
    """Return a figure with its unit, as people read it."""
    if unit == "bytes":
        for size, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
            if value >= size:
                return f"{value / size:,.1f} {name}"
        return f"{value:,.0f} bytes"
    number = f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.2g}"
    return f"{number}{'' if unit.startswith('/') or not unit else ' '}{unit}"
