"""The measurement of delayed messages, with few of them: that it runs to its end, and judges."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.delays import Size, bars, measure

FIGURES = {
    "pending_peak_mib": [400.0],
    "restart_seconds": [4.0],
    "lateness_p99_ms": [100.0],
    "scheduled_per_second": [90_000.0],
}


def test_figures_within_all_limits_meet_the_bars() -> None:
    assert all(bar.met for bar in bars(FIGURES))


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        ("pending_peak_mib", 701.0),
        ("restart_seconds", 10.1),
        ("lateness_p99_ms", 251.0),
        ("scheduled_per_second", 49_999.0),
    ],
)
def test_each_bar_can_be_missed(figure: str, found: float) -> None:
    assert [bar.found for bar in bars({**FIGURES, figure: [found]}) if not bar.met] == [found]


async def test_messages_that_wait_are_measured(servers: str, tmp_path: Path) -> None:
    figures = await measure(servers, tmp_path, Size(pending=3_000, rate=50, seconds=2, partitions=2), say=print)

    assert min(min(found) for name, found in figures.items() if "lateness" not in name) > 0
    assert {len(found) for found in figures.values()} == {1}
    assert len(bars(figures)) == 4
