"""``python -m faults``: play the scenarios, each under load on real parts, and let the checker judge each history.

The last line is one JSON object; exit 1 when something was lost, is unexplained, or could not be played.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence

from broker import EmbeddedBroker, java
from faults import brokers, consumers, delays, disks, groups, networks, outages, times, upgrades, workers
from faults.report import DOCUMENT, write_table
from faults.scenario import Result, Scenario, play
from faults.stage import SEED_VARIABLE

SCENARIOS: Sequence[Scenario] = [
    scenario
    for module in (consumers, workers, groups, outages, brokers, disks, networks, times, upgrades, delays)
    for scenario in module.SCENARIOS
]


def chosen(only: str, *, quick: bool) -> list[Scenario]:
    """Return the scenarios whose names begin with one of those in ``only``, separated by commas; all without it.

    Raises:
        ValueError: there is none that begins so.
    """
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(scenario.name.startswith(name) for scenario in SCENARIOS):
            known = ", ".join(scenario.name for scenario in SCENARIOS)
            raise ValueError(f"ONLY={name}: no scenario begins with that; there are {known}")
    found = [each for each in SCENARIOS if not wanted or each.name.startswith(tuple(wanted))]
    return [each for each in found if each.quick] if quick else found


async def play_all(scenarios: Sequence[Scenario], *, audit: bool = False) -> list[Result]:
    results = []
    os.environ["JAVA_TOOL_OPTIONS"] = java.SHORT_LIVED_OPTIONS
    with EmbeddedBroker() as shared:
        for scenario in scenarios:
            result = await play(scenario, shared, audit=audit)
            print("\n".join([result.line(), *[f"    {line}" for line in result.wrong]]), flush=True)
            results.append(result)
    return results


def summary(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """Return what the last line says."""
    return {
        "scenarios": len(results),
        "passed": sum(result.passed for result in results),
        "failed": [result.scenario.name for result in results if not result.passed],
        **{name: sum(result.figures.get(name, 0) for result in results) for name in ("accepted", "lost", "duplicates")},
        "seconds": round(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,…", help="scenarios whose names begin so")
    parser.add_argument("--quick", action="store_true", help="the few that CI plays")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--seed", type=int, default=1, help="of the scenarios that act by chance")
    parser.add_argument("--audit", action="store_true", help="let the data pipeline audit each, too")
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    given = parser.parse_args()
    try:
        scenarios = chosen(given.only, quick=given.quick)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(f"{scenario.name:36} {scenario.fault}" for scenario in scenarios))
        return 0
    os.environ[SEED_VARIABLE] = str(given.seed)
    # The outages are meant.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    began_s = time.monotonic()
    results = asyncio.run(play_all(scenarios, audit=given.audit))
    if given.write:
        write_table(results, whole=len(scenarios) == len(SCENARIOS))
    found = summary(results, time.monotonic() - began_s)
    print(json.dumps(found))
    return 0 if found["passed"] == len(results) and not found["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
