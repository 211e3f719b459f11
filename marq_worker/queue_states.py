"""The state of a queue in one word or two, for the dashboard and for ``marq queues``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marq.kafka.owned_partitions import OPEN

PAUSED, HANDLER_REMOVED, BREAKER_OPEN, NO_CONSUMER = "paused", "handler removed", "breaker open", "no consumer"
BUSY, WAITING, IDLE = "busy", "waiting", "idle"
STATES = (BUSY, WAITING, IDLE, NO_CONSUMER, PAUSED, BREAKER_OPEN, HANDLER_REMOVED)
#: States that need an operator.
ALARMING = (HANDLER_REMOVED, BREAKER_OPEN, NO_CONSUMER)
#: Metrics that count messages of a queue.
_MESSAGES = ("waiting", *OPEN, "dead_letters")


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


def is_listed(metrics: Mapping[str, Any], *, known: bool) -> bool:
    """Return whether lists of queues contain a queue; ``known``: it has a definition or a consumer group.

    Trackers know each name that a message ever had, so an unknown queue is listed only while it has messages.
    """
    return known or any(metrics.get(name) for name in _MESSAGES)


def open_breakers(workers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the queues whose circuit breaker is not closed, with its state."""
    return {
        queue: breaker["state"]
        for worker in workers
        for process in worker.get("handlers", ())
        for queue, breaker in process.get("breakers", {}).items()
        if breaker["state"] != "closed"
    }
