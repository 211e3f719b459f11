"""``python -m tests.simulation SEEDS [--start N]``: simulate that many seeds; the last line is one JSON object.

Of the first seeds that fail it prints the command that repeats them, and what happened in the smallest world that
still fails in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from tests.simulation import seeds, swarm
from tests.simulation.minimise import command, minimise, trace
from tests.simulation.world import Plan, inspect

#: Failed seeds to minimise: each takes some seconds.
MINIMISED = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1_000, help="how many seeds to simulate")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, help="how many at a time (default: as many as cores)")
    parser.add_argument("--without", default="", metavar="FAULT,…", help="faults that do not happen")
    parser.add_argument("--messages", type=int, help="how many messages are sent (default: by the seed)")
    parser.add_argument("--history", type=Path, metavar="FILE", help="write the first seed's history, to be checked")
    given = parser.parse_args()
    without = frozenset(filter(None, given.without.split(",")))
    if given.seeds < 1:
        parser.error("SEEDS must be at least 1")
    if unknown := without - set(swarm.NAMES):
        parser.error(f"--without: unknown {', '.join(sorted(unknown))}; there are {', '.join(swarm.NAMES)}")
    plan = Plan(without=without, messages=given.messages)
    began = time.monotonic()
    if given.history is not None:
        inspect(given.start, plan)[2].history.write(given.history)

    def progress(summary: seeds.Summary) -> None:
        speed = summary.seeds / (time.monotonic() - began)
        failed = f" ({', '.join(str(result.seed) for result in summary.failed)})" if summary.failed else ""
        done = f"{summary.seeds} of {given.seeds} seeds, {summary.failures} failed{failed}, {speed:.0f} a second"
        print(done, flush=True)

    summary = seeds.run(given.start, given.seeds, plan, cores=given.processes, progress=progress)
    for number, result in enumerate(summary.failed):
        print(f"seed {result.seed} failed: {result.failed}")
        print(f"  again with: {command(result.seed, plan)}")
        if number < MINIMISED:
            small = minimise(result.seed, plan)
            print(f"  in small: {command(result.seed, small)}")
            print("\n".join(f"    {line}" for line in trace(result.seed, small)))
    print(", ".join(f"{name} {count}" for name, count in sorted(summary.stats.items())))
    report = {
        "seeds": summary.seeds,
        "failed": summary.failures,
        "first_failed": summary.failed[0].seed if summary.failed else None,
        "events": summary.events,
        "duplicates": summary.duplicates,
        "causes": {str(cause): count for cause, count in sorted(summary.causes.items())},
        "lost": summary.stats["lost"],
        "expired_unread": summary.stats["expired_unread"],
        "stranded": summary.stats["stranded"],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    return 1 if summary.failures else 0


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:
        # The order of a set of texts differs between processes: with this, a seed is the same world in all of them.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
