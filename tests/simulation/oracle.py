"""Checks that only the simulation can make: a lease book and a table's rows must equal the plain fold of the log.

``proof`` has the fold itself, and all checks that need only a history. A seed can fail with these names, in addition to
those of lab/proof/checker.py:

================  ====================================================================================================
``book-differs``  the lease book is not the plain fold of the log up to its ``applied``
``table-differs`` the rows of a table or of the changelog are not the plain fold of the log up to the applied row
``rows-left``     a row of a message in a changelog after the world has drained
``order``         messages due together are not sent in the order of their times, then of their arrival
``no-row``        a tracker that is to send a copy finds no payload
``concurrent``    a consumer delivers a message of an ordering key while it has another one in flight
``limit``         more messages of a key are in flight, in all consumers, than the limits of the queue allow
``rate``          a queue or key has more turns than its rate allows (rating.py)
``priority``      a turn of one queue was due to another by their priorities (prioritising.py)
``stuck``         the faults have ended and the world does not drain
``blamed``        a message became a dead letter because the handler of another one ends its process
``unblamed``      a message whose handler ends its process is delivered too often
``raised``        the core raised something
================  ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from lab.proof.fold import Fold, Standing
from lab.proof.history import holder_name, log_name, name_of
from marq.core.lease_book import LeaseBook
from marq.core.storage import rows
from marq.core.storage.rows import EventCounts, LeaseRow, State
from marq.core.storage.settled_dead_letters import CHUNK_OFFSETS
from marq.settings.queue import QueueSettings


class Violation(AssertionError):
    """A property that does not hold."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(f"{check}: {text}")
        self.check = check


def violate(violation: Violation) -> None:
    """End the world; schedule it where an exception would not reach the world."""
    raise violation


def difference(fold: Fold, book: LeaseBook) -> str:
    """Return how a lease book differs from the fold; empty if it does not."""
    if book.applied != fold.applied:
        return f"applied {book.applied}, the log says {fold.applied}"
    clock = book.clock
    anchor = (_holder(clock.anchor_holder), clock.anchor_now_ms, clock.anchor_monotonic_ms)
    if (clock.now_ms, clock.skew_ms, anchor) != (fold.now_ms, fold.skew_ms, fold.anchor):
        return f"clock {clock}, the log says {fold.now_ms}, skew {fold.skew_ms}, anchor {fold.anchor}"
    found = {(lease.queue, name_of(source, offset)): lease for source, offset, lease in book.open_leases()}
    for key in found.keys() | fold.open.keys():
        lease, standing = found.get(key), fold.open.get(key)
        if lease is None or standing is None or not _stands(lease, standing):
            return f"message {key[1]} of {key[0]} is {lease}, the log says {standing}"
    remembered = sorted(expiry for expiry in fold.ids.values() if expiry > fold.now_ms)
    if (known := sorted(book.accepted_ids.expiries(clock.now_ms))) != remembered:
        return f"deduplication ids expire at {known}, the log says {remembered}"
    for queue, counts in fold.counts.items():
        for name in _COUNTED:
            if getattr(book.counts.get(queue, _NO_COUNTS), name) != counts.get(name, 0):
                return f"{queue}: {name} is {book.counts.get(queue)}, the log says {counts}"
    return ""


def table_difference(fold: Fold, table: dict[bytes, bytes]) -> str:
    """Return how the rows of a table differ from the fold; empty if they do not."""
    book = LeaseBook(lambda queue: QueueSettings())
    book.restore(sorted(table.items()))
    for key in table:
        if key[:1] == b"s" and b"r" + key[1:] not in table:
            return f"a lease without its message: {rows.parse_row_key(key)}"
    if wrong := _marks(table) ^ _acquired(fold):
        return f"marks differ from the log in {sorted(wrong)[:5]}"
    return difference(fold, book)


def _marks(table: dict[bytes, bytes]) -> set[tuple[str, str, int]]:
    marked: set[tuple[str, str, int]] = set()
    for key, row in table.items():
        if key[:1] == b"m":
            queue, source = rows.parse_mark_key(key)
            for start, end in rows.decode_marks(row):
                marked.update((queue, log_name(source), offset) for offset in range(start, end))
        elif key[:1] == b"k":
            source, number = rows.parse_places_key(key)
            bits = [bit for bit in range(8 * len(row)) if row[bit // 8] >> bit % 8 & 1]
            marked.update(("", log_name(source), number * CHUNK_OFFSETS + bit) for bit in bits)
    return marked


def _acquired(fold: Fold) -> set[tuple[str, str, int]]:
    acquired = {(queue, source, offset) for (queue, source), each in fold.acquired.items() for offset in _offsets(each)}
    delayed = {
        ("", source, number)
        for source, spans in fold.delayed.items()
        for start, end in spans
        for number in range(start, end)
    }
    return acquired | delayed


def _offsets(acquired: bytearray) -> Iterable[int]:
    return [offset for offset, yes in enumerate(acquired) if yes]


def _stands(lease: LeaseRow, standing: Standing) -> bool:
    return lease.due_ms in standing.dues_ms and (
        lease.queue, _holder(lease.holder), lease.attempt, lease.since_ms, lease.state, lease.counted, lease.text
    ) == (
        standing.queue, standing.holder, standing.attempt, standing.since_ms, State[standing.state], standing.counted,
        standing.text,
    )  # fmt: skip


def _holder(holder: int) -> str:
    return holder_name(holder) if holder else ""


_COUNTED = tuple(each.name for each in fields(EventCounts))
_NO_COUNTS = EventCounts()
