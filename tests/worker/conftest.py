"""Workers for the tests; what they wrote is shown when a test fails.

Tests that leave a worker as it is share one, ``shared_worker``, with queues of each test's own. They run in the event
loop of the session: ``pytestmark = pytest.mark.asyncio(loop_scope="session")``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import marq
from marq_worker.broker import EmbeddedBroker
from tests.worker.handling import Handlers
from tests.worker.harness import Namespace, Worker

LOG_LINES = 25


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        for worker in Worker.started:
            tail = "\n".join(worker.log().splitlines()[-LOG_LINES:])
            report.sections.append((f"end of {worker.log_file}", tail))
    return report


@pytest.fixture
def new_worker(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Makes workers on the session's broker; none outlives the test."""
    yield from workers(broker, tmp_path)


@pytest.fixture
def handlers(tmp_path: Path) -> Handlers:
    """Handlers that workers of the test can run, and what they noted."""
    return Handlers(tmp_path / "handlers")


def workers(broker: EmbeddedBroker, directory: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*, like: Worker | None = None, **settings: Any) -> Worker:
        worker = Worker(broker.bootstrap_servers, directory, **settings) if like is None else like.again(**settings)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    with Worker(broker.bootstrap_servers, tmp_path_factory.mktemp("shared")) as worker:
        yield await worker.ready()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def namespace(shared_worker: Worker) -> AsyncIterator[Namespace]:
    """The topics of the shared worker."""
    async with Namespace(shared_worker.environment["MARQ_BOOTSTRAP_SERVERS"], shared_worker.names) as namespace:
        yield namespace


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def queues(shared_worker: Worker) -> AsyncIterator[marq.Queues]:
    async with marq.Queues(**client_of(shared_worker)) as queues:
        yield queues


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """The name of a queue of the test's own."""
    return re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:40]


def client_of(worker: Worker) -> dict[str, Any]:
    """Arguments for a client of a worker."""
    address = worker.environment["MARQ_BOOTSTRAP_SERVERS"]
    return {"bootstrap_servers": address, "prefix": worker.names.prefix, "connect_timeout": 60}
