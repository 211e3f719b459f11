"""Figures of the queues, as this worker's partitions know them; a worker's web page adds up those of all workers.

Everything is counted by the lease books, so it survives restarts and moves with the partition.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import faust

from agents.ownership import Ownership
from agents.tracker import TrackerOwners
from marq.core.rows import Counts

#: Seconds between two samples, and over how many of them a rate is taken.
SAMPLE_SECONDS = 1.0
RATE_SAMPLES = 10

#: Counters of a queue whose rates are shown.
_RATED = ("acquired", "acked", "redelivered", "dead")


@dataclass
class Statistics:
    """Samples of the counters of the partitions that this worker owns."""

    owners: TrackerOwners
    #: (monotonic seconds, {(partition, queue): counters}).
    samples: deque[tuple[float, dict[tuple[int, str], Counts]]] = field(
        default_factory=lambda: deque(maxlen=RATE_SAMPLES + 1)
    )

    def sample(self) -> None:
        """Note the counters as they are now."""
        totals = {
            (partition, queue): replace(counts)
            for partition, owner in self.owners.owned.items()
            for queue, counts in owner.tracker.book.counts.items()
        }
        self.samples.append((time.monotonic(), totals))

    def local(self) -> dict[str, Any]:
        """Figures of this worker's partitions: ``queues`` by name, and ``partitions``."""
        queues: dict[str, dict[str, float]] = {}
        for owner in self.owners.owned.values():
            _add_owner(queues, owner)
        for queue, rates in self._rates().items():
            if queue in queues:
                queues[queue].update(rates)
        return {"queues": queues, "partitions": [_partition(owner) for owner in self.owners.owned.values()]}

    def _rates(self) -> dict[str, dict[str, float]]:
        if len(self.samples) < 2:
            return {}
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        rates: dict[str, dict[str, float]] = {}
        for key, counts in last.items():
            # A partition that was gained meanwhile brought its counters with it: they are no rate.
            before = first.get(key)
            if before is not None:
                rate = rates.setdefault(key[1], dict.fromkeys((f"{name}_per_second" for name in _RATED), 0.0))
                for name in _RATED:
                    rate[f"{name}_per_second"] += (getattr(counts, name) - getattr(before, name)) / (end - start)
        return rates


def _add_owner(queues: dict[str, dict[str, float]], owner: Ownership) -> None:
    book = owner.tracker.book
    for queue, counts in book.counts.items():
        figures = queues.setdefault(queue, _empty())
        for name, value in asdict(counts).items():
            figures[name] += value
    now_ms = owner.tracker.estimate_ms(int(time.monotonic() * 1000))
    for queue, gauge in book.gauges().items():
        figures = queues.setdefault(queue, _empty())
        figures["in_flight"] += gauge.in_flight
        figures["waiting_for_redelivery"] += gauge.released
        figures["waiting_for_dead_letters"] += gauge.rejected
        figures["waiting_for_delivery"] += gauge.delayed
        if gauge.oldest_ms is not None:
            age = max(0.0, (now_ms - gauge.oldest_ms) / 1000)
            figures["oldest_lease_seconds"] = max(figures["oldest_lease_seconds"], age)


def _empty() -> dict[str, float]:
    rates = {f"{name}_per_second": 0.0 for name in _RATED}
    waiting = dict.fromkeys(
        ("in_flight", "waiting_for_delivery", "waiting_for_redelivery", "waiting_for_dead_letters"), 0
    )
    gauges = {**waiting, "oldest_lease_seconds": 0.0}
    return {**gauges, **asdict(Counts()), **rates}


def _partition(owner: Ownership) -> dict[str, Any]:
    book, late = owner.tracker.book, sorted(owner.lateness_ms)
    return {
        "partition": owner.partition,
        "state": owner.state,
        "alarm": owner.alarm,
        "applied_offset": book.applied,
        "open": len(book),
        "recovered_records": owner.recovered_records,
        "folded": owner.folded,
        "skipped": owner.skipped,
        "quarantined": owner.quarantined,
        "transactions": owner.transactions,
        "clock_jump_ms": owner.tracker.jump_ms,
        "lateness_p50_ms": late[len(late) // 2] if late else None,
        "lateness_p99_ms": late[len(late) * 99 // 100] if late else None,
    }


def add_up(answers: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the ``queues`` of several workers; of ages the greatest counts."""
    total: dict[str, dict[str, float]] = {}
    for answer in answers:
        for queue, figures in answer["queues"].items():
            sums = total.setdefault(queue, _empty())
            for name, value in figures.items():
                sums[name] = max(sums[name], value) if name == "oldest_lease_seconds" else sums[name] + value
    return total


def attach(app: faust.App, owners: TrackerOwners) -> Statistics:
    """Sample the counters of an application's partitions from its start on."""
    statistics = Statistics(owners)

    @app.timer(SAMPLE_SECONDS, name="statistics")
    async def sample(app: faust.App) -> None:
        statistics.sample()

    return statistics
