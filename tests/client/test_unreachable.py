"""Clients that find no broker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import marq
from tests.client.waiting import producer_threads

NOWHERE = "127.0.0.1:1"


async def start(client: Any) -> None:
    starting = client.start()
    if inspect.isawaitable(starting):
        await starting


@pytest.mark.parametrize(
    "new_client",
    [
        marq.Producer,
        lambda servers, **options: marq.Consumer("q", servers, **options),
        marq.Queues,
        marq.DeadLetters,
        marq.SyncProducer,
    ],
    ids=["Producer", "Consumer", "Queues", "DeadLetters", "SyncProducer"],
)
async def test_a_start_without_a_broker_names_the_address_and_the_setting(new_client: Callable[..., Any]) -> None:
    client = new_client(NOWHERE, connect_timeout=0.5)

    for _ in range(2):
        with pytest.raises(marq.BrokerUnavailable, match=r"127\.0\.0\.1:1 .*MARQ_BOOTSTRAP_SERVERS"):
            await start(client)

    assert producer_threads() == []
