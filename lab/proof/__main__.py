"""``python -m lab.proof FILE...``: check a history; exit 1 when a property does not hold.

Each finding is printed with the events that show it; the last line is one JSON object with the statistics.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from lab.proof.checker import check
from lab.proof.findings import told
from lab.proof.history import MalformedHistory, read


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.proof", description=__doc__)
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help="histories, as lab/proof/history.py describes"
    )
    parser.add_argument("--findings", type=int, metavar="N", default=20, help="how many to print (default: 20)")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        report = check(read(given.files))
    except (MalformedHistory, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = report.findings[: given.findings]
    if shown:
        print("\n".join(told(shown, read(given.files))))
    print(json.dumps({**report.summary(), "seconds": round(time.monotonic() - began, 1)}))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
