"""A log whose markers a lease book folds, through the codec, and the table with the book's rows."""

from __future__ import annotations

from dataclasses import replace

from marq.core.lease_book import LeaseBook
from marq.core.storage.rows import LeaseRow, State
from marq.settings.backoff import Backoff
from marq.settings.queue import QueueSettings
from marq.wire.marker_codec import decode, encode
from marq.wire.markers import Batch

SETTINGS = QueueSettings(max_attempts=3, backoff=Backoff(100, 2.0, 1_000, jitter=False))
#: The log's clock, unless a test says otherwise.
T0 = 1_000_000


class Log:
    """Feeds a book with rising offsets."""

    def __init__(self, *batches: Batch, settings: QueueSettings = SETTINGS) -> None:
        self.settings = settings
        #: The queues that are paused.
        self.paused: set[str] = set()
        self.book = self._new_book()
        self.table: dict[bytes, bytes] = {}
        self.fold(*batches)

    def _new_book(self) -> LeaseBook:
        return LeaseBook(lambda queue: replace(self.settings, paused=queue in self.paused))

    def fold(self, *batches: Batch, at: int = T0) -> None:
        for batch in batches:
            self.book.fold(decode(encode(batch)), at, self.book.applied + 1)

    def write(self) -> dict[bytes, bytes | None]:
        """Write the changed rows into the table, as a shell does; return them."""
        changes = self.book.take_changes()
        for key, row in changes.items():
            if row is None:
                del self.table[key]
            else:
                self.table[key] = row
        return changes

    def restart(self) -> None:
        """Write the changed rows, and restore another book from the table."""
        self.write()
        self.book = self._new_book()
        self.book.restore(sorted(self.table.items()))

    def leases(self) -> dict[int, LeaseRow]:
        return {offset: lease for _, offset, lease in self.book.open_leases()}

    def states(self) -> dict[int, State]:
        return {offset: lease.state for offset, lease in self.leases().items()}
