"""What commands do that look more than once: ``--watch`` and progress bars."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.commands.command import Interrupted, say
from app.commands.tables import terminal
from marq.core.errors import BrokerUnavailable, ConfigError

#: Seconds between two looks when nobody says.
DEFAULT_WATCH_S = 2.0

WATCH = click.option(
    "--watch",
    metavar="SECONDS",
    type=click.FloatRange(0.1, 3_600),
    help="Look again every so many seconds, until Ctrl-C.",
)

Found = TypeVar("Found", bound="dict[str, Any]")


async def looked(
    look: Callable[[], Awaitable[Found]], show: Callable[[Found], None], *, watch: float | None, as_json: bool
) -> Found:
    """Look and show, once or every ``watch`` seconds; return what was seen.

    Who watches is told once that the broker, or the workers, are away, and sees more when they are back.

    Raises:
        Interrupted: somebody who watched has seen enough.
    """
    if watch is None:
        found = await look()
        print(json.dumps(found)) if as_json else show(found)
        return found
    console, seen, away = terminal(), False, False
    try:
        while True:
            try:
                found = await look()
            except BrokerUnavailable as error:
                # What has never been seen is rather a wrong setting than an outage.
                if isinstance(error, ConfigError) or not seen:
                    raise
                if not away:
                    say(f"{error}; looking on until that is over, or Ctrl-C")
                away = True
            else:
                seen, away = True, False
                if console.is_terminal and not as_json:
                    console.clear()
                print(json.dumps(found), flush=True) if as_json else show(found)
            await asyncio.sleep(watch)
    except asyncio.CancelledError:
        raise Interrupted from None


@contextmanager
def bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal, beside the answer, how far something is; called with what is done and of how much."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = progress.add_task(description, total=None)
    with progress:
        yield lambda done, total: progress.update(task, completed=done, total=total)
