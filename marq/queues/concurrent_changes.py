"""Changes that several clients make to one document at the same time.

A client writes a whole document, merged from the last one that it has read. If other clients have written records
since, its record undoes their changes. When it has read those records, it writes again, with their changes
(:meth:`Queues.merge`).

But those records, and later ones, may have undone other changes in the same way. Taken literally, they would undo
changes that other clients have already reported as made. So each record counts as a change to the earlier document from
which it differs least, because its writer probably started from that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Document = Mapping[str, Any]


def with_changes(document: Document, known: list[Document], others: Iterable[Document]) -> dict[str, Any]:
    """Return a document with the changes that other clients have made; append their documents to ``known``.

    ``known`` are the documents from which they may have started, oldest first.
    """
    result = dict(document)
    for other in others:
        # No client writes a document that equals the one from which it started.
        starts = [start for start in reversed(known) if start != other]
        if starts:
            start = min(starts, key=lambda start: len(_changed(start, other)))
            for key in _changed(start, other):
                result.pop(key, None)
            result |= {key: other[key] for key in _changed(start, other) if key in other}
        known.append(other)
    return result


def _changed(start: Document, end: Document) -> list[str]:
    """Return the keys whose values differ."""
    return [key for key in {**start, **end} if (key in start, start.get(key)) != (key in end, end.get(key))]
