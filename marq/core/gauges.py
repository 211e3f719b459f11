"""How many messages of each queue are open, by what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marq.core.rows import HELD, Lease, State

_BEFORE_DELIVERY = (State.DELAYED, State.CANCELLED)


@dataclass(slots=True)
class Gauge:
    """How many messages of a queue are open now; ``oldest_ms`` is the clock at the oldest ACQUIRE of them."""

    in_flight: int = 0
    released: int = 0
    rejected: int = 0
    oldest_ms: int | None = None
    delayed: int = 0

    def add(self, lease: Lease, count: int) -> None:
        """Count messages that were delivered before."""
        if lease.state in HELD:
            self.in_flight += count
        elif lease.state is State.RELEASED:
            self.released += count
        else:
            self.rejected += count
        if self.oldest_ms is None or lease.since_ms < self.oldest_ms:
            self.oldest_ms = lease.since_ms


def gauges_of(leases: Iterable[Collection[Lease]]) -> dict[str, Gauge]:
    """Return, for each queue, how many of these messages are its own."""
    gauges: dict[str, Gauge] = {}
    for each in leases:
        add_gauges(gauges, each)
    return gauges


def add_gauges(gauges: dict[str, Gauge], leases: Collection[Lease]) -> None:
    """Count some more messages."""
    # Each of a million delayed messages has a lease of its own: no look at each but for its queue.
    delayed = [lease.queue for lease in leases if lease.state in _BEFORE_DELIVERY]
    for queue, count in Counter(delayed).items():
        gauges.setdefault(queue, Gauge()).delayed += count
    if len(delayed) == len(leases):
        return
    others = [lease for lease in leases if lease.state not in _BEFORE_DELIVERY] if delayed else leases
    for lease, count in Counter(others).items():
        gauges.setdefault(lease.queue, Gauge()).add(lease, count)
