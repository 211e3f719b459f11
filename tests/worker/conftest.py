"""Workers for the tests; what they wrote is shown when a test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from broker import EmbeddedBroker
from tests.worker.harness import Worker

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
async def admin(servers: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    yield admin
    await admin.close()


@pytest.fixture
def new_worker(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Makes workers on the session's broker; none outlives the test."""
    yield from workers(broker, tmp_path)


def workers(broker: EmbeddedBroker, directory: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*, like: Worker | None = None, **settings: Any) -> Worker:
        worker = Worker(broker.bootstrap_servers, directory, **settings) if like is None else like.again(**settings)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()
