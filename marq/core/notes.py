"""Notes among the dead letters: which of them are settled, so that who reads their topic knows it without asking.

A note is a record of the dead-letters topic, in the partition of the dead letters that it is about, and later than
these. Its key is empty, which no queue's name is: so whoever looks for the letters of a queue never finds one. What it
says is in its header ``marq-settled`` (what they became) and its value, a JSON object::

    {"offsets": [[17, 19], [40, 40]], "became": "redriven", "queue": "emails", "by": "00000000000a11ce"}

``offsets`` are runs from the first to the last of each; ``queue`` is the queue that the redriven messages went to, or
the one that was named when they were deleted; ``by`` is who asked. ``became`` is ``redriven``, ``deleted``, or
``settled before``, which answers somebody who asked too late.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from marq.core.markers import Headers, Source
from marq.core.names import SETTLED_HEADER

#: Runs of offsets in one note, so that it stays far below any limit on records.
MAX_RUNS = 2_000
#: Offsets in one note, so that a foreign record can't fill the memory of whoever reads it.
MAX_OFFSETS = 100_000
#: Of all notes.
NOTE_KEY = b""


class Became(StrEnum):
    """What became of a dead letter."""

    REDRIVEN = "redriven"
    DELETED = "deleted"
    BEFORE = "settled before"


@dataclass(frozen=True, slots=True)
class Note:
    """What became of some dead letters of one partition."""

    source: Source
    offsets: Sequence[int]
    became: Became
    queue: str
    holder: int


def encoded(note: Note) -> Iterator[tuple[bytes, list[tuple[str, bytes]]]]:
    """Return the values and headers of the records that tell of a note."""
    headers = [(SETTLED_HEADER, note.became.encode())]
    for start in range(0, len(note.offsets), MAX_OFFSETS):
        runs = list(_runs(note.offsets[start : start + MAX_OFFSETS]))
        for first in range(0, len(runs), MAX_RUNS):
            said = {
                "offsets": runs[first : first + MAX_RUNS],
                "became": note.became,
                "queue": note.queue,
                "by": f"{note.holder:016x}",
            }
            yield json.dumps(said, ensure_ascii=False).encode(), headers


def _runs(offsets: Iterable[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for offset in offsets:
        if run and offset == run[1] + 1:
            run[1] = offset
            continue
        if run:
            yield run
        run = [offset, offset]
    if run:
        yield run


def is_note(headers: Headers) -> bool:
    """Whether a record of the dead-letters topic is a note, and no dead letter."""
    return any(name == SETTLED_HEADER for name, _ in headers)


def decode(source: Source, value: bytes | None) -> Note | None:
    """Return what a note says; None where it can't be read, for anybody may write into a topic."""
    try:
        said = json.loads(value or b"")
        runs = [range(int(first), int(last) + 1) for first, last in said["offsets"]]
        if any(run.start < 0 for run in runs) or sum(map(len, runs)) > MAX_OFFSETS:
            return None
        offsets = [offset for run in runs for offset in run]
        return Note(source, offsets, Became(said["became"]), str(said["queue"]), int(said["by"], 16))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
