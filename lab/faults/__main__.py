"""``python -m lab.faults``: play the scenarios under load on real processes, and let the checker judge each history.

With ``--soak``, play a long run instead (:mod:`lab.faults.soak`).

The last line is one JSON object. Exit code 1: a message was lost, a finding, or a scenario that could not be played.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.faults.scenario import Scenario, ScenarioResult, play
from lab.faults.scenarios import SCENARIOS
from lab.faults.soak import soak
from lab.report import between, placed
from marq_worker.broker import EmbeddedBroker, java

#: The page with a table of all scenarios, whose first two columns are written by hand.
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
MARK = "faults"


def chosen(only: str) -> list[Scenario]:
    """Return the scenarios whose names begin with one of the comma-separated texts in ``only``; all if it is empty.

    Raise ValueError if a name matches no scenario.
    """
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(scenario.name.startswith(name) for scenario in SCENARIOS):
            known = ", ".join(scenario.name for scenario in SCENARIOS)
            raise ValueError(f"ONLY={name}: no scenario begins with it; there are {known}")
    return [scenario for scenario in SCENARIOS if not wanted or scenario.name.startswith(tuple(wanted))]


def play_all(scenarios: Sequence[Scenario], *, audit: bool = False, seed: int = 1) -> list[ScenarioResult]:
    results = []
    os.environ["JAVA_TOOL_OPTIONS"] = java.SHORT_LIVED_OPTIONS
    shares = any(scenario.place is None for scenario in scenarios)
    with EmbeddedBroker() if shares else contextlib.nullcontext() as shared:
        for scenario in scenarios:
            result = play(scenario, shared, audit=audit, seed=seed)
            print("\n".join([result.line(), *[f"    {line}" for line in result.wrong]]), flush=True)
            results.append(result)
    return results


def summary(results: Sequence[ScenarioResult], seconds: float) -> dict[str, object]:
    """Return the last line of the output."""
    return {
        "scenarios": len(results),
        "passed": sum(result.passed for result in results),
        "failed": [result.scenario.name for result in results if not result.passed],
        **{
            name: sum(result.statistics.get(name, 0) for result in results)
            for name in ("accepted", "redelivered", "dead", "lost", "duplicates")
        },
        "seconds": round(seconds),
    }


def write_table(results: Sequence[ScenarioResult], *, whole: bool = True) -> None:
    """Write the numbers of these scenarios; with ``whole``, also the date.

    Raise ValueError if the document has no such marks, or no row for a scenario.
    """
    page = DOCUMENT.read_text(encoding="utf-8")
    table = updated(between(page, MARK), results)
    if whole:
        today = dt.datetime.now(tz=dt.UTC).date()
        table = re.sub(r"`make faults`, [^:]+", f"`make faults`, {today}", table, count=1)
    DOCUMENT.write_text(placed(page, MARK, table), encoding="utf-8")


def updated(table: str, results: Sequence[ScenarioResult]) -> str:
    """Return the table with the numbers of these scenarios."""
    head, *rows = table.splitlines()
    for result in results:
        named = [number for number, row in enumerate(rows) if f"(`{result.scenario.name}`)" in row]
        if not named:
            raise ValueError(f"{DOCUMENT}: describe {result.scenario.name} in a row of the table")
        fault, seen = rows[named[0]].split(" | ")[:2]
        rows[named[0]] = " | ".join([fault, seen, *numbers(result)]) + " |"
    names = [row for row in rows if "(`" in row]
    passed = sum("**failed**" not in row for row in names)
    return "\n".join([re.sub(r"\d+ of \d+", f"{passed} of {len(names)}", head), *rows])


def numbers(result: ScenarioResult) -> list[str]:
    """Return the cells sent, lost, duplicates by cause, and recovery."""
    return [*result.numbers()[:3], result.numbers()[3] if result.passed else "**failed**"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,…", help="only scenarios whose names begin so")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="a long run instead of the scenarios")
    parser.add_argument("--seed", type=int, help="which faults come (default: 1; for a long run, by chance)")
    parser.add_argument("--audit", action="store_true", help="also let the data pipeline audit each")
    parser.add_argument("--write", action="store_true", help=f"write the numbers into {DOCUMENT.name}")
    options = parser.parse_args()
    try:
        scenarios = [soak(options.soak)] if options.soak else chosen(options.only)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # The outages are intended.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    began_s = time.monotonic()
    seed = options.seed or (random.randrange(1_000_000) if options.soak else 1)
    results = play_all(scenarios, audit=options.audit, seed=seed)
    if options.write:
        write_table(results, whole=len(scenarios) == len(SCENARIOS))
    totals = summary(results, time.monotonic() - began_s)
    print(json.dumps(totals))
    return 0 if totals["passed"] == len(results) and not totals["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
