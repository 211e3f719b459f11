"""The pytest plugin: the fixture ``marq_broker``. It needs no other plugin, and loads nothing before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from marq.testing.broker import Broker


@pytest.fixture
def marq_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """A broker in memory, at which all clients arrive that a test makes without an address of their own."""
    from marq.testing.broker import Broker

    broker = Broker()
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", broker.address)
    yield broker
    broker.close()
