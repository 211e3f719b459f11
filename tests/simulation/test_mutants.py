"""All mutants: each must be killed by a check that it names, and, judged from outside, by any check."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, SEEDS, judge_all

pytestmark = [pytest.mark.verify, pytest.mark.timeout(7_200)]


@pytest.mark.parametrize("blind", [False, True], ids=["seen from inside", "seen from outside"])
def test_every_mutant_is_killed(blind: bool) -> None:
    mutants = [mutant for mutant in MUTANTS if not (blind and mutant.inside)]

    verdicts = judge_all(SEEDS, mutants, blind=blind)

    # A text, because pytest would show only the first of a list.
    assert "\n".join(map(str, [verdict for verdict in verdicts if not verdict.expected])) == ""
