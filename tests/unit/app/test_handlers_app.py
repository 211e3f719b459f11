"""What a handler process reports to its watchdog."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marq.wire.markers import Source
from marq_worker.agents.progress import ProgressReport
from marq_worker.app.handlers.handlers_app import HandlersApp
from marq_worker.app.watchdog.broker_probe import Messages, Rebalance

READ = ProgressReport((7,), 7)


def app(*, rebalancing: bool, reads_committed: bool = False) -> Any:
    reader = SimpleNamespace(standings=lambda: {Source("t.messages", 0): READ})
    return SimpleNamespace(
        handlers=SimpleNamespace(reader=reader),
        rebalancing=rebalancing,
        rebalancing_count=3,
        conf=SimpleNamespace(id="t-emails"),
        group=SimpleNamespace(committed=False),
        consumer=SimpleNamespace(thread=SimpleNamespace(reads_committed=reads_committed)),
    )


@pytest.mark.parametrize("reads_committed", [False, True])
def test_between_rebalances_the_watchdog_watches_what_is_read(reads_committed: bool) -> None:
    """Else it would end a process that waits for another program's transaction."""
    standings = HandlersApp._standings(app(rebalancing=False, reads_committed=reads_committed))

    assert standings == {Messages("t.messages", 0, reads_committed): READ}


def test_a_rebalance_must_end() -> None:
    """Else a process that hangs in one would live on without reading anything."""
    owed = ProgressReport((3,), owes="it does not end")

    assert HandlersApp._standings(app(rebalancing=True)) == {Rebalance("t-emails"): owed}
