"""The quick ones of the fault runs."""

from __future__ import annotations

import pytest

from broker import EmbeddedBroker
from faults.scenario import Scenario
from tests.faults.quick import AUDITED, QUICK, check

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


@pytest.mark.parametrize("scenario", [each for each in QUICK if each.name not in AUDITED], ids=lambda each: each.name)
async def test_nothing_is_lost_and_each_duplicate_is_explained(scenario: Scenario, broker: EmbeddedBroker) -> None:
    await check(scenario, broker)
