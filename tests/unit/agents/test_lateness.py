"""What a partition says of its lateness is of lately, and bounded."""

from __future__ import annotations

from marq_worker.progress import RECENT, RECENT_MS, RecentLateness


def test_an_outage_that_is_over_is_forgotten() -> None:
    lateness = RecentLateness()
    lateness.note(0, [9_000, 8_000])
    lateness.note(1_000, [20, 5])

    assert lateness.rising(RECENT_MS) == [5, 20, 8_000, 9_000]
    assert lateness.rising(RECENT_MS + 1) == [5, 20]
    assert lateness.rising(RECENT_MS + 1_001) == []


def test_only_the_last_messages_are_kept() -> None:
    lateness = RecentLateness()
    for at_ms in range(40):
        lateness.note(at_ms, [at_ms] * (RECENT // 10))

    assert lateness.rising(40) == [at_ms for at_ms in range(30, 40) for _ in range(RECENT // 10)]


def test_a_great_list_is_kept_whole() -> None:
    lateness = RecentLateness()
    lateness.note(0, [1])
    lateness.note(1, [2] * (2 * RECENT))

    assert lateness.rising(1) == [2] * (2 * RECENT)
