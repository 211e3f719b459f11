"""A real worker for each module, and clients that join it: all of marq at once, as a user has it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import marq
from broker import EmbeddedBroker
from tests.acceptance.processes import Process
from tests.worker.conftest import new_worker, pytest_runtest_makereport
from tests.worker.harness import Installation, Worker

__all__ = ["new_worker", "pytest_runtest_makereport"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(
    request: pytest.FixtureRequest, broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Worker]:
    """The module's worker; ``QUEUES`` of the module are its queues.toml."""
    directory = tmp_path_factory.mktemp("worker")
    worker = Worker(broker.bootstrap_servers, directory, queues=getattr(request.module, "QUEUES", ""))
    try:
        yield await worker.start().ready()
    finally:
        worker.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[Installation]:
    """What stands in the topics."""
    async with Installation(broker.bootstrap_servers, worker.names) as installation:
        yield installation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer(worker: Worker, broker: EmbeddedBroker) -> AsyncIterator[marq.Producer]:
    async with marq.Producer(broker.bootstrap_servers, prefix=worker.names.prefix) as producer:
        yield producer


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue of the test's own, with the default settings."""
    return re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:100]


@pytest_asyncio.fixture(loop_scope="module")
async def make_consumer(
    worker: Worker, broker: EmbeddedBroker, queue: str
) -> AsyncIterator[Callable[..., marq.Consumer]]:
    """Makes consumers, of the test's queue unless told; they are stopped after the test."""
    made: list[marq.Consumer] = []

    def make(name: str = queue, **options: Any) -> marq.Consumer:
        options.setdefault("prefix", worker.names.prefix)
        made.append(marq.Consumer(name, broker.bootstrap_servers, **options))
        return made[-1]

    yield make
    await asyncio.gather(*[consumer.stop() for consumer in made])


@pytest.fixture
def start_process(worker: Worker, broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts programs that find broker and prefix in the environment; none outlives the test."""
    made: list[Process] = []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MARQ_")}
    environment = {
        **kept,
        "MARQ_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        "MARQ_PREFIX": worker.names.prefix,
    }

    def start(*arguments: str, **more: str) -> Process:
        made.append(Process(arguments, tmp_path / f"process-{len(made)}.txt", {**environment, **more}))
        return made[-1]

    yield start
    for process in made:
        process.close()
