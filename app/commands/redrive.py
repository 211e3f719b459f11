"""``faust -A app redrive NAME``: dead letters go back to a queue, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import faust

from app.commands.command import command
from app.commands.letters import DRY_RUN, FILTERS, JSON, YES, ask_and_act, read_filters
from marq.core.errors import UnknownQueue
from marq.core.names import check_queue_name
from marq.dead_letters import DeadLetters


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name"),
        *FILTERS,
        click.option("--to", metavar="QUEUE", help="Send them to this queue, not to the one in which they died."),
        click.option("--allow-unknown", is_flag=True, help="Send to an unknown queue without asking."),
        click.option("--limit", type=click.IntRange(1), help="So many at the most, those that died first."),
        click.option("--rate", type=float, metavar="N", help="At most so many messages per second."),
        DRY_RUN,
        JSON,
        YES,
    )
    async def redrive(
        self: Any, name: str, to: str | None, allow_unknown: bool, limit: int | None, rate: float | None,
        dry_run: bool, as_json: bool, yes: bool, **options: Any,
    ) -> int:  # fmt: skip
        """Send dead letters back to their queue; it may be interrupted, and called again to go on."""
        target = check_queue_name(name if to is None else to)
        filters = read_filters(**options)
        async with DeadLetters.of(self.app.client) as letters:
            unknown = "" if to is None or allow_unknown else await _unknown(letters, to)
            return await ask_and_act(
                letters,
                partial(
                    letters.redrive, name, to=to, allow_unknown=allow_unknown or bool(unknown), rate=rate, **filters
                ),
                (f"{unknown}Send", f"of queue {name!r} to queue {target!r}"),
                {"queue": name, "to": target},
                limit=limit, dry_run=dry_run, as_json=as_json,
                # A script that answers every question with --yes must not send messages to a mistyped queue.
                yes=yes and not unknown, option="--allow-unknown" if unknown else "--yes",
            )  # fmt: skip


async def _unknown(letters: DeadLetters, queue: str) -> str:
    """Return a text to put before the question if the queue is unknown, else ""."""
    try:
        await letters.check_known(queue)
    except UnknownQueue as error:
        return f"{error.finding} "
    return ""
