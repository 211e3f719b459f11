"""The log's clock: a running maximum that a jumping broker does not fool."""

from __future__ import annotations

from marq.core.storage.log_clock import LogClock

ME = 1


def test_a_jump_back_is_seen_between_ticks_that_follow_each_other_quickly() -> None:
    """Found by the fault run "broker-clock-moved": no lease ended until the broker's clock had caught up."""
    clock = LogClock()
    clock.tick(100_000, ME, 0)

    jumps = [clock.tick(100_000 - 3_600_000 + now_ms, ME, now_ms) for now_ms in range(50, 10_000, 50)]

    assert jumps == [-3_600_000, *[0] * (len(jumps) - 1)]
    assert clock.now_ms == 109_950
