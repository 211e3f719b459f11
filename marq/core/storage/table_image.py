"""The lease table of one markers partition in memory, and the rows of it that have changed.

The image has an index of the open messages; their payloads are in the table only, once their rows are written.
:meth:`TableImage.take_changes` returns the rows to write since the last call.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct
from types import MappingProxyType
from typing import NamedTuple

from marq.core.storage import rows
from marq.core.storage.acquired_ranges import AcquiredRanges
from marq.core.storage.deduplication import AcceptedIds
from marq.core.storage.gauges import Gauge, gauges_of
from marq.core.storage.log_clock import LogClock
from marq.core.storage.rows import EventCounts, LeaseRow, State, encode_lease, encode_row, row_keys
from marq.core.storage.settled_dead_letters import Dispositions
from marq.wire.markers import ANY_QUEUE, Acquire, Delay, Payload, Source, payload_of
from marq.wire.names import is_scheduled, is_synthetic

#: Rows that are read before other tasks can run: about 10 ms.
ROWS_AT_ONCE = 10_000
#: Distinct leases whose bytes are remembered, to share equal ones.
MAX_SHARED_LEASES = 100_000

_OFFSET = Struct(">Q")
#: Placeholder before the first row that is read.
_NO_LEASE = LeaseRow("", 0, 0, 0, 0)


class Place(NamedTuple):
    """Where a message of a queue is."""

    queue: str
    source: Source
    offset: int


@dataclass(slots=True, eq=False)
class OpenMessages:
    """The open messages of a queue in one source.

    A payload stays in the marker that contained it until its row is written; after that, only the table has it. A
    message that is opened and closed in between leaves no row. If the marker left the payload in the message's record,
    the row has none until it is copied from there (:meth:`supply`).
    """

    queue: str
    source: Source
    leases: dict[int, LeaseRow] = field(default_factory=dict)
    #: Opened since the last take_rows, with the marker that still holds the payload.
    fresh: dict[int, Acquire | Delay] = field(default_factory=dict)
    #: Rows of the table without payloads, in the order of their markers, and copied payloads that are not in it yet.
    left: dict[int, None] = field(default_factory=dict)
    copied: dict[int, Payload] = field(default_factory=dict)
    #: Rows of the table whose lease has changed since.
    changed: set[int] = field(default_factory=set)
    #: Rows of the table whose message was closed since.
    ended: list[int] = field(default_factory=list)
    #: Messages with an `s` row as well as an `r` row.
    overridden: set[int] = field(default_factory=set)
    #: Sent by the tracker, whose fact has not been read back yet.
    firing: set[int] = field(default_factory=set)

    def replace(self, offsets: Sequence[int], lease: LeaseRow) -> None:
        """Give open messages another lease."""
        self.leases.update(dict.fromkeys(offsets, lease))
        self.changed.update(offsets)

    def close(self, offsets: Sequence[int]) -> int:
        """Remove messages; return how many of them were open."""
        pop_lease, pop_fresh = self.leases.pop, self.fresh.pop
        ended, closed = self.ended, 0
        for offset in offsets:
            if pop_lease(offset, None) is not None:
                closed += 1
                if pop_fresh(offset, None) is None:
                    ended.append(offset)
        # Nearly always empty.
        for kept in (self.left, self.copied):
            if kept:
                for offset in offsets:
                    kept.pop(offset, None)
        return closed

    def supply(self, offset: int, payload: Payload) -> None:
        """Take the payload of a message, copied from its record, unless the message has ended or has its payload."""
        left = offset in self.left
        if left or ((fresh := self.payload(offset)) is not None and fresh.left):
            self.left.pop(offset, None)
            self.copied[offset] = payload

    def payload(self, offset: int) -> Payload | None:
        """Return the payload of an open message that is not in the table yet, else None."""
        if offset in self.copied:
            return self.copied[offset]
        batch = self.fresh.get(offset)
        return None if batch is None else payload_of(batch, offset)

    def waiting(self, offsets: Sequence[int], lease: LeaseRow) -> list[int]:
        """Return those of the offsets that still have exactly this lease and are not firing."""
        leases, firing = self.leases, self.firing
        return [offset for offset in offsets if leases.get(offset) is lease and offset not in firing]

    @property
    def pending_rows(self) -> int:
        return len(self.fresh) + len(self.copied) + len(self.changed) + len(self.ended)

    def take_rows(self, changes: dict[bytes, bytes | None]) -> None:
        """Add the rows to write (None: delete), and treat them as written."""
        if not self.pending_rows:
            # With thousands of queues, that is so for almost all of them.
            return
        queue, source = self.queue, self.source
        changes.update(dict.fromkeys(row_keys(queue, source, self.ended, b"r")))
        gone = [offset for offset in self.ended if offset in self.overridden]
        changes.update(dict.fromkeys(row_keys(queue, source, gone, b"s")))
        self.overridden.difference_update(gone)
        # Written whole below.
        whole = self.fresh | self.copied
        if replaced := self.overridden & self.copied.keys():
            changes.update(dict.fromkeys(row_keys(queue, source, sorted(replaced), b"s")))
            self.overridden -= replaced
        overridden = [offset for offset in self.changed if offset in self.leases and offset not in whole]
        for key, offset in zip(row_keys(queue, source, overridden, b"s"), overridden, strict=True):
            changes[key] = encode_lease(self.leases[offset])
        self.overridden.update(overridden)
        encoded: dict[LeaseRow, bytes] = {}
        keys = row_keys(queue, source, list(whole), b"r")
        for key, (offset, kept) in zip(keys, whole.items(), strict=True):
            lease = self.leases[offset]
            if lease not in encoded:
                encoded[lease] = encode_lease(lease)
            payload = kept if isinstance(kept, Payload) else payload_of(kept, offset)
            if payload.left:
                self.left[offset] = None
            changes[key] = encode_row(encoded[lease], payload)
        self.fresh.clear()
        self.copied.clear()
        self.changed.clear()
        self.ended.clear()


#: Placeholder for no open messages; never written to.
NO_MESSAGES = OpenMessages("", Source("", 0))
_NO_QUEUES: Mapping[str, OpenMessages] = MappingProxyType({})


class TableImage:
    """Everything of a markers partition that has a row."""

    def __init__(self) -> None:
        self.clock = LogClock()
        #: The offset of the last record folded; a record at or below it must not be folded again.
        self.applied = -1
        self.counts: dict[str, EventCounts] = {}
        #: The offsets of each source that a queue has acquired; under the queue "", those that were delayed.
        self.acquired: dict[tuple[str, Source], AcquiredRanges] = {}
        #: Dead letters that were redriven or deleted.
        self.settled_dead_letters = Dispositions()
        #: The deduplication ids of recent messages.
        self.accepted_ids = AcceptedIds()
        #: Sources of schedules, and the number of changes to their open messages.
        self.scheduled: set[Source] = set()
        self.scheduled_changes = 0
        #: The open messages of each source, by queue.
        self._sources: dict[Source, dict[str, OpenMessages]] = {}
        self._open_count = 0
        # At least the number of rows that take_changes would return.
        self._most_rows = 0
        # Candidates for changed rows since the last take_changes.
        self._touched: dict[tuple[str, Source], OpenMessages] = {}
        self._touched_counts: set[str] = set()
        self._touched_acquired: set[tuple[str, Source]] = set()
        self._changed = False

    # --- what a fold changes ------------------------------------------------------------------------------------------

    def _known_of(self, queue: str, source: Source) -> OpenMessages:
        """Return the open messages of a queue in a source, to change them; NO_MESSAGES if there are none."""
        opened = self._sources.get(source, _NO_QUEUES).get(queue)
        if opened is None:
            return NO_MESSAGES
        self._touched[queue, source] = opened
        return opened

    def _of(self, queue: str, source: Source) -> OpenMessages:
        """Return the open messages of a queue in a source, to add to them."""
        opened = self._known_of(queue, source)
        if opened is NO_MESSAGES:
            opened = self._sources.setdefault(source, {})[queue] = OpenMessages(queue, source)
            self._touched[queue, source] = opened
        return opened

    def _all_of(self, queue: str, source: Source) -> list[OpenMessages]:
        """Return the open messages of a queue in a source, to change them; for ANY_QUEUE, those of each queue."""
        queues = list(self._sources.get(source, _NO_QUEUES)) if queue == ANY_QUEUE else [queue]
        return [self._known_of(name, source) for name in queues]

    def _in(self, source: Source) -> Iterable[OpenMessages]:
        """Return the open messages of each queue in a source, for reading only."""
        return self._sources.get(source, _NO_QUEUES).values()

    def _each(self) -> list[OpenMessages]:
        return [opened for queues in self._sources.values() for opened in queues.values()]

    def _acquired_of(self, queue: str, source: Source) -> AcquiredRanges:
        mark = (queue, source)
        self._touched_acquired.add(mark)
        return self.acquired.setdefault(mark, AcquiredRanges())

    def _count(self, queue: str) -> EventCounts:
        self._touched_counts.add(queue)
        return self.counts.setdefault(queue, EventCounts())

    def _note_schedule(self, source: Source) -> None:
        self.scheduled.add(source)
        self.scheduled_changes += 1

    def _forget_schedule(self, source: Source) -> None:
        self.acquired.pop(("", source), None)
        self._touched_acquired.add(("", source))
        self.scheduled.discard(source)
        self.scheduled_changes += 1

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether records were folded since the last take_changes."""
        return self._changed

    def has_more_rows(self, than: int) -> bool:
        """Return whether take_changes would return more than about this number of rows."""
        than -= self.accepted_ids.pending_rows
        if self._most_rows > than:
            # Counting them takes long with thousands of queues.
            self._most_rows = self._pending_messages
        return self._most_rows > than

    @property
    def pending_rows(self) -> int:
        """An upper bound on the number of rows that take_changes would return."""
        return self._pending_messages + self.accepted_ids.pending_rows

    @property
    def _pending_messages(self) -> int:
        return sum([opened.pending_rows for opened in self._touched.values()])

    def take_changes(self) -> dict[bytes, bytes | None]:
        """Return the rows to write (None: delete) so that the table holds the fold up to ``applied``.

        The caller must write them, or keep them and write them under the next ones: they are not returned twice.
        """
        changes: dict[bytes, bytes | None] = {}
        for (queue, source), opened in self._touched.items():
            opened.take_rows(changes)
            if not (opened.leases or opened.firing) and is_synthetic(source.topic):
                # Its sender must never use this source again.
                del self._sources[source][queue]
                if not self._sources[source]:
                    del self._sources[source]
        self._touched.clear()
        for queue, source in self._touched_acquired:
            acquired = self.acquired.get((queue, source))
            changes[rows.mark_key(queue, source)] = None if acquired is None else rows.encode_marks(acquired.intervals)
        changes.update(self.settled_dead_letters.take_rows())
        # In one transaction with `a`: if these were missing, a duplicate would be accepted after a restart.
        changes.update(self.accepted_ids.take_rows(self.clock.least_ms))
        for queue in self._touched_counts:
            changes[rows.counts_key(queue)] = rows.encode_counts(self.counts[queue])
        self._touched_acquired.clear()
        self._touched_counts.clear()
        self._changed, self._most_rows = False, 0
        # Last, so that a reader of the changelog that stops early never assumes more than it has read.
        changes[rows.APPLIED_KEY] = rows.encode_applied(self.applied, self.clock)
        return changes

    def restore(self, table: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the rows of a table: the image is then in the state of its ``applied`` offset."""
        for _ in self.restoring(table):
            pass

    def restoring(self, table: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Do the same as :meth:`restore`, but yield after every few thousand rows, so that other tasks can run."""
        read = Restoration()
        yield from read.read(table)
        self.applied, self.clock, self.counts, self.acquired = read.applied, read.clock, read.counts, read.acquired
        self.settled_dead_letters, self.accepted_ids = read.settled_dead_letters, read.accepted_ids
        self.scheduled = {source for queue, source in self.acquired if not queue and is_scheduled(source.topic)}
        for (queue, source), leases in read.leases.items():
            overridden = read.overridden.get((queue, source), set())
            opened = OpenMessages(queue, source, leases, overridden=overridden)
            opened.left.update(dict.fromkeys(read.left.get((queue, source), ())))
            self._sources.setdefault(source, {})[queue] = opened
            self._open_count += len(leases)

    # --- questions ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._open_count

    def open_in(self, queue: str, source: Source) -> Mapping[int, LeaseRow]:
        """Return the open messages of a queue in a source by their offsets or numbers; ANY_QUEUE: of all queues."""
        queues = self._sources.get(source, _NO_QUEUES)
        if queue == ANY_QUEUE:
            return ChainMap(*[opened.leases for opened in queues.values()])
        return queues.get(queue, NO_MESSAGES).leases

    def queues_in(self, source: Source) -> int:
        """Return the number of queues that have had messages in a source."""
        return len(self._sources.get(source, _NO_QUEUES))

    def open_leases(self) -> Iterator[tuple[Source, int, LeaseRow]]:
        """Yield each open message, in no particular order."""
        for opened in self._each():
            for offset, lease in opened.leases.items():
                yield opened.source, offset, lease

    def leases_by_source(self) -> Iterator[tuple[Source, list[tuple[int, LeaseRow]]]]:
        """Yield all open messages, as they are when each source's turn comes."""
        for opened in self._each():
            yield opened.source, list(opened.leases.items())

    def incarnations(self, log: Source) -> list[Source]:
        """Return the sources with messages that are this partition in an incarnation of its topic."""
        return [source for source in self._sources if source.log == log and source != log]

    def former_incarnations(self, queue: str, source: Source) -> list[Source]:
        """Return the sources of a queue that are the same partition in other incarnations of its own topic."""
        if source.log is source:
            return []
        return [other for name, other in self.acquired if name == queue and other != source and other.log == source.log]

    def leases(self) -> Iterator[list[LeaseRow]]:
        """Yield the leases of all open messages, one for each, as they are when each source's turn comes."""
        for opened in self._each():
            yield list(opened.leases.values())

    def gauges(self) -> dict[str, Gauge]:
        """Return, for each queue, how many of its messages are open and since when."""
        return gauges_of(opened.leases.values() for opened in self._each())

    def fresh_payload(self, queue: str, source: Source, offset: int) -> Payload | None:
        """Return the payload of an open message whose row is not in the table yet, else None."""
        return self._sources.get(source, _NO_QUEUES).get(queue, NO_MESSAGES).payload(offset)

    def left(self, most: int, before_ms: int) -> list[Place]:
        """Return messages whose rows have no payload and that were opened before a time of the clock.

        At most about ``most``: the same number from each source, those that were acquired first.
        """
        sources = [opened for opened in self._each() if opened.left]
        share = -(-most // max(1, len(sources)))
        return [
            Place(opened.queue, opened.source, offset)
            for opened in sources
            for offset in islice(opened.left, share)
            if opened.leases[offset].since_ms <= before_ms
        ]

    def supply(self, place: Place, payload: Payload) -> None:
        """Take the payload of a message, copied from its record."""
        if (opened := self._known_of(place.queue, place.source)) is not NO_MESSAGES:
            opened.supply(place.offset, payload)
            self._changed = True
            self._most_rows += 1

    def last_number(self, source: Source) -> int | None:
        """Return the last number of a source that was ever delayed, or None."""
        acquired = self.acquired.get(("", source))
        return None if acquired is None else acquired.end - 1


# --- the rows of a table ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Restoration:
    """The content of the rows that were read so far; a million of them are read in about a second.

    Rows of one kind, queue and source are adjacent in a table, and neighbours were usually acquired together. So nearly
    every row differs from the previous one only in its offset, and nothing else of it is decoded. All messages with
    equal leases share one object, which keeps the image of a million messages small.
    """

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
