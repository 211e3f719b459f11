"""Stopping a client of aiokafka, which does not always end by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from marq.connection import stop_consumer


class Connections:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


async def test_a_stop_that_passes_on_a_cancellation_of_its_own_still_closes_the_connections() -> None:
    """aiokafka's fetcher does so when it is stopped just after a fetch has failed."""

    async def stop() -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    connections = Connections()
    consumer = SimpleNamespace(stop=stop, _client=connections, _coordinator=None, _fetcher=None)

    assert not await stop_consumer(consumer, 5)

    assert connections.closed
