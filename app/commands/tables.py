"""Tables that fit the terminal: what is long is cut, what is less important left out, and ids never."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.plain import plain

#: Between two columns.
_GAP = 2


class Alarm(str):
    """A cell that is shown in red."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """``least``: how narrow it may be made before others are left out, None: it is shown whole.

    ``rank``: columns with the highest one are left out first; with 0 it is always there.
    """

    name: str
    rank: int = 0
    least: int | None = None
    right: bool = False


class Fitted(NamedTuple):
    """A table, how wide it is, and the names of the columns that had to be left out."""

    table: Table
    width: int
    missing: list[str]


def fitted(columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int) -> Fitted:
    """Return a table of at most ``width`` cells: only columns that are always there and shown whole make it wider."""
    rows = list(rows)
    cells = [[plain(each) for each in row] for row in rows]
    wanted = [
        max([cell_len(column.name), *(cell_len(row[place]) for row in cells)]) for place, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while _width(columns, wanted, kept) > width:
        last = max(kept, key=lambda place: columns[place].rank)
        if not columns[last].rank:
            break
        kept.remove(last)
    widths = _shared(columns, wanted, kept, width)
    found = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for place in kept:
        column = columns[place]
        found.add_column(
            column.name, no_wrap=True, overflow="ellipsis", width=widths[place],
            justify="right" if column.right else "left",
        )  # fmt: skip
    for row, given in zip(cells, rows, strict=True):
        found.add_row(*(Text(row[place], "red" if isinstance(given[place], Alarm) else "") for place in kept))
    missing = [column.name for place, column in enumerate(columns) if place not in kept]
    return Fitted(found, sum(widths.values()) + _GAP * (len(kept) - 1), missing)


def show(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal."""
    console = terminal()
    found, needed, missing = fitted(columns, rows, console.width)
    # Where it is wider than the terminal, that breaks its lines itself.
    terminal(max(console.width, needed)).print(found)
    if missing:
        console.print(f"not shown here: {', '.join(missing)}; a wider terminal or --json has all", soft_wrap=True)


class _Terminal(Console):
    """One that leaves it to :func:`app.commands.command.ending` what becomes of a command whose answer nobody reads."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def terminal(width: int | None = None) -> Console:
    """Return where answers go; its width is the terminal's, or COLUMNS, or 80."""
    return _Terminal(file=sys.stdout, highlight=False, width=width)


def _width(columns: Sequence[Column], wanted: Sequence[int], kept: Sequence[int]) -> int:
    """Return how wide the columns are when each that may be cut is."""
    return sum(_least(columns[place], wanted[place]) + _GAP for place in kept) - _GAP


def _least(column: Column, wanted: int) -> int:
    return wanted if column.least is None else min(wanted, max(column.least, cell_len(column.name)))


def _shared(columns: Sequence[Column], wanted: Sequence[int], kept: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column: what is left over goes to those that were cut, in their order."""
    widths = {place: _least(columns[place], wanted[place]) for place in kept}
    left = width - _width(columns, wanted, kept)
    for place in kept:
        more = max(0, min(left, wanted[place] - widths[place]))
        widths[place] += more
        left -= more
    return widths
