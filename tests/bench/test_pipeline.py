"""The measurement of the pipeline, with few messages: its history is found to the message, and a wrong truth is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.history import Truth
from bench.pipeline import Size, bars, compare, growth, measure, plot

FIGURES = {
    "markers": 25_000_000,
    "ingest_seconds": 300.0,
    "ingest_peak_mib": 3_000.0,
    "lifecycle_seconds": 350.0,
    "lifecycle_peak_mib": 3_000.0,
    "audit_seconds": 50.0,
    "audit_peak_mib": 2_000.0,
}
QUIET = {"emails": {"sent": 2, "acked": 2}}


def _truth() -> Truth:
    truth = Truth()
    truth.figures["emails"].update(sent=2, acked=2)
    truth.rows.update(markers=4, messages=2)
    return truth


def test_a_run_within_all_limits_meets_its_bars() -> None:
    assert all(bar.met for bar in bars(FIGURES))


@pytest.mark.parametrize(
    ("figure", "found"), [("ingest_seconds", 313.0), ("audit_seconds", 67.0), ("ingest_peak_mib", 4_097.0)]
)
def test_each_limit_is_judged(figure: str, found: float) -> None:
    assert [bar.met for bar in bars({**FIGURES, figure: found})].count(False) == 1


def test_time_that_grows_faster_than_markers_is_judged_and_drawn(tmp_path: Path) -> None:
    tenth = {**FIGURES, "markers": 2_500_000, "ingest_seconds": 20.0, "lifecycle_seconds": 30.0, "audit_seconds": 5.0}

    plot([tenth, FIGURES], tmp_path / "plot.png")

    assert not growth([tenth, FIGURES]).met
    assert growth([FIGURES, FIGURES]).met
    assert (tmp_path / "plot.png").stat().st_size > 1_000


def test_what_the_jobs_found_is_the_truth() -> None:
    compare(_truth(), "ingested 4 markers, 2 messages in 1 s", {"queues": QUIET, "causes": {}, "right": True})


@pytest.mark.parametrize(
    ("ingested", "audit"),
    [
        ("ingested 5 markers, 2 messages in 1 s", {"queues": QUIET, "causes": {}, "right": True}),
        ("ingested 4 markers in 1 s", {"queues": QUIET, "causes": {}, "right": True}),
        ("ingested 4 markers, 2 messages in 1 s", {"queues": {}, "causes": {}, "right": True}),
        ("ingested 4 markers, 2 messages in 1 s", {"queues": QUIET, "causes": {"acked late": 1}, "right": True}),
        ("ingested 4 markers, 2 messages in 1 s", {"queues": QUIET, "causes": {}, "right": False, "wrong": ["x"]}),
    ],
)
def test_any_difference_ends_the_run(ingested: str, audit: dict[str, object]) -> None:
    with pytest.raises(SystemExit, match="not found the truth"):
        compare(_truth(), ingested, audit)


@pytest.mark.skipif(os.environ.get("SPARK") == "skip", reason="SPARK=skip: tests on Spark are left out")
@pytest.mark.timeout(1_200)  # three starts of Spark
def test_the_pipeline_finds_the_truth_of_a_history(servers: str, tmp_path: Path) -> None:
    figures = measure(servers, tmp_path, Size(messages=20_000), say=print)

    assert figures["markers"] > 2 * 20_000
    assert len(bars(figures)) == 3
