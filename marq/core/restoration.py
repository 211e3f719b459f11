"""Reads the rows of a lease table back, a million of them in about a second.

Rows of one kind and source lie together in a table, and neighbours were acquired together, so nearly every row is told
from the one before it by its offset alone: no more of it is decoded. All messages with equal leases share one object,
which keeps the book of a million messages small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct

from marq.core import rows
from marq.core.clock import LogClock
from marq.core.markers import Source
from marq.core.marks import Marks
from marq.core.rows import Counts, Lease, State
from marq.core.settlements import Settlements

#: Rows that are read without giving way to others: some 10 ms.
ROWS_AT_ONCE = 10_000
#: Leases that differ, of which the bytes are remembered to find those that are alike.
MAX_SHARED_LEASES = 100_000

_OFFSET = Struct(">Q")


@dataclass(slots=True)
class Restoration:
    """What the rows that were read so far say."""

    applied: int = -1
    clock: LogClock = field(default_factory=LogClock)
    leases: dict[Source, dict[int, Lease]] = field(default_factory=dict)
    #: Of messages with an `s` row, from which their leases are.
    restated: dict[Source, set[int]] = field(default_factory=dict)
    marks: dict[tuple[str, Source], Marks] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    settlements: Settlements = field(default_factory=Settlements)
    _changed: dict[Source, dict[int, Lease]] = field(default_factory=dict)
    _shared: dict[bytes, Lease] = field(default_factory=dict)

    def read(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Read all rows, and stop after each :data:`ROWS_AT_ONCE` of them, so that others can work in between.

        Raises:
            ValueError: a row has an unknown key, or a later version wrote it.
        """
        remaining = iter(table)
        while self._read_some(islice(remaining, ROWS_AT_ONCE)):
            yield
        for source, changed in self._changed.items():
            leases = self.leases.get(source, {})
            # One without its `r` row says nothing: the message is closed.
            still_open = leases.keys() & changed.keys()
            leases.update({offset: changed[offset] for offset in still_open})
            self.restated[source] = still_open
        self._changed.clear()
        self._shared.clear()

    def _read_some(self, table: Iterable[tuple[bytes, bytes]]) -> bool:
        # This loop is most of what a worker with many open messages does at its start.
        key: bytes | None = None
        prefix: bytes | None = None
        leases: dict[int, Lease] | None = None
        encoded, lease = b"?", _NO_LEASE
        before_due, after_due = b"?", b""
        for key, row in table:
            if key[: -_OFFSET.size] != prefix:
                prefix = key[: -_OFFSET.size]
                leases = self._leases_of(prefix)
            if leases is None:
                self._read_other(key, row)
                continue
            # The lengths are part of what is compared.
            if not row.startswith(encoded):
                if row.startswith(before_due) and row.startswith(after_due, rows.AFTER_DUE):
                    # A delayed message, like the one before but for its time.
                    lease = rows.with_due_of(row, lease)
                    encoded = row[: len(encoded)]
                else:
                    encoded = rows.encoded_lease(row)
                    lease = self._shared_lease(encoded)
                    delayed = lease.state is State.DELAYED
                    before_due = encoded[: rows.BEFORE_DUE] if delayed else b"?"
                    after_due = encoded[rows.AFTER_DUE :]
            leases[_OFFSET.unpack_from(key, len(key) - _OFFSET.size)[0]] = lease
        return key is not None

    def _leases_of(self, prefix: bytes) -> dict[int, Lease] | None:
        """Return where leases of rows belong whose keys begin with this; None: they are of another kind."""
        if prefix[:1] == b"r":
            return self.leases.setdefault(rows.parse_source(prefix[1:]), {})
        if prefix[:1] == b"s":
            return self._changed.setdefault(rows.parse_source(prefix[1:]), {})
        return None

    def _shared_lease(self, encoded: bytes) -> Lease:
        lease = self._shared.get(encoded)
        if lease is None:
            if len(self._shared) >= MAX_SHARED_LEASES:
                self._shared.clear()
            lease = self._shared[encoded] = rows.decode_lease(encoded)[0]
        return lease

    def _read_other(self, key: bytes, row: bytes) -> None:
        kind = key[:1]
        if kind == b"m":
            self.marks[rows.parse_mark_key(key)] = Marks(rows.decode_marks(row))
        elif kind == b"k":
            self.settlements.put_row(key, row)
        elif kind == b"c":
            self.counts[key[1:].decode()] = rows.decode_counts(row)
        elif key == rows.APPLIED_KEY:
            self.applied, self.clock = rows.decode_applied(row)
        else:
            raise ValueError(f"lease table: a row with the unknown key {key!r}")


#: Of no row: none begins with "?".
_NO_LEASE = Lease("", 0, 0, 0, 0)
