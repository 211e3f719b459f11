"""The open messages of a queue in one source, and which of their rows differ from the table's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from marq.core.storage.rows import LeaseRow, encode_lease, encode_row, row_keys
from marq.wire.markers import Acquire, Delay, Payload, Source, payload_of


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
