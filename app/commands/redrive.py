"""``faust -A app redrive NAME``: dead letters go back to a queue, each once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import click
import faust

from app.commands.command import INTERRUPTED, command
from app.commands.letters import DRY_RUN, FILTERS, JSON, Tally, read_filters, said
from marq.core.names import check_queue_name
from marq.dead_letters import DeadLetters, Redriven


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        *FILTERS,
        click.option("--to", metavar="QUEUE", help="Send them to this queue, not to the one in which they died."),
        click.option("--limit", type=click.IntRange(1), help="So many at the most, those that died first."),
        click.option("--rate", type=float, metavar="N", help="At most so many messages per second."),
        DRY_RUN,
        JSON,
    )
    async def redrive(
        self: Any, name: str, to: str | None, limit: int | None, rate: float | None, dry_run: bool,
        as_json: bool, **options: Any,
    ) -> int:  # fmt: skip
        """Send dead letters back to their queue; it may be interrupted, and called again to go on."""
        check_queue_name(name)
        filters, tally, interrupted = read_filters(**options), Tally(Redriven(0)), False
        async with DeadLetters.of(self.app.client) as letters:
            with tally.shown():
                try:
                    tally(
                        await letters.redrive(
                            name, to=to, limit=limit, rate=rate, dry_run=dry_run, progress=tally, **filters
                        )
                    )
                except asyncio.CancelledError:
                    interrupted = True
        reached = {
            "queue": name,
            "to": to or name,
            **asdict(tally.last),
            "dry_run": dry_run,
            "interrupted": interrupted,
        }
        print(json.dumps(reached) if as_json else said(tally.last, dry_run=dry_run, interrupted=interrupted))
        return INTERRUPTED if interrupted else 0
