"""More than a thousand seeds, which meet every fault and every cause of a duplicate."""

from __future__ import annotations

import pytest

from tests.simulation import seeds

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1_800)]

SEEDS = 1_200


@pytest.fixture(scope="module")
def summary() -> seeds.Summary:
    return seeds.run(0, SEEDS)


def test_nothing_is_lost_doubled_without_a_cause_or_stuck(summary: seeds.Summary) -> None:
    assert [f"seed {result.seed}: {result.failed}" for result in summary.failed] == []
    assert summary.seeds == SEEDS


def test_the_simulation_is_not_vacuous(summary: seeds.Summary) -> None:
    stats = summary.stats

    assert summary.events > 1_000 * SEEDS
    assert stats["handed_out"] > 10 * SEEDS
    assert summary.duplicates > SEEDS // 2
    often = (
        "redelivered released rebalances commits_refused acquire_not_certain clock_step served_anew start_transactions"
        " delayed delivered questions asked_too_late moved cancelled"
    )
    at_times = (
        "tracker_crashes tracker_rebalance consumer_crashes aborted commits_unknown fenced starved suspensions gaps"
        " start_not_certain delayed_by_header asked_again subscriptions rated_turns late_turns"
    )
    now_and_then = (
        "rejected dead clock_jump calm overtaken move settings old_tables changelogs_made_anew compacted"
        " markers_gone position_lost skipped expired_unread stranded unknown_versions newer_markers offsets_lost"
        " delays_repeated waited_for_transactions abandoned"
    )
    rarely = "questions_given_up"
    limits = (often, SEEDS // 2), (at_times, SEEDS // 5), (now_and_then, SEEDS // 100), (rarely, SEEDS // 400)
    for names, least in limits:
        assert {name: stats[name] for name in names.split() if stats[name] <= least} == {}
    assert {1, 2, 3, 4, 5, 6, 7, 8, 9, 13} <= summary.causes.keys()
