"""Figures of the queues, as this worker's partitions know them; a worker's web page adds up those of all workers.

Everything is counted by the lease books, so it survives restarts and moves with the partition.
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import faust

from agents.census import Census, QueueCensus
from agents.ownership import Ownership
from agents.progress import Pace, Paces
from agents.totals import Totals
from agents.tracker import TrackerOwners
from marq.core.gauges import Gauge, add_gauges
from marq.core.handling_times import HandlingTimes
from marq.core.rows import Counts

#: Seconds between two samples, and over how many of them a rate is taken.
SAMPLE_SECONDS = 1.0
RATE_SAMPLES = 10
#: Samples after which handling times are forgotten once more: they are of the last 30 to 60 s.
HANDLING_SAMPLES = 30

#: Open messages that are counted without giving way to others: some milliseconds.
_AT_ONCE = 20_000
#: Counters of a queue whose rates are shown.
_RATED = ("acquired", "acked", "redelivered", "dead")
_COUNTED = tuple(each.name for each in fields(Counts))
#: Made once: pages add up those of thousands of queues.
_EMPTY: Mapping[str, float] = {
    **dict.fromkeys(("in_flight", "waiting_for_delivery", "waiting_for_redelivery", "waiting_for_dead_letters"), 0),
    "oldest_lease_seconds": 0.0,
    **dict.fromkeys(_COUNTED, 0),
    **{f"{name}_per_second": 0.0 for name in _RATED},
}


#: What figures have beside these only where a census is taken.
_UNCOUNTED = QueueCensus()


@dataclass
class Statistics:
    """Samples of the counters of the partitions that this worker owns; ``census``: None where nothing is counted."""

    owners: TrackerOwners
    census: Census | None = None
    #: More figures of a queue: for how long it has had no consumer.
    watched: Callable[[str], Mapping[str, float]] = lambda _: {}
    #: (monotonic seconds, {(partition, queue): counters}).
    samples: deque[tuple[float, dict[tuple[int, str], Counts]]] = field(
        default_factory=lambda: deque(maxlen=RATE_SAMPLES + 1)
    )
    #: What happened here since this worker was started.
    totals: Totals = field(default_factory=Totals)
    #: How fast partitions grow and are read.
    paces: Paces = field(default_factory=Paces)
    #: By how much the last sample came late: so long the event loop gave nobody a turn.
    loop_lag_seconds: float = 0.0
    _until_turn: int = HANDLING_SAMPLES

    @property
    def handling(self) -> HandlingTimes:
        """How long the messages took whose ACKs this worker read."""
        return HandlingTimes() if self.owners.around is None else self.owners.around.handling

    def sample(self) -> None:
        """Note the counters as they are now."""
        totals = {
            (partition, queue): replace(counts)
            for partition, owner in self.owners.owned.items()
            for queue, counts in owner.tracker.book.counts.items()
        }
        now_s = time.monotonic()
        if self.samples:
            self.loop_lag_seconds = max(0.0, now_s - self.samples[-1][0] - SAMPLE_SECONDS)
        self.samples.append((now_s, totals))
        self._note_totals(totals)
        self._until_turn -= 1
        if self._until_turn == 0:
            self._until_turn = HANDLING_SAMPLES
            self.handling.turn()
        self.paces.note(now_s, {partition: owner.position for partition, owner in self.owners.owned.items()})

    def _note_totals(self, totals: Mapping[tuple[int, str], Counts]) -> None:
        found: dict[int, dict[str, Counts]] = {partition: {} for partition in self.owners.owned}
        for (partition, queue), counts in totals.items():
            found[partition][queue] = counts
        for partition, now in found.items():
            before = self.owners.owned[partition].counted_before
            if before is not None:
                self.totals.note(partition, before, now)

    def local(self) -> dict[str, Any]:
        """Figures of this worker: ``queues`` by name, ``handled`` (how long their messages took), ``partitions``."""
        queues: dict[str, dict[str, float]] = {}
        for owner in self.owners.owned.values():
            _add_owner(queues, owner)
        for queue, rates in self._rates().items():
            if queue in queues:
                queues[queue].update(rates)
        self._add_census(queues)
        census = None if self.census is None else self.census.figures()
        handled = self.handling.recent()
        return {"queues": queues, "handled": handled, "partitions": self.partitions(), "census": census}

    async def open_now(self) -> dict[str, dict[str, float]]:
        """Figures of what is open in each queue that this worker knows, giving way to others in between."""
        queues: dict[str, dict[str, float]] = {}
        for owner in list(self.owners.owned.values()):
            for queue in owner.tracker.book.counts:
                queues.setdefault(queue, empty_figures())
            _add_gauges(queues, owner, await _gauges(owner))
        self._add_census(queues)
        return queues

    async def recent(self) -> dict[str, dict[str, float]]:
        """As :meth:`open_now`, and what happens per second."""
        queues = await self.open_now()
        for queue, rates in self._rates().items():
            queues.setdefault(queue, empty_figures()).update(rates)
        return queues

    def partitions(self) -> list[dict[str, Any]]:
        """Figures of this worker's partitions."""
        return [_partition(owner, self.paces.of(owner.partition)) for owner in self.owners.owned.values()]

    def _add_census(self, queues: dict[str, dict[str, float]]) -> None:
        if self.census is None or not self.census.counts:
            # Not known is not 0.
            return
        found, now_ms = self.census.queues, time.time() * 1000
        for queue in found.keys() | queues.keys():
            counted = found.get(queue, _UNCOUNTED)
            oldest_ms = counted.oldest_ms
            queues.setdefault(queue, empty_figures()).update(
                waiting=counted.waiting,
                oldest_waiting_seconds=0.0 if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000),
                arrived=counted.arrived,
                arrived_per_second=counted.arrived_per_second,
                **self.watched(queue),
            )

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
        figures = queues.setdefault(queue, empty_figures())
        for name in _COUNTED:
            figures[name] += getattr(counts, name)
    _add_gauges(queues, owner, book.gauges())


def _add_gauges(queues: dict[str, dict[str, float]], owner: Ownership, gauges: Mapping[str, Gauge]) -> None:
    now_ms = owner.tracker.estimate_ms(int(time.monotonic() * 1000))
    for queue, gauge in gauges.items():
        figures = queues.setdefault(queue, empty_figures())
        figures["in_flight"] += gauge.in_flight
        figures["waiting_for_redelivery"] += gauge.released
        figures["waiting_for_dead_letters"] += gauge.rejected
        figures["waiting_for_delivery"] += gauge.delayed
        if gauge.oldest_ms is not None:
            age = max(0.0, (now_ms - gauge.oldest_ms) / 1000)
            figures["oldest_lease_seconds"] = max(figures["oldest_lease_seconds"], age)


async def _gauges(owner: Ownership) -> dict[str, Gauge]:
    gauges: dict[str, Gauge] = {}
    for leases in owner.tracker.book.leases():
        for start in range(0, len(leases), _AT_ONCE):
            add_gauges(gauges, leases[start : start + _AT_ONCE])
            await asyncio.sleep(0)
    return gauges


def empty_figures() -> dict[str, float]:
    """Return the figures of a queue of which nothing is known yet."""
    return dict(_EMPTY)


def _partition(owner: Ownership, pace: Pace) -> dict[str, Any]:
    book, late = owner.tracker.book, owner.lateness_ms()
    return {
        "partition": owner.partition,
        "state": owner.state,
        "alarm": owner.alarm,
        "stopped_before": None if owner.stopped_before is None else owner.stopped_before[0],
        "applied_offset": book.applied,
        "open": len(book),
        "lag": pace.lag,
        "lag_per_second": round(pace.lag_per_second, 3),
        "read_per_second": round(pace.read_per_second, 3),
        "drain_seconds": pace.drain_seconds,
        "stalled_seconds": round(pace.stalled_seconds, 3),
        "recovered_records": owner.recovered_records,
        "folded": owner.folded,
        "skipped": owner.skipped,
        "quarantined": owner.quarantined,
        "transactions": owner.transactions,
        "takeover_seconds": round(owner.takeover_seconds, 3),
        "clock_ms": book.clock.now_ms,
        "clock_jump_ms": owner.tracker.jump_ms,
        "lateness_p50_ms": late[len(late) // 2] if late else None,
        "lateness_p99_ms": late[len(late) * 99 // 100] if late else None,
    }


def add_up(answers: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the ``queues`` of several workers; take the maximum of ages and the minimum of idle times."""
    total: dict[str, dict[str, float]] = {}
    for answer in answers:
        for queue, figures in answer["queues"].items():
            sums = total.get(queue)
            if sums is None:
                # Which most queues of most workers are.
                total[queue] = {**_EMPTY, **figures}
                continue
            for name, value in figures.items():
                # Not each worker may take a census.
                sums[name] = _COMBINED.get(name, operator.add)(sums[name], value) if name in sums else value
    return total


#: Figures of a queue that are not added up over workers.
_COMBINED: Mapping[str, Callable[[float, float], float]] = {
    "oldest_lease_seconds": max,
    "oldest_waiting_seconds": max,
    "no_consumer_seconds": max,
    "idle_seconds": min,
}


def census_of(answers: Iterable[Mapping[str, Any]], *, everyone: bool) -> dict[str, Any]:
    """Return how far the count of what waits can be relied on; ``everyone``: each worker is known and answered.

    ``counted``: somebody takes a census; ``complete``: everyone does, and has looked at all that waited when it
    began, or some seconds ago; ``uncounted``: records that are not looked at yet; ``strangers``: records whose key
    names no queue; ``others``: messages of queues that nobody knows, which are too many to be shown;
    ``switched_off``: workers that count nothing of their partitions; ``trouble``: why others do not.
    """
    taken = [answer.get("census") for answer in answers if answer["partitions"]]
    known = [census for census in taken if census is not None]
    return {
        "counted": bool(known),
        "complete": everyone and bool(known) and all(census is not None and census["complete"] for census in taken),
        "uncounted": sum(census["uncounted"] for census in known),
        "strangers": sum(census["strangers"] for census in known),
        "others": sum(census.get("others", 0) for census in known),
        "switched_off": len(taken) - len(known),
        "trouble": sorted({trouble for census in known if (trouble := census.get("trouble", ""))}),
    }


def attach(app: faust.App, owners: TrackerOwners, census: Census | None) -> Statistics:
    """Sample the counters of an application's partitions from its start on."""
    statistics = Statistics(owners, census)

    @app.timer(SAMPLE_SECONDS, name="statistics")
    async def sample(app: faust.App) -> None:
        statistics.sample()

    return statistics
