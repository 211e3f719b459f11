"""The figures of one worker as Prometheus metrics, computed when they are asked for: a message costs nothing.

Each worker tells of the partitions that it owns, so that sums over all workers are those of the installation. Counters
begin at 0 with the worker (agents/totals.py). docs/operations.md explains each metric; a test compares both.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from agents.lateness import Lateness
from marq.core.handling_times import HandlingTimes
from marq.core.rows import Counts
from marq.core.version import VERSION

PARTITION_STATES = ("recovering", "owner", "waiting", "stopped")
BREAKER_STATES = ("closed", "open", "half-open")

#: Metric, what it counts, and which of a queue's counters it is.
_QUEUE_COUNTERS = (
    ("marq_messages_acquired", "Deliveries: messages that a consumer has taken.", "acquired"),
    ("marq_messages_redelivered", "Messages that were sent to their queue again.", "redelivered"),
    ("marq_messages_dead_lettered", "Messages that became dead letters.", "dead"),
    ("marq_messages_delayed", "Messages that were sent with a delay.", "delayed"),
    ("marq_messages_delivered", "Delayed messages that were due and sent to their queue.", "delivered"),
    ("marq_messages_cancelled", "Delayed messages that were cancelled.", "cancelled"),
    ("marq_messages_abandoned", "Messages of queues that deliver at most once whose consumer was lost.", "abandoned"),
    (
        "marq_messages_invalid_deliver_at",
        "Messages delivered immediately because their marq-deliver-at can't be read.",
        "invalid_deliver_at",
    ),
    ("marq_messages_reacquired", "Messages that were taken again, for a commit had failed.", "reacquired"),
    ("marq_leases_renewed", "Renewals of leases.", "renewed"),
    ("marq_settlements_late", "Acks, releases and rejects that came after the end of the lease.", "late"),
    ("marq_dead_letters_redriven", "Dead letters that were sent to their queue again.", "redriven"),
    ("marq_dead_letters_discarded", "Dead letters that were deleted.", "discarded"),
)
#: Of one metric, by outcome.
_OUTCOMES = ("acked", "released", "rejected", "expired")
#: State, as it is among the figures of a queue.
_STATES = {
    "in_flight": "in_flight",
    "delayed": "waiting_for_delivery",
    "released": "waiting_for_redelivery",
    "rejected": "waiting_for_dead_letters",
}


@dataclass(frozen=True)
class Snapshot:
    """What one worker knows at a moment; ``queues``, ``partitions`` and ``handlers`` as in /api/queues."""

    roles: Sequence[str]
    ready: bool
    loop_lag_seconds: float = 0.0
    rebalances: int = 0
    queues: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    totals: Mapping[str, Counts] = field(default_factory=dict)
    partitions: Sequence[Mapping[str, Any]] = ()
    wedged: frozenset[int] = frozenset()
    lateness: Lateness = field(default_factory=Lateness)
    handling: HandlingTimes = field(default_factory=HandlingTimes)
    handlers: Sequence[Mapping[str, Any]] = ()
    #: How the count of what waits goes; None: none is taken.
    census: Mapping[str, Any] | None = None
    #: Queues that are defined, and whether they are paused.
    paused: Mapping[str, bool] = field(default_factory=dict)


class Exposition:
    """Writes snapshots in the format that a scraper accepts, with the figures of the process."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)

    def write(self, snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type; may run in a thread."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # It asks for a version that is none.
            encode, content_type = choose_encoder("")
        return encode(_Collected([*families(snapshot), *self._process.collect()])), content_type


class _Collected:
    """Metrics that are there already, in the place of a registry."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Return all metrics of a worker, those without any value, too."""
    yield from _worker(snapshot)
    yield from _queues(snapshot)
    yield from _partitions(snapshot)
    yield from _handlers(snapshot)


def _worker(snapshot: Snapshot) -> Iterator[Metric]:
    build = {"version": VERSION, "python": platform.python_version(), "faust": version("faust-streaming")}
    yield InfoMetricFamily("marq_build", "What this worker is made of.", build)
    roles = GaugeMetricFamily("marq_worker_role", "1 for each role of this worker.", labels=["role"])
    for role in sorted(snapshot.roles):
        roles.add_metric([role], 1)
    yield roles
    yield GaugeMetricFamily("marq_worker_ready", "Whether /readyz says so.", snapshot.ready)
    lag = "How late the event loop's last look at its figures came."
    yield GaugeMetricFamily("marq_event_loop_lag_seconds", lag, snapshot.loop_lag_seconds)
    yield CounterMetricFamily("marq_rebalances", "Rebalances of the trackers' group.", snapshot.rebalances)


def _queues(snapshot: Snapshot) -> Iterator[Metric]:
    for name, what, key in _QUEUE_COUNTERS:
        counter = CounterMetricFamily(name, what, labels=["queue"])
        for queue, counts in snapshot.totals.items():
            counter.add_metric([queue], getattr(counts, key))
        yield counter
    settled = CounterMetricFamily(
        "marq_messages_settled", "Ends of deliveries, expired ones included.", labels=["queue", "outcome"]
    )
    for queue, counts in snapshot.totals.items():
        for outcome in _OUTCOMES:
            settled.add_metric([queue, outcome], getattr(counts, outcome))
    yield settled
    messages = GaugeMetricFamily("marq_queue_messages", "Open messages.", labels=["queue", "state"])
    oldest = GaugeMetricFamily(
        "marq_queue_oldest_message_age_seconds", "Age of the oldest open message since it was taken.", labels=["queue"]
    )
    for queue, figures in snapshot.queues.items():
        for state, key in _STATES.items():
            messages.add_metric([queue, state], figures[key])
        oldest.add_metric([queue], figures["oldest_lease_seconds"])
    paused = GaugeMetricFamily("marq_queue_paused", "Whether a defined queue is paused.", labels=["queue"])
    for queue, is_paused in snapshot.paused.items():
        paused.add_metric([queue], is_paused)
    yield from (messages, oldest, paused)
    yield from _census(snapshot)
    lateness = snapshot.lateness
    yield HistogramMetricFamily(
        "marq_redelivery_lateness_seconds",
        "How long after their due time messages were sent: redeliveries, delayed ones, dead letters.",
        list(lateness.buckets()),
        lateness.sum_ms / 1000,
    )
    handling = snapshot.handling
    yield HistogramMetricFamily(
        "marq_message_handling_seconds",
        "How long messages were worked on, from delivery to acknowledgement: estimated from samples.",
        list(handling.buckets()),
        handling.sum_ms / 1000,
    )


def _census(snapshot: Snapshot) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "marq_queue_waiting_messages", "Messages that no consumer has taken yet.", labels=["queue"]
    )
    oldest = GaugeMetricFamily(
        "marq_queue_oldest_waiting_age_seconds", "Age of the oldest of them since it was sent.", labels=["queue"]
    )
    no_consumer = GaugeMetricFamily(
        "marq_queue_no_consumer_seconds", "How long they have had no consumer; 0 if they have one.", labels=["queue"]
    )
    arrived = CounterMetricFamily(
        "marq_messages_arrived", "Messages that came, copies and redriven ones included.", labels=["queue"]
    )
    known = snapshot.totals.keys() | snapshot.paused.keys()
    if snapshot.census is not None:
        # Nothing of it is there while nothing is counted.
        counted = {queue: row for queue, row in snapshot.queues.items() if "waiting" in row}
        for queue in known & counted.keys():
            figures = counted[queue]
            waiting.add_metric([queue], figures["waiting"])
            oldest.add_metric([queue], figures["oldest_waiting_seconds"])
            arrived.add_metric([queue], figures["arrived"])
            no_consumer.add_metric([queue], figures.get("no_consumer_seconds", 0.0))
    yield from (waiting, oldest, arrived, no_consumer)
    complete = GaugeMetricFamily("marq_census_complete", "Whether the census has counted all that waits.")
    left = GaugeMetricFamily("marq_census_uncounted_records", "Records that the census has not looked at yet.")
    # Anybody may write any key: not each is to become a series.
    others = GaugeMetricFamily(
        "marq_census_other_messages", "Messages that wait in queues that nobody has defined or read, together."
    )
    if snapshot.census is not None:
        unknown = sum(row["waiting"] for queue, row in counted.items() if queue not in known)
        others.add_metric([], unknown + snapshot.census["others"])
        complete.add_metric([], snapshot.census["complete"])
        left.add_metric([], snapshot.census["uncounted"])
    yield from (complete, left, others)


#: Metric, what it is, and its key among the figures of a partition.
_PARTITION_GAUGES = (
    ("marq_partition_open_messages", "Open messages whose markers are in this partition.", "open"),
    ("marq_partition_lag_records", "Records of the markers topic that are not read yet.", "lag"),
    (
        "marq_partition_lag_velocity_records_per_second",
        "By how much the lag grows, or falls.",
        "lag_per_second",
    ),
    ("marq_partition_takeover_seconds", "How long the last takeover took.", "takeover_seconds"),
)
_PARTITION_COUNTERS = (
    ("marq_marker_records_folded", "Records of markers that were folded into the table.", "folded"),
    ("marq_marker_records_skipped", "Records of markers that the table had already.", "skipped"),
    ("marq_marker_records_quarantined", "Records that are no markers, put aside.", "quarantined"),
    ("marq_partition_transactions", "Transactions of the partition's owner.", "transactions"),
)


def _partitions(snapshot: Snapshot) -> Iterator[Metric]:
    kinds = ((_PARTITION_GAUGES, GaugeMetricFamily), (_PARTITION_COUNTERS, CounterMetricFamily))
    for table, kind in kinds:
        for name, what, key in table:
            metric = kind(name, what, labels=["partition"])
            for part in snapshot.partitions:
                metric.add_metric([str(part["partition"])], part[key])
            yield metric
    states = GaugeMetricFamily("marq_partition_state", "1 for the state of its owner.", labels=["partition", "state"])
    wedged = GaugeMetricFamily(
        "marq_partition_wedged", "1: it has work that could be done, and makes no progress.", labels=["partition"]
    )
    jump = GaugeMetricFamily(
        "marq_partition_clock_jump_seconds",
        "By how much the broker's clock last jumped.",
        labels=["partition"],
    )
    for part in snapshot.partitions:
        label = [str(part["partition"])]
        for state in PARTITION_STATES:
            states.add_metric([*label, state], state == part["state"])
        wedged.add_metric(label, part["partition"] in snapshot.wedged)
        jump.add_metric(label, part["clock_jump_ms"] / 1000)
    yield from (states, wedged, jump)


def _handlers(snapshot: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily("marq_handlers_up", "Whether the process of a group's handlers runs.", labels=["group"])
    starts = CounterMetricFamily("marq_handlers_starts", "How often it was started.", labels=["group"])
    held = GaugeMetricFamily("marq_handlers_messages_held", "Messages that it has leased.", labels=["group"])
    taken = GaugeMetricFamily("marq_handlers_messages_taken", "Of these, those in handlers.", labels=["group"])
    blocked = GaugeMetricFamily(
        "marq_handlers_blocked_seconds", "How long a handler has blocked the event loop.", labels=["group"]
    )
    breakers = GaugeMetricFamily(
        "marq_breaker_state", "1 for the state of a queue's circuit breaker.", labels=["queue", "state"]
    )
    openings = CounterMetricFamily("marq_breaker_openings", "How often it has opened.", labels=["queue"])
    for process in snapshot.handlers:
        group = [process["group"]]
        up.add_metric(group, process["pid"] is not None)
        starts.add_metric(group, process["starts"])
        held.add_metric(group, process["held"])
        taken.add_metric(group, process["taken"])
        blocked.add_metric(group, process["blocked_seconds"])
        for queue, breaker in process["breakers"].items():
            for state in BREAKER_STATES:
                breakers.add_metric([queue, state], state == breaker["state"])
            openings.add_metric([queue], breaker["openings"])
    yield from (up, starts, held, taken, blocked, breakers, openings)
