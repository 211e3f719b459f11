"""``faust -A app rewind NAME``: delivers messages again that a queue has had."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click
import faust

from app.commands.command import INTERRUPTED, command, confirm, say
from app.commands.watching import bar
from app.commands.words import seconds
from marq import rewinding
from marq.core.copies import record_id
from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.core.names import check_queue_name
from marq.receipt import Receipt
from marq.rewinding import Rewound, Start, new_id


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--since", metavar="AGE", help="What was sent since then: 90s, 15m, 2h, 7d, or a moment."),
        click.option("--from", "place", metavar="PLACE", help="One partition from there on: topic/partition/offset."),
        click.option("--id", "identity", metavar="ID", help="Go on with a rewind that was interrupted."),
        click.option("--dry-run", is_flag=True, help="Only say how many are meant."),
        click.option("--json", "as_json", is_flag=True, help="Show the answer as JSON."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    )
    async def rewind(
        self: Any, name: str, since: str | None, place: str | None, identity: str | None, dry_run: bool, as_json: bool,
        yes: bool,
    ) -> int:  # fmt: skip
        """Deliver messages of a queue again that it has had; what is still open is left alone."""
        check_queue_name(name)
        start, identity = read_start(since, place), identity or new_id()
        client, interrupted = self.app.client, False
        found = await rewinding.rewind(client, name, start, identity=identity, dry_run=True)
        if found.again and not dry_run:
            confirm(f"Deliver {found.again} messages of queue {name!r} again?", yes=yes)
            # Said before: who is killed, or loses the broker, says nothing any more, and another id would double.
            say(f"should this not come to its end, go on with: rewind {shlex.quote(name)} {further(start, identity)}")
            try:
                with bar(f"rewinding {name}") as progress:
                    found = await rewinding.rewind(client, name, start, identity=identity, progress=progress)
            except asyncio.CancelledError:
                interrupted = True
        reached = {"queue": name, **asdict(found), "dry_run": dry_run, "interrupted": interrupted}
        print(json.dumps(reached) if as_json else said(name, found, start, dry_run=dry_run, interrupted=interrupted))
        return INTERRUPTED if interrupted else 0


def read_start(since: str | None, place: str | None) -> Start:
    """Return what the options say.

    Raises:
        ConfigError: not one of the two is given, or it can't be read.
    """
    if (since is None) == (place is None):
        raise ConfigError("rewind: say from when on: --since 2h (or a moment), or --from topic/partition/offset")
    if place is not None:
        receipt = Receipt.of(place)
        return Start(place=(Source(receipt.topic, receipt.partition), receipt.offset))
    try:
        moment = datetime.fromisoformat(since or "")
    except ValueError:
        return Start(max(0, int((time.time() - seconds("--since", since or "")) * 1000)))
    if moment.tzinfo is None:
        raise ConfigError(f"--since {since}: expected a moment with a time zone, as in 2030-01-31T08:00:00+00:00")
    return Start(max(0, round(moment.timestamp() * 1000)))


def further(start: Start, identity: str) -> str:
    """Return the options that go on with a rewind, from the same moment on, be it that an age was given."""
    if start.place is not None:
        source, offset = start.place
        return f"--from {record_id(source, offset)} --id {identity}"
    moment = datetime.fromtimestamp((start.time_ms or 0) / 1000, UTC)
    return f"--since {moment.isoformat(timespec='milliseconds')} --id {identity}"


def said(name: str, found: Rewound, start: Start, *, dry_run: bool, interrupted: bool) -> str:
    """Say what became of it."""
    if interrupted:
        return (
            f"interrupted: some of {found.again:,} messages are delivered again; go on with {further(start, found.id)}"
        )
    verb = "would be delivered again" if dry_run else "are delivered again"
    left = f"; {found.open:,} are still open and left alone" if found.open else ""
    return f"queue {name!r}: {found.again:,} messages {verb}{left}"
