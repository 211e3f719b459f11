"""``faust -A app drain NAME``: waits until nothing of a queue is left."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import click
import faust

from app.commands.command import INTERRUPTED, command
from app.commands.figures import opened
from app.commands.watching import bar
from app.commands.words import seconds
from marq.core.names import check_queue_name
from marq.inspector import Inspector
from marq.queues import Queues
from marq.settings import ClientSettings
from marq.topics import ensure_topics

#: Between two looks.
_PAUSE_S = 0.5


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--timeout", default="10m", show_default=True, metavar="DURATION", help="90s, 15m, 2h, 7d."),
        click.option("--json", "as_json", is_flag=True, help="Show the outcome as JSON."),
    )
    async def drain(self: Any, name: str, timeout: str, as_json: bool) -> int:
        """Wait until nothing of a queue waits, is in flight or delayed; exits 1 when the time is over before."""
        check_queue_name(name)
        limit_s, began_s = seconds("--timeout", timeout), time.monotonic()
        client, code = self.app.client, 1
        await ensure_topics(client, changelog=True)
        async with Queues.of(client) as queues:
            draining = Draining(client, Inspector(client, queues.definitions), name)
            try:
                with bar(f"draining {name}") as progress:
                    while True:
                        if await draining.look():
                            code = 0
                            break
                        progress(draining.first - draining.left, draining.first)
                        if time.monotonic() - began_s + _PAUSE_S > limit_s:
                            break
                        await asyncio.sleep(_PAUSE_S)
            except asyncio.CancelledError:
                code = INTERRUPTED
        found = {"queue": name, "drained": code == 0, "seconds": time.monotonic() - began_s, **draining.found}
        print(json.dumps(found) if as_json else _said(found))
        return code


class Draining:
    """Looks, again and again, whether something is left of a queue.

    A message goes from the topic to the markers and, when it is redelivered, back. So one look is: what waits; then
    what is open when all markers have been read that were there after that; then whether anything has come into the
    topic meanwhile. Only when all three find nothing was there a moment at which nothing was left.
    """

    def __init__(self, client: ClientSettings, inspector: Inspector, queue: str) -> None:
        self._client = client
        self._inspector = inspector
        self._queue = queue
        #: What was left at the first look, or later when that was more, and at the last one.
        self.first, self.left = 0, 0
        self.found: dict[str, int] = {}

    async def look(self) -> bool:
        """Return whether nothing is left."""
        waiting = await self._inspector.waiting([self._queue])
        told = await opened(self._client, self._inspector, await self._inspector.marker_ends())
        figures = told.of(self._queue)
        self.found = {"waiting": waiting.counts[self._queue], **figures}
        self.left = sum(self.found.values())
        self.first = max(self.first, self.left)
        if self.left or not (told.complete and waiting.complete):
            return False
        return not await self._inspector.arrived(self._queue, waiting.ends)


def _said(found: dict[str, Any]) -> str:
    name = found["queue"]
    if found["drained"]:
        return f"queue {name!r}: nothing is left"
    delayed = found.get("waiting_for_delivery", 0) + found.get("waiting_for_redelivery", 0)
    return (
        f"queue {name!r}: not drained: {found.get('waiting', 0):,} wait, {found.get('in_flight', 0):,} are in flight,"
        f" {delayed:,} wait for their time"
    )
