"""The core under simulated faults: a hundred seeds, and the seeds that once failed; test_mutants.py has the mutants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lab.proof.checker import check
from lab.proof.history import read
from marq.core.lease_book import LeaseBook
from tests.simulation import mutants, seeds, swarm
from tests.simulation.minimise import command, minimise, trace
from tests.simulation.mutant import HARD_CASES, ORDERS
from tests.simulation.world import Plan, World, inspect, simulate

#: Seeds of this file; test_many_seeds.py has more, and `make simulate SEEDS=` runs any number.
SEEDS = 100
ROOT = Path(__file__).resolve().parents[2]


#: Seeds that failed once, each with the defect that it showed. Defects that earlier versions of the simulation found
#: (a TICK from before the new fencing was taken for the awaited one; a fenced owner wrote its old rows over newer ones)
#: are mutants now, because a seed becomes a different world when the simulation grows.
REGRESSIONS = {
    6632: "a consumer counted its lease by settings that had changed since its ACQUIRE",
    377: "the simulator: a message that was too large to be sent again, of a queue that keeps no dead letters",
    110785: "the checker: a release came while a copy was on its way, and the tracker's next TICK before its fact",
    93433: "the checker: an ordered message was delivered after the late rejection of its former attempt",
    50126: "the checker: a rejected message did not count, if retention had removed its record before",
    14357: "the checker: a request for any queue was judged by the fact of one queue",
    5477: "the simulator: the last markers of a quiet log were removed, and the tracker did not look",
    1008056: "a stop released prefetched messages when its handlers had ended, and the lease of one had ended before",
}


def test_nothing_is_lost_doubled_without_a_cause_or_stuck_in_a_hundred_seeds() -> None:
    summary = seeds.run(0, SEEDS, cores=1)

    assert [f"seed {result.seed}: {result.failed}" for result in summary.failed] == []
    assert summary.events > 1_000 * SEEDS


def test_a_seed_is_the_same_world_each_time() -> None:
    for seed in range(7, 17):
        (first, _, one), (second, _, other) = inspect(seed), inspect(seed)

        assert first == second
        assert one.history.events == other.history.events
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


def test_a_mutant_changes_texts_that_are_in_its_modules_once() -> None:
    places = {
        (mutant.name, old): ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text().count(old)
        for mutant in mutants.MUTANTS
        for module, changes in mutant.changes.items()
        for old, _ in changes
    }

    assert {text: count for text, count in places.items() if count != 1} == {}


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
