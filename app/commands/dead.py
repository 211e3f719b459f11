"""``faust -A app dead [NAME]``: dead letters, looked at, counted, deleted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
import faust

from app.commands.command import command
from app.commands.letters import DRY_RUN, FILTERS, JSON, YES, ask_and_act, read_filters
from app.commands.tables import Column, show
from marq.core.errors import ConfigError
from marq.dead_letter import DeadLetter
from marq.dead_letters import Count, DeadLetters

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
        YES,
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
                if name is None:
                    raise ConfigError("--delete: name the queue whose dead letters are to be deleted")
                return await ask_and_act(
                    letters,
                    partial(letters.delete, name, **filters),
                    ("Delete", f"of queue {name!r} for good"),
                    {"queue": name},
                    limit=limit, dry_run=dry_run, as_json=as_json, yes=yes,
                )  # fmt: skip
            if count or name is None:
                _show_counts(await letters.count(name, **filters), as_json=as_json)
            else:
                most = limit or DEFAULT_LETTERS
                found = [letter async for letter in letters.peek(name, limit=most, **filters)]
                _show_letters(name, sorted(found, key=lambda letter: letter.died_at), most, as_json=as_json)
        return 0


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
