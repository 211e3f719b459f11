"""Clients of a worker's web server that send nothing, too much, or something other than HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, AppRunner, HTTPRequestTimeout, Request, Response, TCPSite

from marq_worker.config.settings import LogFormat
from marq_worker.logs import shape
from marq_worker.web.connection_limits import Connections
from marq_worker.web.dashboard import forms

LIMIT_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def server(connections: Connections, idle_s: float = 75.0) -> AsyncIterator[int]:
    """A server with limits; its port."""

    async def page(request: Request) -> Response:
        return Response(text="served")

    app = Application()
    app.router.add_get("/", page)
    runner = AppRunner(app, access_log=None, keepalive_timeout=idle_s)
    await runner.setup()
    assert runner.server is not None
    connections.limit(runner.server)
    try:
        await TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Ask for the page; what is answered, b"" when the connection is closed instead."""
    try:
        writer.write(REQUEST)
        async with asyncio.timeout(LIMIT_S):
            return await reader.readuntil(b"served")
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("limits", [{"most": 3}, {"of_address": 3}])
async def test_connections_beyond_the_limit_are_closed_until_others_end(
    limits: dict[str, int], logged: Callable[[], list[str]]
) -> None:
    async with server(Connections(**limits)) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]

        answers = [await answer(*connection) for connection in opened]

        assert [bool(text) for text in answers] == [True] * 3 + [False] * 3
        assert logged() == ["connections are refused: open=3 address=127.0.0.1"]
        for _, writer in opened:
            await closed(writer)
        async with asyncio.timeout(LIMIT_S):
            while True:
                # The server learns of an end a moment later.
                again = await asyncio.open_connection("127.0.0.1", port)
                served = await answer(*again)
                await closed(again[1])
                if served:
                    break


async def test_the_server_does_not_wait_for_incomplete_requests() -> None:
    async with server(Connections(), idle_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST[:-4])

        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        await closed(writer)


async def test_an_invalid_request_logs_one_line_without_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    shape(logging.getLogger("test-of-connections"), LogFormat.TEXT)
    with caplog.at_level(logging.INFO):
        async with server(Connections()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nX: " + b"secret" * 5_000 + b"\r\n\r\n")

            async with asyncio.timeout(LIMIT_S):
                assert (await reader.read()).startswith(b"HTTP/1.0 400")
            await closed(writer)

    assert "request from 127.0.0.1 is not valid HTTP: LineTooLong" in caplog.messages
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_form_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "FORM_LIMIT_S", 0.1)
    given_up, never = asyncio.Event(), asyncio.Event()

    async def act(request: Request) -> Response:
        with pytest.raises(HTTPRequestTimeout):
            await forms.read_form(request)
        given_up.set()
        return Response()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"queue="
        await never.wait()

    app = Application()
    app.router.add_post("/", act)
    async with TestClient(TestServer(app)) as client:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        sending = asyncio.create_task(client.post("/", data=slowly(), headers=headers))
        async with asyncio.timeout(LIMIT_S):
            await given_up.wait()
        never.set()
        await asyncio.gather(sending, return_exceptions=True)
