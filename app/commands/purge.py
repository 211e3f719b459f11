"""``faust -A app purge NAME``: ends what waits in a queue."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import click
import faust

from app.commands.command import INTERRUPTED, command, confirm
from app.commands.watching import bar
from marq import purging
from marq.core.names import check_queue_name
from marq.purging import Purged


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        click.option("--delayed", is_flag=True, help="What waits for its time, too."),
        click.option("--dead", is_flag=True, help="Its dead letters, too."),
        click.option("--dry-run", is_flag=True, help="Only say how many are meant."),
        click.option("--json", "as_json", is_flag=True, help="Show the answer as JSON."),
        click.option("--yes", is_flag=True, help="Do not ask."),
    )
    async def purge(
        self: Any, name: str, delayed: bool, dead: bool, dry_run: bool, as_json: bool, yes: bool
    ) -> int:  # fmt: skip
        """End what waits in a queue, for good; what is being worked on goes on. The queue is paused meanwhile."""
        check_queue_name(name)
        client, interrupted = self.app.client, False
        found, extent = await purging.meant(client, name, delayed=delayed, dead=dead)
        if not dry_run and found.total:
            confirm(f"End {found.total} messages of queue {name!r} for good?", yes=yes)
        if not dry_run:
            try:
                with bar(f"purging {name}") as progress:
                    found = await purging.purge(
                        client, name, delayed=delayed, dead=dead, extent=extent, progress=progress
                    )
            except asyncio.CancelledError:
                interrupted = True
        reached = {"queue": name, **asdict(found), "dry_run": dry_run, "interrupted": interrupted}
        print(json.dumps(reached) if as_json else said(name, found, dry_run=dry_run, interrupted=interrupted))
        return INTERRUPTED if interrupted else 0


def said(name: str, found: Purged, *, dry_run: bool, interrupted: bool) -> str:
    """Say what became of it."""
    if interrupted:
        return (
            f"interrupted: queue {name!r} may be left paused, and what waited in it passed over without having"
            f" ended: purge it again, which finishes that, then `resume {name}`"
        )
    kinds = {
        "waiting": found.waiting, "for redelivery": found.redelivery, "delayed": found.delayed, "dead": found.dead,
    }  # fmt: skip
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count) or "nothing was there"
    late = f"; {found.too_late:,} went on meanwhile, or were ended before" if found.too_late else ""
    verb = "would be ended" if dry_run else "ended"
    paused = f"; it is paused, as it was before: `resume {name}`" if found.paused else ""
    return f"queue {name!r}: {found.total:,} messages {verb} ({listed}){late}{paused}"
