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
            rig.receiver.start()
        return rig

    yield make
    for rig in rigs:
        rig.acquirer.gate.set()
        rig.settler.gate.set()
        rig.receiver._reader.__dict__["refuse_commits"] = 0
        await rig.receiver.stop_reading(1)
        await rig.receiver.stop(1)
