"""docs/benchmarks.md shows the newest whole run, as `python -m lab.bench.table` writes it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lab.bench.rows.drain import GROUP, QUORUM, RUN, SHARE
from lab.bench.table import MARK, PAGE, RESULTS, TIMES, newest, render
from lab.report import between, placed

MEASURED = {"rate": 123_456.0, "startup_seconds": 0.25, "cpu_seconds": 2.0, "broker_cpu_seconds": 1.0}
WORK = {RUN: {"rate": 60_400.0}, SHARE: {"rate": 59_900.0}, GROUP: {"rate": 1_240.0}}
RESULT = {
    "date": "2026-11-22T04:15:00+00:00",
    "machine": "2 cores, Python 3.11.7",
    "versions": {"Kafka": "4.3.1", "Java": "17"},
    "size": {"messages": 400_000, "runs": 5, "value_bytes": 200, "partitions": 4},
    "rows": {
        "drain": {"medians": {RUN: {**MEASURED, "tracker_cpu_seconds": 0.5}, GROUP: MEASURED}},
        "work-10ms": {"medians": WORK},
        "work-slow": {"medians": WORK},
        "rabbitmq": {"medians": {RUN: {"rate": 50_000.0}}, "skipped": {QUORUM: "there is none"}},
    },
    "bars": [
        {"what": "drain", "found": 0.6, "limit": 0.55, "unit": "times", "at_least": True, "met": True},
        {"what": "markers", "found": 1.2, "limit": 1.3, "unit": "times the payload", "at_least": False, "met": True},
        {"what": "lateness", "found": 300.0, "limit": 250.0, "unit": "ms", "at_least": False, "met": False},
        {"what": "polls", "found": (1.1 - 1.0) * 10, "limit": 1.0, "unit": "%", "at_least": False, "met": False},
    ],
}


def test_the_page_shows_the_newest_whole_run() -> None:
    # Only committed results count, so local measurements do not change the page.
    listed = subprocess.run(
        ["git", "ls-files", "suite-*.json"], cwd=RESULTS, capture_output=True, text=True, check=False
    ).stdout.split()
    assert listed, "no whole run is committed: make bench writes one"
    path = RESULTS / max(listed)

    assert between(PAGE.read_text(encoding="utf-8"), MARK).strip() == render(json.loads(path.read_text()), path.name)


def test_a_result_becomes_tables_in_which_an_unmet_bar_is_seen() -> None:
    lines = render(RESULT, "suite-x.json").splitlines()

    assert "2026-11-22; 2 cores, shared by" in lines[0]
    assert "Kafka 4.3.1, Java 17" in lines[0]
    assert "`lab/bench/results/suite-x.json`" in lines[0]
    assert "| Marq, `run`: a handler for each message | 123,000 | 0.25 s | 2.00 + 0.50 + 1.00 |" in lines
    assert "| 10 ms | 60,000 | 60,000 | 1,200 |" in lines
    assert "| 500 ms for 1% of them | 60,000 | 60,000 | 1,200 |" in lines
    assert "RabbitMQ was not measured: there is none." in lines
    assert f"| drain | at least 0.55{TIMES} | 0.6 | yes |" in lines
    assert f"| markers | at most 1.3{TIMES} the payload | 1.2 | yes |" in lines
    assert "| lateness | at most 250 ms | 300 | **no** |" in lines
    assert "| polls | at most 1 % | 1 | yes |" in lines


def test_only_what_is_between_the_marks_is_written() -> None:
    begin, end = "<!-- bench: begin -->", "<!-- bench: end -->"

    again = placed(f"before\n\n{begin}\nold\n{end}\n\nafter\n", "bench", "new \\1")

    assert again == f"before\n\n{begin}\nnew \\1\n{end}\n\nafter\n"
    assert between(again, "bench") == "new \\1"
    with pytest.raises(ValueError, match="no <!-- bench: begin -->"):
        placed("no marks", "bench", "new")


def test_the_newest_file_of_a_whole_run_is_taken(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no whole run"):
        newest(tmp_path)
    for name in ("suite-2026-11-21T100000.json", "suite-2026-11-22T090000.json", "rows-2026-11-23T100000.json"):
        (tmp_path / name).write_text("{}")

    assert newest(tmp_path).name == "suite-2026-11-22T090000.json"
