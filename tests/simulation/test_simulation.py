"""The core under simulated faults: thousands of seeds, the seeds that once failed, and the mutants that must fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from marq.core.leases import LeaseBook
from proof.checker import check
from proof.history import read
from tests.simulation import mutants, seeds, swarm
from tests.simulation.minimise import command, minimise, trace
from tests.simulation.mutant import HARD_CASES, ORDERS
from tests.simulation.world import Plan, World, inspect, simulate

#: Tens of seconds of work: on a machine that does much else at the same time, minutes.
pytestmark = pytest.mark.timeout(1_800)

#: Seeds in `make test`; `make simulate SEEDS=` runs any number.
SEEDS = 1_200
#: How many seeds a mutant may survive in `make test`; `make mutants` allows more.
MUTANT_SEEDS = 300
ROOT = Path(__file__).resolve().parents[2]

#: Seeds that failed once, each with what it showed. What earlier versions of the simulation found (a TICK from before
#: the new fencing that was taken for the awaited one, an overtaken owner that wrote its old rows over newer ones) are
#: mutants now: a seed is another world when the simulation grows.
REGRESSIONS = {
    6632: "a consumer counted its lease by settings that had changed since its ACQUIRE (marq/flow.py, _hand_out)",
    377: "the simulator: a message that was too large to be sent again, of a queue that keeps no dead letters",
    110785: "the checker: a release came while a copy was on its way, and the tracker's next TICK before its fact",
    5477: "the simulator: the last markers of a quiet log were removed, and the tracker did not look",
}


@pytest.fixture(scope="module")
def summary() -> seeds.Summary:
    return seeds.run(0, SEEDS)


def test_nothing_is_lost_doubled_without_a_cause_or_stuck_in_thousands_of_seeds(summary: seeds.Summary) -> None:
    assert [f"seed {result.seed}: {result.failed}" for result in summary.failed] == []
    assert summary.seeds == SEEDS


def test_the_simulation_is_not_vacuous(summary: seeds.Summary) -> None:
    stats = summary.stats

    assert summary.events > 1_000 * SEEDS
    assert stats["handed_out"] > 10 * SEEDS
    assert summary.duplicates > SEEDS
    often = (
        "redelivered released rebalances commits_refused acquire_not_certain clock_step served_anew start_transactions"
        " delayed delivered questions asked_too_late moved cancelled"
    )
    at_times = (
        "tracker_crashes tracker_rebalance consumer_crashes aborted commits_unknown fenced starved suspensions gaps"
        " start_not_certain waited_for_transactions delayed_by_header asked_again"
    )
    now_and_then = (
        "rejected dead clock_jump calm overtaken move settings old_tables changelogs_made_anew compacted"
        " markers_gone position_lost skipped expired_unread stranded unknown_versions newer_markers offsets_lost"
        " delays_repeated questions_given_up"
    )
    for names, least in ((often, SEEDS // 2), (at_times, SEEDS // 5), (now_and_then, SEEDS // 100)):
        assert {name: stats[name] for name in names.split() if stats[name] <= least} == {}
    assert {1, 2, 3, 4, 5, 6, 7, 8, 9, 13} <= summary.causes.keys()


def test_a_seed_is_the_same_world_each_time() -> None:
    first, second = simulate(7), simulate(7)

    assert first == second
    assert first.events > 100


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_failed_once_passes(seed: int) -> None:
    assert simulate(seed).failed == "", REGRESSIONS[seed]


def test_without_faults_each_message_is_handed_out_once_and_as_often_as_it_was_given_back() -> None:
    calm = [seed for seed in range(300) if not any(vars(World(seed).faults).values())]

    results = [simulate(seed) for seed in calm]

    assert len(results) > 5
    assert [(result.failed, result.duplicates) for result in results] == [("", 0)] * len(results)


def test_a_history_that_was_written_is_judged_like_the_one_in_memory(tmp_path: Path) -> None:
    result, findings, world = inspect(11)
    world.history.write(tmp_path / "history.jsonl")

    report = check(read([tmp_path / "history.jsonl"]))

    assert (report.duplicates, report.findings) == (result.duplicates, findings)
    assert report.events == len(world.history.events) > 200


def test_every_mutant_is_killed_by_a_check_that_it_names() -> None:
    verdicts = mutants.judge_all(MUTANT_SEEDS)

    assert [verdict for verdict in verdicts if not verdict.expected] == []


def test_each_hard_case_and_each_order_of_operations_has_mutants() -> None:
    abouts = Counter(mutant.about for mutant in mutants.MUTANTS)

    assert {about: abouts[about] for about in (*HARD_CASES, *ORDERS) if abouts[about] < 2} == {}
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)


def test_a_failure_is_made_smaller_and_its_command_and_events_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    due = LeaseBook.due
    monkeypatch.setattr(LeaseBook, "due", lambda book, now_ms: due(book, now_ms + 50))
    failed = next(seed for seed in range(20) if simulate(seed).check in ("early", "renewed"))

    small = minimise(failed, Plan())
    lines = trace(failed, small)

    assert command(failed, small).startswith(f"python -m tests.simulation 1 --start {failed} --without ")
    assert simulate(failed, small).check == simulate(failed).check
    assert len(small.without) > len(swarm.NAMES) // 2
    assert '"op": "fire"' in "".join(lines)


def test_the_command_ends_with_one_json_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "3", "--start", "5"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["seeds"], report["failed"], report["first_failed"]) == (3, 0, None)
    assert {"events", "duplicates", "causes", "expired_unread", "stranded", "seconds"} <= report.keys()
