"""Mutants of expiry: when a message expires, and who must not deliver it afterwards."""

from __future__ import annotations

from tests.simulation.mutant import EXPIRY, Mutant, mutant

_CORE = "marq.core.redeliver_or_dead_letter"
_HEADERS = "marq.wire.record_headers"
_CONSUMER = "marq.consumer.expiry"
_BOOK = "marq.core.lease_book"

EXPIRY_MUTANTS: tuple[Mutant, ...] = (
    mutant(
        EXPIRY, "the tracker redelivers what has expired", _CORE, "expired",
        ("    if expires_ms is None or now_ms < expires_ms:\n", "    if True:\n"),
    ),
    mutant(
        EXPIRY, "a consumer delivers what has expired", _CONSUMER, "expired",
        ("    return rules.expires_after_ms is not None or", "    return False and"),
    ),
    mutant(
        EXPIRY, "a message is ended before it expires", _CORE, "expired",
        ("now_ms < expires_ms:", "now_ms < expires_ms - 200:"),
    ),
    mutant(
        EXPIRY, "a delayed message expires some time after it was sent, not after it was due", _CORE, "expired",
        ("due_ms=due_time_ms(fire.lease, fire.source),", "due_ms=None,"),
    ),
    mutant(
        EXPIRY, "the redelivery of a delayed message does not say when it was due",
        "marq.core.deliveries.redelivery_records", "expired",
        ("(due_ms := due_time_ms(fire.lease, fire.source)) is not None:", "False:"),
        ('b"%d" % due_ms)', 'b"0")'),
    ),
    mutant(
        EXPIRY, "only the queue's setting counts, not the sender's time", _HEADERS, "expired",
        ("by_queue_ms if time_ms == NOW else min(time_ms, by_queue_ms)", "by_queue_ms"),
    ),
    mutant(
        EXPIRY, "a dropped message counts as cancelled", _BOOK, "book-differs table-differs",
        ("            counts.cancelled -= expired\n", "            pass\n"),
    ),
)  # fmt: skip
