"""The log's clock: a running maximum that a jumping broker does not fool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.clock import MAX_DRIFT_MS, LogClock

ME, OTHER = 1, 2


@given(st.lists(st.integers(0, 10_000)))
def test_without_ticks_the_clock_is_the_largest_append_time(times: list[int]) -> None:
    clock = LogClock()

    for time_ms in times:
        clock.advance(time_ms)

    assert clock.now_ms == max(times, default=0)


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(-1_000, 1_000)), max_size=30))
def test_small_steps_of_the_brokers_clock_are_no_jumps(steps: list[tuple[int, int]]) -> None:
    clock = LogClock()
    now_ms = 1_000_000

    for pause_ms, skew_ms in steps:
        now_ms += pause_ms
        before_ms = clock.now_ms

        assert clock.tick(now_ms + skew_ms, ME, now_ms) == 0
        assert clock.now_ms >= before_ms


def test_the_first_tick_of_a_holder_finds_no_jump() -> None:
    clock = LogClock()
    clock.tick(1_000, OTHER, 5)

    jump_ms = clock.tick(1_000_000, ME, 77)

    assert jump_ms == 0
    assert clock.now_ms == 1_000_000


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


def test_a_single_record_of_a_leader_whose_clock_is_ahead_does_not_stop_the_clock() -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)
    clock.advance(100_000 + 3_600_000)

    clock.tick(100_050, ME, 50)

    assert (clock.now_ms, clock.skew_ms) == (100_050, 0)


def test_a_late_tick_looks_like_a_jump_and_the_next_one_mends_it() -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    clock.tick(120_000, ME, 1)
    assert clock.now_ms == 100_001
    clock.tick(120_050, ME, 20_050)

    assert clock.now_ms == 120_050
    assert clock.skew_ms == 0


def test_a_jump_between_two_owners_is_not_seen_and_the_clock_does_not_go_back() -> None:
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    clock.tick(90_000, OTHER, 123)

    assert clock.now_ms == 100_000
