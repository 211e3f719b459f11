"""Fixtures for tests on a real broker."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from marq.wire.names import Names
from marq_worker.broker import Certificates, java
from marq_worker.broker.embedded import EmbeddedBroker
from tests.brokers import UNFENCED

os.environ["JAVA_TOOL_OPTIONS"] = java.SHORT_LIVED_OPTIONS
# A shell starts background jobs with SIGINT ignored, and all child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How quickly examples are made and tried is the machine's business. `make test` tries the same ones in each run: a new
# one could fail a change that has nothing to do with it. `make verify` searches for new ones.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", settings.get_profile("same"), derandomize=False, max_examples=1_000)
settings.load_profile("same")


class Schedule(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one process; all tests that share a Spark session run in one process, too."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "tests/pipeline" if file.startswith("tests/pipeline/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long scopes first: at the end, one of them would run alone."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/pipeline/", "tests/worker/")))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule:
    return Schedule(config, log)


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """One real Kafka for all tests; a test that stops or kills it makes its own."""
    # Hundreds of tests leave their topics behind.
    with EmbeddedBroker(heap="1g", properties=UNFENCED) as embedded:
        yield embedded


@pytest.fixture
def servers(broker: EmbeddedBroker) -> str:
    return broker.bootstrap_servers


@pytest.fixture
async def admin(servers: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=servers)
    await client.start()
    yield client
    await client.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def prefix() -> str:
    """A name of its own for each test's topics and groups."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def names(prefix: str) -> Names:
    return Names(prefix)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns what Marq has logged: clients that earlier tests left behind may log when they are collected."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("marq")]
