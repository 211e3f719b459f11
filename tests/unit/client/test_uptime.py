"""The clock of a worker's owners advances as the broker's does."""

from __future__ import annotations

import time

import pytest

from marq.client.uptime import uptime_ms
from marq.core.storage.log_clock import LogClock

ME, AWAKE_S, SUSPENDED_S = 1, 1, 600


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="CLOCK_MONOTONIC counts suspensions here")
def test_a_suspension_of_the_worker_is_not_a_jump_of_the_brokers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages with absolute times came late by the length of the suspension, from then on."""
    passed_s = {"awake": 100, "suspended": 0}
    monkeypatch.setattr(time, "monotonic", lambda: passed_s["awake"])
    monkeypatch.setattr(
        time,
        "clock_gettime",
        lambda clock: passed_s["awake"] + (0 if clock == time.CLOCK_MONOTONIC else passed_s["suspended"]),
    )
    log = LogClock()
    log.tick(1_000_000, ME, uptime_ms())

    passed_s["awake"] += AWAKE_S
    passed_s["suspended"] += SUSPENDED_S
    jump_ms = log.tick(1_000_000 + (AWAKE_S + SUSPENDED_S) * 1000, ME, uptime_ms())

    assert (jump_ms, log.skew_ms) == (0, 0)
