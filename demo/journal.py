"""A consumer's own record of what it did: a file of lines, each of them written before the next thing is done.

A line is in the kernel's hands as soon as it was written, so kill -9 takes nothing back: at worst the last one is cut
short, which its reader leaves out.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self


class What(StrEnum):
    """``handled``: the work was done, the ack not yet queued. ``acked``: the library said that the ack is durable."""

    READY = "ready"
    HANDLED = "handled"
    ACKED = "acked"
    FORGOT = "forgot"
    FAILED = "failed"
    STRANGE = "strange"


class Entry(NamedTuple):
    """One line; ``partition`` and ``offset`` say which record of the messages topic it was."""

    what: What
    number: int
    attempt: int
    partition: int
    offset: int
    at_ms: int


class Journal:
    """Appends entries to a file, until it is left."""

    def __init__(self, path: Path) -> None:
        # One write to the kernel for each line.
        self._file = path.open("a", buffering=1, encoding="ascii")

    def note(self, what: What, number: int = -1, attempt: int = 0, partition: int = -1, offset: int = -1) -> None:
        self._file.write(f"{what} {number} {attempt} {partition} {offset} {int(time.time() * 1000)}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


class JournalTail:
    """Reads what has been appended since it last looked; a file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def read(self) -> list[Entry]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [_entry(line) for line in whole.decode("ascii").splitlines()]


def _entry(line: str) -> Entry:
    what, *numbers = line.split()
    number, attempt, partition, offset, at_ms = map(int, numbers)
    return Entry(What(what), number, attempt, partition, offset, at_ms)
