"""Simulated Kafka: partitioned logs with append times, transactions with fencing, and reads up to a stable offset.

Reads are never wrong, only late. A ``committed`` reader sees neither records behind the start of an open transaction
nor records of an aborted one. Retention removes the oldest records, and compaction those that a later record with the
same key replaces. Removed records stay in ``records`` for the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class Fenced(Exception):
    """Another producer took the transactional id over."""


class TooLarge(Exception):
    """The record is too large for the topic."""


class Outcome(Enum):
    OPEN = 0
    COMMITTED = 1
    ABORTED = 2


@dataclass(slots=True)
class Record:
    """One record; ``about`` is what its writer knows of it, which no reader except the oracle may look at."""

    offset: int
    value: bytes | None
    timestamp: int
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    about: Any
    transaction: Transaction | None

    @property
    def aborted(self) -> bool:
        return self.transaction is not None and self.transaction.outcome is Outcome.ABORTED

    @property
    def committed(self) -> bool:
        return self.transaction is None or self.transaction.outcome is Outcome.COMMITTED


class Partition:
    """The log of one partition; ``clock`` gives its leader's wall clock, which may step back."""

    def __init__(self, name: str, clock: Callable[[], int], limit_bytes: int | None = None) -> None:
        self.name = name
        self.skew_ms = 0
        #: None: the control record of a transaction, which takes an offset and is never read.
        self.records: list[Record | None] = []
        self.start = 0
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._open: dict[Transaction, int] = {}
        self._compacted: set[int] = set()
        #: When a compaction first met each deletion, by offset.
        self._cleaned_ms: dict[int, int] = {}

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        about: Any = None,
        transaction: Transaction | None = None,
        timestamp: int | None = None,
    ) -> Record:
        """Append a record; ``timestamp`` is its sender's, if the log does not set its own.

        Raises:
            TooLarge: nothing was appended.
        """
        offset, headers = len(self.records), tuple(headers)
        if self._limit_bytes is not None and _size(key, value, headers) > self._limit_bytes:
            raise TooLarge
        if transaction is not None:
            transaction.partitions.add(self)
            self._open.setdefault(transaction, offset)
        time_ms = self.time_ms() if timestamp is None else timestamp
        record = Record(offset, value, time_ms, key, headers, about, transaction)
        self.records.append(record)
        return record

    def time_ms(self) -> int:
        """Return what its leader's clock says."""
        return self._clock() + self.skew_ms

    def finish(self, transaction: Transaction) -> None:
        del self._open[transaction]
        self.records.append(None)

    def end(self, *, committed: bool) -> int:
        if committed and self._open:
            return min(self._open.values())
        return len(self.records)

    def read(self, start: int, end: int, *, committed: bool) -> list[Record]:
        """Return the records from ``start`` to before ``end``, which the reader got from :meth:`end`."""
        found = self.records[max(start, self.start) : end]
        gone = self._compacted
        return [
            record
            for record in found
            if record is not None and not (committed and record.aborted) and record.offset not in gone
        ]

    def truncate(self, offset: int) -> None:
        """Remove the records before an offset."""
        self.start = max(self.start, offset)

    def compact(self, now_ms: int, delete_retention_ms: int) -> int:
        """Remove records that later ones replace, and deletions first met long enough ago; return how many."""
        before = len(self._compacted)
        end = self.end(committed=True)
        last: dict[bytes | None, int] = {}
        for record in self.records[:end]:
            if record is not None and record.committed and record.offset not in self._compacted:
                if record.key in last:
                    self._compacted.add(last[record.key])
                last[record.key] = record.offset
        for offset in last.values():
            record = self.records[offset]
            if record is not None and record.value is None:
                seen_ms = self._cleaned_ms.setdefault(offset, now_ms)
                if now_ms - seen_ms > delete_retention_ms:
                    self._compacted.add(offset)
        return len(self._compacted) - before


def _size(key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...]) -> int:
    return len(key or b"") + len(value or b"") + sum(len(name) + len(each or b"") for name, each in headers)


class Participant(Protocol):
    """Anything that a transaction writes to."""

    name: str

    def finish(self, transaction: Transaction) -> None:
        """Learn how it has ended."""


class Transaction:
    """The writes of one transaction; decided at once, shown in each partition when its control record is written."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.outcome = Outcome.OPEN
        self.shown = False
        self.partitions: set[Participant] = set()

    def show(self) -> None:
        if not self.shown:
            self.shown = True
            for partition in sorted(self.partitions, key=lambda each: each.name):
                partition.finish(self)


class TransactionalId:
    """The broker's side of one transactional id: one producer at a time may write with it."""

    def __init__(self) -> None:
        self.epoch = 0
        self._current: Transaction | None = None

    def fence(self) -> int:
        """Let a new producer in: abort an open transaction, show a decided one first, refuse the former producer."""
        self.epoch += 1
        if self._current is not None:
            if self._current.outcome is Outcome.OPEN:
                self._current.outcome = Outcome.ABORTED
            self._current.show()
            self._current = None
        return self.epoch

    def check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced

    def begin(self, epoch: int) -> Transaction:
        self.check(epoch)
        assert self._current is None or self._current.shown, "a producer has one transaction at a time"
        self._current = Transaction(epoch)
        return self._current

    def expire(self, transaction: Transaction) -> None:
        """Abort a transaction that was open for too long, and let its producer write no more, as the broker does."""
        if transaction is self._current and transaction.outcome is Outcome.OPEN:
            self.fence()

    def accepts(self, transaction: Transaction) -> bool:
        """Whether a transaction can still be written to."""
        return transaction.epoch == self.epoch and transaction.outcome is Outcome.OPEN

    def decide(self, transaction: Transaction, outcome: Outcome) -> None:
        self.check(transaction.epoch)
        transaction.outcome = outcome
