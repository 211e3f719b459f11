"""The suite runs in one event loop, so that what is expensive to start on Kafka starts only once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import marq
from marq.settings.client import ClientSettings
from marq.testing import Broker
from marq_worker.broker.embedded import EmbeddedBroker
from marq_worker.sqs.polling import TokenSettler
from tests.conformance.backend import QUEUES, Backend, KafkaBackend, MemoryBackend, settings
from tests.worker.conftest import pytest_runtest_makereport
from tests.worker.harness import Namespace, Worker

# Shows the worker's output when a test fails.
__all__ = ["pytest_runtest_makereport"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(loop_scope="session")
async def memory() -> AsyncIterator[Backend]:
    async with Broker(**settings()) as broker:
        backend = MemoryBackend(broker)
        async with backend.new_producer() as backend.producer:
            yield backend


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def kafka(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
    servers, directory = broker.bootstrap_servers, tmp_path_factory.mktemp("worker")
    worker = Worker(servers, directory, queues=QUEUES.read_text(encoding="utf-8"))
    backend: KafkaBackend | None = None
    try:
        await worker.start().ready(2)
        async with Namespace(servers, worker.names) as namespace:
            backend = KafkaBackend(worker, servers, namespace)
            async with backend.new_producer() as backend.producer, marq.Queues(**backend.client) as backend.queues:
                yield backend
    finally:
        # A test may have started another one.
        (worker if backend is None else backend.worker).close()


@pytest.fixture(params=["memory", "kafka"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """What the test runs on."""
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture(name="settings")
def client_settings(backend: Backend) -> ClientSettings:
    return ClientSettings.read(backend.address, {"prefix": backend.names.prefix}, owner="test")


@pytest_asyncio.fixture(loop_scope="session")
async def settler(settings: ClientSettings) -> AsyncIterator[TokenSettler]:
    """Connect a client other than the one that receives."""
    async with TokenSettler(settings) as settler:
        yield settler
