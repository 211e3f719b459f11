"""Requests to other endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from marq_worker.sqs.peers import PATH, SETTLE_PATH, Peers

LIMIT_S = 20
#: More than the connections of aiohttp's default pool.
ASKS = 150


class NoGroups:
    """Groups without members."""

    async def members(self, groups: list[str]) -> dict[str, Any]:
        return {}

    async def stop(self) -> None:
        return


def peers() -> Peers:
    groups: Any = NoGroups()
    return Peers("http://here:1", b"secret", lambda queue: queue, groups)


async def test_requests_that_wait_for_messages_hold_up_neither_each_other_nor_outcomes() -> None:
    asked: list[str] = []
    all_asked, messages = asyncio.Event(), asyncio.Event()

    async def ask(request: web.Request) -> web.Response:
        asked.append((await request.json())["queue"])
        if len(asked) == ASKS:
            all_asked.set()
        await messages.wait()
        return web.json_response([])

    async def settle(request: web.Request) -> web.Response:
        return web.json_response([True])

    application = web.Application()
    application.router.add_post(PATH, ask)
    application.router.add_post(SETTLE_PATH, settle)
    this = peers()
    this.start()
    async with TestServer(application) as server:
        url = str(server.make_url("")).rstrip("/")
        asks = [asyncio.create_task(this.ask(url, f"queue-{number}", 1)) for number in range(ASKS)]
        try:
            async with asyncio.timeout(LIMIT_S):
                await all_asked.wait()
                assert await this.settle(url, [{}]) == [True]
        finally:
            messages.set()
            await asyncio.gather(*asks)
            await this.stop()


async def test_only_endpoints_with_the_same_secret_are_authorized() -> None:
    this = peers()

    assert this.authorizes(f"Bearer {this._token}")
    assert not any(map(this.authorizes, (None, "", "Bearer token", "Bearer gr\u00fc\u00df", "\udcff")))
