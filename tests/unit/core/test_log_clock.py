"""The log's clock: a running maximum that a jumping broker does not fool."""

from __future__ import annotations

import pytest

from marq.core.storage.log_clock import MAX_DRIFT_MS, LogClock

ME, OTHER = 1, 2


@pytest.mark.parametrize("drift_ms", [MAX_DRIFT_MS, -MAX_DRIFT_MS, 0])
def test_a_difference_up_to_the_limit_is_drift(drift_ms: int) -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    assert clock.tick(100_000 + 10_000 + drift_ms, ME, 10_000) == 0
    assert clock.now_ms == 110_000 + drift_ms


def test_after_a_jump_ahead_the_monotonic_time_counts() -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    jump_ms = clock.tick(100_000 + 3_600_000, ME, 50)

    assert jump_ms == 3_600_000 - 50
    assert clock.now_ms == 100_050
    clock.advance(100_000 + 3_600_000 + 10)
    assert clock.now_ms == 100_060


def test_after_a_jump_back_the_clock_goes_on() -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    jump_ms = clock.tick(100_000 - 3_600_000, ME, 10_000)

    assert jump_ms == -3_610_000
    assert clock.now_ms == 110_000
    clock.advance(100_000 - 3_600_000 + 10)
    assert clock.now_ms == 110_010


def test_a_jump_back_is_seen_between_ticks_that_follow_each_other_quickly() -> None:
    """Found by the fault run "broker-clock-moved": no lease ended until the broker's clock had caught up."""
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    jumps = [clock.tick(100_000 - 3_600_000 + now_ms, ME, now_ms) for now_ms in range(50, 10_000, 50)]

    assert jumps == [-3_600_000, *[0] * (len(jumps) - 1)]
    assert clock.now_ms == 109_950
