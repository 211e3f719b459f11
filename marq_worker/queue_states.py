"""The state of a queue in one word or two, for the dashboard and for ``marq queues``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PAUSED, HANDLER_REMOVED, BREAKER_OPEN, NO_CONSUMER = "paused", "handler removed", "breaker open", "no consumer"
BUSY, WAITING, IDLE = "busy", "waiting", "idle"
STATES = (BUSY, WAITING, IDLE, NO_CONSUMER, PAUSED, BREAKER_OPEN, HANDLER_REMOVED)
#: States that need an operator.
ALARMING = (HANDLER_REMOVED, BREAKER_OPEN, NO_CONSUMER)


def queue_state(
    metrics: Mapping[str, Any], *, paused: bool, breaker_open: bool, removed_handler: bool, no_consumer: bool
) -> str:
    """Return a queue's state from its metrics, as all workers together report them; some may be missing."""
    if paused:
        return PAUSED
    if removed_handler:
        return HANDLER_REMOVED
    if breaker_open:
        return BREAKER_OPEN
    if no_consumer:
        return NO_CONSUMER
    if any(metrics.get(name) for name in ("in_flight", "acquired_per_second", "acked_per_second")):
        return BUSY
    return WAITING if metrics.get("waiting") else IDLE


def open_breakers(workers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the queues whose circuit breaker is not closed, with its state."""
    return {
        queue: breaker["state"]
        for worker in workers
        for process in worker.get("handlers", ())
        for queue, breaker in process.get("breakers", {}).items()
        if breaker["state"] != "closed"
    }
