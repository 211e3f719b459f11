"""The deduplication ids that a markers partition has accepted, each until its queue's window has passed.

The partition of an id follows from the queue and the id (:func:`marq.wire.names.deduplicating_partition`), so one
tracker decides on it. A message whose id was accepted before, and has not expired by the log's clock, is a
duplicate. The expiry is fixed when an id is accepted: a later change of the window concerns later messages.

All ids that one DELAY contains share a record, in memory and in the table: a million ids of a million DELAYs take some
200 bytes each. Expired records are removed in the order in which they were accepted, so a record waits for earlier ones
if the window was made shorter. Until then it only takes up room, because its expiry is checked as well.

If the broker's clock jumps, ids are checked and accepted by the wrong time until the next TICK, because nothing in the
log shows the jump earlier. docs/guarantees.md lists the consequences under "Limits".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

from marq.core.storage import rows
from marq.core.storage.log_clock import LogClock
from marq.wire.markers import Delay, Headers, payload_of
from marq.wire.record_headers import deduplication_id, ordering_key

#: Bytes of a digest: two of a million ids are equal with a probability of one in 10^26.
DIGEST_BYTES = 16
#: Expired records that are removed with each accepted one, and whenever the changed rows are written.
EXPIRED_AT_ONCE, EXPIRED_AT_WRITE = 2, 10_000

#: A record: its expiry, its place in the log, and the digests of its ids. Its row has the same without the place.
_RECORD, _EXPIRY = Struct(">qQ"), Struct(">q")


def digest_of(queue: str, headers: Headers) -> bytes | None:
    """Return the digest of a message's deduplication id within its ordering key and queue; None without an id."""
    own = deduplication_id(headers)
    if own is None:
        return None
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in (queue.encode(), ordering_key(headers) or b"", own):
        # With its length, so that no two triples give the same bytes.
        digest.update(b"%d:%b" % (len(part), part))
    return digest.digest()


class AcceptedIds:
    """The accepted ids of one markers partition, and the changes of their rows."""

    def __init__(self) -> None:
        #: The record of each digest. It is one bytes object, shared by its digests, because there may be millions.
        self._records: dict[bytes, bytes] = {}
        self._by_queue: dict[str, deque[bytes]] = {}
        self._changed: dict[bytes, bytes | None] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def pending_rows(self) -> int:
        return len(self._changed)

    def has(self, digest: bytes, now_ms: int) -> bool:
        """Return whether an id was accepted and has not expired."""
        record = self._records.get(digest)
        return record is not None and _EXPIRY.unpack_from(record)[0] > now_ms

    def expiries(self, now_ms: int) -> list[int]:
        """Return when each accepted id expires."""
        expiries = [int(_EXPIRY.unpack_from(record)[0]) for record in self._records.values()]
        return [expiry_ms for expiry_ms in expiries if expiry_ms > now_ms]

    def accept(self, batch: Delay, offsets: Sequence[int], place: int, clock: LogClock, window_ms: int) -> list[int]:
        """Accept the ids of these messages, which expire after ``window_ms``; return all that are not duplicates.

        ``place`` is the offset of the DELAY in the log. A message without an id has no duplicate.
        """
        kept, now_ms = list[int](), clock.now_ms
        digests: dict[bytes, None] = {}
        for offset in offsets:
            digest = digest_of(batch.queue, payload_of(batch, offset).headers)
            if digest is not None:
                if digest in digests or self.has(digest, now_ms):
                    continue
                digests[digest] = None
            kept.append(offset)
        if digests:
            row = _EXPIRY.pack(now_ms + window_ms) + b"".join(digests)
            self._put(batch.queue, place, row)
            self._changed[rows.deduplication_key(batch.queue, place)] = row
            self._expire(batch.queue, clock.least_ms, EXPIRED_AT_ONCE)
        return kept

    def _put(self, queue: str, place: int, row: bytes) -> None:
        (expiry_ms,) = _EXPIRY.unpack_from(row)
        record = _RECORD.pack(expiry_ms, place) + row[_EXPIRY.size :]
        self._by_queue.setdefault(queue, deque()).append(record)
        for digest in _digests(record):
            self._records[digest] = record

    def _expire(self, queue: str, least_ms: int, limit: int) -> int:
        """Remove expired records of a queue, at most ``limit``; return how many.

        By the least time that the clock may still show, not by its present one: if the broker's clock jumped ahead, the
        next TICK sets it back, and an id must be remembered as if it had not jumped.
        """
        records, removed = self._by_queue[queue], 0
        while records and removed < limit and _EXPIRY.unpack_from(records[0])[0] <= least_ms:
            record = records.popleft()
            removed += 1
            for digest in _digests(record):
                # An expired id may have been accepted again, with a later record.
                if self._records.get(digest) is record:
                    del self._records[digest]
            key = rows.deduplication_key(queue, _RECORD.unpack_from(record)[1])
            if self._changed.pop(key, None) is None:
                self._changed[key] = None
        if not records:
            del self._by_queue[queue]
        return removed

    def take_rows(self, least_ms: int) -> dict[bytes, bytes | None]:
        """Remove more of the expired records; return the rows that have changed since the last call."""
        left = EXPIRED_AT_WRITE
        for queue in list(self._by_queue):
            left -= self._expire(queue, least_ms, left)
        changed, self._changed = self._changed, {}
        return changed

    def put_row(self, key: bytes, row: bytes) -> None:
        """Restore a row of the table; the rows of a queue come in the order of the log."""
        self._put(*rows.parse_deduplication_key(key), row)


def _digests(record: bytes) -> list[bytes]:
    return [record[start : start + DIGEST_BYTES] for start in range(_RECORD.size, len(record), DIGEST_BYTES)]
