"""``faust -A app dead [NAME]``: dead letters, looked at, counted, deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import faust

from app.commands.command import INTERRUPTED, command, confirm
from app.commands.letters import DRY_RUN, FILTERS, JSON, Tally, read_filters, said
from app.commands.tables import Column, show
from marq.core.errors import ConfigError
from marq.dead_letter import DeadLetter
from marq.dead_letters import Count, DeadLetters, Deleted
from marq.letter_filter import Filters

#: Letters that are shown when nobody says how many.
DEFAULT_LETTERS = 20
#: Bytes of a value or of a header's that are shown, and characters in a table.
SHOWN_BYTES = 1_024

_COUNTS = (Column("queue", least=16), Column("letters", right=True), Column("reason", least=20))
_LETTERS = (
    Column("id"),
    Column("died", rank=2),
    Column("attempts", rank=3, right=True),
    Column("reason", least=16),
    Column("last error", least=12, rank=1),
    Column("bytes", rank=5, right=True),
    Column("value", least=12, rank=4),
)


def attach(app: faust.App) -> None:
    """Add the command to an application."""

    @command(
        app,
        click.argument("name", required=False),
        *FILTERS,
        click.option(
            "--limit", type=click.IntRange(1), help=f"So many, those that died first; {DEFAULT_LETTERS} are shown."
        ),
        click.option("--count", is_flag=True, help="Count them by reason; without NAME those of all queues."),
        click.option("--delete", is_flag=True, help="Delete them: they are listed and redriven no more."),
        DRY_RUN,
        JSON,
        click.option("--yes", is_flag=True, help="Do not ask."),
    )
    async def dead(
        self: Any, name: str | None, limit: int | None, count: bool, delete: bool, dry_run: bool, as_json: bool,
        yes: bool, **options: Any,
    ) -> int:  # fmt: skip
        """Show the dead letters of a queue, the oldest first; or count or delete them."""
        filters = read_filters(**options)
        if dry_run and not delete:
            raise ConfigError("--dry-run: of --delete only; without that nothing is changed anyhow")
        if count and (delete or limit):
            raise ConfigError("--count: all that fit are counted; leave out --delete and --limit")
        async with DeadLetters.of(self.app.client) as letters:
            if delete:
                return await _delete(letters, name, filters, limit, dry_run=dry_run, as_json=as_json, yes=yes)
            if count or name is None:
                _show_counts(await letters.count(name, **filters), as_json=as_json)
            else:
                most = limit or DEFAULT_LETTERS
                found = [letter async for letter in letters.peek(name, limit=most, **filters)]
                _show_letters(name, sorted(found, key=lambda letter: letter.died_at), most, as_json=as_json)
        return 0


async def _delete(
    letters: DeadLetters,
    name: str | None,
    filters: Filters,
    limit: int | None,
    *,
    dry_run: bool,
    as_json: bool,
    yes: bool,
) -> int:
    if name is None:
        raise ConfigError("--delete: name the queue whose dead letters are to be deleted")
    tally, interrupted = Tally(Deleted(0)), False
    meant = await letters.delete(name, limit=limit, dry_run=True, **filters)
    tally(meant)
    # What dies from now on nobody was asked about.
    if meant.chosen and not dry_run:
        confirm(f"Delete {meant.chosen} dead letters of queue {name!r} for good?", yes=yes)
        with tally.shown():
            try:
                tally(await letters.delete(name, limit=meant.chosen, progress=tally, **filters))
            except asyncio.CancelledError:
                interrupted = True
    reached = {"queue": name, **asdict(tally.last), "dry_run": dry_run, "interrupted": interrupted}
    print(json.dumps(reached) if as_json else said(tally.last, dry_run=dry_run, interrupted=interrupted))
    return INTERRUPTED if interrupted else 0


def _show_counts(counts: Sequence[Count], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"queue": each.queue, "reason": each.reason, "letters": each.letters} for each in counts]))
        return
    if not counts:
        print("there are no such dead letters")
        return
    show(_COUNTS, [(each.queue, f"{each.letters:,}", each.reason) for each in counts])


def _show_letters(name: str, letters: Sequence[DeadLetter], most: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([described(letter) for letter in letters]))
        return
    if not letters:
        print(f"queue {name!r} has no such dead letters")
        return
    show(_LETTERS, [_row(letter) for letter in letters])
    if len(letters) == most:
        print(f"the {most} that died first; --limit shows more, --count says how many there are")


def _row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        letter.id,
        letter.died_at.strftime("%Y-%m-%d %H:%M:%S"),
        str(letter.attempts),
        letter.reason,
        letter.last_error,
        f"{len(letter.body):,}",
        repr(_text(letter.body) or "")[1:-1],
    )


def described(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter for programs; of long values the beginning, as far as it is text."""
    return {
        "id": letter.id,
        "queue": letter.queue,
        "reason": letter.reason,
        "last_error": letter.last_error,
        "attempts": letter.attempts,
        "first_sent": letter.first_sent.isoformat(timespec="milliseconds"),
        "died_at": letter.died_at.isoformat(timespec="milliseconds"),
        "origin": letter.origin,
        "partition": letter.partition,
        "offset": letter.offset,
        "bytes": len(letter.body),
        "value": _text(letter.body),
        "headers": {name: _text(value) for name, value in letter.headers.items()},
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value[:SHOWN_BYTES].decode("utf-8", "replace")
