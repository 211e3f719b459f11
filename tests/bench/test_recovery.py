"""The measurement of recovery, with few leases: it kills a worker three times, and runs to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.recovery import Size, measure

pytestmark = pytest.mark.verify


async def test_kills_of_a_worker_with_open_leases_are_measured(
    servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARQ_SESSION_TIMEOUT", "6")

    figures, judged = await measure(servers, tmp_path, Size(leases=2_000, partitions=2), say=print)

    assert len(judged) == 4
    assert min(min(found) for name, found in figures.items() if "over_session" not in name) > 0
    # Nobody can own what a killed worker had before its session has run out, and some time of it was over.
    assert figures["takeover_seconds"][0] > 3
