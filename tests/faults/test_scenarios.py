"""The quick fault scenarios: nothing is lost, and the history explains each duplicate."""

from __future__ import annotations

import os

import pytest

from lab.faults.scenario import Scenario, play
from lab.faults.scenarios import SCENARIOS
from marq_worker.broker import EmbeddedBroker

QUICK = [scenario for scenario in SCENARIOS if scenario.quick]
#: The data pipeline also audits these: its account must be the checker's.
AUDITED = {"worker-killed-in-the-transaction", "mixed-at-random"}
#: Sends messages with deduplication ids several times.
SENT_AGAIN = "mixed-at-random"


@pytest.mark.verify
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.name)
def test_nothing_is_lost_and_each_duplicate_is_explained(scenario: Scenario, broker: EmbeddedBroker) -> None:
    audit = scenario.name in AUDITED and os.environ.get("SPARK") != "skip"

    result = play(scenario, broker, audit=audit)

    assert result.wrong == []
    assert result.passed, result.line()
    assert result.statistics["accepted"] > 0
    assert (result.statistics["deduplicated"] > 0) == (scenario.name == SENT_AGAIN)


def test_the_names_of_scenarios_are_unique_and_the_audited_ones_exist() -> None:
    names = [scenario.name for scenario in SCENARIOS]

    assert len(set(names)) == len(names)
    assert {scenario.name for scenario in QUICK} >= AUDITED
