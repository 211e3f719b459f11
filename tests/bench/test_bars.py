"""Bars of measurements, at their limits and beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab.bench import pipeline
from lab.bench.rows import latency, restarts, throughput
from lab.bench.suite import Bar
from lab.bench.synthetic_history import Truth

Measurements = dict[str, float]
#: Measurements at their limits, and beyond them.
DELAYS = {
    "pending_peak_mib": (700.0, 701.0),
    "restart_seconds": (10.0, 10.1),
    "lateness_p99_ms": (250.0, 251.0),
    "scheduled_per_second": (50_000.0, 49_999.0),
}
RECOVERY = {
    "opened_peak_mib": (700.0, 701.0),
    "restart_firing_seconds": (5.0, 5.1),
    "rebuild_firing_seconds": (30.0, 30.1),
    "takeover_seconds": (12.0, 12.1),
}
REDELIVERY = {
    "lateness_p50_ms": (60.0, 61.0),
    "lateness_p99_ms": (250.0, 251.0),
    "all_acked_seconds": (6.5, 6.6),
    "duplicates": (0.0, 1.0),
}
LATENCY = {"p50_ms": (5.0, 5.1), "p99_ms": (40.0, 40.1)}
SCALE = {"messages_per_second": (95.0, 94.0)}
PIPELINE = {"ingest_seconds": (300.0, 313.0), "audit_seconds": (50.0, 67.0), "ingest_peak_mib": (4_096.0, 4_097.0)}
JOBS = {
    "markers": 25_000_000, "ingest_seconds": 300.0, "ingest_peak_mib": 3_000.0, "lifecycle_seconds": 350.0,
    "lifecycle_peak_mib": 3_000.0, "audit_seconds": 50.0, "audit_peak_mib": 2_000.0,
}  # fmt: skip
JOBS_OF_A_TENTH = {**JOBS, "markers": 2_500_000, "ingest_seconds": 40.0}
QUIET = {"emails": {"sent": 2, "acked": 2}}


@pytest.mark.parametrize(
    ("bars", "limits"),
    [
        (lambda measurements: restarts.delays_bars({"marq": {"pending": 1_000_000, **measurements}}), DELAYS),
        (lambda measurements: restarts.recovery_bars({"marq": measurements}), RECOVERY),
        (lambda measurements: latency.REDELIVERY.bars({latency.QUIET: measurements}), REDELIVERY),
        (lambda measurements: latency.LATENCY.bars({latency.STEADY: measurements}), LATENCY),
        (
            lambda measurements: throughput.SCALE.bars(
                {throughput.ONE: {"messages_per_second": 100.0}, throughput.TWO: measurements}
            ),
            SCALE,
        ),
        (lambda measurements: pipeline.bars({"tenth": JOBS_OF_A_TENTH, "all": {**JOBS, **measurements}}), PIPELINE),
    ],
    ids=["delays", "recovery", "redelivery", "latency", "scale", "pipeline"],
)
def test_a_figure_at_its_limit_meets_its_bar_and_a_worse_one_misses_it(
    bars: Callable[[Measurements], list[Bar]], limits: dict[str, tuple[float, float]]
) -> None:
    at_limits = {name: limit for name, (limit, _) in limits.items()}

    assert all(bar.met for bar in bars(at_limits))
    for name, (_, beyond) in limits.items():
        assert [bar.met for bar in bars({**at_limits, name: beyond})].count(False) == 1, name


def test_more_delayed_messages_than_the_bars_apply_to_are_not_judged() -> None:
    assert restarts.delays_bars({"marq": {"pending": 2_000_000}}) == []


def test_time_that_grows_faster_than_markers_misses_a_bar() -> None:
    fast = {**JOBS_OF_A_TENTH, "ingest_seconds": 20.0, "lifecycle_seconds": 30.0, "audit_seconds": 5.0}

    assert [bar.met for bar in pipeline.bars({"tenth": fast, "all": JOBS})] == [True, True, True, False]
    assert [bar.met for bar in pipeline.bars({"one": JOBS, "other": JOBS})] == [True] * 4


@pytest.mark.parametrize(
    ("ingested", "differs"),
    [
        ("ingested 4 markers, 2 messages in 1 s", None),
        ("ingested 5 markers, 2 messages in 1 s", {}),
        ("ingested 4 markers in 1 s", {}),
        ("ingested 4 markers, 2 messages in 1 s", {"queues": {}}),
        ("ingested 4 markers, 2 messages in 1 s", {"causes": {"acked late": 1}}),
        ("ingested 4 markers, 2 messages in 1 s", {"right": False, "wrong": ["x"]}),
    ],
)
def test_any_difference_between_jobs_and_truth_ends_the_run(ingested: str, differs: dict[str, object] | None) -> None:
    truth = Truth()
    truth.counts["emails"].update(sent=2, acked=2)
    truth.rows.update(markers=4, messages=2)
    audit = {"queues": QUIET, "causes": {}, "right": True}

    if differs is None:
        pipeline.compare(truth, ingested, audit)
    else:
        with pytest.raises(SystemExit, match="differ from the truth"):
            pipeline.compare(truth, ingested, {**audit, **differs})
