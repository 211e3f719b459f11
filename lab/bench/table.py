"""Write the results of a whole run into docs/benchmarks.md: ``python -m lab.bench.table [FILE]``.

Without FILE, it uses the newest result in ``lab/bench/results``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.bench.rows.drain import AIOKAFKA, GROUP, ITERATE, QUORUM, RUN, RUN_BATCH, SHARE
from lab.bench.suite import RESULTS, Bar, format_number
from lab.report import page_table, placed

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
TIMES = "\N{MULTIPLICATION SIGN}"
MARK = "bench"

Result = Mapping[str, Any]
Medians = Mapping[str, Mapping[str, float]]

NAMES = {
    RUN: "Marq, `run`: a handler for each message",
    RUN_BATCH: "Marq, `run_batch`: a handler for up to 1,000 messages",
    ITERATE: "Marq, `async for … async with message`",
    SHARE: "confluent-kafka share group, an ack for each message",
    GROUP: "confluent-kafka consumer group, offsets only",
    AIOKAFKA: "aiokafka consumer group, offsets only",
}


def newest(folder: Path = RESULTS) -> Path:
    """Return the file of the newest whole run; raise SystemExit if there is none."""
    files = sorted(folder.glob("suite-*.json"))
    if not files:
        raise SystemExit(f"bench: no whole run in {folder}: make bench writes one")
    return files[-1]


def render(result: Result, name: str) -> str:
    """Return the text between the marks; ``name`` is the name of the result file."""
    rows = result["rows"]
    parts = [_heading(result, name)]
    if "drain" in rows:
        parts.append(_drains(rows["drain"]["medians"]))
    if work := {name.partition("-")[2]: row["medians"] for name, row in rows.items() if name.startswith("work-")}:
        systems = [name for name in (RUN, SHARE, GROUP) if all(name in medians for medians in work.values())]
        lines = [[_waiting(cell), *(rate(medians[name]) for name in systems)] for cell, medians in work.items()]
        parts.append(page_table(("waiting time per message; rates in messages/s", *systems), lines))
    if "rabbitmq" in rows:
        parts.append(_rabbitmq(rows["rabbitmq"]))
    return "\n\n".join([*parts, _bars(result["bars"])])


def _heading(result: Result, name: str) -> str:
    size, cores = result["size"], result["machine"].partition(",")[0]
    versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
    return (
        f"Medians of {size['runs']} alternating runs (3 for long runs) on {result['date'][:10]}; {cores}, shared by"
        f" broker, worker and consumers. {size['messages']:,} messages of {size['value_bytes']} bytes in"
        f" {size['partitions']} partitions unless stated otherwise. {versions}."
        f" All results: `lab/bench/results/{name}`."
    )


def _drains(medians: Medians) -> str:
    head = (
        "drain of a full queue by one process",
        "messages/s",
        "first message after",
        "CPU seconds: client, worker, broker",
    )
    parts = ("cpu_seconds", "tracker_cpu_seconds", "broker_cpu_seconds")
    rows = [
        (NAMES.get(name, name), rate(measured), f"{measured['startup_seconds']:.2f} s",
         " + ".join(f"{measured[part]:.2f}" for part in parts if part in measured))
        for name, measured in medians.items()
    ]  # fmt: skip
    return page_table(head, rows)


def _waiting(cell: str) -> str:
    return "500 ms for 1% of them" if cell == "slow" else cell.replace("ms", " ms")


def _rabbitmq(row: Mapping[str, Any]) -> str:
    medians: Medians = row["medians"]
    if QUORUM not in medians:
        return f"RabbitMQ was not measured: {row['skipped'][QUORUM]}."
    rows = [(name, rate(measured)) for name, measured in medians.items()]
    return page_table(("a tenth as many messages (RabbitMQ syncs each to disk; Kafka does not)", "messages/s"), rows)


def _bars(bars: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (bar["what"],
         f"{'at least' if bar['at_least'] else 'at most'} {_limit(format_number(bar['limit']), bar['unit'])}",
         format_number(bar["found"]),
         "yes" if Bar(bar["what"], bar["found"], bar["limit"], bar["unit"], bar["at_least"]).met else "**no**")
        for bar in bars
    ]  # fmt: skip
    return page_table(("bar", "limit", "measured", "met"), rows)


def _limit(number: str, unit: str) -> str:
    """Return a limit with its unit; a multiplication sign replaces the word "times"."""
    return f"{number}{TIMES}{unit.removeprefix('times')}" if unit.startswith("times") else f"{number} {unit}"


def rate(measured: Mapping[str, float]) -> str:
    return f"{round(measured['rate'], -3 if measured['rate'] >= 10_000 else -2):,.0f}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    result = json.loads(path.read_text(encoding="utf-8"))
    page, text = PAGE.read_text(encoding="utf-8"), render(result, path.name)
    PAGE.write_text(placed(page, MARK, f"\n{text}\n"), encoding="utf-8")
    print(f"{PAGE.name} shows {path.name}")


if __name__ == "__main__":
    main()
