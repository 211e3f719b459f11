"""What a real worker tells Prometheus and its supervisor, and that what is shipped for them fits that."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import ROOT, Namespace, Worker, eventually

#: A breaker, limits, and handlers: each metric has a value.
QUEUES = """
[queues.coroutine]
handler = "handlers_of_the_test:coroutine"
breaker = { reset_timeout = 1 }
limits = { per_key = { concurrency = 2 } }
[queues.halted]
paused = "2999-01-01T00:00:00+00:00"
"""
METRIC = re.compile(r"\b(?:marq|process)_[a-z_]+\b")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    directory = tmp_path_factory.mktemp("probes")
    handlers = Handlers(directory / "handlers")
    with Worker(broker.bootstrap_servers, directory, queues=QUEUES, environment=handlers.environment) as worker:
        yield await worker.ready()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def metrics(worker: Worker, broker: EmbeddedBroker) -> dict[str, Metric]:
    """All metrics, after a message of a queue has come back once and was then acknowledged, and one was handled."""
    async with Namespace(broker.bootstrap_servers, worker.names) as namespace:
        sent = await namespace.send("emails")
        await namespace.acquire(sent, lease=0.2)
        await namespace.send("coroutine")
        done, held = await namespace.send_many("emails", 2)
        await namespace.acquire(done, held, lease=600)
        await namespace.ack(done)
        await eventually(lambda: namespace.copies_of(sent))

        def enough(found: dict[str, Metric]) -> bool:
            settled = sample(found, "marq_messages_settled_total", queue="emails", outcome="acked")
            handled = sample(found, "marq_messages_settled_total", queue="coroutine", outcome="acked")
            expired = sample(found, "marq_messages_settled_total", queue="emails", outcome="expired")
            ready = sample(found, "marq_worker_ready")
            told = found["marq_breaker_state"].samples and found["marq_keys_waiting"].samples
            return settled == handled == expired == ready == 1 and bool(told)

        return await eventually(lambda: scrape(worker), enough)


async def scrape(worker: Worker) -> dict[str, Metric]:
    status, text = await worker.page("/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample(found: dict[str, Metric], name: str, **labels: str) -> float | None:
    for family in found.values():
        for point in family.samples:
            if point.name == name and point.labels == labels:
                return point.value
    return None


def labels_of(found: dict[str, Metric]) -> dict[str, set[str]]:
    """The labels of each name that can be asked for."""
    labels: dict[str, set[str]] = {}
    for family in found.values():
        for point in family.samples:
            labels.setdefault(point.name, set()).update(point.labels)
    return labels


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "marq.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    )


def alert_expressions() -> Iterator[str]:
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


async def test_metrics_of_messages(metrics: dict[str, Metric]) -> None:
    assert sample(metrics, "marq_messages_acquired_total", queue="emails") == 3
    assert sample(metrics, "marq_messages_redelivered_total", queue="emails") == 1
    assert sample(metrics, "marq_queue_messages", queue="emails", state="in_flight") == 1
    assert sample(metrics, "marq_redelivery_lateness_seconds_count") == 1
    assert sample(metrics, "marq_partition_state", partition="0", state="owner") == 1
    assert sample(metrics, "marq_breaker_state", queue="coroutine", state="closed") == 1


async def test_names_follow_the_conventions(metrics: dict[str, Metric]) -> None:
    for family in metrics.values():
        assert family.name.startswith(("marq_", "process_")), family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_ms$|_milliseconds|_minutes", family.name)


async def test_what_is_shipped_asks_for_metrics_and_labels_that_there_are(metrics: dict[str, Metric]) -> None:
    known = labels_of(metrics)
    expressions = [*dashboard_expressions(), *alert_expressions()]

    assert len(expressions) > 30
    for expression in expressions:
        asked = set(METRIC.findall(expression))
        assert asked <= known.keys(), expression
        assert asked or expression.startswith("up{"), expression
        for name, selector in re.findall(r"\b(marq_[a-z_]+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selector)) <= known[name], expression
        grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
        assert grouped <= set().union(*(known[name] for name in asked)), expression


async def test_the_page_on_operations_lists_every_metric(metrics: dict[str, Metric]) -> None:
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    table = page.partition("\n| metric | labels")[2].partition("\n\n")[0]
    documented = set(re.findall(r"^\| `(marq_\w+)", table, re.MULTILINE))
    told = {point.name for family in metrics.values() for point in family.samples if point.name.startswith("marq_")}
    # This worker has no SQS endpoint, and so no values of its metrics.
    empty = [metric for metric in metrics.values() if metric.name.startswith("marq_sqs_") and not metric.samples]
    told |= {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in empty}

    assert documented == {re.sub(r"(?<=seconds)_(bucket|sum|count)$", "", name) for name in told}


async def test_a_worker_lives_and_is_ready_as_long_as_it_does_its_work(
    worker: Worker, metrics: dict[str, Metric]
) -> None:
    for path, verdict in [("/healthz", "live"), ("/readyz", "ready")]:
        # On a busy machine the broker, or the event loop, may take its time now and then.
        status, said = await eventually(lambda path=path: page(worker, path), lambda found: found[0] == 200)
        assert (status, said) == (200, {verdict: True, "reasons": []})


async def page(worker: Worker, path: str) -> tuple[int, Any]:
    status, text = await worker.page(path)
    return status, json.loads(text)
