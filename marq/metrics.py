"""Prometheus metrics of a service that uses marq: the extra ``marq[metrics]``.

Workers export deliveries, acks and messages in flight. This module exports what only the service knows: the state of
its clients and the duration of its handlers. Nothing is measured unless you register a collector.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from marq.client.outcomes import Reject, Retry
from marq.consumer.consumer import Consumer
from marq.handlers.middleware import CallNext
from marq.leases.message import Message
from marq.producer.producer import Producer

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("marq.metrics needs prometheus-client: pip install 'marq[metrics]'") from error

#: Upper bounds of the buckets of both histograms, in seconds.
BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)


class ClientCollector(Collector):
    """Collect metrics of consumers and producers at each scrape.

    Register it: ``prometheus_client.REGISTRY.register(ClientCollector(consumer, producer))``. Stopped
    consumers are left out. The counts of consumers with the same queue or group are added up.
    """

    def __init__(self, *clients: Consumer | Producer) -> None:
        for client in clients:
            if not isinstance(client, Consumer | Producer):
                raise TypeError(f"ClientCollector: expected marq.Consumer or marq.Producer, not {client!r}")
        self._consumers = [client for client in clients if isinstance(client, Consumer)]
        self._producers = [client for client in clients if isinstance(client, Producer)]

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, as prometheus_client asks for them."""
        yield from self._in_flight()
        breakers = GaugeMetricFamily(
            "marq_consumer_breaker_open", "Whether the circuit breaker of a queue is open here.", labels=["queue"]
        )
        is_open: Counter[str] = Counter()
        for consumer in self._consumers:
            for queue, state in consumer.breakers.items():
                # Several consumers of a queue may share a collector, and a series may appear only once.
                is_open[queue] = max(is_open[queue], state == "open")
        for queue, value in is_open.items():
            breakers.add_metric([queue], value)
        yield breakers
        yield CounterMetricFamily(
            "marq_producer_messages_sent",
            "Messages sent and confirmed, except delayed ones.",
            sum(producer.sent for producer in self._producers),
        )
        yield CounterMetricFamily(
            "marq_producer_messages_failed",
            "Messages that are not known to be sent.",
            sum(producer.failed for producer in self._producers),
        )

    def _in_flight(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "marq_consumer_messages_in_flight", "Messages that are leased and not finished.", labels=["consumer"]
        )
        processing = GaugeMetricFamily(
            "marq_consumer_messages_processing", "Of these, what handlers or callers work on.", labels=["consumer"]
        )
        in_flight_by_name: Counter[str] = Counter()
        processing_by_name: Counter[str] = Counter()
        for consumer in self._consumers:
            # Read once each: another thread may stop the consumer at any time.
            counts = (in_flight_by_name, consumer.in_flight), (processing_by_name, consumer.processing)
            for by_name, count in counts:
                if count is not None:
                    by_name[consumer.name] += count
        for family, totals in ((in_flight, in_flight_by_name), (processing, processing_by_name)):
            for name, total in totals.items():
                family.add_metric([name], total)
            yield family


class HandlerMetrics:
    """Histograms of handlers: ``run(handler, middleware=[metrics])``.

    ``marq_process_duration_seconds`` by queue and outcome (``done``, ``retry``, ``reject``, ``failed``), and
    ``marq_wait_duration_seconds`` by queue: from the first send to the call, at first deliveries, by both machines'
    clocks.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._duration = Histogram(
            "marq_process_duration_seconds",
            "How long calls of handlers took.",
            ["queue", "outcome"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._wait = Histogram(
            "marq_wait_duration_seconds",
            "How long messages waited for their first delivery.",
            ["queue"],
            registry=registry,
            buckets=BUCKETS,
        )

    async def __call__(self, message: Message, call_next: CallNext) -> Any:
        queue = message.queue
        if message.attempt == 1:
            waited = datetime.now(UTC) - message.sent_at
            self._wait.labels(queue).observe(max(0.0, waited.total_seconds()))
        began_s = time.perf_counter()
        outcome = "done"
        try:
            return await call_next(message)
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            self._duration.labels(queue, outcome).observe(time.perf_counter() - began_s)


def _outcome(error: BaseException) -> str:
    if isinstance(error, Retry):
        return "retry"
    return "reject" if isinstance(error, Reject) else "failed"
