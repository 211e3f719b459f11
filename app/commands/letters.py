"""Shared parts of the dead-letter commands: filters, the confirmation question and progress."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.commands.command import INTERRUPTED, confirm
from marq.core.errors import ConfigError
from marq.dead_letters import DeadLetters, Deleted, Redriven
from marq.letter_filter import Filters

Reached = Redriven | Deleted

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

FILTERS: Sequence[Callable[..., Any]] = (
    click.option("--reason", metavar="TEXT", help="Only those in whose reason this stands."),
    click.option("--error", metavar="TEXT", help="Only those in whose last error this stands."),
    click.option(
        "--header", "headers", metavar="NAME[=VALUE]", multiple=True,
        help="Only those with this header of their sender's, without a value whatever that is. Repeatable.",
    ),
    click.option("--older", metavar="AGE", help="Only those that died longer ago: 90s, 15m, 2h, 7d, or a moment."),
    click.option("--newer", metavar="AGE", help="Only those that died since: 90s, 15m, 2h, 7d, or a moment."),
    click.option("--id", "identity", metavar="ID", help="Only the message with this id."),
)  # fmt: skip
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say how many are meant.")
JSON = click.option("--json", "as_json", is_flag=True, help="Show the answer as JSON.")
YES = click.option("--yes", is_flag=True, help="Do not ask.")


def read_filters(
    reason: str | None,
    error: str | None,
    headers: Sequence[str],
    older: str | None,
    newer: str | None,
    identity: str | None,
) -> Filters:
    """Return what the options say.

    Raises:
        ConfigError: a value can't be read, or a header is named twice.
    """
    filters: Filters = {"reason": reason, "error": error, "id": identity}
    filters["older_than"] = None if older is None else _age("--older", older)
    filters["newer_than"] = None if newer is None else _age("--newer", newer)
    wanted: dict[str, bytes | str | None] = {}
    for text in headers:
        name, equals, value = text.partition("=")
        if not name or name in wanted:
            raise ConfigError(f"--header {text}: expected NAME or NAME=VALUE, each name once")
        wanted[name] = value if equals else None
    filters["header"] = wanted or None
    return filters


def _age(option: str, text: str) -> float | datetime:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip(), re.ASCII)
    if found:
        return float(found[1]) * _UNITS[found[2] or "s"]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{option} {text}: expected an age such as 90s, 15m, 2h or 7d, or a moment with a time zone, as in"
            " 2030-01-31T08:00:00+00:00"
        )
    return moment


async def ask_and_act(
    letters: DeadLetters,
    act: Callable[..., Awaitable[Reached]],
    question: tuple[str, str],
    document: Mapping[str, Any],
    *,
    limit: int | None,
    dry_run: bool,
    as_json: bool,
    yes: bool,
    option: str = "--yes",
) -> int:
    """Redrive or delete dead letters after a confirmation, and show the progress; return the exit code.

    ``act`` takes the arguments that the two calls have in common; ``question``: the texts before and after
    "dead letters"; ``document``: the first members of the JSON answer; ``option``: the option that answers yes.
    """
    # Leave out messages that are dead-lettered after the count.
    act = partial(act, as_of=await letters.snapshot())
    meant, interrupted = await act(limit=limit, dry_run=True), False
    tally = Tally(meant)
    if meant.chosen and not dry_run:
        before, after = question
        confirm(f"{before} {meant.chosen} dead letters {after}?", yes=yes, option=option)
        with tally.shown():
            try:
                tally(await act(limit=limit, progress=tally))
            except asyncio.CancelledError:
                interrupted = True
    reached = {**document, **asdict(tally.last), "dry_run": dry_run, "interrupted": interrupted}
    print(json.dumps(reached) if as_json else said(tally.last, dry_run=dry_run, interrupted=interrupted))
    return INTERRUPTED if interrupted else 0


class Tally:
    """How far a call is, on a progress bar where somebody looks at a terminal."""

    def __init__(self, last: Reached) -> None:
        self.last = last
        console = Console(stderr=True)
        # Beside the answer, which may be JSON.
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)

    def __call__(self, reached: Reached) -> None:
        """Take note of a progress."""
        self.last = reached
        done = _done(reached) + reached.already_settled
        self._bar.update(self._task, description=_verb(reached), total=reached.chosen, completed=done)

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._bar:
            yield


def said(reached: Reached, *, dry_run: bool = False, interrupted: bool = False) -> str:
    """Say how far a call came."""
    verb = _verb(reached)
    if dry_run:
        return f"{reached.chosen} dead letters would be {verb}; nothing was changed"
    before = f", {reached.already_settled} were settled before" if reached.already_settled else ""
    text = f"{_done(reached)} of {reached.chosen} dead letters {verb}{before}"
    if not interrupted:
        return text
    return f"interrupted: {text}, {reached.asked} asked for, which will be done; the same command again does the rest"


def _done(reached: Reached) -> int:
    return reached.redriven if isinstance(reached, Redriven) else reached.deleted


def _verb(reached: Reached) -> str:
    return "redriven" if isinstance(reached, Redriven) else "deleted"
