"""What a client learns when a connection to a broker breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from marq.kafka import broker_connections as module

ROUNDS = 50
#: The socket option that makes a close reset its connection.
RESET = struct.pack("ii", 1, 0)


class FakeBroker:
    """Accepts connections, and closes each one at its first request."""

    def __init__(self, reset: bool) -> None:
        self._reset = reset

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if self._reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()


async def send_until_closed(port: int) -> None:
    connection = await module.open_connection("127.0.0.1", port, request_timeout_ms=1000)
    # What the broker would answer to ApiVersions.
    connection._versions = {MetadataRequest.API_KEY: (0, 1)}
    answers = []
    try:
        while connection.connected():
            answers.append(asyncio.ensure_future(connection.send(MetadataRequest([]))))
            await asyncio.sleep(0)
    finally:
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {KafkaConnectionError}, outcomes


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_request_to_a_broken_connection_fails_with_an_error_that_clients_expect(
    monkeypatch, run: Callable[[Coroutine[Any, Any, None]], None], reset: bool
) -> None:
    async def no_versions(_: Any) -> None:
        pass

    async def rounds() -> None:
        async with await asyncio.start_server(FakeBroker(reset), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for _ in range(ROUNDS):
                with contextlib.suppress(KafkaConnectionError):
                    await send_until_closed(port)

    monkeypatch.setattr(module._Connection, "_do_version_lookup", no_versions)
    run(rounds())
