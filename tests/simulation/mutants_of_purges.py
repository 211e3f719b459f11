"""Mutants of purges: what a PURGE ends, and which messages consumers must not deliver after it."""

from __future__ import annotations

from tests.simulation.mutant import PURGING, Mutant, mutant

_BOOK = "marq.core.lease_book"
_GATE = "marq.consumer.delivery_gate"
_ACQUISITION = "marq.consumer.acquire"
_LINES = "marq.consumer.ordering"
_PURGER = "tests.simulation.purging"

PURGE_MUTANTS: tuple[Mutant, ...] = (
    mutant(
        PURGING, "unread messages that are purged do not count as acquired", _BOOK, "book-differs table-differs",
        ("self._acquired_of(batch.queue, batch.source).add(0, batch.end)", "pass"),
    ),
    mutant(
        PURGING, "the message at the end of a purge ends, too", _BOOK,
        "book-differs table-differs cancelled no-copy early",
        ("else lease.since_ms) < batch.end", "else lease.since_ms) <= batch.end"),
    ),
    mutant(
        PURGING, "a purge ends messages in flight, although it does not say so", _BOOK,
        "book-differs table-differs cancelled no-copy early",
        ("Marker.PURGE_IN_FLIGHT if batch.in_flight else Marker.PURGE]", "Marker.PURGE_IN_FLIGHT]"),
    ),
    mutant(
        PURGING, "a purge ends delayed messages, although it does not say so", _BOOK,
        "book-differs table-differs early",
        ("lease.state is not State.DELAYED or batch.delayed or", "True or"),
    ),
    mutant(
        PURGING, "a purge ends an ordered message that its consumer is about to deliver again", _BOOK,
        "book-differs table-differs cancelled no-copy",
        (
            "return lease.blocks(self.clock.now_ms)\n        return lease.state",
            "return True\n        return lease.state",
        ),
    ),
    mutant(
        PURGING, "consumers do not skip purged messages", _ACQUISITION, "purged",
        ("if purge is None or own.offsets[0] >= end:", "if True:"),
    ),
    mutant(
        PURGING, "a consumer delivers what it was acquiring when it learned of a purge", _GATE, "purged",
        ("return not purge.left(batch.source, message._offset, message._record.timestamp)", "return False"),
        acquire_slow=0.3,
    ),
    mutant(
        PURGING, "the markers of a purge are written before consumers know of it", _PURGER, "purged",
        ("actor.purges_known < version", "False"),
    ),
    mutant(
        PURGING, "an ordered message that a failed cycle has acquired is skipped after a purge", _LINES,
        "order stuck not-drained",
        ("if offset < tried and", "if False and"),
        commit_failed=0.6,
        late_settings=0.5,
    ),
)  # fmt: skip
