"""Fixtures for tests on a real broker."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from broker import java
from broker.embedded import EmbeddedBroker
from marq.core.names import Names

os.environ["JAVA_TOOL_OPTIONS"] = java.SHORT_LIVED_OPTIONS

# How quickly examples are made and tried is the machine's business.
settings.register_profile("marq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("marq")


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """One real Kafka for all tests; a test that stops or kills it makes its own."""
    # Hundreds of tests leave their topics behind.
    with EmbeddedBroker(heap="1g") as embedded:
        yield embedded


@pytest.fixture
def servers(broker: EmbeddedBroker) -> str:
    return broker.bootstrap_servers


@pytest.fixture
def prefix() -> str:
    """A name of its own for each test's topics and groups."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def names(prefix: str) -> Names:
    return Names(prefix)
