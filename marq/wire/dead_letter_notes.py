"""Notes in the dead-letter topic: they tell its readers which dead letters are settled.

A note is in the partition of the dead letters that it names, after them. Its key is empty, unlike any queue's name, so
a reader never takes a note for a dead letter. Nor does it take a dead letter for a note if the sender of the message
wrote the header of a note. Its content is the header ``marq-settled`` (the disposition) and its value, a JSON object::

    {"offsets": [[17, 19], [40, 40]], "became": "redriven", "queue": "emails", "by": "00000000000a11ce"}

``offsets`` are runs, each from its first to its last offset. ``queue`` is the queue that the redriven messages went to,
or the one that was named when they were deleted. ``by`` is the client that asked. ``became`` is ``redriven``,
``deleted``, or ``settled before``: the answer to a client that asked too late.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from marq.wire.markers import Record, Source
from marq.wire.names import SETTLED_HEADER

#: Maximum number of runs of offsets in one note, so that it stays far below any limit on records.
MAX_RUNS = 2_000
#: Maximum number of offsets in one note, so that a foreign record cannot fill the memory of its reader.
MAX_OFFSETS = 100_000
#: The key of every note.
NOTE_KEY = b""


class Disposition(StrEnum):
    """The end of a dead letter."""

    REDRIVEN = "redriven"
    DELETED = "deleted"
    BEFORE = "settled before"


@dataclass(frozen=True, slots=True)
class Note:
    """The disposition of some dead letters of one partition."""

    source: Source
    offsets: Sequence[int]
    became: Disposition
    queue: str
    holder: int

    def settled_before(self, offset: int) -> list[int]:
        """Return the offsets below the note's own: a note settles no dead letter that comes after it."""
        return [settled for settled in self.offsets if settled < offset]


def encoded(note: Note) -> Iterator[tuple[bytes, list[tuple[str, bytes]]]]:
    """Return the values and headers of the records of a note."""
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


def is_note(record: Record) -> bool:
    """Return whether a record of the dead-letter topic is a note; any sender may write the header alone."""
    return record.key == NOTE_KEY and any(name == SETTLED_HEADER for name, _ in record.headers)


def decode(source: Source, value: bytes | None) -> Note | None:
    """Return a note, None if it is unreadable: any client may write into a topic."""
    try:
        said = json.loads(value or b"")
        runs = [range(int(first), int(last) + 1) for first, last in said["offsets"]]
        if any(run.start < 0 for run in runs) or sum(map(len, runs)) > MAX_OFFSETS:
            return None
        offsets = [offset for run in runs for offset in run]
        return Note(source, offsets, Disposition(said["became"]), str(said["queue"]), int(said["by"], 16))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
