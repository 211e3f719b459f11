"""The quick ones of the fault runs that the data pipeline audits, too."""

from __future__ import annotations

import pytest

from broker import EmbeddedBroker
from faults.scenario import Scenario
from tests.faults.quick import AUDITED, QUICK, check

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


@pytest.mark.parametrize("scenario", [each for each in QUICK if each.name in AUDITED], ids=lambda each: each.name)
async def test_both_accounts_are_the_same_and_nothing_is_lost(scenario: Scenario, broker: EmbeddedBroker) -> None:
    await check(scenario, broker)


def test_all_that_are_audited_are_played() -> None:
    assert set(AUDITED) <= {scenario.name for scenario in QUICK}
