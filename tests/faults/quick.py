"""Which scenarios the tests play, and what each has to come to."""

from __future__ import annotations

import os

from broker import EmbeddedBroker
from faults.__main__ import SCENARIOS
from faults.scenario import Scenario, play

QUICK = [scenario for scenario in SCENARIOS if scenario.quick]
#: Those of them that the data pipeline audits, too: its account must be the checker's.
AUDITED = ("worker-killed-in-the-transaction", "mixed-at-random")


async def check(scenario: Scenario, broker: EmbeddedBroker) -> None:
    """Fail unless nothing is lost and each duplicate is explained."""
    audit = scenario.name in AUDITED and os.environ.get("SPARK") != "skip"

    result = await play(scenario, broker, audit=audit)

    assert result.wrong == []
    assert result.passed, result.line()
    assert result.figures["accepted"] > 0
