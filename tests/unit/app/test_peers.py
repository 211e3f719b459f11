"""Requests to other workers keep names of queues with any characters intact."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from yarl import URL

from marq_worker.web.peers import ask_each, path_segment


@pytest.fixture
async def peer() -> AsyncIterator[URL]:
    """A worker that tells what it was asked for."""

    async def tell(request: web.Request) -> web.Response:
        return web.json_response({"queue": request.match_info["queue"], "query": dict(request.query)})

    application = web.Application()
    application.router.add_get("/api/queues/{queue}/messages", tell)
    async with TestServer(application) as server:
        yield server.make_url("")


@pytest.mark.parametrize("queue", ["emails", "letters/böse", "a%2Fb", "50% off?", "a&b=c#d", ".", "..", "...", "a.b"])
async def test_a_queue_is_asked_for_by_its_name(peer: URL, queue: str) -> None:
    async with ClientSession() as session:
        [answer] = await ask_each(session, [peer], f"api/queues/{path_segment(queue)}/messages", {"error": "a&b"})

    assert answer == {"queue": queue, "query": {"error": "a&b", "scope": "worker"}}
