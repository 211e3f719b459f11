"""Mutants of deduplication ids: in the core, and in the simulated sender."""

from __future__ import annotations

from tests.simulation.mutant import DEDUPLICATION, Mutant, mutant

_CORE, _DELAYING = "marq.core.", "tests.simulation.delaying"
_LEASES, _TABLE_IMAGE, _IDS = _CORE + "lease_book", _CORE + "storage.table_image", _CORE + "storage.deduplication"

DEDUPLICATION_MUTANTS: tuple[Mutant, ...] = (
    mutant(
        DEDUPLICATION,
        "accepted ids get no rows",
        _IDS,
        "book-differs table-differs duplicate",
        ("            self._changed[rows.deduplication_key(batch.queue, place)] = row\n", ""),
        tracker_crash=0.03,
        table_lost=0.3,
    ),
    mutant(
        DEDUPLICATION,
        "accepted ids are forgotten by a restart",
        _TABLE_IMAGE,
        "book-differs table-differs duplicate",
        ("            self.accepted_ids.put_row(key, row)\n", "            pass\n"),
        tracker_crash=0.03,
        table_lost=0.3,
    ),
    mutant(
        DEDUPLICATION,
        "the rows of ids are written one write later than the applied offset",
        _IDS,
        "book-differs table-differs duplicate",
        (
            "        changed, self._changed = self._changed, {}\n",
            ("        changed, self._late = getattr(self, '_late', {}), self._changed\n        self._changed = {}\n"),
        ),
        tracker_crash=0.03,
        table_lost=0.3,
    ),
    mutant(
        DEDUPLICATION,
        "ids are remembered forever",
        _IDS,
        "book-differs lost not-drained",
        ("record is not None and _EXPIRY.unpack_from(record)[0] > now_ms", "record is not None"),
    ),
    mutant(
        DEDUPLICATION,
        "ids are forgotten too soon",
        _IDS,
        "book-differs table-differs duplicate",
        ("row = _EXPIRY.pack(now_ms + window_ms)", "row = _EXPIRY.pack(now_ms + window_ms // 2)"),
    ),
    mutant(
        DEDUPLICATION,
        "the window is measured by the clocks of senders",
        _LEASES,
        "book-differs duplicate lost not-drained",
        (
            "accept(batch, new, self.applied, self.clock, window_ms)",
            "accept(batch, new, self.applied, type(self.clock)(batch.payloads[0].timestamp_ms), window_ms)",
        ),
    ),
    mutant(
        DEDUPLICATION,
        "ids are not compared within one batch",
        _IDS,
        "book-differs table-differs duplicate",
        ("if digest in digests or self.has(digest, now_ms):", "if self.has(digest, now_ms):"),
    ),
    mutant(
        DEDUPLICATION,
        "an id is looked for only when its row is written, perhaps after the delivery",
        _IDS,
        "book-differs table-differs duplicate",
        (
            "            self._put(batch.queue, place, row)\n",
            "            self._later = [*getattr(self, '_later', []), (batch.queue, place, row)]\n",
        ),
        ("self._by_queue[queue], 0", "self._by_queue.setdefault(queue, deque()), 0"),
        (
            "        left = EXPIRED_AT_WRITE\n",
            (
                "        for each in getattr(self, '_later', []):\n"
                "            self._put(*each)\n"
                "        self._later = []\n"
                "        left = EXPIRED_AT_WRITE\n"
            ),
        ),
    ),
    mutant(
        DEDUPLICATION,
        "the ids of an ordering key are those of its queue",
        _IDS,
        "book-differs lost not-drained",
        ('ordering_key(headers) or b""', 'b""'),
    ),
    mutant(
        DEDUPLICATION,
        "messages with the same id go to arbitrary markers partitions",
        _DELAYING,
        "duplicate",
        ("        if wanted is None:\n", "        if True:\n"),
    ),
)
