"""The core under simulated faults: a thousand seeds, the seeds that once failed, and the mutants that must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import mutants, seeds
from tests.simulation.world import World, simulate

#: Tens of seconds of work: on a machine that does much else at the same time, minutes.
pytestmark = pytest.mark.timeout(600)

#: Seeds in `make test`; `make simulate SEEDS=` runs any number.
SEEDS = 1_000
#: How many seeds a mutant may survive in `make test`; `make mutants` allows more.
MUTANT_SEEDS = 300

#: Seeds that failed once, each with what it showed.
REGRESSIONS = {
    0: "a TICK from before the new fencing was taken for the awaited one (Tracker.read after take_over_again)",
    658: "... and a message was sent twice: the facts of the transaction of unknown outcome came after that TICK",
    1: "an owner of unknown outcome, overtaken by another, wrote its old rows over newer ones (Owner._overtaken)",
    212172: "... and that the newest applied offset is its own does not say that nobody else wrote",
    7620: "two owners in turn put one record into quarantine: allowed, but only after a failed transaction",
    13469: "random bytes happened to have the magic and another version: that stops the partition, as it must",
    117734: "the simulator ended a pause and left the steps that it had put off where they were",
}


@pytest.fixture(scope="module")
def summary() -> seeds.Summary:
    return seeds.run(0, SEEDS)


def test_nothing_is_lost_doubled_without_a_cause_or_stuck_in_a_thousand_seeds(summary: seeds.Summary) -> None:
    assert [f"seed {result.seed}: {result.failed}" for result in summary.failed] == []
    assert summary.seeds == SEEDS


def test_the_simulation_is_not_vacuous(summary: seeds.Summary) -> None:
    stats = summary.stats

    assert summary.events > 1_000_000
    assert stats["handed_out"] > 10_000
    assert summary.duplicates > 500
    for what in ("redelivered", "dead", "released", "rebalances", "commits_refused", "acquire_not_certain"):
        assert stats[what] > 500, (what, stats)
    for what in ("tracker_crashes", "tracker_rebalances", "consumer_crashes", "aborted", "commits_unknown", "fenced"):
        assert stats[what] > 200, (what, stats)
    for what in ("rejected", "handed_out_aborted", "clock_jumps", "calm", "overtaken"):
        assert stats[what] > 10, (what, stats)


def test_a_seed_is_the_same_world_each_time() -> None:
    first, second = simulate(7), simulate(7)

    assert first == second
    assert first.events > 100


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    assert simulate(seed).failed == "", REGRESSIONS[seed]


def test_without_faults_each_message_is_handed_out_once_and_as_often_as_it_was_given_back() -> None:
    calm = [seed for seed in range(300) if not any(vars(World(seed).faults).values()) and not World(seed).jumps]

    results = [simulate(seed) for seed in calm]

    assert len(results) > 5
    assert [(result.failed, result.duplicates) for result in results] == [("", 0)] * len(results)


def test_every_mutant_is_killed_by_a_check_that_it_names() -> None:
    verdicts = mutants.judge_all(MUTANT_SEEDS)

    assert [verdict for verdict in verdicts if not verdict.expected] == []
    assert len(verdicts) >= 15


def test_the_command_ends_with_one_json_line() -> None:
    root = Path(__file__).resolve().parents[2]

    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "3", "--start", "5"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() == {"seeds", "failed", "first_failed", "events", "duplicates", "seconds"}
    assert (report["seeds"], report["failed"], report["first_failed"]) == (3, 0, None)
