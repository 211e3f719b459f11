"""Statistics of queues from this worker's partitions; a web page adds up those of all workers.

The lease books count everything, so counters survive restarts and move with the partition.
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import faust

from marq.client.uptime import uptime_ms
from marq.core.storage.gauges import Gauge, add_gauges
from marq.core.storage.handling_times import HandlingTimes
from marq.core.storage.rows import EventCounts
from marq_worker.backlog.backlog_counter import BacklogCounter, QueueBacklog
from marq_worker.owner.ownership import Ownership
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.progress import Paces, PartitionProgress

#: Seconds between two samples, and the number of samples over which a rate is measured.
SAMPLE_SECONDS = 1.0
RATE_SAMPLES = 10
#: Samples after which a new period of handling times begins; the last two cover 30 to 60 s.
HANDLING_SAMPLES = 30

#: For how long the statistics tell that a topic was created again.
RECREATED_SECONDS = 86_400.0

#: Open messages to count before yielding to other tasks: some milliseconds.
_AT_ONCE = 20_000
#: Counters of a queue that get rates.
_RATED = ("acquired", "acked", "redelivered", "dead_lettered")
_COUNTED = tuple(counter.name for counter in fields(EventCounts))
#: Built once: pages add up thousands of queues.
_EMPTY: Mapping[str, float] = {
    **dict.fromkeys(("in_flight", "waiting_for_delivery", "waiting_for_redelivery", "waiting_for_dead_letters"), 0),
    "blocked_keys": 0,
    "oldest_lease_seconds": 0.0,
    **dict.fromkeys(_COUNTED, 0),
    **{f"{name}_per_second": 0.0 for name in _RATED},
}


#: Metrics that exist only if a backlog counter runs.
_UNCOUNTED = QueueBacklog()


@dataclass
class _Term:
    """A partition's counters at its takeover and at the last sample."""

    before: Mapping[str, EventCounts]
    last: Mapping[str, EventCounts]


@dataclass
class Totals:
    """Counters since the start of the worker that never fall, as Prometheus expects.

    The counters of a lease book belong to its partition: they survive restarts and move between workers. Without a
    correction, a takeover would look like a burst. So the counts from before the takeover are subtracted, and the
    counts made here are kept when the partition moves on.

    Markers that a former owner folded without writing are folded and counted again, up to MARQ_FLUSH_INTERVAL.
    """

    _past: dict[str, EventCounts] = field(default_factory=dict)
    _terms: dict[int, _Term] = field(default_factory=dict)

    def note(self, partition: int, before: Mapping[str, EventCounts], now: Mapping[str, EventCounts]) -> None:
        """Note a partition's counters; ``before`` is a new object after each recovery of the table."""
        term = self._terms.get(partition)
        if term is not None and term.before is before:
            term.last = now
            return
        if term is not None:
            _add(self._past, term)
        self._terms[partition] = _Term(before, now)

    def by_queue(self) -> dict[str, EventCounts]:
        totals = {queue: counts.copy() for queue, counts in self._past.items()}
        for term in self._terms.values():
            _add(totals, term)
        return totals


def _add(sums: dict[str, EventCounts], term: _Term) -> None:
    nothing = EventCounts()
    for queue, counts in term.last.items():
        total, before = sums.setdefault(queue, EventCounts()), term.before.get(queue, nothing)
        for name in _COUNTED:
            setattr(total, name, getattr(total, name) + getattr(counts, name) - getattr(before, name))


@dataclass
class Statistics:
    """Samples of the counters of the partitions that this worker owns; ``backlog``: the backlog counter, if any."""

    owners: TrackerOwners
    backlog: BacklogCounter | None = None
    #: More metrics of a queue: for how long it has had no consumer.
    watched: Callable[[str], Mapping[str, float]] = lambda _: {}
    #: As :meth:`agents.handler_watch.RemovedHandlers.metrics`.
    removed_handlers: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    #: (monotonic seconds, {(partition, queue): counters}).
    samples: deque[tuple[float, dict[tuple[int, str], EventCounts]]] = field(
        default_factory=lambda: deque(maxlen=RATE_SAMPLES + 1)
    )
    totals: Totals = field(default_factory=Totals)
    paces: Paces = field(default_factory=Paces)
    #: By how much the last sample was late because the event loop was blocked.
    loop_lag_seconds: float = 0.0
    _until_turn: int = HANDLING_SAMPLES

    @property
    def handling(self) -> HandlingTimes:
        """Handling times of the messages whose ACKs this worker read."""
        return HandlingTimes() if self.owners.context is None else self.owners.context.handling

    @property
    def waiting(self) -> HandlingTimes:
        """Waiting times of the messages whose ACQUIREs this worker read."""
        return HandlingTimes() if self.owners.context is None else self.owners.context.waiting

    def sample(self) -> None:
        totals = {
            (partition, queue): counts.copy()
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
            self.waiting.turn()
        self.paces.note(now_s, {partition: owner.position for partition, owner in self.owners.owned.items()})

    def _note_totals(self, totals: Mapping[tuple[int, str], EventCounts]) -> None:
        by_partition: dict[int, dict[str, EventCounts]] = {partition: {} for partition in self.owners.owned}
        for (partition, queue), counts in totals.items():
            by_partition[partition][queue] = counts
        for partition, counters in by_partition.items():
            before = self.owners.owned[partition].counted_before
            if before is not None:
                self.totals.note(partition, before, counters)

    def local(self) -> dict[str, Any]:
        """Return the metrics of this worker; ``handled`` and ``waited`` have times."""
        queues: dict[str, dict[str, float]] = {}
        for owner in self.owners.owned.values():
            _add_owner(queues, owner)
        for queue, rates in self._rates().items():
            if queue in queues:
                queues[queue].update(rates)
        self._add_backlog(queues)
        backlog = None if self.backlog is None else self.backlog.metrics()
        return {
            "queues": queues,
            "handled": self.handling.recent(),
            "waited": self.waiting.recent(),
            "partitions": self.partitions(),
            "backlog": backlog,
            "removed_handlers": dict(self.removed_handlers()),
            "recreated_topics": recreated_topics([self._recreated()]),
        }

    def _recreated(self) -> list[dict[str, Any]]:
        return [
            {"queue": queue, "topic": topic, "seconds": seconds}
            for owner in self.owners.owned.values()
            for (queue, topic), noticed_ms in owner.tracker.book.recreated.items()
            if (seconds := max(0.0, (owner.tracker.estimate_ms(uptime_ms()) - noticed_ms) / 1000)) < RECREATED_SECONDS
        ]

    async def open_now(self) -> dict[str, dict[str, float]]:
        """Return the open messages of each queue that this worker knows, yielding to other tasks in between."""
        queues: dict[str, dict[str, float]] = {}
        for owner in list(self.owners.owned.values()):
            for queue in owner.tracker.book.counts:
                queues.setdefault(queue, empty_metrics())
            _add_gauges(queues, owner, await _gauges(owner))
        self._add_backlog(queues)
        return queues

    async def recent(self) -> dict[str, dict[str, float]]:
        """As :meth:`open_now`, with rates."""
        queues = await self.open_now()
        for queue, rates in self._rates().items():
            queues.setdefault(queue, empty_metrics()).update(rates)
        return queues

    def partitions(self) -> list[dict[str, Any]]:
        return [_partition(owner, self.paces.of(owner.partition)) for owner in self.owners.owned.values()]

    def _add_backlog(self, queues: dict[str, dict[str, float]]) -> None:
        if self.backlog is None or not self.backlog.counts:
            # Unknown is not 0.
            return
        backlogs, now_ms = self.backlog.queues, time.time() * 1000
        for queue in backlogs.keys() | queues.keys():
            counted = backlogs.get(queue, _UNCOUNTED)
            oldest_ms = counted.oldest_ms
            queues.setdefault(queue, empty_metrics()).update(
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
            # A new partition brings its counters along; they are not a rate.
            before = first.get(key)
            if before is not None:
                rate = rates.setdefault(key[1], dict.fromkeys((f"{name}_per_second" for name in _RATED), 0.0))
                for name in _RATED:
                    rate[f"{name}_per_second"] += (getattr(counts, name) - getattr(before, name)) / (end - start)
        return rates


def _add_owner(queues: dict[str, dict[str, float]], owner: Ownership) -> None:
    book = owner.tracker.book
    for queue, counts in book.counts.items():
        metrics = queues.setdefault(queue, empty_metrics())
        for name in _COUNTED:
            metrics[name] += getattr(counts, name)
    _add_gauges(queues, owner, book.gauges())


def _add_gauges(queues: dict[str, dict[str, float]], owner: Ownership, gauges: Mapping[str, Gauge]) -> None:
    now_ms = owner.tracker.estimate_ms(uptime_ms())
    for queue, gauge in gauges.items():
        metrics = queues.setdefault(queue, empty_metrics())
        metrics["in_flight"] += gauge.in_flight
        metrics["waiting_for_redelivery"] += gauge.released
        metrics["waiting_for_dead_letters"] += gauge.rejected
        metrics["waiting_for_delivery"] += gauge.delayed
        metrics["blocked_keys"] += gauge.blocked
        if gauge.oldest_ms is not None:
            age = max(0.0, (now_ms - gauge.oldest_ms) / 1000)
            metrics["oldest_lease_seconds"] = max(metrics["oldest_lease_seconds"], age)


async def _gauges(owner: Ownership) -> dict[str, Gauge]:
    gauges: dict[str, Gauge] = {}
    for leases in owner.tracker.book.leases():
        for start in range(0, len(leases), _AT_ONCE):
            add_gauges(gauges, leases[start : start + _AT_ONCE])
            await asyncio.sleep(0)
    return gauges


def empty_metrics() -> dict[str, float]:
    return dict(_EMPTY)


def _partition(owner: Ownership, pace: PartitionProgress) -> dict[str, Any]:
    book, late = owner.tracker.book, owner.lateness_ms()
    return {
        "partition": owner.partition,
        "state": owner.state,
        "alarm": owner.alarm,
        "stopped_before": None if owner.engine.stopped_before is None else owner.engine.stopped_before[0],
        "applied_offset": book.applied,
        "unfinished": len(book),
        "lag": pace.lag,
        "lag_per_second": round(pace.lag_per_second, 3),
        "read_per_second": round(pace.read_per_second, 3),
        "drain_seconds": pace.drain_seconds,
        "stalled_seconds": round(pace.stalled_seconds, 3),
        "recovered_records": owner.recovered_records,
        "folded": owner.engine.folded,
        "skipped": owner.engine.skipped,
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
        for queue, metrics in answer["queues"].items():
            sums = total.get(queue)
            if sums is None:
                # The usual case.
                total[queue] = {**_EMPTY, **metrics}
                continue
            for name, value in metrics.items():
                # A worker without a backlog counter lacks some.
                combine: Callable[[float, float], float] = _COMBINED.get(name, operator.add)
                sums[name] = combine(sums[name], value) if name in sums else value
    return total


#: Metrics that are not added up.
_COMBINED: Mapping[str, Callable[[float, float], float]] = {
    "oldest_lease_seconds": max,
    "oldest_waiting_seconds": max,
    "no_consumer_seconds": max,
    "idle_seconds": min,
}


def recreated_topics(reports: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the queues' own topics that were created again, with the seconds since one of several workers saw it."""
    seen: dict[tuple[str, str], float] = {}
    for topic in chain.from_iterable(reports):
        key = topic["queue"], topic["topic"]
        seen[key] = min(topic["seconds"], seen.get(key, topic["seconds"]))
    return [{"queue": queue, "topic": topic, "seconds": seconds} for (queue, topic), seconds in sorted(seen.items())]


def backlog_of(answers: Iterable[Mapping[str, Any]], *, everyone: bool) -> dict[str, Any]:
    """Return how reliable the backlog is; ``everyone``: all workers are known and have answered.

    ``counted``: some worker counts; ``complete``: all do, and have counted everything that waited some seconds ago;
    ``uncounted``: records not read yet; ``unknown``: records whose key does not name a queue; ``unknown_queues``:
    messages of unknown queues beyond the listed ones; ``switched_off``: workers that do not count; ``trouble``: why
    others do not.
    """
    reports = [answer.get("backlog") for answer in answers if answer["partitions"]]
    counting = [backlog for backlog in reports if backlog is not None]
    return {
        "counted": bool(counting),
        "complete": everyone
        and bool(counting)
        and all(backlog is not None and backlog["complete"] for backlog in reports),
        "uncounted": sum(backlog["uncounted"] for backlog in counting),
        "unknown": sum(backlog["unknown"] for backlog in counting),
        "unknown_queues": sum(backlog.get("unknown_queues", 0) for backlog in counting),
        "switched_off": len(reports) - len(counting),
        "trouble": sorted({trouble for backlog in counting if (trouble := backlog.get("trouble", ""))}),
    }


def attach(app: faust.App, owners: TrackerOwners, backlog: BacklogCounter | None) -> Statistics:
    """Sample the counters of an application's partitions from its start on."""
    statistics = Statistics(owners, backlog)

    @app.timer(SAMPLE_SECONDS, name="statistics")  # type: ignore[untyped-decorator]
    async def sample(app: faust.App) -> None:
        statistics.sample()

    return statistics
