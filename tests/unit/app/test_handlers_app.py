"""What a handler process reports to its watchdog."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from marq.wire.markers import Source
from marq_worker.agents.progress import ProgressReport
from marq_worker.app.handlers.handlers_app import HandlersApp
from marq_worker.app.watchdog.broker_probe import Messages, Rebalance

READ = ProgressReport((7,), 7)


def app(*, rebalancing: bool) -> Any:
    reader = SimpleNamespace(standings=lambda: {Source("t.messages", 0): READ})
    return SimpleNamespace(
        handlers=SimpleNamespace(reader=reader),
        rebalancing=rebalancing,
        rebalancing_count=3,
        conf=SimpleNamespace(id="t-emails"),
        group=SimpleNamespace(committed=False),
    )


def test_between_rebalances_the_watchdog_watches_what_is_read() -> None:
    assert HandlersApp._standings(app(rebalancing=False)) == {Messages("t.messages", 0, False): READ}


def test_a_rebalance_must_end() -> None:
    """Else a process that hangs in one would live on without reading anything."""
    owed = ProgressReport((3,), owes="it does not end")

    assert HandlersApp._standings(app(rebalancing=True)) == {Rebalance("t-emails"): owed}
