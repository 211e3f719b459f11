"""Workers with the SQS endpoint, and clients in other environments."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from marq_worker.broker.ports import free_port
from tests.worker.conftest import new_worker, pytest_runtest_makereport
from tests.worker.harness import Worker

__all__ = ["new_worker", "pytest_runtest_makereport"]


@pytest.fixture
def new_endpoint(new_worker: Callable[..., Worker]) -> Callable[..., Worker]:
    """Makes workers with all roles, the endpoint among them, on the session's broker; none outlives the test."""

    def make(*, prefix: str, **environment: str) -> Worker:
        settings = {"MARQ_ROLES": "tracker,handlers,web,sqs", "MARQ_SQS_PORT": str(free_port("127.0.0.1"))}
        return new_worker(prefix=prefix, environment={**settings, **environment})

    return make
