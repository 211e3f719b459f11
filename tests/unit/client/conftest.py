from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.unit.client import fakes


@pytest.fixture
async def make_rig() -> AsyncIterator[Callable[..., fakes.Rig]]:
    """Make started flows, which end with the test."""
    rigs: list[fakes.Rig] = []

    def make(*arguments: Any, started: bool = True, **changes: Any) -> fakes.Rig:
        rig = fakes.rig(*arguments, **changes)
        rigs.append(rig)
        if started:
            rig.flow.start()
        return rig

    yield make
    for rig in rigs:
        rig.acquirer.gate.set()
        rig.settler.gate.set()
        rig.flow._reader.__dict__["refuse_commits"] = 0
        await rig.flow.stop_reading(1)
        await rig.flow.stop(1)
