"""Tables for terminals and pages, and the text between two marks of a page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.table import Table


def terminal_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is text, and all others numbers; without ``head``, it has no line for it."""
    rows = list(rows)
    table = Table(title=title or None, title_justify="left", show_header=bool(head), min_width=len(title) + 4)
    for index, name in enumerate(head or rows[0]):
        table.add_column(name if head else "", justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def page_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown whose first column is text, and all others numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def placed(page: str, mark: str, text: str) -> str:
    """Return the page with the text between its marks; raise ValueError if it has no such marks."""
    before, _, after = _parts(page, mark)
    return f"{before}{text}{after}"


def between(page: str, mark: str) -> str:
    """Return the text between the marks; raise like :func:`placed`."""
    return _parts(page, mark)[1]


def _parts(page: str, mark: str) -> Sequence[str]:
    match = re.fullmatch(rf"(.*<!-- {mark}: begin -->\n)(.*)(\n<!-- {mark}: end -->.*)", page, re.DOTALL)
    if match is None:
        raise ValueError(f"no <!-- {mark}: begin --> and <!-- {mark}: end -->")
    return match.groups()
