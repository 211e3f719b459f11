"""The measurement of recovery, with few leases: that it runs to its end, and judges by the worst run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.recovery import Size, bars, measure

FIGURES = {
    "opened_peak_mib": [400.0],
    "restart_firing_seconds": [4.0, 4.5],
    "rebuild_firing_seconds": [20.0],
    "takeover_seconds": [11.0],
}


def test_a_recovery_within_all_limits_meets_its_bars() -> None:
    assert all(bar.met for bar in bars(FIGURES, session_timeout=10))


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        ("opened_peak_mib", 701.0),
        ("restart_firing_seconds", 5.1),
        ("rebuild_firing_seconds", 30.1),
        ("takeover_seconds", 12.1),
    ],
)
def test_one_bad_run_misses_its_bar(figure: str, found: float) -> None:
    judged = bars({**FIGURES, figure: [*FIGURES[figure], found]}, session_timeout=10)

    assert [bar.found for bar in judged if not bar.met] == [found]


async def test_kills_of_a_worker_with_open_leases_are_measured(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARQ_SESSION_TIMEOUT", "6")

    figures, judged = await measure(servers, tmp_path, Size(leases=2_000, partitions=2), say=print)

    assert len(judged) == 4
    assert min(min(found) for name, found in figures.items() if "over_session" not in name) > 0
    # Nobody can own what a killed worker had before its session has run out, and some time of it was over.
    assert figures["takeover_seconds"][0] > 3
