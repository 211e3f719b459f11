"""Reads the rows of a lease table back, a million of them in about a second.

Rows of one kind, queue and source are adjacent in a table, and neighbours were usually acquired together. So nearly
every row differs from the previous one only in its offset, and nothing else of it is decoded. All messages with equal
leases share one object, which keeps the image of a million messages small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct

from marq.core.storage import rows
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.deduplication import AcceptedIds
from marq.core.storage.log_clock import LogClock
from marq.core.storage.rows import EventCounts, LeaseRow, State
from marq.core.storage.settled_dead_letters import Dispositions
from marq.wire.markers import Source

#: Rows that are read before other tasks can run: about 10 ms.
ROWS_AT_ONCE = 10_000
#: Distinct leases whose bytes are remembered, to share equal ones.
MAX_SHARED_LEASES = 100_000

_OFFSET = Struct(">Q")


@dataclass(slots=True)
class Restoration:
    """The content of the rows that were read so far."""

    applied: int = -1
    clock: LogClock = field(default_factory=LogClock)
    leases: dict[tuple[str, Source], dict[int, LeaseRow]] = field(default_factory=dict)
    #: Messages whose leases come from their `s` rows.
    overridden: dict[tuple[str, Source], set[int]] = field(default_factory=dict)
    #: Messages whose rows have no payload.
    left: dict[tuple[str, Source], list[int]] = field(default_factory=dict)
    acquired: dict[tuple[str, Source], AcquiredRanges] = field(default_factory=dict)
    counts: dict[str, EventCounts] = field(default_factory=dict)
    settled_dead_letters: Dispositions = field(default_factory=Dispositions)
    accepted_ids: AcceptedIds = field(default_factory=AcceptedIds)
    _changed: dict[tuple[str, Source], dict[int, LeaseRow]] = field(default_factory=dict)
    _shared: dict[bytes, LeaseRow] = field(default_factory=dict)

    def read(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Read all rows, yielding after every :data:`ROWS_AT_ONCE` of them so that other tasks can run.

        Raises ValueError if a row has an unknown key, or a later version wrote it.
        """
        remaining = iter(table)
        while self._read_some(islice(remaining, ROWS_AT_ONCE)):
            yield
        for queue, changed in self._changed.items():
            leases = self.leases.get(queue, {})
            # An `s` row without its `r` row belongs to a closed message.
            still_open = leases.keys() & changed.keys()
            leases.update({offset: changed[offset] for offset in still_open})
            self.overridden[queue] = still_open
        self._changed.clear()
        self._shared.clear()

    def _read_some(self, table: Iterable[tuple[bytes, bytes]]) -> bool:
        # A worker with many open messages spends most of its start in this loop.
        key: bytes | None = None
        prefix: bytes | None = None
        leases: dict[int, LeaseRow] | None = None
        left: list[int] = []
        encoded, lease = b"?", _NO_LEASE
        before_due, after_due = b"?", b""
        for key, row in table:
            if key[: -_OFFSET.size] != prefix:
                prefix = key[: -_OFFSET.size]
                leases = self._leases_of(prefix)
                left = [] if leases is None else self.left.setdefault(rows.parse_queue(prefix[1:]), [])
            if leases is None:
                self._read_other(key, row)
                continue
            # The lengths are part of what is compared.
            if not row.startswith(encoded):
                if row.startswith(before_due) and row.startswith(after_due, rows.AFTER_DUE):
                    # A delayed message that differs from the previous one only in its due time.
                    lease = rows.with_due_of(row, lease)
                    encoded = row[: len(encoded)]
                else:
                    encoded = rows.encoded_lease(row)
                    lease = self._shared_lease(encoded)
                    delayed = lease.state is State.DELAYED
                    before_due = encoded[: rows.BEFORE_DUE] if delayed else b"?"
                    after_due = encoded[rows.AFTER_DUE :]
            offset = _OFFSET.unpack_from(key, len(key) - _OFFSET.size)[0]
            leases[offset] = lease
            if len(row) == len(encoded) + rows.LEFT_BYTES:
                left.append(offset)
        return key is not None

    def _leases_of(self, prefix: bytes) -> dict[int, LeaseRow] | None:
        """Return the leases that rows with this key prefix belong to, None for rows of another kind."""
        if prefix[:1] == b"r":
            return self.leases.setdefault(rows.parse_queue(prefix[1:]), {})
        if prefix[:1] == b"s":
            return self._changed.setdefault(rows.parse_queue(prefix[1:]), {})
        return None

    def _shared_lease(self, encoded: bytes) -> LeaseRow:
        lease = self._shared.get(encoded)
        if lease is None:
            if len(self._shared) >= MAX_SHARED_LEASES:
                self._shared.clear()
            lease = self._shared[encoded] = rows.decode_lease(encoded)[0]
        return lease

    def _read_other(self, key: bytes, row: bytes) -> None:
        kind = key[:1]
        if kind == b"d":
            self.accepted_ids.put_row(key, row)
        elif kind == b"m":
            self.acquired[rows.parse_mark_key(key)] = AcquiredRanges(rows.decode_marks(row))
        elif kind == b"k":
            self.settled_dead_letters.put_row(key, row)
        elif kind == b"c":
            self.counts[key[1:].decode()] = rows.decode_counts(row)
        elif key == rows.APPLIED_KEY:
            self.applied, self.clock = rows.decode_applied(row)
        else:
            raise ValueError(f"lease table: a row with the unknown key {key!r}")


#: Placeholder before the first row.
_NO_LEASE = LeaseRow("", 0, 0, 0, 0)
