"""``python -m proof.check FILE...``: check a history; exit 1 when a property does not hold.

Each finding is printed with the events that show it; the last line is one JSON object with the statistics.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from proof.checker import check
from proof.findings import Finding
from proof.history import Event, MalformedHistory, events_of, read

#: Events that are printed for one finding.
MAX_EVENTS = 60


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.check", description=__doc__)
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="histories, as proof/history.py describes")
    parser.add_argument("--findings", type=int, metavar="N", default=20, help="how many to print (default: 20)")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    # Nothing of a history is garbage before its end, and looking for it takes a third of the time.
    gc.disable()
    try:
        report = check(read(given.files))
    except (MalformedHistory, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
    shown = report.findings[: given.findings]
    if shown:
        print("\n".join(told(shown, read(given.files))))
    print(json.dumps({**report.summary(), "seconds": round(time.monotonic() - began, 1)}))
    return 1 if report.violations else 0


def told(findings: list[Finding], events: Iterable[Event]) -> list[str]:
    """Return each finding with its events, line by line."""
    wanted = {number for finding in findings for number in finding.events}
    found = events_of(events, wanted)
    lines: list[str] = []
    for finding in findings:
        lines.append(str(finding))
        numbers = [number for number in finding.events if number in found]
        if len(numbers) > MAX_EVENTS:
            lines.append(f"    (the last {MAX_EVENTS} of {len(numbers)} events)")
        lines += [f"    {number}: {json.dumps(found[number], ensure_ascii=False)}" for number in numbers[-MAX_EVENTS:]]
    return lines


if __name__ == "__main__":
    sys.exit(main())
