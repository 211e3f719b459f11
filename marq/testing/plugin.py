"""The pytest plugin with the fixture ``marq_broker``; it loads the broker at its first use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from marq.testing.broker import Broker


@pytest.fixture
def marq_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker in memory, which the test's clients use unless they have another address."""
    from marq.testing.broker import Broker

    broker = Broker()
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", broker.address)
    yield broker
    broker.close()
