"""Simulated Kafka: partitioned logs with append times, transactions with fencing, and reads up to a stable offset.

A partition is never wrong, only late: who reads it says how far, and a ``committed`` reader sees nothing past the
first record of an open transaction and nothing of an aborted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any


class Fenced(Exception):
    """Another producer took the transactional id over."""


class Outcome(Enum):
    OPEN = 0
    COMMITTED = 1
    ABORTED = 2


class Record:
    """One record; ``about`` is what its writer knows of it and no reader may look at except the oracle."""

    __slots__ = ("about", "headers", "key", "offset", "time_ms", "transaction", "value")

    def __init__(
        self,
        offset: int,
        value: bytes | None,
        time_ms: int,
        key: bytes | None,
        headers: tuple[tuple[str, bytes | None], ...],
        about: Any,
        transaction: Transaction | None,
    ) -> None:
        self.offset = offset
        self.value = value
        self.time_ms = time_ms
        self.key = key
        self.headers = headers
        self.about = about
        self.transaction = transaction

    @property
    def aborted(self) -> bool:
        return self.transaction is not None and self.transaction.outcome is Outcome.ABORTED

    @property
    def committed(self) -> bool:
        return self.transaction is None or self.transaction.outcome is Outcome.COMMITTED


class Partition:
    """The log of one partition; ``clock`` gives its leader's wall clock, which may step back."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.skew_ms = 0
        #: None: the control record of a transaction, which takes an offset and is never read.
        self.records: list[Record | None] = []
        self._clock = clock
        self._open: dict[Transaction, int] = {}

    def append(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        about: Any = None,
        transaction: Transaction | None = None,
    ) -> Record:
        offset = len(self.records)
        if transaction is not None:
            transaction.partitions.add(self)
            self._open.setdefault(transaction, offset)
        record = Record(offset, value, self._clock() + self.skew_ms, key, tuple(headers), about, transaction)
        self.records.append(record)
        return record

    def finish(self, transaction: Transaction) -> None:
        del self._open[transaction]
        self.records.append(None)

    def end(self, *, committed: bool) -> int:
        if committed and self._open:
            return min(self._open.values())
        return len(self.records)

    def read(self, start: int, end: int, *, committed: bool) -> list[Record]:
        """Return the records from ``start`` to before ``end``, which the reader got from :meth:`end`."""
        found = self.records[start:end]
        return [record for record in found if record is not None and not (committed and record.aborted)]


class Transaction:
    """The writes of one transaction; decided at once, shown in each partition when its control record is written."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.outcome = Outcome.OPEN
        self.shown = False
        self.partitions: set[Partition] = set()

    def show(self) -> None:
        if not self.shown:
            self.shown = True
            for partition in self.partitions:
                partition.finish(self)


class TransactionalId:
    """The broker's side of one transactional id: one producer at a time may write with it."""

    def __init__(self) -> None:
        self.epoch = 0
        self._current: Transaction | None = None

    def fence(self) -> int:
        """Let a new producer in: an open transaction is aborted, a decided one shown first, the former one refused."""
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

    def decide(self, transaction: Transaction, outcome: Outcome) -> None:
        self.check(transaction.epoch)
        transaction.outcome = outcome
