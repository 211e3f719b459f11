"""How far behind the owner of a partition is, and whether it catches up."""

from __future__ import annotations

import pytest

from marq_worker.progress import LEVEL_RECORDS, MAX_STEP_SECONDS, WINDOW_SECONDS, Paces, PartitionProgress


def pace_after(ends: list[int], positions: list[int], *, seconds: float = 1.0) -> PartitionProgress:
    paces = Paces(dict(enumerate(ends)).get)
    samples = iter(ends)
    paces.end_of = lambda _: next(samples)
    for turn, position in enumerate(positions):
        paces.note(turn * seconds, {0: position})
    return paces.of(0)


def test_a_partition_that_is_written_faster_than_read_falls_behind() -> None:
    pace = pace_after([0, 100 * LEVEL_RECORDS], [0, 50 * LEVEL_RECORDS])

    assert pace.falls_behind
    assert (pace.lag, pace.lag_per_second) == (50 * LEVEL_RECORDS, 50 * LEVEL_RECORDS)
    assert pace.drain_seconds is None


def test_a_partition_that_is_behind_and_read_faster_catches_up() -> None:
    pace = pace_after([20 * LEVEL_RECORDS, 21 * LEVEL_RECORDS], [0, 11 * LEVEL_RECORDS])

    assert not pace.falls_behind
    assert pace.drain_seconds == pytest.approx(1.0)


def test_a_fetch_that_is_on_its_way_is_no_lag() -> None:
    assert not pace_after([0, LEVEL_RECORDS], [0, 0]).falls_behind
    assert pace_after([5, 5], [5, 7]).lag == 0


def test_only_the_last_window_counts() -> None:
    pace = pace_after([0, 1_000, 1_000, 1_000], [0, 0, 0, 0], seconds=WINDOW_SECONDS)

    assert pace.lag == 1_000
    assert pace.lag_per_second == 0


@pytest.mark.parametrize(
    ("ends", "positions", "stalled_s"),
    [
        # The record was there for three seconds, and none was read.
        ([8, 8, 8, 8], [7, 7, 7, 7], 3.0),
        # It came with the last sample.
        ([7, 7, 8], [7, 7, 7], 0.0),
        # Far behind, and read slowly.
        ([900, 900, 900], [7, 7, 8], 0.0),
        # Read to the end, and behind once more.
        ([8, 8, 8, 9, 9], [7, 7, 8, 8, 8], 1.0),
    ],
)
def test_a_partition_has_stalled_for_as_long_as_nothing_is_read_although_something_is_there(
    ends: list[int], positions: list[int], stalled_s: float
) -> None:
    assert pace_after(ends, positions).stalled_seconds == stalled_s


def test_time_in_which_the_worker_was_suspended_is_no_stall() -> None:
    assert pace_after([8, 8], [7, 7], seconds=600.0).stalled_seconds == MAX_STEP_SECONDS


def test_what_is_not_known_is_no_lag() -> None:
    paces = Paces(lambda _: None)
    paces.note(0.0, {0: 5})
    paces.note(1.0, {0: None})

    assert paces.of(0) == paces.of(1) == PartitionProgress()
    assert PartitionProgress().lag == 0
