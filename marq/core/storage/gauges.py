"""Numbers of open messages of each queue, by state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marq.core.storage.rows import HELD, LeaseRow, State

#: The states of a delayed message.
BEFORE_DELIVERY = (State.DELAYED, State.CANCELLED)


@dataclass(slots=True)
class Gauge:
    """The open messages of a queue; ``oldest_ms`` is the clock at their oldest ACQUIRE.

    ``blocked`` counts released messages of a queue with ordering that wait in their place for the next attempt; the
    later messages of their keys wait for them.
    """

    in_flight: int = 0
    released: int = 0
    rejected: int = 0
    oldest_ms: int | None = None
    delayed: int = 0
    blocked: int = 0

    def add(self, lease: LeaseRow, count: int) -> None:
        """Count messages that were delivered before."""
        if lease.state in HELD:
            self.in_flight += count
        elif lease.state in (State.RELEASED, State.WAITING_IN_ORDER):
            self.released += count
            self.blocked += count * is_blocked(lease)
        else:
            self.rejected += count
        if self.oldest_ms is None or lease.since_ms < self.oldest_ms:
            self.oldest_ms = lease.since_ms


def is_blocked(lease: LeaseRow) -> bool:
    """Return whether a message is waiting for its next attempt, and later messages with its key wait for it.

    A release that does not count, such as at a shutdown, blocks nothing: the next consumer delivers the message.
    """
    return lease.state is State.WAITING_IN_ORDER and lease.counted


def gauges_of(leases: Iterable[Collection[LeaseRow]]) -> dict[str, Gauge]:
    """Count these messages by queue."""
    gauges: dict[str, Gauge] = {}
    for some in leases:
        add_gauges(gauges, some)
    return gauges


def add_gauges(gauges: dict[str, Gauge], leases: Collection[LeaseRow]) -> None:
    """Count some more messages."""
    # Each of a million delayed messages has its own lease, so only the queue is examined.
    delayed = [lease.queue for lease in leases if lease.state in BEFORE_DELIVERY]
    for queue, count in Counter(delayed).items():
        gauges.setdefault(queue, Gauge()).delayed += count
    if len(delayed) == len(leases):
        return
    others = [lease for lease in leases if lease.state not in BEFORE_DELIVERY] if delayed else leases
    for lease, count in Counter(others).items():
        gauges.setdefault(lease.queue, Gauge()).add(lease, count)
