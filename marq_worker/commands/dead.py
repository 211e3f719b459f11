"""``marq dead [NAME]`` and ``redrive NAME``: dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from marq.client.dead_letter import DeadLetter
from marq.dead_letters.dead_letters import DeadLetters, Deleted, KindCount, Redriven
from marq.dead_letters.filters import Filters
from marq.settings.client import ClientSettings
from marq.wire.errors import ConfigError, UnknownQueue
from marq.wire.names import check_queue_name
from marq_worker.commands.command import DRY_RUN, INTERRUPTED, JSON, YES, Setup, command
from marq_worker.commands.confirmation import confirm
from marq_worker.commands.terminal import Column, age, bar, quoted, show, terminal, text
from marq_worker.commands.unknown import note_about
from marq_worker.readable import plain, why_dead

#: Dead letters to show without --limit.
DEFAULT_LETTERS = 20

Reached = Redriven | Deleted

FILTERS: Sequence[Callable[..., Any]] = (
    click.option("--reason", metavar="TEXT", help="Only those whose reason contains TEXT."),
    click.option("--error", metavar="TEXT", help="Only those whose last error contains TEXT."),
    click.option(
        "--header", "headers", metavar="NAME[=VALUE]", multiple=True,
        help="Only those with this header; without VALUE, with any value. Repeatable.",
    ),
    click.option("--older", metavar="AGE", help="Only those older than AGE (90s, 1h30m, 7d) or than a time."),
    click.option("--newer", metavar="AGE", help="Only those newer than AGE (90s, 1h30m, 7d) or than a time."),
    click.option("--id", "identity", metavar="ID", help="Only the message with this id."),
)  # fmt: skip

_COUNTS = (
    Column("queue", lambda count: count.queue, least=16),
    Column("dead letters", lambda count: f"{count.dead_letters:,}", right=True),
    Column("error", lambda count: count.kind, least=20),
)


@command(
    click.argument("name", required=False),
    *FILTERS,
    click.option(
        "--limit", type=click.IntRange(1), help=f"At most N, oldest first; by default {DEFAULT_LETTERS} are shown."
    ),
    click.option("--count", is_flag=True, help="Count by error; without NAME, for all queues."),
    click.option("--traceback", is_flag=True, help="Show the traceback of the last attempt, too."),
    click.option("--delete", is_flag=True, help="Delete them permanently."),
    DRY_RUN,
    JSON,
    YES,
)
async def dead(
    setup: Setup, name: str | None, limit: int | None, count: bool, traceback: bool, delete: bool, dry_run: bool,
    as_json: bool, yes: bool, **options: Any,
) -> int:  # fmt: skip
    """Show, count or delete the dead letters of a queue."""
    filters = read_filters(**options)
    if dry_run and not delete:
        raise ConfigError("--dry-run: only with --delete")
    if count and (delete or limit):
        raise ConfigError("--count: not with --delete or --limit")
    if traceback and (delete or count or name is None):
        raise ConfigError("--traceback: only when dead letters are listed: name a queue, without --count and --delete")
    async with DeadLetters.of(setup.client) as letters:
        if delete:
            if name is None:
                raise ConfigError("--delete: name the queue whose dead letters to delete")
            return await ask_and_act(
                setup.client, letters,
                partial(letters.delete, name, **filters),
                ("Delete", f"of queue {name!r} permanently"),
                {"queue": name},
                limit=limit, dry_run=dry_run, as_json=as_json, yes=yes,
            )  # fmt: skip
        if count or name is None:
            _show_counts(await letters.kinds(name, **filters), as_json=as_json)
        else:
            most = limit or DEFAULT_LETTERS
            shown = [letter async for letter in letters.peek(name, limit=most, **filters)]
            shown.sort(key=lambda letter: letter.dead_lettered_at)
            _show_letters(name, shown, most, as_json=as_json, traceback=traceback)
            if not shown:
                await note_about(letters, name)
    return 0


def _show_counts(counts: Sequence[KindCount], *, as_json: bool) -> None:
    """Print counts by error: most dead letters have used up their attempts, which does not say why."""
    if as_json:
        rows = [{"queue": count.queue, "kind": count.kind, "dead_letters": count.dead_letters} for count in counts]
        print(json.dumps(rows))
    elif counts:
        show(_COUNTS, counts)
    else:
        print("there are no such dead letters")


def _show_letters(name: str, letters: Sequence[DeadLetter], most: int, *, as_json: bool, traceback: bool) -> None:
    if as_json:
        print(json.dumps([described(letter) for letter in letters]))
    elif letters:
        for letter in letters:
            _show_letter(letter, traceback=traceback)
    else:
        print(f"queue {name!r} has no such dead letters")
    if len(letters) == most and not as_json:
        print(f"the {most} oldest; --limit shows more, --count shows how many there are")
    if not (as_json or traceback) and any(letter.traceback for letter in letters):
        print("--traceback shows where each of them failed last")


def _show_letter(letter: DeadLetter, *, traceback: bool) -> None:
    """Print a dead letter with its error first, wrapped: the error decides what to do."""
    console, why = terminal(), why_dead(letter.reason, letter.last_error)
    _print_wrapped(console, why, style="bold")
    if letter.last_error and letter.last_error not in why:
        _print_wrapped(console, f"last error: {letter.last_error}", indent=2)
    died = letter.dead_lettered_at.strftime("%Y-%m-%d %H:%M:%S")
    # Not wrapped: an id is copied as a whole.
    facts = f"  {letter.id}  {died} UTC  attempts: {letter.attempts}  bytes: {len(letter.body):,}"
    console.print(Text(plain(facts)), soft_wrap=True)
    if letter.body:
        value = Text(plain(f"  {quoted(text(letter.body))}"))
        value.truncate(console.width, overflow="ellipsis")
        console.print(value, no_wrap=True)
    if traceback:
        lines = letter.traceback.splitlines() or ["no traceback: no exception ended it, or none was kept"]
        for line in lines:
            console.print(Text(plain(f"    {line}")), soft_wrap=True)
    console.print()


def _print_wrapped(console: Console, said: str, *, indent: int = 0, style: str = "") -> None:
    for paragraph in said.splitlines():
        for line in Text(plain(paragraph), style).wrap(console, console.width - indent):
            line.rstrip()
            console.print(Text(" " * indent) + line, soft_wrap=True)


def described(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter for programs, with the beginning of long values as text."""
    return {
        "id": letter.id,
        "queue": letter.queue,
        "type": letter.type,
        "reason": letter.reason,
        "last_error": letter.last_error,
        "traceback": letter.traceback,
        "attempts": letter.attempts,
        "first_sent": letter.first_sent.isoformat(timespec="milliseconds"),
        "dead_lettered_at": letter.dead_lettered_at.isoformat(timespec="milliseconds"),
        "origin": letter.origin,
        "partition": letter.partition,
        "offset": letter.offset,
        "bytes": len(letter.body),
        "value": text(letter.body),
        "headers": {name: text(value) for name, value in letter.headers.items()},
    }


def read_filters(
    reason: str | None, error: str | None, headers: Sequence[str], older: str | None, newer: str | None,
    identity: str | None,
) -> Filters:  # fmt: skip
    filters: Filters = {"reason": reason, "error": error, "id": identity}
    filters["older_than"] = None if older is None else age("--older", older)
    filters["newer_than"] = None if newer is None else age("--newer", newer)
    wanted: dict[str, bytes | str | None] = {}
    for header in headers:
        name, equals, value = header.partition("=")
        if not name or name in wanted:
            raise ConfigError(f"--header {header}: expected NAME or NAME=VALUE, each name once")
        wanted[name] = value if equals else None
    filters["header"] = wanted or None
    return filters


async def ask_and_act(
    client: ClientSettings, letters: DeadLetters, act: Callable[..., Awaitable[Reached]], question: tuple[str, str],
    document: Mapping[str, Any], *, limit: int | None, dry_run: bool, as_json: bool, yes: bool, option: str = "--yes",
) -> int:  # fmt: skip
    """Redrive or delete dead letters after a confirmation, with progress; return the exit code.

    ``question``: the texts before and after "dead letters"; ``document``: the first members of the JSON answer;
    ``option``: the option that answers yes.
    """
    # Leave out messages that are dead-lettered after the count.
    act = partial(act, as_of=await letters.snapshot())
    reached, interrupted = await act(limit=limit, dry_run=True), False
    if reached.chosen and not dry_run:
        before, after = question
        confirm(f"{before} {reached.chosen} dead letters {after}?", client, yes=yes, option=option)
        with bar(_verb(reached)) as progress:

            def note(latest: Reached) -> None:
                nonlocal reached
                reached = latest
                progress(latest.done + latest.already_settled, latest.chosen)

            try:
                note(await act(limit=limit, progress=note))
            except asyncio.CancelledError:
                interrupted = True
    answer = {**document, **asdict(reached), "dry_run": dry_run, "interrupted": interrupted}
    print(json.dumps(answer) if as_json else said(reached, dry_run=dry_run, interrupted=interrupted))
    if not reached.chosen:
        await note_about(letters, document["queue"])
    return INTERRUPTED if interrupted else 0


def said(reached: Reached, *, dry_run: bool = False, interrupted: bool = False) -> str:
    verb = _verb(reached)
    if dry_run:
        return f"{reached.chosen} dead letters would be {verb}; nothing was changed"
    before = f", {reached.already_settled} already settled" if reached.already_settled else ""
    result = f"{reached.done} of {reached.chosen} dead letters {verb}{before}"
    if not interrupted:
        return result
    requested = f"{reached.requested} were requested and will still be {verb}"
    return f"interrupted: {result}. {requested}; repeat the command for the rest"


def _verb(reached: Reached) -> str:
    return "redriven" if isinstance(reached, Redriven) else "deleted"


@command(
    click.argument("name"),
    *FILTERS,
    click.option("--to", metavar="QUEUE", help="Send them to this queue instead of their own."),
    click.option("--allow-unknown", is_flag=True, help="Send to an unknown queue without asking."),
    click.option("--limit", type=click.IntRange(1), help="At most N, oldest first."),
    click.option("--rate", type=float, metavar="N", help="At most N messages per second."),
    DRY_RUN,
    JSON,
    YES,
)
async def redrive(
    setup: Setup, name: str, to: str | None, allow_unknown: bool, limit: int | None, rate: float | None,
    dry_run: bool, as_json: bool, yes: bool, **options: Any,
) -> int:  # fmt: skip
    """Send dead letters back to their queue; repeat the command after an interruption to continue."""
    target = check_queue_name(name if to is None else to)
    filters = read_filters(**options)
    async with DeadLetters.of(setup.client) as letters:
        unknown = "" if to is None or allow_unknown else await _unknown(letters, to)
        return await ask_and_act(
            setup.client, letters,
            partial(letters.redrive, name, to=to, allow_unknown=allow_unknown or bool(unknown), rate=rate, **filters),
            (f"{unknown}Send", f"of queue {name!r} to queue {target!r}"),
            {"queue": name, "to": target},
            limit=limit, dry_run=dry_run, as_json=as_json,
            # A script that answers every question with --yes must not send messages to a mistyped queue.
            yes=yes and not unknown, option="--allow-unknown" if unknown else "--yes",
        )  # fmt: skip


async def _unknown(letters: DeadLetters, queue: str) -> str:
    """Return the finding about an unknown queue, to put before the question; "" for a known one."""
    try:
        await letters.check_known(queue)
    except UnknownQueue as error:
        return f"{error.finding} "
    return ""
