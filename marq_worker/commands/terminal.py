"""Output of commands: tables that fit the terminal, ``--watch``, progress bars; and durations in their options."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from marq.settings.durations import moment_of
from marq.wire.errors import BrokerUnavailable, ConfigError
from marq_worker.commands.command import Interrupted, say
from marq_worker.readable import DURATION_FORM, plain, read_duration, span

#: Cells between two columns.
_GAP = 2


class Alarm(str):
    """A cell that is shown in red."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """``cell`` returns the text of a row; ``least``: minimum width, None if the column is always shown in full.

    ``rank``: the columns with the highest rank are left out first; those with 0 never.
    """

    name: str
    cell: Callable[[Any], str]
    rank: int = 0
    least: int | None = None
    right: bool = False


class Fitted(NamedTuple):
    """A table, its width, and the names of the columns that were left out."""

    table: Table
    width: int
    missing: list[str]


def cell(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a cell with a member of a document, empty for None."""
    return lambda row: "" if row[key] is None else str(row[key])


def number(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:,}"


def duration(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[key] is None else span(row[key])


def fitted(columns: Sequence[Column], rows: Iterable[Any], width: int) -> Fitted:
    """Return a table of at most ``width`` cells; only columns that may not be cut or left out make it wider."""
    originals = [[column.cell(row) for column in columns] for row in rows]
    cells = [[plain(original) for original in row] for row in originals]
    wanted = [
        max([cell_len(column.name), *(cell_len(row[index]) for row in cells)]) for index, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while _width(columns, wanted, kept) > width:
        last = max(kept, key=lambda index: columns[index].rank)
        if not columns[last].rank:
            break
        kept.remove(last)
    widths = _shared(columns, wanted, kept, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for index in kept:
        column = columns[index]
        table.add_column(
            column.name, no_wrap=True, overflow="ellipsis", width=widths[index],
            justify="right" if column.right else "left",
        )  # fmt: skip
    for row, original in zip(cells, originals, strict=True):
        table.add_row(*(Text(row[index], "red" if isinstance(original[index], Alarm) else "") for index in kept))
    missing = [column.name for index, column in enumerate(columns) if index not in kept]
    return Fitted(table, sum(widths.values()) + _GAP * (len(kept) - 1), missing)


def show(columns: Sequence[Column], rows: Iterable[Any]) -> None:
    """Print a table as wide as the terminal."""
    console = terminal()
    table, needed, missing = fitted(columns, rows, console.width)
    # A wider table is wrapped by the terminal itself.
    terminal(max(console.width, needed)).print(table)
    if missing:
        console.print(f"not shown: {', '.join(missing)}; use a wider terminal or --json", soft_wrap=True)


class _Terminal(Console):
    """Leaves a closed pipe to :func:`marq_worker.commands.command.ending`."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def terminal(width: int | None = None) -> Console:
    """Return a console for answers; its width is the terminal's, or COLUMNS, or 80."""
    return _Terminal(file=sys.stdout, highlight=False, width=width)


def _width(columns: Sequence[Column], wanted: Sequence[int], kept: Sequence[int]) -> int:
    """Return the width of the columns if all that may be cut are."""
    return sum(_least(columns[index], wanted[index]) + _GAP for index in kept) - _GAP


def _least(column: Column, wanted: int) -> int:
    return wanted if column.least is None else min(wanted, max(column.least, cell_len(column.name)))


def _shared(columns: Sequence[Column], wanted: Sequence[int], kept: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column: the cut ones share the remaining space, in order."""
    widths = {index: _least(columns[index], wanted[index]) for index in kept}
    left = width - _width(columns, wanted, kept)
    for index in kept:
        more = max(0, min(left, wanted[index] - widths[index]))
        widths[index] += more
        left -= more
    return widths


WATCH = click.option("--watch", metavar="DURATION", help="Repeat at this interval, until Ctrl-C: 2s.")
#: The shortest and the longest interval of --watch.
WATCH_S = (0.1, 3_600.0)


def interval(watch: str | None) -> float | None:
    """Return the seconds of --watch."""
    interval_s = None if watch is None else seconds("--watch", watch)
    if interval_s is not None and not WATCH_S[0] <= interval_s <= WATCH_S[1]:
        raise ConfigError(f"--watch {watch}: expected a duration from {WATCH_S[0]:g} s to {WATCH_S[1]:g} s")
    return interval_s


Found = TypeVar("Found", bound="dict[str, Any]")


async def looked(
    look: Callable[[], Awaitable[Found]], show: Callable[[Found], None], *, watch: float | None, as_json: bool
) -> Found:
    """Call ``look`` and show its result, once or every ``watch`` seconds; return the last result.

    While the broker or the workers are away, it says so once and continues when they are back.
    """
    if watch is None:
        document = await look()
        print(json.dumps(document)) if as_json else show(document)
        return document
    console, seen, away = terminal(), False, False
    try:
        while True:
            try:
                document = await look()
            except BrokerUnavailable as error:
                # Before the first answer, a wrong setting is more likely than an outage.
                if isinstance(error, ConfigError) or not seen:
                    raise
                if not away:
                    say(f"{error}; waiting for it, until Ctrl-C")
                away = True
            else:
                seen, away = True, False
                if console.is_terminal and not as_json:
                    console.clear()
                print(json.dumps(document), flush=True) if as_json else show(document)
            await asyncio.sleep(watch)
    except asyncio.CancelledError:
        raise Interrupted from None


class ProgressBar:
    """A progress bar: call it with the number done and the total. ``done`` is the last number."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show = show
        self.done = 0

    def __call__(self, done: int, total: int) -> None:
        self.done = done
        self._show(done, total)


@contextmanager
def bar(description: str) -> Iterator[ProgressBar]:
    """Show a progress bar on a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = progress.add_task(description, total=None)
    with progress:
        yield ProgressBar(lambda done, total: progress.update(task, completed=done, total=total))


#: Bytes of a value to show.
SHOWN_BYTES = 1_024


def seconds(option: str, text: str) -> float:
    """Return the seconds of a duration such as 90s or 1h30m; a number without a unit is in seconds."""
    duration_s = read_duration(text)
    if duration_s is None:
        raise ConfigError(f"{option} {text}: expected {DURATION_FORM}")
    return duration_s


def age(option: str, text: str) -> float | datetime:
    """Return an age in seconds, or the time that an option names instead."""
    age_s = read_duration(text)
    if age_s is not None:
        return age_s
    moment = moment_of(text.strip())
    if moment is None:
        raise ConfigError(
            f"{option} {text}: expected an age such as 90s, 15m, 1h30m or 7d, or a time with a time zone, as in"
            " 2030-01-31T08:00:00+00:00"
        )
    return moment


def text(value: bytes | None) -> str | None:
    """Return the beginning of a value as text."""
    return None if value is None else value[:SHOWN_BYTES].decode("utf-8", "replace")


def quoted(value: str | None) -> str:
    """Return a text in one line, with escapes for what can't be printed."""
    return repr(value or "")[1:-1]
