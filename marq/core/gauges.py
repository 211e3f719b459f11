"""How many messages of each queue are open, by what they wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
        if lease.state in _BEFORE_DELIVERY:
            self.delayed += count
            return
        if lease.state in HELD:
            self.in_flight += count
        elif lease.state is State.RELEASED:
            self.released += count
        else:
            self.rejected += count
        if self.oldest_ms is None or lease.since_ms < self.oldest_ms:
            self.oldest_ms = lease.since_ms


def gauges_of(leases: Iterable[Mapping[int, Lease]]) -> dict[str, Gauge]:
    """Return, for each queue, how many of these messages are its own."""
    gauges: dict[str, Gauge] = {}
    for each in leases:
        for lease, count in Counter(each.values()).items():
            gauges.setdefault(lease.queue, Gauge()).add(lease, count)
    return gauges
