"""Text that programs write between two marks of a page of the documentation."""

from __future__ import annotations

import re


def placed(page: str, mark: str, text: str) -> str:
    """Return the page with the text between its marks.

    Raises:
        ValueError: it has no such marks.
    """
    pattern = _pattern(mark)
    if not pattern.search(page):
        raise ValueError(f"no <!-- {mark}: begin --> and <!-- {mark}: end -->")
    return pattern.sub(lambda match: f"{match[1]}{text}{match[3]}", page)


def between(page: str, mark: str) -> str:
    """Return the text between the marks; raise like :func:`placed`."""
    if not (match := _pattern(mark).search(page)):
        raise ValueError(f"no <!-- {mark}: begin --> and <!-- {mark}: end -->")
    return match[2]


def _pattern(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark}: begin -->\n)(.*)(\n<!-- {mark}: end -->)", re.DOTALL)
