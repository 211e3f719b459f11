"""``python -m tests.simulation SEEDS [--start N]``: simulate that many seeds; the last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.simulation import seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1_000, help="how many seeds to simulate")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("SEEDS must be at least 1")
    began = time.monotonic()
    summary = seeds.run(arguments.start, arguments.seeds)
    for result in summary.failed[:20]:
        print(f"seed {result.seed} failed: {result.failed}")
        print(f"  again with: python -m tests.simulation 1 --start {result.seed}")
    print(", ".join(f"{name} {count}" for name, count in sorted(summary.stats.items())))
    report = {
        "seeds": summary.seeds,
        "failed": len(summary.failed),
        "first_failed": summary.failed[0].seed if summary.failed else None,
        "events": summary.events,
        "duplicates": summary.duplicates,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(report))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
