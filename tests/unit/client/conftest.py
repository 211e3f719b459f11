from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from marq.settings.queue import QueueSettings
from tests.unit.client import fakes
from tests.unit.client.fake_tracker import Tracker, queries


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


@pytest.fixture
def make_ordered(make_rig: Callable[..., fakes.Rig]) -> Callable[..., tuple[fakes.Rig, Tracker]]:
    """Make flows of a queue with ordering, which the test starts, and their tracker."""

    def make(*arguments: Any, **changes: Any) -> tuple[fakes.Rig, Tracker]:
        changes.setdefault("queue", lambda _: QueueSettings(ordering="key"))
        rig, tracker = make_rig(*arguments, started=False, **changes), Tracker()
        rig.receiver._queries = queries(tracker, rig.clock)
        return rig, tracker

    return make
