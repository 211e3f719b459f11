"""The metrics of one worker in the format of Prometheus, computed on request, at no cost per message.

Each worker reports the partitions that it owns, so add up the values of all workers. Counters start at 0 with the
worker (marq_worker/web/partition_statistics.py). docs/operations/monitoring.md explains each metric; a test compares
both.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from marq.core.storage.handling_times import HandlingTimes
from marq.core.storage.rows import EventCounts
from marq.version import VERSION
from marq_worker.progress import Lateness
from marq_worker.web.sqs_metrics import CallMetrics

PARTITION_STATES = ("recovering", "owner", "waiting", "stopped")
BREAKER_STATES = ("closed", "open", "half-open")

#: Metric, help, and the counter of a queue.
_QUEUE_COUNTERS = (
    ("marq_messages_acquired", "Deliveries to consumers.", "acquired"),
    ("marq_messages_redelivered", "Redeliveries.", "redelivered"),
    ("marq_messages_dead_lettered", "Messages that became dead letters.", "dead_lettered"),
    ("marq_messages_too_large", "Messages that became dead letters because they were too large.", "too_large"),
    ("marq_messages_gone", "Messages that became dead letters because their records were removed.", "gone"),
    (
        "marq_messages_expired",
        "Messages that expired before they could be delivered, dropped or dead-lettered.",
        "messages_expired",
    ),
    ("marq_messages_delayed", "Messages that were sent with a delay or a deduplication id.", "delayed"),
    ("marq_messages_delivered", "Delayed messages that became due and were sent to their queue.", "delivered"),
    ("marq_messages_cancelled", "Delayed messages that were cancelled.", "cancelled"),
    (
        "marq_messages_deduplicated",
        "Messages dropped because their deduplication id had already been accepted.",
        "deduplicated",
    ),
    ("marq_messages_abandoned", "Messages of at-most-once queues whose consumer was lost.", "abandoned"),
    (
        "marq_messages_invalid_deliver_at",
        "Messages with an unreadable marq-deliver-at, which is ignored.",
        "invalid_deliver_at",
    ),
    ("marq_messages_reacquired", "Messages acquired again after a failed commit or a long wait.", "reacquired"),
    ("marq_leases_renewed", "Renewals of leases.", "renewed"),
    ("marq_settlements_late", "Acks, releases and rejects after the end of the lease.", "late"),
    ("marq_dead_letters_redriven", "Redriven dead letters.", "redriven"),
    ("marq_dead_letters_deleted", "Deleted dead letters.", "deleted"),
)
#: Metric, help, and its key among the metrics of a partition.
_PARTITION_GAUGES = (
    ("marq_partition_messages", "Unfinished messages.", "unfinished"),
    ("marq_partition_lag_records", "Unread marker records.", "lag"),
    (
        "marq_partition_lag_velocity_records_per_second",
        "Growth of the lag over the last 30 s; below 0, it shrinks.",
        "lag_per_second",
    ),
    ("marq_partition_takeover_seconds", "Duration of the last takeover, including recovery.", "takeover_seconds"),
)
_PARTITION_COUNTERS = (
    ("marq_marker_records_folded", "Marker records applied to the table.", "folded"),
    ("marq_marker_records_skipped", "Marker records that the table already contained.", "skipped"),
    ("marq_marker_records_quarantined", "Records that are not markers, moved to the quarantine topic.", "quarantined"),
    ("marq_partition_transactions", "Transactions of the partition's owner.", "transactions"),
)
#: Metric, help and key of each gauge of a handler process.
_HANDLER_GAUGES = (
    ("marq_handlers_messages_in_flight", "Messages that the handler process has leased.", "in_flight"),
    ("marq_handlers_messages_processing", "Messages passed to handlers.", "processing"),
    ("marq_handlers_blocked_seconds", "How long a handler has blocked the event loop.", "blocked_seconds"),
)
#: Outcomes of one metric.
_OUTCOMES = ("acked", "released", "rejected", "expired")
#: States, and their keys among the metrics of a queue.
_STATES = {
    "in_flight": "in_flight",
    "delayed": "waiting_for_delivery",
    "released": "waiting_for_redelivery",
    "rejected": "waiting_for_dead_letters",
}


@dataclass(frozen=True)
class WorkerMetrics:
    """The metrics of one worker; ``queues``, ``partitions`` and ``handlers`` as in /api/queues."""

    roles: Sequence[str]
    ready: bool
    loop_lag_seconds: float = 0.0
    rebalances: int = 0
    queues: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    totals: Mapping[str, EventCounts] = field(default_factory=dict)
    partitions: Sequence[Mapping[str, Any]] = ()
    stalled: frozenset[int] = frozenset()
    lateness: Lateness = field(default_factory=Lateness)
    handling: HandlingTimes = field(default_factory=HandlingTimes)
    waiting: HandlingTimes = field(default_factory=HandlingTimes)
    handlers: Sequence[Mapping[str, Any]] = ()
    #: State of the backlog counter; None if there is none.
    backlog: Mapping[str, Any] | None = None
    #: Defined queues, and whether they are paused.
    paused: Mapping[str, bool] = field(default_factory=dict)
    #: Ends of pauses that have one, in seconds since 1970.
    pause_ends: Mapping[str, float] = field(default_factory=dict)
    #: The calls of SQS clients.
    sqs: CallMetrics = field(default_factory=CallMetrics)


class Exposition:
    """Encodes snapshots, with the metrics of the process, in the format that a scraper accepts."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)

    def write(self, snapshot: WorkerMetrics, accept: str) -> tuple[bytes, str]:
        """Return the text and its content type; may run in a thread."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # An invalid version in the request.
            encode, content_type = choose_encoder("")
        return encode(_Collected([*families(snapshot), *self._process.collect()])), content_type


class _Collected:
    """Stands for a registry of metrics."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def families(snapshot: WorkerMetrics) -> Iterator[Metric]:
    """Return all metrics of a worker, including those without a value."""
    yield from _worker(snapshot)
    yield from _queues(snapshot)
    yield from _partitions(snapshot)
    yield from _handlers(snapshot)
    yield from _sqs(snapshot.sqs)


_Samples = Iterable[tuple[Sequence[str], float]]


def _gauge(name: str, what: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, what, labels=labels), samples)


def _counter(name: str, what: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(name, what, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _worker(snapshot: WorkerMetrics) -> Iterator[Metric]:
    build = {"version": VERSION, "python": platform.python_version(), "faust": version("faust-streaming")}
    yield InfoMetricFamily("marq_build", "Versions of this worker.", build)
    roles = (([role], 1) for role in sorted(snapshot.roles))
    yield _gauge("marq_worker_role", "1 for each role of this worker.", ["role"], roles)
    yield GaugeMetricFamily("marq_worker_ready", "Whether /readyz returns 200.", snapshot.ready)
    lag = "Lateness of the event loop's last sampling timer."
    yield GaugeMetricFamily("marq_event_loop_lag_seconds", lag, snapshot.loop_lag_seconds)
    yield CounterMetricFamily("marq_rebalances", "Rebalances of the trackers' group.", snapshot.rebalances)


def _queues(snapshot: WorkerMetrics) -> Iterator[Metric]:
    totals, queues = snapshot.totals.items(), snapshot.queues.items()
    for name, what, key in _QUEUE_COUNTERS:
        yield _counter(name, what, ["queue"], (([queue], getattr(counts, key)) for queue, counts in totals))
    settled = (([queue, outcome], getattr(counts, outcome)) for queue, counts in totals for outcome in _OUTCOMES)
    what = "Ends of deliveries, by outcome."
    yield _counter("marq_messages_settled", what, ["queue", "outcome"], settled)
    states = (([queue, state], found[key]) for queue, found in queues for state, key in _STATES.items())
    yield _gauge("marq_queue_messages", "Unfinished messages, by state.", ["queue", "state"], states)
    blocked = (([queue], found["blocked_keys"]) for queue, found in queues)
    what = "Ordering keys whose first message waits for its next attempt."
    yield _gauge("marq_queue_blocked_keys", what, ["queue"], blocked)
    ages = (([queue], found["oldest_lease_seconds"]) for queue, found in queues)
    what = "Age of the oldest unfinished message, since its first delivery."
    yield _gauge("marq_queue_oldest_message_age_seconds", what, ["queue"], ages)
    paused = (([queue], is_paused) for queue, is_paused in snapshot.paused.items())
    yield _gauge("marq_queue_paused", "Whether a defined queue is paused.", ["queue"], paused)
    what = "When the pause of a queue ends, in seconds since 1970; only for pauses with an end."
    ends = (([queue], end_s) for queue, end_s in snapshot.pause_ends.items())
    yield _gauge("marq_queue_pause_end_timestamp_seconds", what, ["queue"], ends)
    yield from _backlog(snapshot)
    for name, what, times in (
        (
            "marq_redelivery_lateness_seconds",
            "Time from due to sent, for redelivered, delayed and dead-lettered messages.",
            snapshot.lateness,
        ),
        (
            "marq_message_handling_seconds",
            "Time from delivery to acknowledgement, estimated from samples.",
            snapshot.handling,
        ),
        ("marq_message_wait_seconds", "Time from sending to delivery, estimated from samples.", snapshot.waiting),
    ):
        yield HistogramMetricFamily(name, what, list(times.buckets()), times.sum_ms / 1000)


def _backlog(snapshot: WorkerMetrics) -> Iterator[Metric]:
    backlog, known = snapshot.backlog, snapshot.totals.keys() | snapshot.paused.keys()
    # The counter may not run.
    counted = {queue: row for queue, row in snapshot.queues.items() if "waiting" in row} if backlog is not None else {}
    for kind, name, what, key in _BACKLOG:
        yield kind(name, what, ["queue"], (([queue], counted[queue].get(key, 0.0)) for queue in known & counted.keys()))
    totals: Mapping[str, float] = {}
    if backlog is not None:
        # Senders can write any key; keys of unknown queues must not become a series each.
        unknown = sum(row["waiting"] for queue, row in counted.items() if queue not in known)
        totals = {**backlog, "unknown_queues": unknown + backlog["unknown_queues"]}
    for name, what, key in _BACKLOG_TOTALS:
        yield _gauge(name, what, [], [([], totals[key])] if totals else [])


#: Metric, help, and its key among the metrics of a queue that is counted.
_BACKLOG = (
    (_gauge, "marq_queue_waiting_messages", "Waiting messages.", "waiting"),
    (
        _gauge,
        "marq_queue_oldest_waiting_age_seconds",
        "Age of the oldest waiting message, since it was sent.",
        "oldest_waiting_seconds",
    ),
    (
        _counter,
        "marq_messages_arrived",
        "Messages sent to the queue, including redelivered and redriven ones.",
        "arrived",
    ),
    (
        _gauge,
        "marq_queue_no_consumer_seconds",
        "Time with waiting messages and no consumer; 0 if there is one.",
        "no_consumer_seconds",
    ),
)
#: Metric, help, and its key in the state of the backlog counter.
_BACKLOG_TOTALS = (
    ("marq_backlog_complete", "Whether all waiting messages are counted.", "complete"),
    ("marq_backlog_uncounted_records", "Records not counted yet.", "uncounted"),
    (
        "marq_backlog_unknown_queue_messages",
        "Waiting messages of all unknown queues together.",
        "unknown_queues",
    ),
)


def _partitions(snapshot: WorkerMetrics) -> Iterator[Metric]:
    parts = [([str(part["partition"])], part) for part in snapshot.partitions]
    for kind, table in ((_gauge, _PARTITION_GAUGES), (_counter, _PARTITION_COUNTERS)):
        for name, what, key in table:
            yield kind(name, what, ["partition"], ((label, part[key]) for label, part in parts))
    states = (([*label, state], state == part["state"]) for label, part in parts for state in PARTITION_STATES)
    yield _gauge(
        "marq_partition_state", "1 for the current state of the partition's owner.", ["partition", "state"], states
    )
    stalled = ((label, part["partition"] in snapshot.stalled) for label, part in parts)
    what = "1 without progress although work is possible."
    yield _gauge("marq_partition_stalled", what, ["partition"], stalled)
    jumps = ((label, part["clock_jump_ms"] / 1000) for label, part in parts)
    what = "Last jump of the broker's clock."
    yield _gauge("marq_partition_clock_jump_seconds", what, ["partition"], jumps)


def _handlers(snapshot: WorkerMetrics) -> Iterator[Metric]:
    groups = [([process["group"]], process) for process in snapshot.handlers]
    up = ((label, process["pid"] is not None) for label, process in groups)
    yield _gauge("marq_handlers_up", "Whether the group's handler process runs.", ["group"], up)
    starts = ((label, process["starts"]) for label, process in groups)
    yield _counter("marq_handlers_starts", "Starts of the handler process.", ["group"], starts)
    for name, what, key in _HANDLER_GAUGES:
        yield _gauge(name, what, ["group"], ((label, process[key]) for label, process in groups))
    keys = [(queue, told) for _, process in groups for queue, told in process["keys"].items()]
    what = "Keys with messages that wait for their turns, in queues with limits, fairness or a priority."
    yield _gauge("marq_keys_waiting", what, ["queue"], (([queue], told["waiting"]) for queue, told in keys))
    what = "Keys whose next message waits for a limit of the key."
    yield _gauge("marq_keys_at_limit", what, ["queue"], (([queue], told["at_limit"]) for queue, told in keys))
    breakers = [breaker for _, process in groups for breaker in process["breakers"].items()]
    states = (([queue, state], state == found["state"]) for queue, found in breakers for state in BREAKER_STATES)
    what = "1 for the current state of the queue's circuit breaker."
    yield _gauge("marq_breaker_state", what, ["queue", "state"], states)
    openings = (([queue], found["openings"]) for queue, found in breakers)
    yield _counter("marq_breaker_openings", "Openings of the circuit breaker.", ["queue"], openings)


def _sqs(calls: CallMetrics) -> Iterator[Metric]:
    # Copies, because this may run in another thread than the calls.
    counted, seconds, messages = list(calls.calls.items()), list(calls.seconds.items()), list(calls.messages.items())
    yield _counter("marq_sqs_calls", "Calls, by operation and error.", ["operation", "code"], counted)
    what = "Time until calls were answered; polls include the wait for messages."
    yield _counter("marq_sqs_call_seconds", what, ["operation"], (([operation], total) for operation, total in seconds))
    what = "Messages that clients have sent, received and deleted."
    yield _counter("marq_sqs_messages", what, ["action"], (([action], count) for action, count in messages))
    polls: _Samples = [([], calls.polls)] if calls.calls or calls.polls else []
    yield _gauge("marq_sqs_polls", "Polls that are waiting for messages.", [], polls)
