"""How a worker's metrics are written for Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from marq.core.storage.rows import EventCounts
from marq_worker.progress import Lateness
from marq_worker.sqs.errors import SqsError
from marq_worker.web.metrics import Exposition, WorkerMetrics
from marq_worker.web.partition_statistics import empty_metrics
from marq_worker.web.sqs_metrics import CallMetrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def written(snapshot: WorkerMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    body, content_type = Exposition().write(snapshot, "text/plain")
    assert content_type.startswith("text/plain; version=")
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_queues_are_told_of_by_their_names() -> None:
    queues = {'a "b"\\c': {**empty_metrics(), "in_flight": 3, "waiting_for_delivery": 2, "blocked_keys": 4,
                          "oldest_lease_seconds": 1.5}}  # fmt: skip
    snapshot = WorkerMetrics(
        ["tracker"], True, queues=queues, totals={"emails": EventCounts(acquired=5, acked=4, dead_lettered=1)}
    )

    found = written(snapshot)

    assert found["marq_queue_messages", ('a "b"\\c', "in_flight")] == 3
    assert found["marq_queue_messages", ('a "b"\\c', "delayed")] == 2
    assert found["marq_queue_blocked_keys", ('a "b"\\c',)] == 4
    assert found["marq_queue_oldest_message_age_seconds", ('a "b"\\c',)] == 1.5
    assert found["marq_messages_acquired_total", ("emails",)] == 5
    assert found["marq_messages_settled_total", ("acked", "emails")] == 4
    assert found["marq_messages_dead_lettered_total", ("emails",)] == 1
    assert found["marq_worker_ready", ()] == 1


async def test_calls_of_sqs_clients_are_counted_by_operation_and_error() -> None:
    calls = CallMetrics()

    async def answered(answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    async def refused() -> dict[str, Any]:
        raise SqsError("AccessDenied", "no")

    await calls.measured("SendMessageBatch", answered({"Successful": [1, 2]}))
    await calls.measured("ReceiveMessage", answered({}))
    with pytest.raises(SqsError):
        await calls.measured("SendMessage", refused())
    poll = asyncio.create_task(calls.measured("ReceiveMessage", asyncio.Event().wait()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    found = written(WorkerMetrics(["sqs"], True, sqs=calls))
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)

    assert found["marq_sqs_calls_total", ("OK", "SendMessageBatch")] == 1
    assert found["marq_sqs_calls_total", ("AccessDenied", "SendMessage")] == 1
    assert found["marq_sqs_messages_total", ("sent",)] == 2
    assert found["marq_sqs_polls", ()] == 1
    after = written(WorkerMetrics(["sqs"], True, sqs=calls))
    assert (after["marq_sqs_polls", ()], after["marq_sqs_calls_total", ("HungUp", "ReceiveMessage")]) == (0, 1)


def test_what_waits_is_told_where_it_is_counted() -> None:
    counted = {**empty_metrics(), "waiting": 7, "oldest_waiting_seconds": 2.5, "arrived": 9}
    backlog = {"complete": False, "uncounted": 3, "unknown": 0, "unknown_queues": 0, "trouble": ""}

    queues = {"emails": counted, "mistaken": counted, "too": counted}
    found = written(WorkerMetrics(["tracker"], True, queues=queues, backlog=backlog, paused={"emails": False}))
    nothing = written(WorkerMetrics(["tracker"], True, queues={"emails": empty_metrics()}))

    assert found["marq_queue_waiting_messages", ("emails",)] == 7
    assert found["marq_queue_oldest_waiting_age_seconds", ("emails",)] == 2.5
    assert found["marq_messages_arrived_total", ("emails",)] == 9
    assert ("marq_queue_waiting_messages", ("mistaken",)) not in found
    assert found["marq_backlog_unknown_queue_messages", ()] == 14
    assert (found["marq_backlog_complete", ()], found["marq_backlog_uncounted_records", ()]) == (0, 3)
    assert not [name for name, _ in nothing if "waiting" in name or "backlog" in name]


def test_the_end_of_a_pause_is_a_time() -> None:
    found = written(WorkerMetrics([], True, paused={"a": True, "b": True}, pause_ends={"b": 1_790_000_000.0}))

    assert (found["marq_queue_paused", ("a",)], found["marq_queue_paused", ("b",)]) == (1, 1)
    assert found["marq_queue_pause_end_timestamp_seconds", ("b",)] == 1_790_000_000
    assert ("marq_queue_pause_end_timestamp_seconds", ("a",)) not in found


def test_lateness_is_a_histogram_of_seconds() -> None:
    lateness = Lateness()
    lateness.note([5, 5, 700, 10_000_000])

    found = written(WorkerMetrics([], False, lateness=lateness))

    assert found["marq_redelivery_lateness_seconds_bucket", ("0.01",)] == 2
    assert found["marq_redelivery_lateness_seconds_bucket", ("1.0",)] == 3
    assert found["marq_redelivery_lateness_seconds_bucket", ("+Inf",)] == 4
    assert found["marq_redelivery_lateness_seconds_sum", ()] == 10_000.71


def test_a_scraper_gets_the_format_that_it_asks_for() -> None:
    body, content_type = Exposition().write(WorkerMetrics([], True), OPENMETRICS)

    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_scraper_that_asks_for_a_version_that_is_none_gets_plain_text() -> None:
    _, content_type = Exposition().write(WorkerMetrics([], True), "application/openmetrics-text; version=new")

    assert content_type.startswith("text/plain")


def test_a_breaker_has_one_state() -> None:
    handlers = [
        {
            "group": "g",
            "pid": None,
            "starts": 2,
            "in_flight": 5,
            "processing": 1,
            "blocked_seconds": 12.0,
            "breakers": {"emails": {"state": "half-open", "openings": 3}},
            "keys": {"emails": {"waiting": 7, "at_limit": 2, "busiest": []}},
        }
    ]

    found = written(WorkerMetrics([], True, handlers=handlers))

    assert found["marq_handlers_up", ("g",)] == 0
    assert (found["marq_handlers_messages_in_flight", ("g",)], found["marq_handlers_messages_processing", ("g",)]) == (
        5,
        1,
    )
    assert found["marq_handlers_starts_total", ("g",)] == 2
    assert found["marq_handlers_blocked_seconds", ("g",)] == 12
    assert found["marq_breaker_openings_total", ("emails",)] == 3
    assert (found["marq_keys_waiting", ("emails",)], found["marq_keys_at_limit", ("emails",)]) == (7, 2)
    states = {labels[1]: value for (name, labels), value in found.items() if name == "marq_breaker_state"}
    assert states == {"closed": 0, "open": 0, "half-open": 1}
