"""How much an owner folds before it writes rows.

All pending rows are written in one transaction, whose time is limited. On a slow broker, a full transaction would be
aborted, folded and written again, endlessly. So a transaction that takes too long halves the limits. They are doubled
only after several transactions in time, because a failed attempt costs the time limit and a recovery of the table.
"""

from __future__ import annotations

from collections.abc import Callable

from marq.core.lease_book import LeaseBook

#: Limits for folded but unwritten rows and marker bytes, shared evenly by the owners of a process. A pending row and
#: its marker take up to a kilobyte, and twice that while they are being written.
MAX_PENDING_ROWS = 50_000
MAX_PENDING_BYTES = 64 << 20
#: Maximum divisor of the limits, so that an owner soon becomes as fast as before an outage.
MAX_DIVISOR = 256
#: Number of transactions in a row that must end in time before the limits are doubled.
COMMITS_TO_DOUBLE = 10


class PendingLimits:
    """The limits of one owner; ``sharers`` returns the number of owners in the process."""

    def __init__(self, sharers: Callable[[], int]) -> None:
        self._sharers = sharers
        self._divisor = 1
        self._commits = 0

    def timed_out(self) -> None:
        self._divisor, self._commits = min(2 * self._divisor, MAX_DIVISOR), 0

    def committed(self) -> None:
        self._commits += 1
        if self._commits == COMMITS_TO_DOUBLE:
            self._divisor, self._commits = max(1, self._divisor // 2), 0

    def are_reached(self, book: LeaseBook, pending_bytes: int) -> bool:
        """Return whether rows must be written before more markers are folded."""
        shares = max(1, self._sharers()) * self._divisor
        return pending_bytes > MAX_PENDING_BYTES // shares or book.pending_rows > MAX_PENDING_ROWS // shares
