"""Waits for a CPU, which show that the machine was too slow, not the program."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.cpu_waits import BrokerWatch, Starvation, waited_s

LEASE_S = 4.0


def pauses(*readings: tuple[float, float]) -> list[float | None]:
    starvation = Starvation(LEASE_S)
    return [starvation.take(now_s, wait_s) for now_s, wait_s in readings]


def test_half_a_lease_of_many_short_waits_is_a_pause_since_the_first() -> None:
    assert pauses((10, 0.0), (11, 0.7), (12, 1.4), (13, 2.1)) == [None, None, None, 10]


def test_the_same_waits_over_a_longer_time_are_not_a_pause() -> None:
    assert pauses(*[(10 + second, 0.4 * second) for second in range(20)]) == [None] * 20


def test_a_wait_counts_once() -> None:
    assert pauses((10, 0.0), (13, 2.5), (13.1, 2.6), (15, 4.3), (16, 4.4)) == [None, 10, None, None, None]


def test_one_wait_that_is_longer_than_a_lease_is_a_pause() -> None:
    assert pauses((10, 0.0), (11, 0.0), (21, 9.0)) == [None, None, 11]


def test_the_count_of_the_kernel_is_in_seconds(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("202580 1500000000 2\n")

    assert waited_s(tmp_path) == 1.5


def test_a_system_without_this_count_has_none(tmp_path: Path) -> None:
    assert waited_s(tmp_path) is None


def test_only_the_request_threads_of_a_broker_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = BrokerWatch(tmp_path, LEASE_S)
    for number, name in enumerate(("data-plane-kafk", "C2 CompilerThre")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")

    def look(now_s: float, **waits_s: float) -> float | None:
        monkeypatch.setattr("lab.cpu_waits.time", SimpleNamespace(monotonic=lambda: now_s))
        for number, wait_s in enumerate(waits_s.values()):
            (tmp_path / str(number) / "schedstat").write_text(f"1 {wait_s * 1e9:.0f} 1")
        return watch.look()

    assert look(10, requests=0, compiler=0) is None
    assert look(13, requests=1, compiler=3) is None
    assert look(14, requests=2, compiler=4) == 10


def test_a_broker_that_is_gone_has_no_threads(tmp_path: Path) -> None:
    assert BrokerWatch(tmp_path / "gone", LEASE_S).look() is None
