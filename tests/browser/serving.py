"""Serves the pages of a pretended namespace, in a thread of its own, with the headers that a worker sends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from aiohttp import web

from marq_worker.web.security import HEADERS
from tests.browser.pretend import PretendActor, PretendNamespace, site

LIMIT_S = 120.0

Found = TypeVar("Found")


class Background:
    """An event loop in a thread: Playwright's synchronous interface has the main thread's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Found], limit_s: float = LIMIT_S) -> Found:
        """Run a coroutine there, and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


class Site:
    """The pages with invented statistics."""

    def __init__(self, namespace: PretendNamespace) -> None:
        self.namespace = namespace
        self.actor = PretendActor(namespace)
        self.url = ""

    async def start(self) -> web.AppRunner:
        application = site(self.namespace, self.actor)
        application.on_response_prepare.append(_add_headers)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return runner


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)


@contextmanager
def serving(background: Background, namespace: PretendNamespace) -> Iterator[Site]:
    """Serve the pages until the block ends."""
    site = Site(namespace)
    runner = background.run(site.start())
    try:
        yield site
    finally:
        background.run(runner.cleanup())
