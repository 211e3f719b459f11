from __future__ import annotations

import itertools

from marq.consumer.prefetch import PrefetchWindow


def test_a_slow_pace_holds_no_more_than_the_floor() -> None:
    pace = PrefetchWindow()
    pace.busy(0.0)
    for second in range(1, 10):
        pace.finished(2, float(second), idle=False)

    assert pace.window(8, 10_000, 10.0) == 8


def test_a_fast_pace_holds_about_a_second_of_work_after_some_doublings() -> None:
    pace = PrefetchWindow()
    pace.busy(0.0)
    windows = []
    for step in range(1, 21):
        pace.finished(50, step * 0.01, idle=False)
        windows.append(pace.window(8, 100_000, step * 0.01))

    assert windows[0] <= 16
    assert all(after <= 2 * before for before, after in itertools.pairwise(windows))
    assert 4_500 <= windows[-1] <= 5_500


def test_idle_time_does_not_slow_the_pace_down() -> None:
    pace = PrefetchWindow()
    pace.busy(0.0)
    pace.finished(1_000, 0.1, idle=True)
    pace.busy(100.0)
    pace.finished(1_000, 100.1, idle=True)

    windows = [pace.window(1, 100_000, 100.1) for _ in range(20)]

    assert windows[-1] >= 9_000


def test_a_handler_that_became_slow_is_noticed_within_some_seconds() -> None:
    pace = PrefetchWindow()
    pace.busy(0.0)
    for step in range(100):
        pace.finished(100, step * 0.01, idle=False)
        pace.window(8, 100_000, step * 0.01)

    for second in range(1, 11):
        pace.finished(2, 1.0 + second, idle=False)

    assert pace.window(8, 100_000, 11.0) < 100


def test_the_window_never_passes_the_limit() -> None:
    pace = PrefetchWindow()
    pace.busy(0.0)
    pace.finished(10**6, 0.1, idle=False)

    assert [pace.window(8, 10, 0.1) for _ in range(5)][-1] == 10
