"""``marq purge NAME`` and ``drain NAME``: empty a queue, or wait until it is empty."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from marq.admin import purge as purging
from marq.admin.purge import Purged
from marq.kafka.inspector import MAX_SCANNED, Inspector, Waiting
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError
from marq.wire.names import check_queue_name
from marq_worker.commands.command import DRY_RUN, INTERRUPTED, JSON, YES, Setup, command, open_queues
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.open_messages import opened
from marq_worker.commands.terminal import age, bar, seconds
from marq_worker.commands.unknown import note_if_unknown


@command(
    click.argument("name"),
    click.option("--delayed", is_flag=True, help="Purge delayed messages too."),
    click.option("--dead", is_flag=True, help="Delete dead letters too."),
    click.option("--older", metavar="AGE", help="Only messages sent earlier than AGE ago (90s, 1h30m, 7d) or a time."),
    DRY_RUN,
    JSON,
    YES,
)
async def purge(
    setup: Setup, name: str, delayed: bool, dead: bool, older: str | None, dry_run: bool, as_json: bool, yes: bool
) -> int:  # fmt: skip
    """Discard all waiting messages of a queue; messages in flight continue."""
    check_queue_name(name)
    if dead and older is not None:
        raise ConfigError(f"--older with --dead: run marq dead {name} --delete --older {older} instead")
    before_ms = None if older is None else _before_ms(older)
    client, interrupted = setup.client, False
    purged, extent, complete = await purging.preview(client, name, delayed=delayed, dead=dead, before_ms=before_ms)
    # An incomplete count may have found none of the queue's messages.
    if not dry_run and (purged.total or not complete):
        confirm(f"Purge {_counted(purged, complete=complete)} of queue {name!r} permanently?", client, yes=yes)
    if not dry_run:
        try:
            purged = await purging.purge(client, name, delayed=delayed, dead=dead, extent=extent)
            complete = True
        except asyncio.CancelledError:
            interrupted, complete = True, False
    # After an interruption, the numbers by kind are unknown.
    figures = dict.fromkeys(asdict(purged)) if interrupted else asdict(purged)
    reached = {"queue": name, **figures, "complete": complete, "dry_run": dry_run, "interrupted": interrupted}
    text = INTERRUPTED_TEXT.format(name) if interrupted else said(name, purged, complete=complete, dry_run=dry_run)
    print(json.dumps(reached) if as_json else text)
    if complete and not (purged.total or interrupted):
        await note_if_unknown(client, name)
    return INTERRUPTED if interrupted else int(not complete)


def _before_ms(older: str) -> int:
    """Return the time before which messages are purged."""
    limit = age("--older", older)
    before_s = limit.timestamp() if isinstance(limit, datetime) else time.time() - limit
    return max(0, int(before_s * 1000))


INTERRUPTED_TEXT = "interrupted: waiting messages of queue {!r} may be skipped but not purged: purge it again"


def _counted(purged: Purged, *, complete: bool) -> str:
    at_least, stopped = ("", "") if complete else ("at least ", f" (counting stopped after {MAX_SCANNED:,} records)")
    return f"{at_least}{purged.total:,} message{'' if purged.total == 1 else 's'}{stopped}"


def said(name: str, purged: Purged, *, complete: bool, dry_run: bool) -> str:
    kinds = {
        "waiting": purged.waiting, "for redelivery": purged.redelivery, "delayed": purged.delayed,
        "dead-lettered": purged.dead_letters,
    }  # fmt: skip
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count) or "there were none"
    verb = "would be purged" if dry_run else "purged"
    return f"queue {name!r}: {_counted(purged, complete=complete)} {verb} ({listed})"


#: Seconds between two counts.
_PAUSE_S = 0.5


@command(
    click.argument("name"),
    click.option(
        "--timeout",
        default="10m",
        show_default=True,
        metavar="DURATION",
        help="Wait at most this long: 90s, 15m, 1h30m.",
    ),
    JSON,
)
async def drain(setup: Setup, name: str, timeout: str, as_json: bool) -> int:
    """Wait until a queue has no waiting, in-flight or delayed messages; exit 1 after the timeout."""
    check_queue_name(name)
    limit_s, began_s = seconds("--timeout", timeout), time.monotonic()
    client, code = setup.client, 1
    async with open_queues(client, changelog=True) as queues:
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
    document = {
        "queue": name, "drained": code == 0, "seconds": time.monotonic() - began_s,
        "waiting_complete": draining.waiting_complete, "open_complete": draining.open_complete, **draining.found,
    }  # fmt: skip
    print(json.dumps(document) if as_json else _said(document))
    if code == 0 and not draining.first:
        await note_if_unknown(client, name)
    return code


class Draining:
    """Checks whether a queue is empty.

    A message moves from the topic to the markers and, when it is redelivered, back. So one check counts the waiting
    messages, then, when all markers up to then have been read, the unfinished ones, then arrivals in the topic. Only if
    all three counts are 0 was the queue empty at some moment.
    """

    def __init__(self, client: ClientSettings, inspector: Inspector, queue: str) -> None:
        self._client = client
        self._inspector = inspector
        self._queue = queue
        #: The highest count so far, and the last one.
        self.first, self.left = 0, 0
        self.found: dict[str, int] = {}
        #: Whether the last check counted all waiting messages, and all unfinished ones.
        self.waiting_complete = self.open_complete = False

    async def look(self) -> bool:
        waiting = await self._waiting()
        told = await opened(self._client, self._inspector, await self._inspector.marker_ends())
        metrics = told.of(self._queue)
        self.found = {"waiting": waiting.counts[self._queue], **metrics}
        self.waiting_complete, self.open_complete = waiting.complete, told.complete
        self.left = sum(self.found.values())
        self.first = max(self.first, self.left)
        if self.left or not (told.complete and waiting.complete):
            return False
        return not await self._inspector.arrived(self._queue, waiting.ends)

    async def _waiting(self) -> Waiting:
        waiting = await self._inspector.waiting([self._queue])
        if waiting.complete or waiting.counts[self._queue]:
            return waiting
        # All counted records may belong to other queues. If this queue has no consumers, the next check would read the
        # same ones again.
        return await self._inspector.waiting([self._queue], limit=sys.maxsize)


def _said(drained: dict[str, Any]) -> str:
    name = drained["queue"]
    if drained["drained"]:
        return f"queue {name!r}: drained, no message is waiting, in flight or delayed"
    if "waiting" not in drained:
        return f"queue {name!r}: interrupted before its messages were counted"
    waiting, in_flight = drained["waiting"], drained["in_flight"]
    delayed = drained["waiting_for_delivery"] + drained["waiting_for_redelivery"]
    least = "" if drained["waiting_complete"] else "at least "
    hidden = "" if drained["open_complete"] else "; incomplete: a worker did not respond, or is still reading"
    return (
        f"queue {name!r}: not drained: {least}{waiting:,} waiting, {in_flight:,} in flight, {delayed:,} delayed{hidden}"
    )
